"""Chat messages and tools from outside, checked, in the form that chat templates take.

Knows: OpenAI's roles and content parts, and what of them a text model can use. Knows no template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from radixkv.chat.messages import Message
from radixkv.chat.tool_call_formats import too_deep
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import Fields, JsonObject, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = r"[a-zA-Z0-9_.-]{1,64}"


def read_messages(given: object) -> list[Message]:
    """Check a conversation; raises ApiError, which says where it is wrong.

    Results of tool calls come in the order of the calls: most templates write no ids, so that their places alone say
    which is whose.
    """
    if not isinstance(given, list) or not given:
        raise bad_request("messages must be an array of at least one message", "messages", "invalid_type")
    return _in_order([_message(Fields(each, f"messages[{at}]")) for at, each in enumerate(given)])


def read_tools(given: Sequence[Any] | None) -> list[JsonObject] | None:
    """Check tool definitions, which stay as they came; raises ApiError. An empty list is none."""
    for at, each in enumerate(given or ()):
        fields = Fields(each, f"tools[{at}]")
        if fields.need("type") != "function":
            fields.refuse("type", 'must be "function"')
        _check_function(Fields(fields.need("function"), fields.path("function")))
        fields.close()
    return list(given) if given else None


def _in_order(messages: list[Message]) -> list[Message]:
    """The messages with the results behind each reply in the order of its calls, if it is clear whose they are."""
    ordered: list[Message] = []
    places: dict[str, int] = {}
    for is_result, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        each = list(run)
        if is_result and {message["tool_call_id"] for message in each} <= places.keys():
            each.sort(key=lambda message: places[message["tool_call_id"]])
        ordered += each
        calls = [call["id"] for call in each[-1].get("tool_calls") or ()]
        places = {call: at for at, call in enumerate(calls)} if len({*calls}) == len(calls) else {}
    return ordered


def _message(fields: Fields) -> Message:
    role = fields.need("role")
    if role not in ROLES:
        fields.refuse("role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    content = _content(fields)
    message: Message = {"role": "system" if role == "developer" else role}
    if role == "assistant":
        message |= _assistant(fields, content)
    elif content is None:
        fields.need("content")
    else:
        message["content"] = content
    if role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id") or fields.need("tool_call_id")
    if (name := fields.text("name")) is not None:
        message["name"] = name
    fields.close()
    return message


def _assistant(fields: Fields, content: str | None) -> Message:
    calls = [_call(Fields(each, f"{fields.path('tool_calls')}[{at}]")) for at, each in _numbered(fields, "tool_calls")]
    thinking = fields.text("reasoning_content")
    refusal = fields.text("refusal")
    _numbered(fields, "annotations")
    fields.only("audio", (), "this server reads and writes text only")
    fields.only("function_call", (), "it is the old form of tool_calls: use that")
    if content is None and not calls and refusal is None:
        fields.need("content")
    message: Message = {"content": refusal if content is None and refusal is not None else content or ""}
    if calls:
        message["tool_calls"] = calls
    if thinking is not None:
        message["reasoning_content"] = thinking
    return message


def _content(fields: Fields) -> str | None:
    """A text, or the texts of all parts, a line each."""
    given = fields.take("content")
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        fields.wrong("content", "a string or an array of text parts", given)
    return "\n".join(_part(Fields(part, f"{fields.path('content')}[{at}]")) for at, part in enumerate(given))


def _part(fields: Fields) -> str:
    kind = fields.need("type")
    if kind not in ("text", "refusal"):
        fields.refuse("type", f'must be "text", not {shown(kind)}: this server reads text only')
    text = fields.need(str(kind))
    if not isinstance(text, str):
        fields.wrong(str(kind), "a string", text)
    fields.ignore("cache_control", "annotations")  # hints that some frameworks put there for others
    fields.close()
    return str(text)


def _call(fields: Fields) -> JsonObject:
    """A tool call; its arguments become an object if they are the text of one, since templates write them as JSON."""
    call_id = fields.text("id") or fields.need("id")
    fields.only("type", ("function",), "there is no other kind of call")
    fields.ignore("index")  # left by clients that put a call together from its events
    function = Fields(fields.need("function"), fields.path("function"))
    name = function.text("name") or function.need("name")
    arguments = function.take("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        function.wrong("arguments", "a string of JSON", arguments)
    for each in (function, fields):
        each.close()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(given: str | JsonObject | None) -> str | JsonObject:
    if not isinstance(given, str):
        return given or {}
    try:
        parsed = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return given
    return parsed if isinstance(parsed, dict) and not too_deep(parsed) else given


def _check_function(fields: Fields) -> None:
    name = fields.need("name")
    if not isinstance(name, str) or not re.fullmatch(TOOL_NAME, name):
        fields.refuse("name", "must be 1 to 64 letters, digits, underscores, dots or dashes")
    fields.text("description")
    parameters = fields.take("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        fields.wrong("parameters", "a JSON schema (an object)", parameters)
    fields.flag("strict")  # sent by default by some frameworks; arguments are what the model wrote all the same
    fields.close()


def _numbered(fields: Fields, name: str) -> list[tuple[int, Any]]:
    return list(enumerate(fields.list(name) or ()))


def written(messages: Sequence[Message], tools: Sequence[JsonObject] | None, *, thinking: bool) -> list[str]:
    """What a template writes of a conversation, for a first look at how long it is; JSON without its white space.

    Without `thinking` only that behind the last message of a user counts. O(bytes).
    """
    asked = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=0)
    texts = [_compact(tools)] if tools else []
    for at, message in enumerate(messages):
        texts += [message.get("content") or "", message.get("name") or ""]
        texts += [_compact(call["function"]) for call in message.get("tool_calls") or ()]
        if thinking or at > asked:
            texts.append(message.get("reasoning_content") or "")
    return texts


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
