"""The forms in which models write tool calls, and which of them a model uses.

Knows: tags, ids, what a tokenizer and its template tell. Knows no JSON and no reply.

JSON as models write it: where it ends, while it comes in pieces, and which calls it stands for.

Knows: JSON, and the names that models give to a call's fields. Knows no tag, no format and no id.

The arguments of a tool call as a chat template takes them: an object, or the JSON text of one.

Knows: calls as messages have them, whole or not. Knows no template.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NoReturn

from radixkv.chat.messages import Message
from radixkv.engine.input_processor import template_text


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a call is written: `start`, JSON, `end`.

    `named`: the name may stand before the JSON, which is then the arguments alone. `bare`: a call of a tool that was
    given needs no `start` at the beginning of a reply, or behind another call. `inner` tags stand within a call.
    """

    name: str
    start: str
    end: str = ""
    inner: tuple[str, ...] = ()
    named: bool = False
    bare: bool = False
    short_ids: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """All texts that may be control tokens, which decoding leaves out."""
        return tuple(tag for tag in (self.start, self.end, *self.inner) if tag)

    def call_id(self, seed: str, number: int) -> str:
        """The id of a reply's call `number`: another for each `seed`, and always the same.

        >>> HERMES.call_id("7", 0)
        'call_7_0'
        """
        if self.short_ids:
            return blake2b(f"{seed}_{number}".encode(), digest_size=5).hexdigest()[:9]
        return f"call_{seed}_{number}"


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", inner=("[CALL_ID]", "[ARGS]"), named=True, short_ids=True)
LLAMA = CallFormat("llama", "<|python_tag|>", bare=True)
FORMATS = (HERMES, MISTRAL, LLAMA)  # in this order: models that were trained further keep tokens that they do not use


def format_of(tokenizer: Any | None) -> CallFormat | None:
    """The form that a model's template writes, else the one whose tag is a token of its own; None for another form."""
    template = template_text(tokenizer)
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    written = [form for form in FORMATS if form.start in template]
    return next(iter([*written, *(form for form in FORMATS if form.start in added)]), None)


def tool_names(tools: Sequence[Any] | None) -> frozenset[str]:
    """Names of the tools among these schemas, which may be anything that JSON can hold."""
    schemas = [tool for tool in tools or () if isinstance(tool, dict)]
    functions = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in schemas]
    return frozenset(name for function in functions if isinstance(name := function.get("name"), str))


DEEPEST = 100  # nested deeper than this is no call: what reads and writes JSON has limits of its own, not far above

_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # up to its quote, or to what is not there yet
_BETWEEN = re.compile(r"[\s\w.+,:-]*", re.ASCII)  # what stands between strings and brackets
_SPACE = re.compile(r"\s*")
_MISSING = object()


def too_deep(value: object) -> bool:
    """Whether JSON is nested deeper than templates and tokenizers, which recurse, are given. O(its values)."""
    level = _brackets([value])
    for _ in range(DEEPEST):
        level = [each for outer in level for each in _brackets(outer.values() if isinstance(outer, dict) else outer)]
        if not level:
            return False
    return bool(level)


def _brackets(values: Iterable[Any]) -> list[list[Any] | dict[str, Any]]:
    return [value for value in values if isinstance(value, list | dict)]


class NotACall(Exception):
    """What was read as a call is text."""


class JsonEnd:
    """Finds the end of one object or array; each character is looked at once, however the text grows."""

    def __init__(self, at: int) -> None:
        """Begin at the bracket at `at`."""
        self._at = at
        self._depth = 0
        self._in_string = self._behind_string = False

    def find(self, text: str) -> int | None:
        """Index behind the closing bracket, None while it is not there; raises NotACall for what cannot be JSON.

        `text` is the one of the call before, and more. O(what is new).
        """
        while self._at < len(text):
            if not (self._leave_string(text) if self._in_string else self._go_on(text)):
                return None
            if not self._depth and not self._in_string:
                return self._at
        return None

    def _leave_string(self, text: str) -> bool:
        match = _STRING.match(text, self._at)
        assert match is not None
        self._at = match.end()
        if not text.startswith('"', self._at):
            return False
        self._at += 1
        self._in_string, self._behind_string = False, True
        return True

    def _go_on(self, text: str) -> bool:
        """To the next string or bracket. A quote too many is noticed here: it makes text of what follows a string."""
        if self._behind_string:
            self._at = end_of(_SPACE, text, self._at)
            if self._at == len(text):
                return False
            if text[self._at] not in ",:]}":
                raise NotACall
            self._behind_string = False
        self._at = end_of(_BETWEEN, text, self._at)
        if self._at == len(text):
            return False
        self._step(text[self._at])
        return True

    def _step(self, character: str) -> None:
        self._at += 1
        if character == '"':
            self._in_string = True
        elif character in "{[" and self._depth < DEEPEST:
            self._depth += 1
        elif character in "]}":
            self._depth -= 1
        else:
            raise NotACall


def entries(value: Any) -> list[dict[str, Any]]:
    """The objects of an array, or the one that there is; raises NotACall for all else."""
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(entry, dict) for entry in found):
        raise NotACall
    return found


def parsed(text: str) -> Any:
    """The value of an object or array that JSON, UTF-8 and another reader can hold; raises NotACall for all else.

    Line ends within strings are forgiven.
    """
    text = text.strip()
    if text[:1] not in ("{", "[") or JsonEnd(0).find(text) != len(text):
        raise NotACall
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # an escape may be half of a surrogate pair
    except ValueError as error:
        raise NotACall from error
    return value


def name_and_arguments(entry: dict[str, Any], *, strict: bool = False) -> tuple[str, dict[str, Any]]:
    """What an object asks for; raises NotACall unless it has a name, and an object, or the text of one, as arguments.

    Unless it is `strict`, arguments may lack.
    """
    name = entry.get("name")
    given = next((entry[key] for key in ("arguments", "parameters") if key in entry), _MISSING)
    arguments = {} if given is _MISSING and not strict else _meant(given)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise NotACall
    return name, arguments


def _meant(given: Any) -> Any:
    if isinstance(given, str):
        return parsed(given) if given.strip() else {}
    return {} if given is None or given == [] else given


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where the match of a pattern at `at` ends; `at` itself if there is none."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def with_text(call: Message) -> Message:
    """A call with its arguments as a JSON text."""
    function = call.get("function") or {}
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def with_object(call: Message) -> Message:
    """A call with its arguments as an object, if they are the text of one that templates can write."""
    function = call.get("function") or {}
    arguments = arguments_object(function.get("arguments"))
    return call if arguments is None else {**call, "function": {**function, "arguments": arguments}}


def arguments_object(text: object) -> dict[str, Any] | None:
    """The object that a JSON text holds; None for anything else, and for one that is nested too deep to be written."""
    if not isinstance(text, str):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and not too_deep(found) else None
