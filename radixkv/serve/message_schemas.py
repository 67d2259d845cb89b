"""Messages and tools in request bodies: check their fields, and convert them to the form of chat templates.

A wrong field raises ApiError with one sentence that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from radixkv.chat.messages import Message
from radixkv.chat.tool_call_formats import arguments_object
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import Fields, IgnoredFields, JsonObject, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_FIELDS = ("name", "description", "parameters", "strict")
TOOL_NAME = r"[a-zA-Z0-9_.-]{1,64}"


def read_messages(given: object, ignored: IgnoredFields | None = None) -> list[Message]:
    """Check a conversation, and return it in the form of chat templates; raise ApiError, which names the wrong field.

    Unknown fields are treated as in `read_chat`. Results of tool calls are put in the order of the calls: most
    templates write no ids, so the order must match.
    """
    if not isinstance(given, list) or not given:
        raise bad_request("messages must be an array of at least one message", "messages", "invalid_type")
    return results_in_order([_message(Fields(each, f"messages[{at}]", ignored)) for at, each in enumerate(given)])


def read_tools(given: Sequence[Any] | None, ignored: IgnoredFields | None = None) -> list[JsonObject] | None:
    """Check tool definitions, and return their known fields; None for an empty list. Raises ApiError.

    A template writes all fields of a tool, so a field without effect is left out.
    """
    return [_tool(Fields(each, f"tools[{at}]", ignored)) for at, each in enumerate(given or ())] or None


@dataclass(frozen=True, slots=True)
class RoleOrder:
    """The orders of roles that a chat template takes.

    `late_system`: a system message after a reply is written in its place. `user_after_results`: a text of the user may
    follow the results of tool calls.
    """

    late_system: bool = True
    user_after_results: bool = True


ANY_ORDER = RoleOrder()


def in_order(messages: Sequence[Message], order: RoleOrder) -> list[Message]:
    """Return messages in an order of roles that a chat template takes. O(bytes).

    Messages of the user that follow each other are joined, since some templates require alternating roles. Results are
    put in the order of their calls. A system message or a text that the template refuses in its place becomes text of
    the user, or of the last result before it. Each message depends on its own turn only, so that later messages do not
    change earlier ones.

    >>> in_order([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], ANY_ORDER)
    [{'role': 'user', 'content': 'a\\nb'}]
    """
    if not order.late_system:
        messages = [{**each, "role": "user"} if each["role"] == "system" else each for each in messages]
    arranged = results_in_order(_joined_user_texts(messages))
    return arranged if order.user_after_results else _with_texts_in_results(arranged)


def results_in_order(messages: list[Message]) -> list[Message]:
    """Put the results after each reply in the order of its calls, if their ids are unique and known."""
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


def _joined_user_texts(messages: Sequence[Message]) -> list[Message]:
    joined: list[Message] = []
    for is_user, run in groupby(messages, key=lambda message: message["role"] == "user"):
        each = list(run)
        joined += [{**each[0], "content": "\n".join(one["content"] for one in each)}] if is_user else each
    return joined


def _with_texts_in_results(messages: Sequence[Message]) -> list[Message]:
    """Append each text of the user that follows a result to that result."""
    joined: list[Message] = []
    for each in messages:
        if each["role"] == "user" and joined and joined[-1]["role"] == "tool":
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n{each['content']}"}
        else:
            joined.append(each)
    return joined


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
        message["tool_call_id"] = fields.needed_text("tool_call_id", empty=False)
    if (name := fields.text("name")) is not None:
        message["name"] = name
    fields.ignore("cache_control")
    fields.close()
    return message


def _assistant(fields: Fields, content: str | None) -> Message:
    calls = [
        _call(fields.nested(each, f"{fields.path('tool_calls')}[{at}]")) for at, each in _numbered(fields, "tool_calls")
    ]
    thinking, other = fields.text("reasoning_content"), fields.text("reasoning")  # the names that servers use
    refusal = fields.text("refusal")
    _numbered(fields, "annotations")
    fields.only("audio", (), "this server reads and writes text only")
    fields.only("function_call", (), "it is the old form of tool_calls: use that")
    if content is None and not calls and refusal is None:
        fields.need("content")
    message: Message = {"content": refusal if content is None and refusal is not None else content or ""}
    if calls:
        message["tool_calls"] = calls
    if thinking is not None or other is not None:
        message["reasoning_content"] = other if thinking is None else thinking
    return message


def _content(fields: Fields) -> str | None:
    """Read a text, or join the texts of all parts with line feeds."""
    given = fields.take("content")
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        fields.wrong("content", "a string or an array of text parts", given)
    path = fields.path("content")
    return "\n".join(_part(fields.nested(part, f"{path}[{at}]")) for at, part in enumerate(given))


def _part(fields: Fields) -> str:
    kind = fields.need("type")
    if kind not in ("text", "refusal"):
        fields.refuse("type", f'must be "text", not {shown(kind)}: this server reads text only')
    text = fields.need(str(kind))
    if not isinstance(text, str):
        fields.wrong(str(kind), "a string", text)
    fields.ignore("cache_control", "annotations")  # hints of some frameworks for other servers
    fields.close()
    return str(text)


def _call(fields: Fields) -> JsonObject:
    """Read a tool call. The JSON text of an arguments object becomes the object, since templates write JSON."""
    call_id = fields.needed_text("id", empty=False)
    fields.only("type", ("function",), "there is no other kind of call")
    fields.ignore("index")  # from clients that assembled a call from its events
    function = fields.nested(fields.need("function"), fields.path("function"))
    name = function.needed_text("name", empty=False)
    arguments = function.take("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        function.wrong("arguments", "a string of JSON", arguments)
    for each in (function, fields):
        each.close()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(arguments)}}


def arguments_of(given: str | JsonObject | None) -> str | JsonObject:
    """Return the arguments of a call as an object if they are JSON of one, since templates write JSON."""
    arguments = arguments_object(given)
    return given or {} if arguments is None else arguments


def _tool(fields: Fields) -> JsonObject:
    if fields.need("type") != "function":
        fields.refuse("type", 'must be "function"')
    given = fields.need("function")
    check_function(fields.nested(given, fields.path("function")))
    fields.ignore("cache_control")
    fields.close()
    return {"type": "function", "function": {name: given[name] for name in given if name in TOOL_FIELDS}}


def check_function(fields: Fields) -> None:
    """Check a function that a model may call; raise ApiError, which names the wrong field."""
    name = fields.need("name")
    if not isinstance(name, str) or not re.fullmatch(TOOL_NAME, name):
        fields.refuse("name", "must be 1 to 64 letters, digits, underscores, dots or dashes")
    fields.text("description")
    parameters = fields.take("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        fields.wrong("parameters", "a JSON schema (an object)", parameters)
    fields.flag("strict")  # accepted without effect: arguments are as the model writes them
    fields.close()


def _numbered(fields: Fields, name: str) -> list[tuple[int, Any]]:
    return list(enumerate(fields.list(name) or ()))


def template_texts(messages: Sequence[Message], tools: Sequence[JsonObject] | None, *, thinking: bool) -> list[str]:
    """Return the texts of a conversation that a template writes, for a lower bound of its length. O(bytes).

    JSON is written without white space. Without `thinking`, only thinking after the last user message counts.
    """
    last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=0)
    texts = [_compact(tools)] if tools else []
    for at, message in enumerate(messages):
        texts += [message.get("content") or "", message.get("name") or ""]
        texts += [_compact(call["function"]) for call in message.get("tool_calls") or ()]
        if thinking or at > last_user:
            texts.append(message.get("reasoning_content") or "")
    return texts


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
