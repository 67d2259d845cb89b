"""Request bodies of Anthropic's Messages API: check them, and convert them to neutral messages and tools.

A string and a list of text blocks are one form, and `cache_control` is no part of a message. So a client may change
between both forms, and move its cache marks, without changing its conversation. A wrong body raises ApiError with one
sentence that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from radixkv.chat.constrained import CallRule
from radixkv.chat.messages import Message
from radixkv.chat.template_arguments import TemplateOption, thinking_option
from radixkv.chat.tool_call_formats import tool_names
from radixkv.serve.constraints import ReplyConstraint, checked_rule, read_constraint, read_text_format
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import Fields, IgnoredFields, JsonObject, shown
from radixkv.serve.message_schemas import ANY_ORDER, RoleOrder, in_order
from radixkv.serve.sampling_fields import sampling_params, wire_range
from radixkv.serve.schemas import ChatRequest, RequestOptions, read_effort

BILLING = "x-anthropic-billing-header:"
ROLES = ("user", "assistant", "system")
TOOL_NAME = r"[a-zA-Z0-9_.-]{1,128}"
WITHOUT_EFFECT = (
    *("context_management", "diagnostics", "inference_geo", "service_tier", "speed", "user_profile_id", "workspace_id"),
)
BLOCK_HINTS = ("cache_control", "citations", "caller")  # of a block
REFERENCE = "tool_reference"  # in the result of a search for tools
FORMATS = ("json_schema",)
TOOL_CHOICES = ("auto", "any", "tool", "none")
_NOT_TEXT = ("image", "document", "search_result", "container_upload")
_ERROR = "Error: "
_EFFORTS = {"xhigh": "high", "max": "high"}  # chat templates have low, medium and high


@dataclass(frozen=True, slots=True)
class Dialect:
    """Differences between servers in the reading of bodies.

    Without `keeps_billing`, a first system block with the billing line of a client is dropped. `order` is that of the
    chat template.
    """

    keeps_billing: bool = False
    order: RoleOrder = ANY_ORDER


@dataclass(frozen=True, slots=True)
class MessageRequest(ChatRequest):
    """The body of POST /v1/messages.

    `marks_cache` says that the client marked parts of it with `cache_control`. With `omits_thinking` it requested
    thinking blocks without text.
    """

    marks_cache: bool = False
    omits_thinking: bool = False


@dataclass(frozen=True, slots=True)
class CountRequest:
    """The body of POST /v1/messages/count_tokens."""

    model: str
    messages: list[Message]
    tools: list[JsonObject] | None
    template_options: tuple[TemplateOption, ...]
    prefill: bool


def read_message(body: JsonObject, ignored: IgnoredFields | None, dialect: Dialect) -> MessageRequest:
    """Check the body of a message; raise ApiError, which names the wrong field.

    Fields without effect are added to `ignored`; without it, unknown fields are refused.
    """
    fields = Fields(body, ignored=ignored)
    messages, (tools, strict) = _conversation(fields, dialect), _tools(fields)
    rule, reads_calls = _call_rule(fields, tools, strict)
    effort, constraint = _output(fields)
    constraint = read_constraint(fields, constraint)
    thinking, omits_thinking = _thinking(fields)
    bound = fields.integer("max_tokens", *wire_range("max_tokens"))
    fields.only("n", (1,), "a message is one reply")
    fields.only("use_beam_search", (False,), "a message is one reply")
    params = sampling_params(fields, bound, None, renamed={"stop": "stop_sequences"}, constraint=constraint)
    stream = fields.flag("stream")
    model = fields.needed_text("model")
    marks_cache = _marked(body)
    session_key = _session_key(fields)
    fields.ignore("cache_control", *WITHOUT_EFFECT)
    fields.close()
    constraint_field = None if constraint is None else constraint.field
    options = RequestOptions(
        model, params, bound is not None, stream, True, session_key, constraint_field=constraint_field
    )
    return MessageRequest(
        options,
        messages,
        tools,
        reads_calls,
        (*effort, *thinking),
        prefill=_is_begun(messages),
        call_rule=rule,
        marks_cache=marks_cache,
        omits_thinking=omits_thinking,
    )


def read_count(body: JsonObject, ignored: IgnoredFields | None, dialect: Dialect) -> CountRequest:
    """Check the body of a count of tokens, as `read_message` does."""
    fields = Fields(body, ignored=ignored)
    messages, (tools, strict) = _conversation(fields, dialect), _tools(fields)
    _call_rule(fields, tools, strict)
    effort, _ = _output(fields)
    thinking, _ = _thinking(fields)
    model = fields.needed_text("model")
    fields.ignore("cache_control", *WITHOUT_EFFECT)
    fields.close()
    return CountRequest(model, messages, tools, (*effort, *thinking), _is_begun(messages))


# ---- fields of a request


def _session_key(fields: Fields) -> str | None:
    """Return the name of a user or session that clients send as metadata."""
    given = fields.take("metadata")
    if given is None:
        return None
    metadata = fields.nested(given, "metadata")
    key = metadata.text("user_id")
    metadata.close()
    return key


def _call_rule(fields: Fields, tools: list[JsonObject] | None, strict: Set[str]) -> tuple[CallRule, bool]:
    """Read `tool_choice`: the rule for calls, and whether they are taken out of the reply."""
    given = fields.take("tool_choice")
    kind, only, several = "auto", None, True
    if given is not None:
        choice = fields.nested(given, "tool_choice")
        kind = choice.need("type")
        if kind not in TOOL_CHOICES:
            choice.refuse("type", f"must be {', '.join(TOOL_CHOICES)}, not {shown(kind)}")
        if kind == "tool":
            only = frozenset({choice.needed_text("name")})
        several = not choice.flag("disable_parallel_tool_use") and only is None
        choice.close()
    rule = CallRule(kind in ("any", "tool"), several, only, frozenset(strict))
    rule = checked_rule(rule, fields, tool_names(tools), parallel="tool_choice.disable_parallel_tool_use")
    return rule, bool(tools) and kind != "none"


def _thinking(fields: Fields) -> tuple[list[TemplateOption], bool]:
    """Return the option that enables or disables thinking, and whether thinking blocks have no text."""
    given = fields.take("thinking")
    if given is None:
        return [], False
    thinking = fields.nested(given, "thinking")
    kind = thinking.need("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        thinking.refuse("type", f"must be enabled, adaptive or disabled, not {shown(kind)}")
    thinking.ignore("budget_tokens")  # a model cannot be held to it
    thinking.prefer("display", ("summarized", "updates", "omitted"), "thinking is shown as it is, or not at all")
    thinking.close()
    option = thinking_option("thinking", enabled=kind != "disabled", hint=kind == "adaptive")
    return [option], given.get("display") == "omitted"


def _output(fields: Fields) -> tuple[list[TemplateOption], ReplyConstraint | None]:
    """Read `output_config` and the older field for its format: the option for the effort, and the constraint."""
    constraint = read_text_format(fields, "output_format", FORMATS)
    given = fields.take("output_config")
    if given is None:
        return [], constraint
    output = fields.nested(given, "output_config")
    constraint = read_text_format(output, "format", FORMATS) or constraint
    effort = read_effort(output, "effort")
    output.close()
    if effort is None:
        return [], constraint
    values = (("reasoning_effort", _EFFORTS.get(effort, effort)),)
    return [TemplateOption("output_config.effort", values, hint=True)], constraint


def _marked(body: JsonObject) -> bool:
    """Whether any part of a body has `cache_control`. O(blocks)."""
    parts = [body, *_objects(body.get("tools")), *_objects(body.get("system"))]
    for message in _objects(body.get("messages")):
        for block in _objects(message.get("content")):
            parts += [block, *_objects(block.get("content"))]
    return any(part.get("cache_control") for part in parts)


def _objects(given: object) -> list[JsonObject]:
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []


# ---- tools


def _tools(fields: Fields) -> tuple[list[JsonObject] | None, set[str]]:
    """Return the tools with a schema as OpenAI's functions, and the names of the strict ones.

    Tools that a server would have to run are ignored.
    """
    tools, strict = [], set()
    for at, each in enumerate(fields.list("tools") or ()):
        tool = fields.nested(each, f"tools[{at}]")
        tool.prefer("type", ("custom",), "this server runs no tools")
        if each.get("type") in (None, "custom"):
            tools.append({"type": "function", "function": _function(tool)})
            if each.get("strict"):
                strict.add(each["name"])
    return tools or None, strict


def _function(fields: Fields) -> JsonObject:
    name = fields.need("name")
    if not isinstance(name, str) or not re.fullmatch(TOOL_NAME, name):
        fields.refuse("name", "must be 1 to 128 letters, digits, underscores, dots or dashes")
    description, schema = fields.text("description"), fields.need("input_schema")
    if not isinstance(schema, dict):
        fields.wrong("input_schema", "a JSON schema (an object)", schema)
    for hint in ("strict", "defer_loading", "eager_input_streaming"):
        fields.flag(hint)  # the others have no effect: every tool is in the prompt, and a call is one event
    fields.ignore("cache_control", "allowed_callers", "input_examples")
    fields.close()
    described = {} if description is None else {"description": description}
    return {"name": name, **described, "parameters": schema}


# ---- messages


def _is_begun(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the reply."""
    return bool(messages[-1]["role"] == "assistant")


