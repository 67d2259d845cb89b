"""Declare the messages of Anthropic's Messages API and their blocks, and convert them to neutral messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from radixkv.chat.messages import Message
from radixkv.serve.bodies import Anything, Body, ByField, ByType, Several, taking

_ERROR = "Error: "
_READ = "this server reads text, tool calls and their results"


# ---- blocks


@taking("cache_control", "citations", "caller")
class Block(Body):
    """The fields of all blocks."""


class Text(Block):
    """A text."""

    type: Literal["text"]
    text: str


class ToolReference(Block):
    """The name of a tool that a client's search found."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """A sentence about the tool: every tool is in the prompt already."""
        return f"The tool {self.tool_name} is available."


class ThinkingBlock(Body):
    """The thinking before a reply."""

    type: Literal["thinking"]
    thinking: str
    signature: Anything = None


class RedactedThinking(Body):
    """Thinking that only another server can read."""

    type: Literal["redacted_thinking"]
    data: Anything = None


class ToolUse(Block):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | None = None


Texts = Annotated[str | Several[Annotated[Text, ByField("type", _READ)]], ByType("a string or an array of text blocks")]
Found = Annotated[Text | ToolReference, ByField("type", _READ)]


class ToolResult(Block):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | Several[Found], ByType("a string or an array of blocks")] | None = None
    is_error: bool | None = None

    def neutral(self) -> Message:
        """Return the result. The text of an error says so, since a chat template has no mark for it."""
        text = "\n".join(texts_of(self.content or ""))
        if self.is_error and "error" not in text.partition("\n")[0].lower():
            text = _ERROR + text
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text}


def texts_of(content: str | Sequence[Text | ToolReference]) -> list[str]:
    """Return the texts of a message, a result or a system prompt."""
    return [content] if isinstance(content, str) else [block.text for block in content]


# ---- messages

_BLOCKS = ByType("a string or an array of blocks")


@taking("id", "type")
class MessageFields(Body):
    """The fields of a whole response that a client sends back."""


class SystemMessage(MessageFields):
    """An instruction in the conversation."""

    role: Literal["system"]
    content: Annotated[str | Several[Annotated[Text, ByField("type", _READ)]], _BLOCKS]

    def neutral(self) -> list[Message]:
        """Return one message."""
        return [{"role": "system", "content": "\n".join(texts_of(self.content))}]


class UserMessage(MessageFields):
    """Text and results of tool calls."""

    role: Literal["user"]
    content: Annotated[str | Several[Annotated[Text | ToolResult, ByField("type", _READ)]], _BLOCKS]

    def neutral(self) -> list[Message]:
        """Return the results of tool calls, then the text in one message: results must follow their calls."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        results = [block.neutral() for block in self.content if isinstance(block, ToolResult)]
        texts = [block.text for block in self.content if isinstance(block, Text)]
        said: list[Message] = [{"role": "user", "content": "\n".join(texts)}] if texts or not results else []
        return results + said


class ReplyMessage(MessageFields):
    """A reply, as this server splits it into blocks."""

    role: Literal["assistant"]
    content: Annotated[
        str | Several[Annotated[Text | ThinkingBlock | RedactedThinking | ToolUse, ByField("type", _READ)]], _BLOCKS
    ]

    def neutral(self) -> list[Message]:
        """Return one message: the texts of its blocks are joined without a separator."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        message: Message = {"role": "assistant", "content": ""}
        thinking: list[str] = []
        for block in self.content:
            match block:
                case Text():
                    message["content"] += block.text
                case ThinkingBlock():
                    thinking.append(block.thinking)
                case ToolUse():
                    function = {"name": block.name, "arguments": block.input or {}}
                    call = {"id": block.id, "type": "function", "function": function}
                    message.setdefault("tool_calls", []).append(call)
        if text := "".join(thinking):
            message["reasoning_content"] = text
        return [message]


AnyMessage = Annotated[UserMessage | ReplyMessage | SystemMessage, ByField("role")]
