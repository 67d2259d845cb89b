"""Declare the bodies of chat and text completions and of tokenisation, and convert them to the engine's types.

Types and ranges are declared in the models; a rule between fields is a function here. A wrong body raises ApiError with
one sentence that names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from radixkv.chat.calls.tools import tools_by_name
from radixkv.chat.constrained import FREE_CALLS, CallRule, strict_tools
from radixkv.chat.messages import Message
from radixkv.chat.template_arguments import TemplateOption, effort_option, thinking_option
from radixkv.errors import PromptTooLong
from radixkv.sampling.params import SamplingParams
from radixkv.serve.bodies import (
    Body,
    ByType,
    CacheSalt,
    NotEmpty,
    OneError,
    Only,
    Prefer,
    SessionKey,
    Several,
    broken,
    joined,
    needs,
    optional,
    read,
    refuse,
    taking,
    without_effect,
)
from radixkv.serve.constraints import Guided, NestedFormat, constraint_of, of_format
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import IgnoredFields, JsonObject
from radixkv.serve.message_schemas import ChatTool, Content, Messages, neutral_messages, neutral_tools
from radixkv.serve.sampling_fields import TokenId, sampling_params, wire, with_sampling
from radixkv.serve.tool_choices import NestedChoice, call_rule

MOST_PROMPTS = 1024
MOST_SCORES = 2**22  # log probabilities of prompts in a response, 25 to 80 bytes each
LONGEST_VALUE = 256  # characters of a value in chat_template_kwargs
_PROMPT = "must be a string or an array of token ids that is not empty"
_PROMPTS = "a string, or an array of strings, of token ids, or of arrays of token ids"
_THINKING = "must be one of enabled, disabled, adaptive, auto"
NO_PREFIX = Only(why="only completions and chat completions follow a compressed prefix")
_OLDER = Only(why="it is the old form of tools and tool_choice: use those")
_IF_READ = "For the model's chat template; ignored if the template does not read it, and then named in `Warning`."

TextOrIds = str | list[int]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The fields that chat and text completions share.

    `include_usage` adds an event with the usage at the end of a stream, `running_usage` the usage so far to each event.
    `params.max_tokens` applies only if `bounded`; else a reply may fill the context. Requests with the same
    `session_key` are one session for the monitor. It never isolates cached prefixes. `constraint_field` is the field of
    the constraint in `params`. The response has `replies` to each prompt; a beam search may have more beams. Without
    `samples` only the prompt is computed. `prompt_logprobs` is the number of alternatives in the field of this name of
    the response, None if it has no such field. `context` limits the prompt and the reply together, in tokens. `prefix`
    names the compressed prefix that the prompt follows.
    """

    model: str
    params: SamplingParams
    bounded: bool
    stream: bool
    include_usage: bool
    session_key: str | None
    running_usage: bool = False
    constraint_field: str | None = None
    replies: int = 1
    samples: bool = True
    prompt_logprobs: int | None = None
    context: int | None = None
    prefix: str | None = None

    def params_after(self, prompt: int) -> SamplingParams:
        """Return the parameters of a reply to `prompt` tokens that ends within `context`; raise PromptTooLong."""
        if self.context is None:
            return self.params
        if prompt >= self.context:
            message = f"the prompt has {prompt} tokens, and options.num_ctx is {self.context}: raise it, or shorten it"
            raise PromptTooLong(message, tokens=prompt, limit=self.context - 1)
        return self.params.but(max_tokens=min(self.params.max_tokens, self.context - prompt))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation that the chat template writes as a prompt.

    `template_options` set variables of the template. `prefill`: the last message is a reply's beginning, to be
    continued.
    """

    messages: list[Message]
    tools: list[JsonObject] | None
    template_options: tuple[TemplateOption, ...] = ()
    prefill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Dialogue):
    """The body of POST /v1/chat/completions.

    `reads_calls`: tool calls are taken out of the reply's text, and follow `call_rule`. `hides_thinking`: the response
    has no thinking. `call_seed` makes the ids of calls, also in place of ids that the model writes: for clients that
    send calls back without ids. None: the prompt makes them.
    """

    options: RequestOptions
    reads_calls: bool
    hides_thinking: bool = False
    call_rule: CallRule = FREE_CALLS
    call_seed: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """The body of POST /v1/completions: prompts, each a text or token ids.

    `echo` repeats a prompt before its reply. A reply fills the middle between its prompt and `suffix`, if not empty.
    """

    options: RequestOptions
    prompts: list[TextOrIds]
    echo: bool
    suffix: str = ""

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the log probabilities include the prompt's, before the reply's."""
        return self.echo and self.options.params.logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest(Dialogue):
    """The body of POST /tokenize: a text, or messages that are rendered as in a chat completion."""

    model: str | None
    prompt: str | None


