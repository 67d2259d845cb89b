"""Declare the bodies of Ollama's API, and convert them to requests of the neutral core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from radixkv.chat.calls.formats import CallFormat
from radixkv.chat.calls.tools import tools_by_name
from radixkv.chat.constrained import strict_tools
from radixkv.chat.template_arguments import TemplateOption, effort_option, thinking_option
from radixkv.durations import parse_duration
from radixkv.serve.bodies import (
    Body,
    ByType,
    CacheSalt,
    OneError,
    Only,
    SessionKey,
    Several,
    optional,
    read,
    refuse,
    taking,
)
from radixkv.serve.constraints import ANY_OBJECT, ReplyConstraint, Schema
from radixkv.serve.errors import errors_about
from radixkv.serve.fields import IgnoredFields, JsonObject
from radixkv.serve.message_schemas import ChatTool, neutral_tools
from radixkv.serve.ollama.messages import NO_IMAGES, OllamaMessage, neutral_messages
from radixkv.serve.sampling_fields import sampling_params, wire, with_sampling
from radixkv.serve.schemas import NO_PREFIX, ChatRequest, RequestOptions
from radixkv.serve.tool_choices import call_rule

_DURATION = r"^-?([0-9]+|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$"

# ---- bodies


@with_sampling(without="n")
class OllamaOptions(Body):
    """The sampling parameters of a request. Others of Ollama's, such as `num_gpu`, have no effect."""

    num_predict: Annotated[int, wire("max_tokens", low=-2)] | None = optional(
        "Maximum length of the reply; below 1: no limit."
    )
    num_ctx: Annotated[int, wire("max_tokens")] | None = optional(
        "Maximum length of the prompt and the reply; a longer prompt is refused."
    )


KeepAlive = Annotated[
    float | Annotated[str, Field(pattern=_DURATION)],
    OneError("is a number of seconds, or a duration such as 90s, 5m or 1h30m"),
    Field(description="How long the model stays loaded after the request."),
]
Format = Annotated[Literal["json", ""] | Schema, ByType('"json" or a JSON schema (an object)')]
Think = Annotated[bool | Literal["low", "medium", "high", "max"], ByType("true, false or a level")]


@taking(prefix=NO_PREFIX)
class PromptFields(Body):
    """The fields that chat and generate share."""

    model: str
    stream: bool | None = optional("True by default.")
    options: OllamaOptions | None = None
    format: Format | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    prompt_cache_key: SessionKey | None = None
    cache_salt: CacheSalt | None = None


class OllamaChatBody(PromptFields):
    """The body of POST /api/chat. Without messages, the model is only loaded."""

    messages: Several[OllamaMessage] | None = None
    tools: Several[ChatTool] | None = None


@taking(
    template=Only("", why="the model's own is used; with raw=true, none"),
    context=Only([], why="send the conversation to /api/chat"),
    images=NO_IMAGES,
)
class GenerateBody(PromptFields):
    """The body of POST /api/generate. Without a prompt, the model is only loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = optional("Without the chat template.")
    suffix: str | None = optional("The text after the reply, for models with FIM tokens.")


class ShowBody(Body):
    """The body of POST /api/show."""

    model: str = Field(validation_alias=AliasChoices("model", "name"))  # the second is of older clients


# ---- reading


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A body: a conversation, or a raw text that no template writes; without both, the model is only loaded.

    The reply to a text ends before `suffix`, if that is not empty.
    `keep_alive` is the number of seconds for which the model is to stay.
    """

    options: RequestOptions
    keep_alive: float | None
    chat: ChatRequest | None = None
    text: str = ""
    suffix: str = ""


Reader = Callable[[JsonObject, IgnoredFields | None], OllamaRequest]


def read_chat(given: JsonObject, ignored: IgnoredFields | None, form: CallFormat) -> OllamaRequest:
    """Read the body of a chat; raise ApiError, which names the wrong field. `form` makes the ids of calls.

    Fields without effect are added to `ignored`; without it, unknown fields are refused.
    """
    body = read(OllamaChatBody, given, ignored)
    request, messages = _request(body, ignored), neutral_messages(body.messages or (), form)
    if not messages:
        return request
    tools = neutral_tools(given.get("tools"))
    rule, reads_calls = call_rule(None, None, tools_by_name(tools), strict_tools(tools), ignored)
    prefill = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    chat = ChatRequest(
        messages=messages,
        tools=tools,
        template_options=_template_options(body),
        prefill=prefill,
        options=request.options,
        reads_calls=reads_calls,
        call_rule=rule,
        call_seed=str(len(messages) - prefill),  # the place of the reply
    )
    return replace(request, chat=chat)


def read_generate(given: JsonObject, ignored: IgnoredFields | None) -> OllamaRequest:
    """Read the body of a generation, as `read_chat` does: a raw text, or the messages of a chat."""
    body = read(GenerateBody, given, ignored)
    request, said = _request(body, ignored), [("system", body.system), ("user", body.prompt)]
    if body.system and (body.raw or body.suffix):
        raise refuse("system", "cannot be combined with raw=true or suffix: write it into the prompt")
    if body.raw or body.suffix or not body.prompt:
        return replace(request, text=body.prompt or "", suffix=body.suffix or "")
    messages = [{"role": role, "content": text} for role, text in said if text]
    options, template_options = request.options, _template_options(body)
    shared: dict[str, Any] = {"options": options, "template_options": template_options, "reads_calls": False}
    return replace(request, chat=ChatRequest(messages=messages, tools=None, **shared))


def _request(body: PromptFields, ignored: IgnoredFields | None) -> OllamaRequest:
    """Return a request that only loads the model."""
    given, constraint = body.options or OllamaOptions(), None
    if vars(given)["seed"] == -1:  # Ollama's default, another seed each time
        given = given.model_copy(update={"seed": None})
    if body.format:
        constraint = ReplyConstraint("json_schema", ANY_OBJECT if body.format == "json" else body.format, "format")
    # `params_after` takes the prompt off the context, so it may stand for a missing limit.
    bound = given.num_predict if (given.num_predict or 0) > 0 else given.num_ctx
    options = RequestOptions(
        body.model,
        sampling_params(given, bound, ignored, constraint=constraint),
        bounded=bound is not None,
        stream=body.stream is not False,
        include_usage=True,
        session_key=body.prompt_cache_key,
        constraint_field="format",
        context=given.num_ctx,
    )
    with errors_about("keep_alive"):
        return OllamaRequest(options, None if body.keep_alive is None else parse_duration(body.keep_alive))


def _template_options(body: PromptFields) -> tuple[TemplateOption, ...]:
    if isinstance(body.think, str):  # chat templates have low, medium and high
        return (effort_option("think", "high" if body.think == "max" else body.think),)
    return () if body.think is None else (thinking_option("think", enabled=body.think),)
