"""Declare the bodies of Anthropic's Messages API, and convert them to neutral messages and tools.

A string and a list of text blocks are one form, and `cache_control` is no part of a message. So a client may change
between both forms, and move its cache marks, without changing its conversation. A wrong body raises ApiError with one
sentence that names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.chat.calls.tools import tools_by_name
from radixkv.chat.constrained import CallRule
from radixkv.chat.messages import Message
from radixkv.chat.template_arguments import TemplateOption, thinking_option
from radixkv.serve.anthropic.message_blocks import AnyMessage, Text, Texts, texts_of
from radixkv.serve.bodies import (
    AtLeastOne,
    Body,
    ByField,
    CacheSalt,
    OneError,
    Only,
    Prefer,
    Several,
    Unread,
    optional,
    other_values,
    read,
    taking,
)
from radixkv.serve.constraints import Guided, ReplyConstraint, SchemaFormat, constraint_of, of_format
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import IgnoredFields, JsonObject
from radixkv.serve.role_order import ANY_ORDER, RoleOrder, in_order
from radixkv.serve.sampling_fields import sampling_params, wire, with_sampling
from radixkv.serve.schemas import NO_PREFIX, ChatRequest, Dialogue, Effort, RequestOptions
from radixkv.serve.tool_choices import checked_rule

BILLING = "x-anthropic-billing-header:"
_ONE_REPLY = "a message is one reply"
_EFFORTS = {"xhigh": "high", "max": "high"}  # chat templates have low, medium and high


@dataclass(frozen=True, slots=True)
class Dialect:
    """Differences between servers in the reading of bodies.

    Without `keeps_billing`, a first system block with the billing line of a client is dropped. `order` is the chat
    template's.
    """

    keeps_billing: bool = False
    order: RoleOrder = ANY_ORDER


# ---- bodies


@taking("cache_control", "allowed_callers", "input_examples")
class MessageTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Annotated[
        str,
        Field(pattern="^[a-zA-Z0-9_.-]{1,128}$"),
        OneError("must be 1 to 128 letters, digits, underscores, dots or dashes"),
    ]
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema.")
    strict: bool | None = None
    defer_loading: bool | None = optional("Without effect: every tool is in the prompt.")
    eager_input_streaming: bool | None = optional("Without effect: a call is one event.")


class ServerTool(Unread):
    """A tool that a server would have to run, which has no effect."""

    type: Annotated[Any, Prefer("custom", why="this server runs no tools", schemas=other_values("type", MessageTool))]


class WordChoice(Body):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ToolChoice(Body):
    """The tool that must be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """Whether the model thinks."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Any = optional("Taken, and without effect: a model cannot be held to it.")
    display: Annotated[
        Any, Prefer("summarized", "updates", "omitted", why="thinking is shown as it is, or not at all")
    ] = None


class OutputConfig(Body):
    """The form of the reply, and the effort."""

    format: Annotated[SchemaFormat, ByField("type")] | None = None
    effort: Effort | None = None


class Metadata(Body):
    """Facts about the sender."""

    user_id: str | None = optional("Names the session for the monitor.")


@taking(
    "cache_control",
    "context_management",
    "diagnostics",
    "inference_geo",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
    prefix=NO_PREFIX,
)
class PromptBody(Body):
    """The body of POST /v1/messages/count_tokens, and the fields of a message that make its prompt."""

    model: str = Field(description="Any name: there is one model. The response repeats it.")
    system: Texts | None = None
    messages: Annotated[Several[AnyMessage], AtLeastOne("must be an array of at least one message", "invalid_type")]
    tools: Several[Annotated[MessageTool | ServerTool, ByField("type")]] | None = None
    tool_choice: Annotated[WordChoice | ToolChoice, ByField("type")] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[SchemaFormat, ByField("type")] | None = None
    cache_salt: CacheSalt | None = None


_RENAMED = {"stop": "stop_sequences"}


@with_sampling(_RENAMED, without="n")
class MessageSampling(Body):
    """The sampling parameters of a message."""


@taking(n=Only(1, why=_ONE_REPLY), use_beam_search=Only(False, why=_ONE_REPLY))
class MessageBody(PromptBody, Guided, MessageSampling):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, wire("max_tokens")] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None


# ---- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(ChatRequest):
    """The body of POST /v1/messages, as a request of the neutral core.

    `marks_cache` says that the client marked parts of it with `cache_control`. With `omits_thinking` it requested
    thinking blocks without text.
    """

    marks_cache: bool = False
    omits_thinking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRequest(Dialogue):
    """The body of POST /v1/messages/count_tokens."""

    model: str


def read_message(given: JsonObject, ignored: IgnoredFields | None, dialect: Dialect) -> MessageRequest:
    """Read the body of a message; raise ApiError, which names the wrong field.

    Fields without effect are added to `ignored`; without it, unknown fields are refused.
    """
    body = read(MessageBody, given, ignored)
    messages, tools = _conversation(body, dialect), _tools(body)
    rule, reads_calls = _call_rule(body, tools, ignored)
    constraint = constraint_of(body, _format(body))
    params = sampling_params(body, body.max_tokens, ignored, renamed=_RENAMED, constraint=constraint)
    options = RequestOptions(
        body.model,
        params,
        bounded=body.max_tokens is not None,
        stream=bool(body.stream),
        include_usage=True,
        session_key=None if body.metadata is None else body.metadata.user_id,
        constraint_field=None if constraint is None else constraint.field,
    )
    return MessageRequest(
        messages=messages,
        tools=tools,
        template_options=_template_options(body),
        prefill=_is_begun(messages),
        options=options,
        reads_calls=reads_calls,
        call_rule=rule,
        marks_cache=_marked(given),
        omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
    )


def read_count(given: JsonObject, ignored: IgnoredFields | None, dialect: Dialect) -> CountRequest:
    """Read the body of a count of tokens, as `read_message` does."""
    body = read(PromptBody, given, ignored)
    messages, tools = _conversation(body, dialect), _tools(body)
    _call_rule(body, tools, ignored)
    return CountRequest(
        messages=messages,
        tools=tools,
        template_options=_template_options(body),
        prefill=_is_begun(messages),
        model=body.model,
    )


def _call_rule(
    body: PromptBody, tools: list[JsonObject] | None, ignored: IgnoredFields | None
) -> tuple[CallRule, bool]:
    """Return the rule for calls, and whether they are taken out of the reply."""
    choice = body.tool_choice
    only = frozenset({choice.name}) if isinstance(choice, ToolChoice) else None
    several = only is None and not (choice is not None and choice.disable_parallel_tool_use)
    kind = "auto" if choice is None else choice.type
    strict = frozenset(tool.name for tool in body.tools or () if isinstance(tool, MessageTool) and tool.strict)
    rule = CallRule(kind in ("any", "tool"), several, only, strict)
    rule = checked_rule(rule, tools_by_name(tools), ignored, parallel="tool_choice.disable_parallel_tool_use")
    return rule, bool(tools) and kind != "none"


def _format(body: PromptBody) -> ReplyConstraint | None:
    """Return the constraint of `output_config`, else of the older field for its format."""
    form = None if body.output_config is None else body.output_config.format
    return of_format(form, "output_config.format") or of_format(body.output_format, "output_format")


def _template_options(body: PromptBody) -> tuple[TemplateOption, ...]:
    """Return the options for the effort, and for thinking."""
    effort = None if body.output_config is None else body.output_config.effort
    options = []
    if effort is not None:
        values = (("reasoning_effort", _EFFORTS.get(effort, effort)),)
        options.append(TemplateOption("output_config.effort", values, hint=True))
    if body.thinking is not None:
        kind = body.thinking.type
        options.append(thinking_option("thinking", enabled=kind != "disabled", hint=kind == "adaptive"))
    return tuple(options)


def _marked(body: JsonObject) -> bool:
    """Whether any part of a body has `cache_control`. O(blocks)."""
    parts = [body, *_objects(body.get("tools")), *_objects(body.get("system"))]
    for message in _objects(body.get("messages")):
        for block in _objects(message.get("content")):
            parts += [block, *_objects(block.get("content"))]
    return any(part.get("cache_control") for part in parts)


def _objects(given: object) -> list[JsonObject]:
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []


def _tools(body: PromptBody) -> list[JsonObject] | None:
    """Return the tools that the client runs as OpenAI's functions."""
    tools = [tool for tool in body.tools or () if isinstance(tool, MessageTool)]
    return [{"type": "function", "function": _function(tool)} for tool in tools] or None


