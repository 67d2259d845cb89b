"""Declare the items of a Responses conversation, and convert them to the messages of chat templates.

One reply of the model is one message for a template, but several items: reasoning, text and calls. So the items of a
reply are merged, and the history finds the reply's tokens. Reading an item never depends on its id or status.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema

from radixkv.chat.messages import Message
from radixkv.serve.bodies import (
    Body,
    ByField,
    ByType,
    NotEmpty,
    Prefer,
    Several,
    Unread,
    broken,
    needs,
    other_values,
    read,
    taking,
)
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import IgnoredFields, JsonObject
from radixkv.serve.message_schemas import arguments_of, text_of
from radixkv.serve.openai_responses.tools import qualified
from radixkv.serve.role_order import RoleOrder, in_order

_TEXTS_OF_MESSAGES = {"content", "reasoning_content"}
_SEALED = "radixkv:"  # begins the encrypted_content of this server
_READ = 'this server reads text only, as "input_text" or "output_text"'


# ---- parts


@taking("annotations", "logprobs", "prompt_cache_breakpoint")
class ResponseText(Body):
    """A text."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str

    _has_text = needs("text", "must be a string", "invalid_type")


@taking("annotations", "logprobs", "prompt_cache_breakpoint")
class ResponseRefusal(Body):
    """A text with which the model refused to answer."""

    type: Literal["refusal"]
    refusal: str

    _has_text = needs("refusal", "must be a string", "invalid_type")

    @property
    def text(self) -> str:
        """The text."""
        return self.refusal


Content = Annotated[
    str | Several[Annotated[ResponseText | ResponseRefusal, ByField("type", _READ)]],
    ByType("a string or an array of text parts"),
]
Arguments = Annotated[str | dict[str, Any], ByType("a string")]


# ---- items


@taking("id", "status", "phase", "caller")
class Item(Body):
    """The fields of all items, which the server wrote and a client sends back."""


class MessageItem(Item):
    """A text of any role."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ReasoningItem(Item):
    """The thinking before a reply."""

    type: Literal["reasoning"]
    content: Content | None = None
    summary: Content | None = None
    encrypted_content: str | None = None


class FunctionCall(Item):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: NotEmpty
    name: NotEmpty
    namespace: str | None = None
    arguments: Arguments | None = None


class CustomCall(Item):
    """A call of a tool that takes text."""

    type: Literal["custom_tool_call"]
    call_id: NotEmpty
    name: NotEmpty
    input: Arguments | None = None


@taking("name", "namespace")
class CallOutput(Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: NotEmpty
    output: Content


def _refuse_reference(_: str) -> str:
    raise broken("", "cannot be item_reference: send the item itself, or previous_response_id")


class ItemReference(Unread):
    """The id of a stored item, which is refused."""

    type: Annotated[Literal["item_reference"], AfterValidator(_refuse_reference), WithJsonSchema({"not": {}})]


_READ_ITEMS = MessageItem, ReasoningItem, FunctionCall, CustomCall, CallOutput, ItemReference


class OtherItem(Unread):
    """An item that has no effect."""

    type: Annotated[Any, Prefer(why="this server does not read such items", schemas=other_values("type", *_READ_ITEMS))]


AnyItem = MessageItem | ReasoningItem | FunctionCall | CustomCall | CallOutput | ItemReference | OtherItem
Items = Several[Annotated[AnyItem, ByField("type")]]


class StoredItems(Body):
    """Items that were read before."""

    items: Items


def stored_items(items: Sequence[JsonObject]) -> list[AnyItem]:
    """Return stored items as they were read. O(bytes)."""
    return read(StoredItems, {"items": list(items)}, IgnoredFields()).items


def raw_items(given: str | list[JsonObject]) -> list[JsonObject]:
    """Return the items of the field `input`; a text is one item."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return given


# ---- messages


def messages_of(instructions: str | None, items: Iterable[AnyItem], order: RoleOrder) -> list[Message]:
    """Return a conversation in the form of chat templates, from `instructions` and items.

    System and developer messages before the first reply are joined at the start, as most templates require. Later ones
    stay in place, so that the text before them does not change. `order` is the chat template's, see `in_order`.
    O(bytes).
    Raises ApiError for a conversation without messages.
    """
    conversation = _Conversation(instructions)
    for item in items:
        conversation.add(item)
    messages = conversation.messages(order)
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

    def add(self, item: AnyItem) -> None:
        """Add one item."""
        match item:
            case MessageItem():
                self._message(item.role, text_of(item.content))
            case ReasoningItem():
                self._reasoning(item)
            case FunctionCall():
                self._call(item.call_id, qualified(item.namespace, item.name), arguments_of(item.arguments))
            case CustomCall():
                self._call(item.call_id, item.name, {"input": item.input})
            case CallOutput():
                self._reply = None
                result = {"role": "tool", "content": [text_of(item.output)], "tool_call_id": item.call_id}
                self._messages.append(result)

    def _message(self, role: str, content: str) -> None:
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

    def _reasoning(self, item: ReasoningItem) -> None:
        sealed, content = item.encrypted_content, text_of(item.content or "")
        thinking = content or (unseal(sealed) if sealed else None) or text_of(item.summary or "")
        reply = self._open_reply()
        if thinking:
            reply.setdefault("reasoning_content", []).append(thinking)
        self._after_text = False

    def _call(self, number: str, name: str, arguments: str | JsonObject) -> None:
        call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._open_reply().setdefault("tool_calls", []).append(call)
        self._after_text = False

    def _open_reply(self) -> Message:
        if self._reply is None:
            self._reply = {"role": "assistant", "content": []}
            self._replied, self._after_text = True, False
            self._messages.append(self._reply)
        return self._reply
