"""The arguments of a tool call as a chat template takes them: an object, or the JSON text of one.

Knows: calls as messages have them, whole or not. Knows no template.
"""

from __future__ import annotations

import json

from radixkv.chat.messages import Message
from radixkv.chat.tool_calls_json import too_deep


def with_text(call: Message) -> Message:
    """A call with its arguments as a JSON text."""
    function = call.get("function") or {}
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def with_object(call: Message) -> Message:
    """A call with its arguments as an object, if they are one that templates can write."""
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments", ""))
    except (TypeError, ValueError, RecursionError):  # no text, or none that JSON can read
        return call
    return {**call, "function": {**function, "arguments": arguments}} if _is_plain(arguments) else call


def _is_plain(arguments: object) -> bool:
    return isinstance(arguments, dict) and not too_deep(arguments)