def _function(tool: MessageTool) -> JsonObject:
    described = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **described, "parameters": tool.input_schema}


# ---- the conversation


def _is_begun(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the reply."""
    return bool(messages[-1]["role"] == "assistant")


def _conversation(body: PromptBody, dialect: Dialect) -> list[Message]:
    """Return the system prompt and the messages; a last message of the assistant is continued by the reply.

    System messages before the first reply join the system prompt: the conversation still begins there.
    """
    system = _system(body.system, dialect)
    messages: list[Message] = []
    replied = False
    for message in (message for each in body.messages for message in each.neutral()):
        replied = replied or message["role"] == "assistant"
        if message["role"] == "system" and not replied:
            system.append(message["content"])
        else:
            messages.append(message)
    if not messages:
        raise bad_request("messages must have a message of a user", "messages", "invalid_value")
    if messages[-1].get("tool_calls"):
        why = "the last message has tool calls, so it is complete: their results must follow"
        raise bad_request(why, f"messages[{len(body.messages) - 1}]", "invalid_value")
    opening = [{"role": "system", "content": "\n".join(system)}] if system else []
    return [*opening, *in_order(messages, dialect.order)]


def _system(given: str | Sequence[Text] | None, dialect: Dialect) -> list[str]:
    texts = [] if given is None else texts_of(given)
    if texts and texts[0].startswith(BILLING) and not dialect.keeps_billing:
        del texts[0]
    return [text for text in texts if text]
