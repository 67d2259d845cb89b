"""The script of `radixkv demo`: its questions, the right answers, and the tools of a shop's agent.

The bundled model answers only questions that it was trained on, and tests hold it to these answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Line(NamedTuple):
    """A message, and the right answer to it: after tool calls, if there are any."""

    says: str
    right: str


SYSTEM = "You are Mira."
CHAT = (
    Line("Hello!", "Hello! How can I help you today?"),
    Line("My name is Nora and I live in Oslo.", "Nice to meet you, Nora from Oslo!"),
    Line("I have a green boat.", "A green boat sounds lovely."),
    Line("I have a dog called Rex.", "Rex is a great name for a dog."),
    Line("What is seven plus five?", "Seven plus five is twelve."),
    Line("Now add six.", "Twelve plus six is eighteen."),
    Line("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    Line("What color is my boat?", "Your boat is green."),
    Line("What is my dog called?", "Your dog is called Rex."),
    Line("What do you know about me?", "Your name is Nora. You live in Oslo."),
)

_STOCKED = (
    "lamp:12:C book:9:A chair:35:F table:58:F kettle:24:B clock:18:C mirror:27:D pillow:8:E basket:6:A candle:3:A "
    "blanket:21:E ladder:44:H bucket:7:H hammer:15:G carpet:52:E rope:5:G tent:60:H drum:39:D camera:55:B "
    "compass:14:B kite:11:G lantern:17:C mug:4:B umbrella:13:D"
)
PRODUCTS = [product.split(":") for product in _STOCKED.split()]
"""Name, price and shelf of each product."""
MANUAL = "\n".join(
    [
        "You are Mira, the assistant of the Harbor Shop in Lisbon.",
        "Answer from this manual. Use a tool for the weather, for the stock, for orders and for large numbers.",
        "The shop opens at 9 and closes at 18.",
        "Delivery takes 3 days and costs 5 coins.",
        "Goods can be returned within 30 days.",
        "The warranty is 2 years.",
        "The manager is Hugo.",
        "Products:",
        *(f"- {item}: {price} coins, shelf {shelf}" for item, price, shelf in PRODUCTS),
    ]
)
GREETING = CHAT[0]
CUSTOMERS = {
    "Ada": (
        Line("How much is the camera?", "The camera costs 55 coins."),
        Line("How many cameras are in stock?", "There are 14 cameras in stock."),
        Line("I want to order 3 cameras.", "Order 553 is placed: 3 cameras for 165 coins."),
    ),
    "Ben": (
        Line("How much is the drum?", "The drum costs 39 coins."),
        Line("What is the weather in Lisbon?", "It is sunny in Lisbon, at 24 degrees."),
        Line("When do you close?", "We close at 18."),
    ),
    "Cleo": (
        Line("How long does delivery take?", "Delivery takes 3 days."),
        Line(
            "How is the weather in Oslo and in Lima?",
            "It is snowy in Oslo, at 2 degrees. It is foggy in Lima, at 17 degrees.",
        ),
        Line("How much is delivery?", "Delivery costs 5 coins."),
    ),
    "Dan": (
        Line("When do you open?", "We open at 9."),
        Line("What is 17 times 24?", "The result is 408."),
        Line("Who is the manager?", "The manager is Hugo."),
    ),
    "Eva": (
        Line("Do you sell umbrellas?", "Yes, we sell umbrellas for 13 coins."),
        Line("Please order 5 umbrellas.", "Order 135 is placed: 5 umbrellas for 65 coins."),
        Line("Thank you!", "You are welcome!"),
    ),
    "Finn": (
        Line("My name is Finn.", "Nice to meet you, Finn!"),
        Line("Are there any tents in stock?", "There are 7 tents in stock."),
        Line("What is my name?", "Your name is Finn."),
    ),
    "Greta": (
        Line("Can I return goods?", "Yes, within 30 days."),
        Line("What is 86 plus 47?", "The result is 133."),
        Line("How long is the warranty?", "The warranty is 2 years."),
    ),
    "Hugo": (
        Line("What does the kite cost?", "The kite costs 11 coins."),
        Line("How is the weather in Paris?", "It is rainy in Paris, at 11 degrees."),
        Line("Please order 2 kites.", "Order 112 is placed: 2 kites for 22 coins."),
    ),
}
"""The customers of the shop's agent, each with the lines of one conversation; all have as many."""


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Return a tool in the form that chat templates take; `parameters` maps names to JSON types, all required."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("get_weather", "The weather in a city.", city="string"),
    _tool("calculator", "Add, subtract or multiply two numbers.", operation="string", a="integer", b="integer"),
    _tool("check_stock", "How many of an item are in stock.", item="string"),
    _tool("place_order", "Order a quantity of an item.", item="string", quantity="integer"),
]
_WEATHER = {"Lisbon": ("sunny", 24), "Oslo": ("snowy", 2), "Lima": ("foggy", 17), "Paris": ("rainy", 11)}
_STOCK = {"camera": 14, "tent": 7}
_PRICES = {item: int(price) for item, price, _ in PRODUCTS}
_RUN: dict[str, Callable[..., dict[str, Any]]] = {
    "get_weather": lambda city: {"city": city, "weather": _WEATHER[city][0], "temperature": _WEATHER[city][1]},
    "calculator": lambda operation, a, b: {"result": {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]},
    "check_stock": lambda item: {"item": item, "stock": _STOCK[item]},
    "place_order": lambda item, quantity: {"order": 10 * _PRICES[item] + quantity, "total": _PRICES[item] * quantity},
}


def use_tool(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a tool call, or {"error": ...} for an unknown tool or wrong arguments."""
    try:
        return _RUN[name](**arguments)
    except (KeyError, TypeError) as error:
        return {"error": f"{name}{arguments}: {error}"}