def _conversation(fields: Fields, dialect: Dialect) -> list[Message]:
    """Return the system prompt and the messages; a last message of the assistant is continued by the reply.

    System messages before the first reply join the system prompt: the conversation still begins there.
    """
    system = _system(fields, dialect)
    given = fields.need("messages")
    if not isinstance(given, list) or not given:
        raise bad_request("messages must be an array of at least one message", "messages", "invalid_type")
    messages: list[Message] = []
    replied = False
    for at, each in enumerate(given):
        for message in _messages(fields.nested(each, f"messages[{at}]")):
            replied = replied or message["role"] == "assistant"
            if message["role"] == "system" and not replied:
                system.append(message["content"])
            else:
                messages.append(message)
    if not messages:
        raise bad_request("messages must have a message of a user", "messages", "invalid_value")
    if messages[-1].get("tool_calls"):
        why = "the last message has tool calls, so it is complete: their results must follow"
        raise bad_request(why, f"messages[{len(given) - 1}]", "invalid_value")
    opening = [{"role": "system", "content": "\n".join(system)}] if system else []
    return [*opening, *in_order(messages, dialect.order)]


def _system(fields: Fields, dialect: Dialect) -> list[str]:
    given = fields.take("system")
    if given is None:
        return []
    texts = [given] if isinstance(given, str) else _texts(fields, "system", given)
    if texts and texts[0].startswith(BILLING) and not dialect.keeps_billing:
        del texts[0]
    return [text for text in texts if text]


