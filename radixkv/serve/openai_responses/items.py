"""Convert the items of a Responses conversation to the messages of chat templates.

One reply of the model is one message for a template, but several items: reasoning, text and calls. So the items of a
reply are merged, and the history finds the reply's tokens. Reading an item never depends on its id or status.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

from radixkv.chat.messages import Message
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import Fields, IgnoredFields, JsonObject, shown
from radixkv.serve.message_schemas import RoleOrder, arguments_of, in_order
from radixkv.serve.openai_responses.tools import qualified

ROLES = ("system", "developer", "user", "assistant")
KINDS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "item_reference",
)
TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
OF_ITEMS = ("id", "status")  # written by the server, and sent back
HINTS = ("phase", "caller")
HINTS_OF_PARTS = ("annotations", "logprobs", "prompt_cache_breakpoint")
_TEXTS_OF_MESSAGES = {"content", "reasoning_content"}
_SEALED = "radixkv:"  # begins the encrypted_content of this server


def read_input(given: object) -> list[JsonObject]:
    """Return the items of the field `input`, which is a text or an array; raise ApiError for other values."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list):
        raise bad_request("input must be a string or an array of items", "input", "invalid_type")
    return given


def read_messages(
    instructions: str | None,
    stored: Sequence[JsonObject],
    items: Sequence[JsonObject],
    ignored: IgnoredFields | None,
    order: RoleOrder,
) -> list[Message]:
    """Return a conversation in the form of chat templates: `instructions`, stored items and new ones.

    System and developer messages before the first reply are joined at the start, as most templates require. Later ones
    stay in place, so that the text before them does not change. `order` is that of the chat template, see `in_order`.
    O(bytes).
    Raises ApiError for a wrong item, and for a conversation without messages.
    """
    reader = _Conversation(instructions)
    for each in stored:
        reader.add(Fields(each, "a stored item", IgnoredFields()), each)
    for at, each in enumerate(items):
        reader.add(Fields(each, f"input[{at}]", ignored), each)
    messages = reader.messages(order)
    if not messages:
        raise bad_request("input has no messages", "input", "invalid_value")
    return messages


def seal(thinking: str) -> str:
    """Return thinking as `encrypted_content`: encoded, so that a client without storage returns it unchanged.

    >>> unseal(seal("2 + 2 = 4"))
    '2 + 2 = 4'
    """
    return _SEALED + b64encode(thinking.encode()).decode()


def unseal(content: str) -> str | None:
    """Return the thinking in `encrypted_content`, None if another server wrote it."""
    if not content.startswith(_SEALED):
        return None
    try:
        return b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


class _Conversation:
    """Collect messages from items, in order."""

    def __init__(self, instructions: str | None) -> None:
        self._system = [] if instructions is None else [instructions]
        self._messages: list[Message] = []  # with lists of texts: joining at each item is quadratic
        self._replied = False
        self._reply: Message | None = None  # the reply that further items may belong to
        self._after_text = False  # whether the last item was a text of that reply

    def messages(self, order: RoleOrder) -> list[Message]:
        """Return the messages. Call once."""
        for message in self._messages:
            separator = "" if message["role"] == "assistant" else "\n"
            for name in _TEXTS_OF_MESSAGES & message.keys():
                message[name] = separator.join(message[name])
        system = [{"role": "system", "content": "\n\n".join(self._system)}] if self._system else []
        return [*system, *in_order(self._messages, order)]

    def add(self, fields: Fields, given: JsonObject) -> None:
        """Add one item; raise ApiError if it is wrong. Items of unknown types are ignored fields."""
        kind = "message" if given.get("type") is None else given["type"]
        fields.prefer("type", KINDS, "this server does not read such items")
        fields.ignore(*OF_ITEMS, *HINTS)
        match kind:
            case "message":
                self._message(fields)
            case "reasoning":
                self._reasoning(fields)
            case "function_call":
                self._call(
                    fields, qualified(fields.text("namespace"), fields.needed_text("name", empty=False)), "arguments"
                )
            case "custom_tool_call":
                self._call(fields, fields.needed_text("name", empty=False), "input")
            case "function_call_output" | "custom_tool_call_output":
                self._result(fields)
            case "item_reference":
                fields.refuse("type", "cannot be item_reference: send the item itself, or previous_response_id")
            case _:
                return
        fields.close()

    def _message(self, fields: Fields) -> None:
        role = fields.need("role")
        if role not in ROLES:
            fields.refuse("role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
        content = _text(fields, "content")
        if role == "assistant":
            self._said(content)
            return
        self._reply = None
        if role != "user" and not self._replied:
            self._system.append(content)
        else:
            self._messages.append({"role": "user" if role == "user" else "system", "content": [content]})

    def _said(self, content: str) -> None:
        """Add text of the model. Two texts in a row are two messages; text after a call continues a message."""
        if self._after_text:
            self._reply = None
        self._open_reply()["content"].append(content)
        self._after_text = True

    def _reasoning(self, fields: Fields) -> None:
        sealed = fields.text("encrypted_content")
        content, summary = (_text(fields, name, needed=False) for name in ("content", "summary"))
        thinking = content or (unseal(sealed) if sealed else None) or summary
        reply = self._open_reply()
        if thinking:
            reply.setdefault("reasoning_content", []).append(thinking)
        self._after_text = False

    def _call(self, fields: Fields, name: str, argument: str) -> None:
        call_id = fields.needed_text("call_id", empty=False)
        given = fields.take(argument)
        if given is not None and not isinstance(given, str | dict):
            fields.wrong(argument, "a string", given)
        arguments = {"input": given} if argument == "input" else arguments_of(given)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._open_reply().setdefault("tool_calls", []).append(call)
        self._after_text = False

    def _result(self, fields: Fields) -> None:
        call_id, output = fields.needed_text("call_id", empty=False), _text(fields, "output")
        fields.ignore("name", "namespace")
        self._reply = None
        self._messages.append({"role": "tool", "content": [output], "tool_call_id": call_id})

    def _open_reply(self) -> Message:
        if self._reply is None:
            self._reply = {"role": "assistant", "content": []}
            self._replied, self._after_text = True, False
            self._messages.append(self._reply)
        return self._reply


def _text(fields: Fields, name: str, *, needed: bool = True) -> str:
    """Read a text, or join the texts of all parts with line feeds."""
    given: Any = fields.take(name)
    if given is None and needed:
        fields.need(name)
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        fields.wrong(name, "a string or an array of text parts", given)
    return "\n".join(_part(fields.nested(part, f"{fields.path(name)}[{at}]")) for at, part in enumerate(given))


def _part(fields: Fields) -> str:
    kind = fields.need("type")
    if kind not in TEXTS:
        fields.refuse("type", f'must be "input_text" or "output_text", not {shown(kind)}: this server reads text only')
    name = "refusal" if kind == "refusal" else "text"
    text = fields.take(name)
    if not isinstance(text, str):
        fields.wrong(name, "a string", text)
    fields.ignore(*HINTS_OF_PARTS)
    fields.close()
    return str(text)
