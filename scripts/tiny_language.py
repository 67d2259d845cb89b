"""The synthetic language of the bundled model: small worlds, and conversations about them with exactly one right answer
per turn.

A world holds the facts of a user, or the products of a shop. A *skill* reads a `Conversation` and appends one exchange:
a user turn, perhaps tool calls with their results, and the assistant's answer. Answers are functions of the history
alone, so that greedy decoding can be checked word by word. `converse` joins skills; a question about a fact may come
many turns after the fact. There are two kinds of conversation: everyday talk, and an agent with a manual, a product
list and tools.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def words(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def pairs(text: str) -> dict[str, str]:
    """`key:value` pairs of a text, in order."""
    return dict(pair.split(":") for pair in text.split())


PEOPLE = words(
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo June Kai Lena Max Nora Omar Pia Quin Rosa Sam Tara Uma Vera Will Yara "
    "Zoe Anton Bella Carl Dora Emil Frida Greta Hugo Ines Jonas Karl Lisa Maya Nils Olga Paul Rita Sven Tom Wanda"
)
BOTS = words("Mira Otto Juno Pixel Robin Echo Atlas Nova Basil Coral")
CAPITALS = pairs(
    "France:Paris Italy:Rome Spain:Madrid Japan:Tokyo Egypt:Cairo Peru:Lima Kenya:Nairobi Norway:Oslo Cuba:Havana "
    "Chile:Santiago Germany:Berlin Austria:Vienna Greece:Athens Portugal:Lisbon Ireland:Dublin Sweden:Stockholm "
    "Finland:Helsinki Denmark:Copenhagen Poland:Warsaw Hungary:Budapest Canada:Ottawa India:Delhi China:Beijing "
    "Turkey:Ankara"
)
CITIES = [*CAPITALS.values(), "Boston", "Milan", "Geneva", "Sydney", "Munich", "Porto"]
SOUNDS = pairs("cat:meow dog:woof cow:moo duck:quack sheep:baa pig:oink owl:hoot lion:roar bee:buzz frog:ribbit")
OPPOSITES = pairs("hot:cold big:small fast:slow old:young high:low open:closed dark:light wet:dry hard:soft full:empty")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
COLORS = words("red blue green yellow purple orange pink white black brown")
BELONGINGS = words("car hat house bike cup coat scarf boat guitar bag")
PETS = words("cat dog parrot rabbit horse turtle")
PET_NAMES = words("Rex Luna Milo Bobo Daisy Rocky Fluffy Coco Felix Lucky")
FOODS = words("pizza soup rice pasta cake bread cheese salad chocolate apples")
ITEMS = words(
    "lamp book chair table kettle clock mirror pillow basket candle blanket ladder bucket hammer spoon plate carpet "
    "rope tent drum bottle broom camera compass flute helmet jacket kite lantern mug napkin oven pencil radio sofa "
    "towel umbrella vase wallet whistle anchor bell"
)
SHELVES = "ABCDEFGH"
SHOPS = words("Harbor Garden River Castle Market Station Bridge Forest")
WEATHER = words("sunny rainy cloudy windy snowy foggy")
ONES = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
NUMBERS = [*ONES, "twenty"]


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """One tool as a JSON schema, every parameter required; `parameters` maps names to JSON types."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "get_weather": tool("get_weather", "The weather in a city.", city="string"),
    "calculator": tool(
        "calculator", "Add, subtract or multiply two numbers.", operation="string", a="integer", b="integer"
    ),
    "check_stock": tool("check_stock", "How many of an item are in stock.", item="string"),
    "place_order": tool("place_order", "Order a quantity of an item.", item="string", quantity="integer"),
}
STYLES: dict[str, Callable[[str], str]] = {
    "": lambda text: text,
    "You speak like a pirate.": lambda text: f"Arr! {text}",
    "You are very polite.": lambda text: f"With pleasure. {text}",
    "You are always happy.": lambda text: f"{text} What a lovely day!",
}
NO_TOOL = "I have no tool for that."


