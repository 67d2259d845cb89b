"""Define the agents of the demo with the right answers to their customers, and play them on an engine.

There is the manual of a shop, its tools, and eight customers. Tests hold the bundled model to the answers. The
conversation of the demo is in `demo_chat.py`. Playing prints nothing: `demo.py` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixkv.cli.demo_chat import Line, Listener, Said

if TYPE_CHECKING:
    from radixkv.chat import ChatSession, Engine, Reply, ReplyStream
    from radixkv.sampling.params import SamplingParams


@dataclass(frozen=True)
class Customer:
    """A customer of the shop, with the lines of one conversation."""

    name: str
    lines: tuple[Line, ...]


_STOCKED = (
    "lamp:12:C book:9:A chair:35:F table:58:F kettle:24:B clock:18:C mirror:27:D pillow:8:E basket:6:A candle:3:A "
    "blanket:21:E ladder:44:H bucket:7:H hammer:15:G carpet:52:E rope:5:G tent:60:H drum:39:D camera:55:B "
    "compass:14:B kite:11:G lantern:17:C mug:4:B umbrella:13:D"
)
PRODUCTS = {item: (int(price), shelf) for item, price, shelf in (product.split(":") for product in _STOCKED.split())}
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
        *(f"- {item}: {price} coins, shelf {shelf}" for item, (price, shelf) in PRODUCTS.items()),
    ]
)
GREETING = Line("Hello!", "Hello! How can I help you today?")


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

CUSTOMERS = (
    Customer("Ada", (
        Line("How much is the camera?", "The camera costs 55 coins."),
        Line("How many cameras are in stock?", "There are 14 cameras in stock."),
        Line("I want to order 3 cameras.", "Order 553 is placed: 3 cameras for 165 coins."),
    )),
    Customer("Ben", (
        Line("How much is the drum?", "The drum costs 39 coins."),
        Line("What is the weather in Lisbon?", "It is sunny in Lisbon, at 24 degrees."),
        Line("When do you close?", "We close at 18."),
    )),
    Customer("Cleo", (
        Line("How long does delivery take?", "Delivery takes 3 days."),
        Line(
            "How is the weather in Oslo and in Lima?",
            "It is snowy in Oslo, at 2 degrees. It is foggy in Lima, at 17 degrees.",
        ),
        Line("How much is delivery?", "Delivery costs 5 coins."),
    )),
    Customer("Dan", (
        Line("When do you open?", "We open at 9."),
        Line("What is 17 times 24?", "The result is 408."),
        Line("Who is the manager?", "The manager is Hugo."),
    )),
    Customer("Eva", (
        Line("Do you sell umbrellas?", "Yes, we sell umbrellas for 13 coins."),
        Line("Please order 5 umbrellas.", "Order 135 is placed: 5 umbrellas for 65 coins."),
        Line("Thank you!", "You are welcome!"),
    )),
    Customer("Finn", (
        Line("My name is Finn.", "Nice to meet you, Finn!"),
        Line("Are there any tents in stock?", "There are 7 tents in stock."),
        Line("What is my name?", "Your name is Finn."),
    )),
    Customer("Greta", (
        Line("Can I return goods?", "Yes, within 30 days."),
        Line("What is 86 plus 47?", "The result is 133."),
        Line("How long is the warranty?", "The warranty is 2 years."),
    )),
    Customer("Hugo", (
        Line("What does the kite cost?", "The kite costs 11 coins."),
        Line("How is the weather in Paris?", "It is rainy in Paris, at 11 degrees."),
        Line("Please order 2 kites.", "Order 112 is placed: 2 kites for 22 coins."),
    )),
)  # fmt: skip

_WEATHER = {"Lisbon": ("sunny", 24), "Oslo": ("snowy", 2), "Lima": ("foggy", 17), "Paris": ("rainy", 11)}
_STOCK = {"camera": 14, "tent": 7}


def use_tool(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a tool call, or {"error": ...} for an unknown tool or wrong arguments."""
    try:
        return _RUN[name](**arguments)
    except (KeyError, TypeError) as error:
        return {"error": f"{name}{arguments}: {error}"}


def _weather(city: str) -> dict[str, Any]:
    weather, temperature = _WEATHER[city]
    return {"city": city, "weather": weather, "temperature": temperature}


def _order(item: str, quantity: int) -> dict[str, Any]:
    price, _ = PRODUCTS[item]
    return {"order": 10 * price + quantity, "total": price * quantity}


_RUN: dict[str, Callable[..., dict[str, Any]]] = {
    "get_weather": _weather,
    "calculator": lambda operation, a, b: {"result": {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]},
    "check_stock": lambda item: {"item": item, "stock": _STOCK[item]},
    "place_order": _order,
}


_MOST_CALLS = 3  # rounds of tool calls to one message, before its answer


@dataclass(frozen=True)
class Footprint:
    """KV memory of the agents in tokens: shared in the pool, in separate blocks, and in slabs of the context."""

    pooled: int
    alone: int
    slabs: int


def play(engine: Engine, params: SamplingParams, on_answer: Listener) -> tuple[list[Said], Footprint]:
    """Fork eight conversations from one that has read the manual, and run them at the same time.

    The engine serves nothing else. Calls `on_answer` for each answered line. Raises the errors of the engine.
    """
    first = engine.chat(MANUAL, tools=TOOLS)
    said = [Said("all", GREETING, (first.send(GREETING.says, params),))]
    on_answer(said[0])
    sessions = first.fork(len(CUSTOMERS))
    for at in range(max(len(customer.lines) for customer in CUSTOMERS)):
        for answered in _answer_all(sessions, CUSTOMERS, at, params):
            said.append(answered)
            on_answer(answered)
    return said, _footprint(engine, sessions)


def _answer_all(
    sessions: Sequence[ChatSession], customers: Sequence[Customer], at: int, params: SamplingParams
) -> list[Said]:
    """Answer line `at` of every customer in one batch; tools run between the batches."""
    asking = [
        (session, customer) for session, customer in zip(sessions, customers, strict=True) if at < len(customer.lines)
    ]
    replies: list[list[Reply]] = [[] for _ in asking]
    streams: dict[int, ReplyStream] = {
        index: session.stream(customer.lines[at].says, params) for index, (session, customer) in enumerate(asking)
    }
    for _ in range(_MOST_CALLS):
        for index, stream in streams.items():
            replies[index].append(stream.wait())
        streams = {
            index: _answer_calls(asking[index][0], replies[index][-1], params)
            for index in streams
            if replies[index][-1].tool_calls
        }
    for stream in streams.values():
        stream.close()
    return [
        Said(customer.name, customer.lines[at], tuple(got)) for (_, customer), got in zip(asking, replies, strict=True)
    ]


def _answer_calls(session: ChatSession, reply: Reply, params: SamplingParams) -> ReplyStream:
    from radixkv.chat import ToolResult

    results = [ToolResult(call.id, json.dumps(use_tool(call.name, call.arguments))) for call in reply.tool_calls]
    return session.stream_tool_results(results, params)


def _footprint(engine: Engine, sessions: Sequence[ChatSession]) -> Footprint:
    stats = engine.stats()
    size, used = stats.cache.block_size, stats.cache.num_blocks - stats.cache.free_blocks
    alone = sum(-(-len(session.token_ids) // size) for session in sessions)
    return Footprint(used * size, alone * size, stats.max_length * len(sessions))