# ---- bodies


@with_sampling()
class Sampling(Body):
    """The sampling parameters of a request."""


Effort = Annotated[
    Annotated[str, Field(pattern="^[A-Za-z]{1,32}$")], OneError('must be 1 to 32 letters, such as "low"', "a string")
]
TemplateEffort = Annotated[Effort, Field(description=_IF_READ)]
TemplateSwitch = Annotated[bool, Field(description=_IF_READ)]
TemplateValue = Annotated[
    bool | int | float | Annotated[str, Field(max_length=LONGEST_VALUE)] | None,
    OneError(f"must be true, false, a number or a string of at most {LONGEST_VALUE} characters"),
]
TokenPrompt = Annotated[Annotated[Several[TokenId], Field(min_length=1)], OneError(_PROMPT)]
Prompts = Annotated[
    Several[Annotated[str | Annotated[Several[TokenId], Field(min_length=1)], OneError(_PROMPT)]],
    Field(min_length=1, max_length=MOST_PROMPTS),
]


def _listed(given: Any) -> Any:
    """Return OpenAI's four forms of prompts as one: an array of texts and of arrays of token ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        return [given]
    if given is not None and not (isinstance(given, list) and given):
        raise broken("", f"must be {_PROMPTS}")
    return given


class Reasoning(Body):
    """How the model reasons."""

    effort: TemplateEffort | None = None
    enabled: TemplateSwitch | None = None
    exclude: bool | None = optional("Leave the thinking out of the answer.")


class ThinkingType(Body):
    """Whether the model thinks."""

    type: Annotated[Literal["enabled", "disabled", "adaptive", "auto"], OneError(_THINKING, "a string")]

    _has_type = needs("type", _THINKING, "invalid_value")


class TemplateFields(Body):
    """The variables of the chat template that a client may set, and the beginning of the reply."""

    reasoning_effort: TemplateEffort | None = None
    reasoning: Reasoning | None = None
    thinking: Annotated[TemplateSwitch | ThinkingType, ByType("true, false or an object")] | None = None
    enable_thinking: TemplateSwitch | None = None
    chat_template_kwargs: Annotated[dict[str, TemplateValue], Field(description=_IF_READ)] | None = None
    continue_final_message: bool | None = optional("The reply continues the last message, an assistant's.")
    add_generation_prompt: bool | None = optional("False is the same as `continue_final_message`.")


class StreamOptions(Body):
    """The additions to a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = optional("Without effect: events are not padded.")


@taking(
    "user",
    "safety_identifier",
    "metadata",
    "prompt_cache_retention",
    store=Prefer(False, why="nothing that was said is stored"),
    service_tier=Prefer("auto", "default", why="there is one tier"),
)
class Options(Sampling, Guided):
    """The fields that chat and text completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: NestedFormat | None = None
    use_beam_search: bool | None = optional("Search for the `n` most likely replies, and return them best first.")
    prompt_logprobs: Annotated[int, wire("prompt_logprobs")] | None = optional(
        "Log probabilities of the prompt's tokens, with so many alternatives; not in a stream."
    )
    prompt_cache_key: SessionKey | None = None
    cache_salt: CacheSalt | None = None
    prefix: str | None = optional("The id of a compressed prefix, which the prompt follows.")


class Prediction(Body):
    """Text that a reply may repeat."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The whole text, without line feeds between its parts: they would end drafts that go on."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


