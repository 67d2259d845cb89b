"""Declare the messages and tools of chat completions, and convert them to the form of chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from radixkv.chat.calls.tools import arguments_object
from radixkv.chat.messages import Message
from radixkv.serve.bodies import (
    Anything,
    AtLeastOne,
    Body,
    ByField,
    ByType,
    NotEmpty,
    OneError,
    Only,
    Several,
    broken,
    optional,
    taking,
)
from radixkv.serve.fields import JsonObject
from radixkv.serve.role_order import results_in_order

TOOL_NAME = "[a-zA-Z0-9_.-]{1,64}"
NAME_RULE = "must be 1 to 64 letters, digits, underscores, dots or dashes"
ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME}$"), OneError(NAME_RULE)]


# ---- messages


@taking("cache_control", "annotations")
class TextPart(Body):
    """A text of a message."""

    type: Literal["text"]
    text: str


@taking("cache_control", "annotations")
class RefusalPart(Body):
    """A text with which the model refused to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text."""
        return self.refusal


Part = Annotated[TextPart | RefusalPart, ByField("type", "this server reads text only")]
Content = Annotated[str | Several[Part], ByType("a string or an array of text parts")]


class SpokenMessage(Body):
    """A message of the user, or an instruction."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None
    cache_control: Anything = None

    def neutral(self) -> Message:
        """Return the message for a template, which has no developers."""
        role = "system" if self.role == "developer" else self.role
        return _named({"role": role, "content": text_of(self.content)}, self.name)


class ResultMessage(Body):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: NotEmpty
    name: str | None = None
    cache_control: Anything = None

    def neutral(self) -> Message:
        """Return the message for a template."""
        message = {"role": "tool", "content": text_of(self.content), "tool_call_id": self.tool_call_id}
        return _named(message, self.name)


class CalledFunction(Body):
    """A function that the model called, and its arguments."""

    name: NotEmpty
    arguments: Annotated[str | dict[str, Any], ByType("a string of JSON")] | None = None


@taking("index", "provider_specific_fields")
class ToolCall(Body):
    """A call in a reply."""

    id: NotEmpty
    type: Literal["function"] | None = None
    function: CalledFunction

    def neutral(self) -> JsonObject:
        """Return the call for a template."""
        function = {"name": self.function.name, "arguments": arguments_of(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@taking(
    "provider_specific_fields",
    "cache_control",
    audio=Only(why="this server reads and writes text only"),
    function_call=Only(why="it is the old form of tool_calls: use that"),
)
class AssistantMessage(Body):
    """A reply, as servers return it and clients send it back."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Several[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = optional("Another name of `reasoning_content`, which goes before it.")
    refusal: str | None = None
    annotations: list[Any] | None = optional("Taken, and without effect.")
    name: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise broken("content", "is required", "missing_required_parameter")
        return self

    def neutral(self) -> Message:
        """Return the message for a template."""
        content = self.refusal if self.content is None else text_of(self.content)
        message: Message = {"role": "assistant", "content": content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.neutral() for call in self.tool_calls]
        thinking = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if thinking is not None:
            message["reasoning_content"] = thinking
        return _named(message, self.name)


AnyMessage = Annotated[SpokenMessage | AssistantMessage | ResultMessage, ByField("role")]
Messages = Annotated[Several[AnyMessage], AtLeastOne("must be an array of at least one message", "invalid_type")]


def neutral_messages(messages: Sequence[SpokenMessage | AssistantMessage | ResultMessage]) -> list[Message]:
    """Return a conversation in the form of chat templates.

    Results of tool calls are put in the order of the calls: most templates write no ids, so the order must match.
    """
    return results_in_order([each.neutral() for each in messages])


def text_of(content: str | list[Any]) -> str:
    """Return a text, or the `text` of all parts with line feeds between them."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def arguments_of(given: str | JsonObject | None) -> str | JsonObject:
    """Return the arguments of a call as an object if they are JSON of one, since templates write JSON."""
    arguments = arguments_object(given)
    return given or {} if arguments is None else arguments


def _named(message: Message, name: str | None) -> Message:
    return message if name is None else {**message, "name": name}


# ---- tools


class ChatFunction(Body):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = optional("A JSON schema.")
    strict: bool | None = None


class ChatTool(Body):
    """A tool of chat completions."""

    type: Literal["function"]
    function: ChatFunction
    cache_control: Anything = None


def neutral_tools(given: Sequence[JsonObject] | None) -> list[JsonObject] | None:
    """Return checked tools with their known fields, as the client wrote them; None for an empty list.

    A template writes all fields of a tool, so a field without effect is left out.
    """
    known = ChatFunction.model_fields
    functions = [tool["function"].items() for tool in given or ()]
    tools = [{name: value for name, value in function if name in known} for function in functions]
    return [{"type": "function", "function": function} for function in tools] or None


# ---- their length


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
