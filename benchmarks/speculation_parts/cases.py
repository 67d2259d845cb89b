"""Define the requests of benchmarks/speculation.py: text that a reply repeats, and text that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FILE = """def read_settings(path):
    settings = {}
    with open(path) as file:
        for line in file:
            name, value = line.strip().split("=")
            settings[name] = value
    return settings


def write_settings(path, settings):
    with open(path, "w") as file:
        for name, value in settings.items():
            file.write(name + "=" + value + "\\n")


def merge_settings(first, second):
    settings = dict(first)
    for name, value in second.items():
        if name not in settings:
            settings[name] = value
    return settings
"""
QUOTE = (
    f"The file settings.py:\n\n```python\n{FILE}```\n\nIt again:\n\n```python\n{FILE}```\n\nIt again:\n\n```python\n"
)
EDIT = (
    f"Rename `settings` to `options`.\n\n```python\n{FILE}```\n\nThe file after the change:\n\n```python\n"
    "def read_options(path):\n    options = {}\n"
)
SUBJECTS = ("a hash table", "a volcano", "inflation", "the heart", "a telescope", "a comet", "a glacier", "an enzyme")
QUESTIONS = (
    "Explain to a child what {} is.",
    "Why does {} matter? Answer in three sentences.",
    "Write a short poem about {}.",
    "Name two common errors about {}.",
    "Who first described {}, and when?",
    "Write the first paragraph of a lecture about {}.",
    "Compare {} with a clock.",
    "Which words should I know to talk about {}?",
)
CHATS = [[{"role": "user", "content": each.format(subject)}] for subject in SUBJECTS for each in QUESTIONS]
ORDERS = "W2378156", "W9571698", "W4817420", "W6679257"
CANCEL = f"Call cancel_order for each of the orders {', '.join(ORDERS)}. The reason is always 'ordered by mistake'."
CALL = {
    "type": "object",
    "properties": {"name": {"const": "cancel_order"}, "order_id": {"enum": ORDERS}, "reason": {"type": "string"}},
    "required": ["name", "order_id", "reason"],
    "additionalProperties": False,
}
CALLS = {"type": "array", "items": CALL, "minItems": 4, "maxItems": 4}


@dataclass(frozen=True)
class Case:
    """Prompts that run at once, for `tokens` tokens each; the replies to those `before` are cached.

    With `predicts`, the prediction of a request is the reply to the same prompt in another namespace.
    """

    prompts: Sequence[Any]
    tokens: int
    before: Sequence[Any] = ()
    schema: dict[str, Any] | None = None
    predicts: bool = False


CASES = {
    "retry": Case(CHATS[:1], 160, before=CHATS[:1]),
    "quote": Case([QUOTE], 140),
    "edit": Case([EDIT], 110),
    "retry_edited": Case(["This is Python. " + EDIT], 110, [EDIT]),
    "calls": Case([[{"role": "user", "content": CANCEL}]], 160, schema=CALLS),
    "prediction": Case(CHATS[1:2], 90, predicts=True),
    "chat": Case(CHATS[3:4], 160),
    "chat_8": Case(CHATS[::9], 64),
    "chat_64": Case(CHATS, 24),
}