@taking(
    modalities=Only(["text"], why="this server reads and writes text"),
    audio=Only(why="this server reads and writes text only"),
    functions=_OLDER,
    function_call=_OLDER,
    web_search_options=Prefer(why="this server does not search"),
    verbosity=Prefer(why="the model decides how much it writes"),
)
class ChatBody(Options, TemplateFields):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    tools: Several[ChatTool] | None = None
    tool_choice: NestedChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, wire("logprobs")] | None = None
    max_tokens: Annotated[int, wire("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, wire("max_tokens")] | None = None
    n_predict: Annotated[int, wire("max_tokens", low=-2)] | None = optional(
        "llama.cpp's `max_tokens`; negative: no limit. 0, of editors that warm up, is 1."
    )
    prediction: Prediction | None = optional(
        "Text that the reply may repeat; has an effect only if the server speculates."
    )


class CompletionBody(Options):
    """The body of POST /v1/completions."""

    prompt: Annotated[Prompts, BeforeValidator(_listed, json_schema_input_type=str | TokenPrompt | Prompts)]
    echo: bool | None = None
    logprobs: Annotated[int, wire("logprobs")] | None = None
    max_tokens: Annotated[int, wire("max_tokens", low=0)] | None = optional(
        "0 computes only the prompt, for `echo` or `prompt_logprobs`."
    )
    suffix: str | None = optional("The text after the reply, for models with FIM tokens.")
    best_of: Annotated[int, wire("n")] | None = optional(
        "The number of beams of a beam search, `n` at least; else equal to `n`."
    )


class PrefixBody(Body):
    """The body of POST /v1/prefixes."""

    model: str
    prompt: Annotated[str | TokenPrompt, ByType("a string or an array of token ids")] | None = None
    messages: Messages | None = None
    tools: Several[ChatTool] | None = None
    keep: Annotated[float, Field(gt=0, le=1, description="The part of the keys and values to keep.")] | None = None
    method: NotEmpty | None = optional("How they are chosen.")
    cache_salt: CacheSalt | None = None


class ModelBody(Body):
    """The body of POST /models/load and /models/unload."""

    model: str


class TokenizeBody(TemplateFields):
    """The body of POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Several[ChatTool] | None = None
    prompt_cache_key: SessionKey | None = optional("Without effect: nothing is computed.")
    cache_salt: CacheSalt | None = None


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Several[TokenId]


# ---- reading


def read_chat(given: JsonObject, ignored: IgnoredFields | None = None) -> ChatRequest:
    """Read the body of a chat completion; raise ApiError, which names the wrong field.

    Fields without effect are added to `ignored`; without it, unknown fields are refused.
    """
    body = read(ChatBody, given, ignored)
    messages, tools = neutral_messages(body.messages), neutral_tools(given.get("tools"))
    names, strict = tools_by_name(tools), strict_tools(tools)
    rule, reads_calls = call_rule(body.tool_choice, body.parallel_tool_calls, names, strict, ignored)
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "has a meaning only with logprobs=true")
    prefill = _prefill(body, messages)
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    options = _options(body, _chat_bound(body), wanted, ignored)
    if body.prediction is not None:
        options = replace(options, params=options.params.but(prediction=body.prediction.text))
    if options.params.beam_width > 1 and rule.constrains(options.params):
        raise refuse("use_beam_search", "cannot be combined with a rule for tool calls: beams have no constraint")
    hides_thinking = body.reasoning is not None and bool(body.reasoning.exclude)
    return ChatRequest(
        messages=messages,
        tools=tools,
        template_options=_template_options(body),
        prefill=prefill,
        options=options,
        reads_calls=reads_calls,
        hides_thinking=hides_thinking,
        call_rule=rule,
    )


def read_completion(given: JsonObject, ignored: IgnoredFields | None = None) -> CompletionRequest:
    """Read the body of a text completion, as `read_chat` does."""
    body = read(CompletionBody, given, ignored)
    bound = 16 if body.max_tokens is None else body.max_tokens  # OpenAI's own default
    options = _with_best_of(body, _options(body, bound, body.logprobs, ignored, echo=bool(body.echo)))
    if len(body.prompt) * options.params.width > MOST_PROMPTS:
        raise refuse("n", f"times the number of prompts must be at most {MOST_PROMPTS}")
    if not options.samples and not body.echo and options.prompt_logprobs is None:
        raise refuse("max_tokens", "can be 0 only with echo or prompt_logprobs: there is nothing else to return")
    if not options.samples and options.params.width > 1:
        raise refuse("n", "must be 1 with max_tokens 0: there are no replies")
    if body.suffix and (body.echo or not all(isinstance(each, str) for each in body.prompt)):
        raise refuse("suffix", "needs prompts that are texts, without echo")
    return CompletionRequest(options, body.prompt, bool(body.echo), body.suffix or "")


def read_prefix(given: JsonObject, ignored: IgnoredFields | None = None) -> tuple[PrefixBody, Dialogue]:
    """Read the body of a compression, as `read_chat` does, and its messages."""
    body = read(PrefixBody, given, ignored)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt", "missing_required_parameter")
    if body.messages is None and body.tools:
        raise bad_request("tools need messages: put them into the prompt", "tools", "invalid_value")
    return body, Dialogue(messages=neutral_messages(body.messages or ()), tools=neutral_tools(given.get("tools")))


def read_tokenize(given: JsonObject, ignored: IgnoredFields | None = None) -> TokenizeRequest:
    """Read the body of a tokenisation, as `read_chat` does."""
    body = read(TokenizeBody, given, ignored)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt", "missing_required_parameter")
    messages = neutral_messages(body.messages or ())
    return TokenizeRequest(
        messages=messages,
        tools=neutral_tools(given.get("tools")),
        template_options=_template_options(body),
        prefill=_prefill(body, messages),
        model=body.model,
        prompt=body.prompt,
    )


# ---- rules of chat and text completions


def _options(
    body: Options, bound: int | None, logprobs: int | None, ignored: IgnoredFields | None, *, echo: bool = False
) -> RequestOptions:
    """Return the options of a body. A `bound` of 0 tokens computes only the prompt."""
    stream, prompt_logprobs = bool(body.stream), body.prompt_logprobs
    include_usage, running_usage = _stream_options(body, ignored)
    constraint = constraint_of(body, of_format(body.response_format, "response_format"))
    if stream and prompt_logprobs is not None:
        raise refuse("prompt_logprobs", "has no place in a stream")
    scores = [each for each in (prompt_logprobs, logprobs if echo else None) if each is not None]
    params = sampling_params(
        body,
        bound or None,
        ignored,
        logprobs=logprobs,
        constraint=constraint,
        prompt_logprobs=max(scores, default=None),
        beams=bool(body.use_beam_search),
    )
    if bound == 0 and params.min_tokens:
        raise refuse("min_tokens", "must be 0 with max_tokens 0: there is no reply")
    return RequestOptions(
        body.model,
        params,
        bound is not None,
        stream,
        include_usage,
        body.prompt_cache_key,
        running_usage,
        None if constraint is None else constraint.field,
        replies=params.width,
        samples=bound != 0,
        prompt_logprobs=prompt_logprobs,
        prefix=body.prefix,
    )


def _stream_options(body: Options, ignored: IgnoredFields | None) -> tuple[bool, bool]:
    """Return `include_usage` and `running_usage` of RequestOptions."""
    options = body.stream_options
    if options is None:
        return False, False
    if not body.stream:
        without_effect("stream_options", "has a meaning only with stream=true", ignored)
        return False, False
    return bool(options.include_usage), bool(options.continuous_usage_stats)


def _chat_bound(body: ChatBody) -> int | None:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise refuse("max_tokens", "differs from max_completion_tokens: give one of them")
    if older is None and newer is None and body.n_predict is not None and body.n_predict >= 0:
        return max(body.n_predict, 1)
    return older if newer is None else newer


def _prefill(body: TemplateFields, messages: Sequence[Message]) -> bool:
    """Return whether the reply continues the last message, as vLLM's two fields request."""
    continues, begins = body.continue_final_message, body.add_generation_prompt
    if continues and begins:
        raise refuse("add_generation_prompt", "cannot be combined with continue_final_message")
    if not (continues or begins is False):
        return False
    name = "continue_final_message" if continues else "add_generation_prompt"
    if not messages or messages[-1]["role"] != "assistant":
        raise refuse(name, "needs a last message of the assistant, which the reply continues")
    if messages[-1].get("tool_calls"):
        raise refuse(name, "cannot be used after a message with tool calls: it is complete")
    return True


def _template_options(body: TemplateFields) -> tuple[TemplateOption, ...]:
    """Return the options of thinking, and `chat_template_kwargs`; the last one takes precedence in a template."""
    reasoning, thinking = body.reasoning or Reasoning(), body.thinking
    if isinstance(thinking, ThinkingType):
        thinking = thinking.type != "disabled"
    efforts = (("reasoning_effort", body.reasoning_effort), ("reasoning.effort", reasoning.effort))
    options = [effort_option(path, effort) for path, effort in efforts if effort is not None]
    switches = (
        ("reasoning.enabled", reasoning.enabled),
        ("thinking", thinking),
        ("enable_thinking", body.enable_thinking),
    )
    options += [thinking_option(path, enabled=enabled) for path, enabled in switches if enabled is not None]
    values = (body.chat_template_kwargs or {}).items()
    options += [
        TemplateOption(joined(("chat_template_kwargs", name)), ((name, value),))
        for name, value in values
        if value is not None
    ]
    return tuple(options)


def _with_best_of(body: CompletionBody, options: RequestOptions) -> RequestOptions:
    """Return options with `best_of` beams; `n` of them are returned. Without a beam search both are equal."""
    best_of = body.best_of
    if best_of is None or best_of == options.replies:
        return options
    if not body.use_beam_search:
        raise refuse("best_of", f"must be equal to n ({options.replies}): no reply is thrown away")
    if best_of < options.replies:
        raise refuse("best_of", f"must be at least n ({options.replies})")
    if options.constraint_field is not None:
        raise refuse("best_of", f"cannot be combined with {options.constraint_field}: beams have no constraint")
    return replace(options, params=options.params.but(beam_width=best_of))