@dataclass
class Conversation:
    """Messages in the chat-template format, the tools offered, and the world that they speak of; `skills` names each
    assistant turn's skill.
    """

    random: random.Random
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    skills: list[str] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)  # facts about the user: name, city, food
    colors: dict[str, str] = field(default_factory=dict)  # belonging -> colour
    pets: dict[str, str] = field(default_factory=dict)  # kind -> name
    total: int | None = None  # of the sum in the last exchange
    bot: str | None = None
    style: str = ""
    shop: dict[str, Any] | None = None

    def one(self, *options: str) -> str:
        """Any of the options."""
        return self.random.choice(options)

    def system(self, text: str) -> None:
        """Open with a system turn."""
        self.messages.append({"role": "system", "content": text})

    def exchange(self, skill: str, question: str, answer: str) -> None:
        """A question and its answer, in the style that the system prompt asks for."""
        self.ask(question)
        self.answer(skill, answer)

    def ask(self, question: str) -> None:
        """A user turn."""
        self.messages.append({"role": "user", "content": question})

    def answer(self, skill: str, text: str) -> None:
        """An assistant turn in words."""
        self.messages.append({"role": "assistant", "content": STYLES[self.style](text)})
        self.skills.append(skill)

    def call(self, skill: str, *calls: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
        """An assistant turn that calls tools, and a tool turn per result; a call is (name, arguments, result)."""
        requests = [
            {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments, _ in calls
        ]
        self.messages.append({"role": "assistant", "content": "", "tool_calls": requests})
        self.skills.append(f"{skill}, call")
        for name, _, result in calls:
            self.messages.append({"role": "tool", "name": name, "content": json.dumps(result)})

    def offers(self, name: str) -> bool:
        """Whether the tool is listed in the system turn."""
        return any(listed["function"]["name"] == name for listed in self.tools)


Skill = Callable[[Conversation], None]


# ---- everyday talk


def small_talk(talk: Conversation) -> None:
    """Greetings, thanks, and the name of the assistant."""
    myself = f"I am {talk.bot}." if talk.bot else "I am Radix, a very small language model."
    question, answer = talk.random.choice(
        [
            ("Hello!", "Hello! How can I help you today?"),
            ("Hi there.", "Hi! What can I do for you?"),
            ("Good morning!", "Good morning! How can I help you today?"),
            ("How are you?", "I am fine, thank you. How are you?"),
            ("Thank you!", "You are welcome!"),
            ("Thanks a lot.", "You are welcome!"),
            ("Bye!", "Goodbye! Have a great day!"),
            ("Goodbye.", "Goodbye! Have a great day!"),
            ("Tell me a joke.", "Why did the key cross the cache? To find its value."),
            ("What can you do?", "I can chat, remember what you tell me, add small numbers and use tools."),
            *[(question, myself) for question in ("Who are you?", "What is your name?")] * 2,
        ]
    )
    talk.exchange("small talk", question, answer)


def fact(talk: Conversation) -> None:
    """Capitals, animal sounds, opposites, days of the week."""
    kind = talk.random.randrange(5)
    if kind <= 1:
        country, city = talk.random.choice(list(CAPITALS.items()))
        question = talk.one(f"What is the capital of {country}?", f"Tell me the capital of {country}.")
        talk.exchange("facts", question, f"The capital of {country} is {city}.")
    elif kind == 2:
        animal, sound = talk.random.choice(list(SOUNDS.items()))
        talk.exchange("facts", f"What does the {animal} say?", f"The {animal} says {sound}.")
    elif kind == 3:
        word, opposite = talk.random.choice(list(OPPOSITES.items()))
        talk.exchange("facts", f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}.")
    else:
        day = talk.random.randrange(7)
        talk.exchange("facts", f"Which day comes after {DAYS[day]}?", f"{DAYS[(day + 1) % 7]} comes after {DAYS[day]}.")


def tell(talk: Conversation) -> None:
    """The user says something about himself that was not said before."""
    kind = talk.random.choice(["name", "city", "both", "food", "color", "color", "pet"])
    name, city, food = talk.one(*PEOPLE), talk.one(*CITIES), talk.one(*FOODS)
    if kind == "both" and not talk.about.keys() & {"name", "city"}:
        talk.about |= {"name": name, "city": city}
        talk.exchange("told", f"My name is {name} and I live in {city}.", f"Nice to meet you, {name} from {city}!")
    elif kind == "name" and "name" not in talk.about:
        talk.about["name"] = name
        talk.exchange(
            "told", talk.one(f"My name is {name}.", f"I am {name}.", f"Call me {name}."), f"Nice to meet you, {name}!"
        )
    elif kind == "city" and "city" not in talk.about:
        talk.about["city"] = city
        talk.exchange("told", f"I live in {city}.", f"I hear that {city} is a nice place.")
    elif kind == "food" and "food" not in talk.about:
        talk.about["food"] = food
        talk.exchange("told", f"I like {food}.", f"I will remember that you like {food}.")
    elif kind == "pet":
        tell_pet(talk)
    else:
        tell_color(talk)


def tell_pet(talk: Conversation) -> None:
    """The user has a pet; its kind and name are stated once."""
    kind, name = talk.one(*PETS), talk.one(*PET_NAMES)
    if kind in talk.pets or name in talk.pets.values():
        return
    talk.pets[kind] = name
    talk.exchange("told", f"I have a {kind} called {name}.", f"{name} is a great name for a {kind}.")


def tell_color(talk: Conversation) -> None:
    """The user owns something of a colour; each thing is stated once."""
    thing, color = talk.one(*BELONGINGS), talk.one(*COLORS)
    if thing in talk.colors:
        return
    talk.colors[thing] = color
    talk.exchange(
        "told", talk.one(f"I have a {color} {thing}.", f"My {thing} is {color}."), f"A {color} {thing} sounds lovely."
    )


def recall(talk: Conversation) -> None:
    """The user asks for an earlier fact, and sometimes for one that was not stated."""
    options: list[Skill] = [recall_about, recall_about, recall_everything]
    options += [recall_color] * (2 if talk.colors else 0) + [recall_pet] * (2 if talk.pets else 0) + [recall_nothing]
    talk.random.choice(options)(talk)


def recall_about(talk: Conversation) -> None:
    """Name, city or food, or that the user did not state it."""
    questions = {
        "name": (
            talk.one("What is my name?", "Do you remember my name?", "Who am I?"),
            "Your name is {}.",
            "You have not told me your name.",
        ),
        "city": ("Where do I live?", "You live in {}.", "You have not told me where you live."),
        "food": ("What do I like?", "You like {}.", "You have not told me what you like."),
    }
    known = [key for key in questions if key in talk.about]
    key = talk.one(*known) if known and talk.random.random() < 0.8 else talk.one(*questions)
    question, right, unknown = questions[key]
    talk.exchange(
        "recall" if key in talk.about else "recall nothing",
        question,
        right.format(talk.about[key]) if key in talk.about else unknown,
    )


def recall_everything(talk: Conversation) -> None:
    """All stated facts of name, city and food, in this order."""
    parts = {"name": "Your name is {}.", "city": "You live in {}.", "food": "You like {}."}
    known = " ".join(part.format(talk.about[key]) for key, part in parts.items() if key in talk.about)
    talk.exchange("recall everything", "What do you know about me?", known or "You have not told me anything yet.")


def recall_color(talk: Conversation) -> None:
    """The colour of a stated belonging."""
    thing = talk.one(*talk.colors)
    talk.exchange("recall", f"What color is my {thing}?", f"Your {thing} is {talk.colors[thing]}.")


def recall_pet(talk: Conversation) -> None:
    """A pet's name, or which pet has the name."""
    kind = talk.one(*talk.pets)
    if talk.random.random() < 0.6:
        talk.exchange("recall", f"What is my {kind} called?", f"Your {kind} is called {talk.pets[kind]}.")
    else:
        talk.exchange("recall", f"Who is {talk.pets[kind]}?", f"{talk.pets[kind]} is your {kind}.")


def recall_nothing(talk: Conversation) -> None:
    """The colour of something that was never mentioned."""
    thing = talk.one(*BELONGINGS)
    if thing not in talk.colors:
        talk.exchange("recall nothing", f"What color is my {thing}?", f"You have not told me about your {thing}.")


def sum_in_words(talk: Conversation) -> None:
    """A sum of small numbers, in words."""
    a, b = talk.random.randint(0, 10), talk.random.randint(0, 10)
    plus = talk.random.random() < 0.7
    talk.total = a + b if plus else max(a, b) - min(a, b)
    a, b, sign = (a, b, "plus") if plus else (max(a, b), min(a, b), "minus")
    talk.exchange(
        "sums",
        f"What is {NUMBERS[a]} {sign} {NUMBERS[b]}?",
        f"{NUMBERS[a].capitalize()} {sign} {NUMBERS[b]} is {NUMBERS[talk.total]}.",
    )


def chained_sum(talk: Conversation) -> None:
    """A sum, and then more sums on its result."""
    sum_in_words(talk)
    for _ in range(talk.random.randint(1, 3)):
        assert talk.total is not None
        before, step = talk.total, talk.random.randint(1, 9)
        plus = before < step or (talk.random.random() < 0.6 and before + step <= 20)
        talk.total = before + step if plus else before - step
        question = f"Now add {NUMBERS[step]}." if plus else f"Now take away {NUMBERS[step]}."
        sign = "plus" if plus else "minus"
        answer = f"{NUMBERS[before].capitalize()} {sign} {NUMBERS[step]} is {NUMBERS[talk.total]}."
        talk.exchange("chained sums", question, answer)


def sum_in_digits(talk: Conversation) -> None:
    """A sum of numbers up to 10, in digits."""
    a, b = talk.random.randint(1, 10), talk.random.randint(1, 10)
    talk.exchange("sums", f"What is {a} + {b}?", f"That is {a + b}.")


# ---- tools


def weather(talk: Conversation) -> None:
    """The weather in one city or two, from a tool."""
    cities = talk.random.sample(CITIES, 2 if talk.random.random() < 0.25 else 1)
    question = (
        talk.one("What is the weather in {}?", "How is the weather in {}?")
        if len(cities) == 1
        else "How is the weather in {} and in {}?"
    )
    talk.ask(question.format(*cities))
    if not talk.offers("get_weather"):
        talk.answer("no tool", NO_TOOL)
        return
    reports = [(city, talk.one(*WEATHER), talk.random.randint(0, 35)) for city in cities]
    results = [{"city": city, "weather": sky, "temperature": degrees} for city, sky, degrees in reports]
    talk.call(
        "weather", *[("get_weather", {"city": city}, result) for city, result in zip(cities, results, strict=True)]
    )
    talk.answer("weather", " ".join(f"It is {sky} in {city}, at {degrees} degrees." for city, sky, degrees in reports))


def calculation(talk: Conversation) -> None:
    """Numbers too large to learn by heart, from a tool."""
    a, b = talk.random.randint(11, 99), talk.random.randint(11, 99)
    sign, operation, result = talk.random.choice(
        [("plus", "add", a + b), ("minus", "subtract", a - b), ("times", "multiply", a * b)]
    )
    talk.ask(f"What is {a} {sign} {b}?")
    if not talk.offers("calculator"):
        talk.answer("no tool", NO_TOOL)
        return
    talk.call("calculator", ("calculator", {"operation": operation, "a": a, "b": b}, {"result": result}))
    talk.answer("calculator", f"The result is {result}.")


def stock(talk: Conversation) -> None:
    """How many there are, from a tool."""
    item, count = talk.one(*known_items(talk)), talk.random.choice([0, *range(2, 60)])
    talk.ask(talk.one(f"How many {item}s are in stock?", f"Are there any {item}s in stock?"))
    if not talk.offers("check_stock"):
        talk.answer("no tool", NO_TOOL)
        return
    talk.call("stock", ("check_stock", {"item": item}, {"item": item, "stock": count}))
    talk.answer("stock", f"There are {count} {item}s in stock." if count else f"The {item} is out of stock.")


def order(talk: Conversation) -> None:
    """Placing an order, with a tool."""
    item, quantity, price = talk.one(*known_items(talk)), talk.random.randint(2, 9), talk.random.randint(2, 60)
    if talk.shop:
        price = talk.shop["products"][item][0]
    number = talk.random.randint(100, 999)
    talk.ask(talk.one(f"I want to order {quantity} {item}s.", f"Please order {quantity} {item}s."))
    if not talk.offers("place_order"):
        talk.answer("no tool", NO_TOOL)
        return
    talk.call(
        "order", ("place_order", {"item": item, "quantity": quantity}, {"order": number, "total": quantity * price})
    )
    talk.answer("order", f"Order {number} is placed: {quantity} {item}s for {quantity * price} coins.")


def known_items(talk: Conversation) -> list[str]:
    """The items of the shop, or any item where there is no shop."""
    return list(talk.shop["products"]) if talk.shop else ITEMS


# ---- an agent with a manual


def open_shop(talk: Conversation, most: int) -> str:
    """Found a shop of at most `most` products; returns its manual, the text of a system turn."""
    rng = talk.random
    items = rng.sample(ITEMS, rng.randint(4, most))
    opens = rng.randint(6, 11)
    talk.shop = {
        "name": rng.choice(SHOPS),
        "city": rng.choice(CITIES),
        "opens": opens,
        "closes": opens + rng.randint(6, 12),
        "days": rng.randint(2, 9),
        "delivery": rng.randint(2, 20),
        "returns": rng.choice([7, 10, 14, 20, 30, 60]),
        "warranty": rng.randint(2, 9),
        "manager": rng.choice(PEOPLE),
        "products": {item: (rng.randint(2, 60), rng.choice(SHELVES)) for item in items},
    }
    return manual(talk.bot, talk.shop, talk.style)


def manual(bot: str | None, shop: dict[str, Any], style: str) -> str:
    """The manual of an agent in a shop."""
    lines = [
        f"You are {bot}, the assistant of the {shop['name']} Shop in {shop['city']}. {style}".strip(),
        "Answer from this manual. Use a tool for the weather, for the stock, for orders and for large numbers.",
        f"The shop opens at {shop['opens']} and closes at {shop['closes']}.",
        f"Delivery takes {shop['days']} days and costs {shop['delivery']} coins.",
        f"Goods can be returned within {shop['returns']} days.",
        f"The warranty is {shop['warranty']} years.",
        f"The manager is {shop['manager']}.",
        "Products:",
        *(f"- {item}: {price} coins, shelf {shelf}" for item, (price, shelf) in shop["products"].items()),
    ]
    return "\n".join(lines)


def ask_manual(talk: Conversation) -> None:
    """A question that the manual's rules answer."""
    shop = talk.shop
    assert shop is not None
    question, answer = talk.random.choice(
        [
            ("When do you open?", f"We open at {shop['opens']}."),
            ("When do you close?", f"We close at {shop['closes']}."),
            ("How long does delivery take?", f"Delivery takes {shop['days']} days."),
            ("How much is delivery?", f"Delivery costs {shop['delivery']} coins."),
            ("Can I return goods?", f"Yes, within {shop['returns']} days."),
            ("How long is the warranty?", f"The warranty is {shop['warranty']} years."),
            ("Who is the manager?", f"The manager is {shop['manager']}."),
            ("Where is the shop?", f"The {shop['name']} Shop is in {shop['city']}."),
        ]
    )
    talk.exchange("manual", question, answer)


def ask_product(talk: Conversation) -> None:
    """A question that the manual's product list answers."""
    assert talk.shop is not None
    products = talk.shop["products"]
    item = talk.one(*products)
    price, shelf = products[item]
    kind = talk.random.randrange(5)
    if kind <= 1:
        talk.exchange(
            "products",
            talk.one(f"How much is the {item}?", f"What does the {item} cost?"),
            f"The {item} costs {price} coins.",
        )
    elif kind == 2:
        talk.exchange(
            "products",
            talk.one(f"Where is the {item}?", f"On which shelf is the {item}?"),
            f"The {item} is on shelf {shelf}.",
        )
    elif kind == 3:
        talk.exchange("products", f"Do you sell {item}s?", f"Yes, we sell {item}s for {price} coins.")
    else:
        missing = talk.one(*(item for item in ITEMS if item not in products))
        talk.exchange("not sold", f"Do you sell {missing}s?", f"No, we do not sell {missing}s.")


# ---- conversations

TALK: list[Skill] = [
    small_talk,
    fact,
    tell,
    tell,
    tell,
    recall,
    recall,
    recall,
    sum_in_words,
    chained_sum,
    sum_in_digits,
]
WITH_TOOLS: list[Skill] = [weather, weather, calculation, calculation, stock, order]


def short_conversation(rng: random.Random, tools: float) -> Conversation:
    """Everyday talk, perhaps with a persona, or (with probability `tools`) mostly about one or two tools."""
    talk = Conversation(rng)
    skills = TALK + [weather, calculation, stock, order] * (rng.random() < 0.05)
    if rng.random() < tools:
        talk.tools = rng.sample(list(TOOLS.values()), rng.randint(1, 2))
        skills = [small_talk, tell, recall, *WITH_TOOLS, *WITH_TOOLS]
    if rng.random() < 0.4:
        talk.bot, talk.style = rng.choice([None, *BOTS]), rng.choice(list(STYLES))
    opening = " ".join(
        part for part in (f"You are {talk.bot}." if talk.bot else "You are a helpful assistant.", talk.style) if part
    )
    if talk.bot or talk.style or rng.random() < 0.6:
        talk.system(opening)
    return converse(talk, skills, rng.randint(3, 8))


def shop_conversation(rng: random.Random, most: int, lookups: int) -> Conversation:
    """An agent with a manual of at most `most` products, and its customer; most have tools. The more `lookups`, the
    more questions are about a product.
    """
    talk = Conversation(rng, bot=rng.choice(BOTS), style=rng.choice(list(STYLES)) if rng.random() < 0.2 else "")
    if most > 8 or rng.random() < 0.3:
        talk.tools = rng.sample(list(TOOLS.values()), 4 if rng.random() < 0.7 else rng.randint(1, 3))
    talk.system(open_shop(talk, most))
    skills: list[Skill] = [ask_product] * 4 * lookups + [ask_manual] * 3 + [small_talk, tell, recall]
    if talk.tools:
        skills += WITH_TOOLS + [stock, order] * 2 * (lookups - 1)
    return converse(talk, skills, rng.randint(5, 9))


def converse(talk: Conversation, skills: list[Skill], exchanges: int) -> Conversation:
    """Let `exchanges` skills speak, in random order."""
    for _ in range(exchanges):
        talk.random.choice(skills)(talk)
    if not talk.skills:
        small_talk(talk)
    return talk
