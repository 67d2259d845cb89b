"""Define the formats in which models write tool calls, and read and write the JSON inside.

`format_of` finds the format that a model uses. `JsonEnd` finds the end of JSON that arrives in pieces.
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
    """A format of tool calls: `start`, JSON, `end`.

    `named`: the name may precede the JSON, which then holds the arguments only. `bare`: a call of an existing tool
    needs no `start` at the beginning of a reply or after another call. `inner` are the tags within a call.
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
        """All texts of the format that may be control tokens, which decoding leaves out."""
        return tuple(tag for tag in (self.start, self.end, *self.inner) if tag)

    def call_id(self, seed: str, number: int) -> str:
        """Return the id of call `number` of a reply: deterministic, and different for each `seed`.

        >>> HERMES.call_id("7", 0)
        'call_7_0'
        """
        if self.short_ids:
            return blake2b(f"{seed}_{number}".encode(), digest_size=5).hexdigest()[:9]
        return f"call_{seed}_{number}"


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", inner=("[CALL_ID]", "[ARGS]"), named=True, short_ids=True)
LLAMA = CallFormat("llama", "<|python_tag|>", bare=True)
FORMATS = (HERMES, MISTRAL, LLAMA)  # in this order: fine-tuned models keep tokens of formats that they no longer use


def format_of(tokenizer: Any | None) -> CallFormat | None:
    """Return the format that the template of a tokenizer writes, else one whose tag is a token; None if unknown."""
    template = template_text(tokenizer)
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    written = [form for form in FORMATS if form.start in template]
    return next(iter([*written, *(form for form in FORMATS if form.start in added)]), None)


def tool_names(tools: Sequence[Any] | None) -> frozenset[str]:
    """Return the names of the tools; schemas of other shapes are skipped."""
    return frozenset(name for name, _ in functions_of(tools))


def functions_of(tools: Sequence[Any] | None) -> list[tuple[str, dict[str, Any]]]:
    """Return name and declaration of each tool, in their order; schemas of other shapes are skipped."""
    schemas = [tool for tool in tools or () if isinstance(tool, dict)]
    functions = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in schemas]
    return [(name, function) for function in functions if isinstance(name := function.get("name"), str)]


DEEPEST = 100  # deeper nesting is not a call: JSON readers and writers have recursion limits not far above

_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # up to its closing quote, or to the end of the text
_BETWEEN = re.compile(r"[\s\w.+,:-]*", re.ASCII)  # characters between strings and brackets
_SPACE = re.compile(r"\s*")
_MISSING = object()


def too_deep(value: object) -> bool:
    """Whether a JSON value is nested too deeply for templates, which recurse. O(its values)."""
    level = _brackets([value])
    for _ in range(DEEPEST):
        level = [each for outer in level for each in _brackets(outer.values() if isinstance(outer, dict) else outer)]
        if not level:
            return False
    return bool(level)


def _brackets(values: Iterable[Any]) -> list[list[Any] | dict[str, Any]]:
    return [value for value in values if isinstance(value, list | dict)]


class NotACall(Exception):
    """The text that was read as a call is not one."""


class JsonEnd:
    """Finds the end of one JSON object or array in a text that grows; reads each character once."""

    def __init__(self, at: int) -> None:
        """Begin at the bracket at `at`."""
        self._at = at
        self._depth = 0
        self._in_string = self._after_string = False

    def find(self, text: str) -> int | None:
        """Return the index after the closing bracket, None while it is missing; raises NotACall for invalid JSON.

        `text` extends the text of the previous call. O(new text).
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
        self._in_string, self._after_string = False, True
        return True

    def _go_on(self, text: str) -> bool:
        """Advance to the next string or bracket; raises NotACall if other text follows a string."""
        if self._after_string:
            self._at = end_of(_SPACE, text, self._at)
            if self._at == len(text):
                return False
            if text[self._at] not in ",:]}":
                raise NotACall
            self._after_string = False
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
    """Return the objects of an array, or a single object as a list; raises NotACall for other values."""
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(entry, dict) for entry in found):
        raise NotACall
    return found


def parsed(text: str) -> Any:
    """Parse an object or array; raises NotACall for anything that is not portable JSON in valid Unicode.

    Line breaks within strings are accepted.
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
    """Return name and arguments of a call; raises NotACall without a name.

    The arguments are an object or its JSON text; without `strict` they may be missing.
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
    """Return the end of the match of a pattern at `at`; `at` itself if there is none."""
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
    """Return the call with its arguments as JSON text."""
    function = call.get("function") or {}
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def with_object(call: Message) -> Message:
    """Return the call with its arguments as an object, if they are an object that templates can write."""
    function = call.get("function") or {}
    arguments = arguments_object(function.get("arguments"))
    return call if arguments is None else {**call, "function": {**function, "arguments": arguments}}


def arguments_object(text: object) -> dict[str, Any] | None:
    """Return the object in a JSON text; None for other values, and for an object that is nested too deeply."""
    if not isinstance(text, str):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and not too_deep(found) else None
