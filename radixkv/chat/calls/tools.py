"""Read the declarations of tools, and convert the arguments of calls between objects and JSON texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from radixkv.chat.calls.values import DEEPEST
from radixkv.chat.messages import Message


def tools_by_name(tools: Sequence[Any] | None) -> dict[str, dict[str, Any]]:
    """Return the declaration of each tool by its name; schemas of other shapes are skipped."""
    schemas = [tool for tool in tools or () if isinstance(tool, dict)]
    functions = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in schemas]
    return {name: function for function in functions if isinstance(name := function.get("name"), str)}


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