def _messages(fields: Fields) -> Iterator[Message]:
    """Yield the neutral messages of one message."""
    role = fields.need("role")
    if role not in ROLES:
        fields.refuse("role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    content = fields.need("content")
    fields.ignore("id", "type")  # of a whole response that a client sends back
    fields.close()
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list):
        fields.wrong("content", "a string or an array of blocks", content)
    blocks = [fields.nested(block, f"{fields.path('content')}[{at}]") for at, block in enumerate(content)]
    if role == "assistant":
        yield _assistant(blocks)
    elif role == "system":
        yield {"role": "system", "content": "\n".join(_text(block, _kind(block)) for block in blocks)}
    else:
        yield from _user(blocks)


def _user(blocks: Sequence[Fields]) -> Iterator[Message]:
    """Yield the results of tool calls in one message, then its text: results must follow their calls."""
    texts: list[str] = []
    results: list[Message] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "tool_result":
            results.append(_result(block))
        else:
            texts.append(_text(block, kind))
    yield from results
    if texts or not results:
        yield {"role": "user", "content": "\n".join(texts)}


def _assistant(blocks: Sequence[Fields]) -> Message:
    """Return a reply, as this server splits it into blocks: their texts are joined without a separator."""
    message: Message = {"role": "assistant", "content": ""}
    thinking: list[str] = []
    calls: list[JsonObject] = []
    for block in blocks:
        match kind := _kind(block):
            case "thinking":
                thinking.append(block.needed_text("thinking"))
                block.ignore("signature")
                block.close()
            case "redacted_thinking":
                block.ignore("data")
                block.close()
            case "tool_use":
                calls.append(_call(block))
            case _:
                message["content"] += _text(block, kind)
    if calls:
        message["tool_calls"] = calls
    if text := "".join(thinking):
        message["reasoning_content"] = text
    return message


def _call(fields: Fields) -> JsonObject:
    number, name, arguments = fields.needed_text("id"), fields.needed_text("name"), fields.take("input")
    if arguments is not None and not isinstance(arguments, dict):
        fields.wrong("input", "an object", arguments)
    fields.ignore(*BLOCK_HINTS)
    fields.close()
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _result(fields: Fields) -> Message:
    """Return the result of a tool call. The text of an error says so, since a chat template has no mark for it."""
    number, content, failed = fields.needed_text("tool_use_id"), fields.take("content"), fields.flag("is_error")
    fields.ignore(*BLOCK_HINTS)
    fields.close()
    if content is None or isinstance(content, str):
        text = content or ""
    elif isinstance(content, list):
        text = "\n".join(_texts(fields, fields.path("content"), content, references=True))
    else:
        fields.wrong("content", "a string or an array of blocks", content)
    if failed and "error" not in text.partition("\n")[0].lower():
        text = _ERROR + text
    return {"role": "tool", "tool_call_id": number, "content": text}


# ---- blocks


def _texts(fields: Fields, path: str, given: object, *, references: bool = False) -> list[str]:
    """Return the texts of a list of text blocks; with `references`, blocks that name a tool are texts as well."""
    if not isinstance(given, list):
        fields.wrong(path, "a string or an array of text blocks", given)
    blocks = [fields.nested(block, f"{path}[{at}]") for at, block in enumerate(given)]
    kinds = [_kind(block) for block in blocks]
    return [
        _reference(block) if references and kind == REFERENCE else _text(block, kind)
        for block, kind in zip(blocks, kinds, strict=True)
    ]


def _reference(fields: Fields) -> str:
    """Return a sentence for a tool that a client's search found: every tool is in the prompt already."""
    name = fields.needed_text("tool_name")
    fields.ignore(*BLOCK_HINTS)
    fields.close()
    return f"The tool {name} is available."


def _kind(fields: Fields) -> Any:
    return fields.need("type")


def _text(fields: Fields, kind: object) -> str:
    if kind in _NOT_TEXT:
        fields.refuse("type", f'must be "text", not {shown(kind)}: this server reads text only')
    if kind != "text":
        fields.refuse("type", f"can not be {shown(kind)} here: this server reads text, tool calls and their results")
    text = fields.needed_text("text")
    fields.ignore(*BLOCK_HINTS)
    fields.close()
    return text
