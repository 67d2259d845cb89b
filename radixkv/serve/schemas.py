"""Request bodies: check the fields of each endpoint, and convert them to the engine's types.

A wrong body raises ApiError with one sentence that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixkv.chat.constrained import FREE_CALLS, CallRule, strict_tools
from radixkv.chat.messages import Message
from radixkv.chat.template_arguments import TemplateOption, effort_option, thinking_option
from radixkv.chat.tool_call_formats import tool_names
from radixkv.sampling.params import SamplingParams
from radixkv.serve.constraints import read_call_rule, read_constraint, read_response_format
from radixkv.serve.errors import bad_request
from radixkv.serve.fields import Fields, IgnoredFields, JsonObject, shown
from radixkv.serve.message_schemas import read_messages, read_tools
from radixkv.serve.sampling_fields import are_token_ids, sampling_params, wire_range

MOST_PROMPTS = 1024
MOST_SCORES = 2**22  # log probabilities of prompts in a response, 25 to 80 bytes each
WITHOUT_EFFECT = ("user", "safety_identifier", "metadata", "prompt_cache_retention")
NOT_OF_CHAT = {
    "audio": "this server reads and writes text only",
    **dict.fromkeys(("functions", "function_call"), "it is the old form of tools and tool_choice: use those"),
}
# Fields that are ignored with a warning, with the reason why a strict server refuses them.
IGNORED_IN_CHAT = {
    "prediction": "the text of a reply is not predicted",
    "web_search_options": "this server does not search",
    "verbosity": "the model decides how much it writes",
}
# Fields whose other values are ignored with a warning: the values with an effect, and why others are refused.
IGNORED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "store": ((False,), "nothing that was said is stored"),
    "service_tier": (("auto", "default"), "there is one tier"),
}
EFFORT = "[A-Za-z]{1,32}"
THINKING_TYPES = ("enabled", "disabled", "adaptive", "auto")
LONGEST_VALUE = 256  # characters of a value in chat_template_kwargs

TextOrIds = str | list[int]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The fields that chat and text completions share.

    `include_usage` adds an event with the usage at the end of a stream, `running_usage` the usage so far to each event.
    `params.max_tokens` applies only if `bounded`; else a reply may fill the context. Requests with the same
    `session_key` are one session for the monitor. It never isolates cached prefixes. `constraint_field` is the field of
    the constraint in `params`. The response has `replies` to each prompt; a beam search may have more beams. Without
    `samples` only the prompt is computed. `prompt_logprobs` is the number of alternatives in the field of this name of
    the response, None if it has no such field.
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


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The body of POST /v1/chat/completions.

    `reads_calls`: tool calls are taken out of the reply's text, and follow `call_rule`. `template_options` set
    variables of the chat template. `hides_thinking`: the response has no thinking. `prefill`: the last message is a
    reply's beginning, to be continued.
    """

    options: RequestOptions
    messages: list[Message]
    tools: list[JsonObject] | None
    reads_calls: bool
    template_options: tuple[TemplateOption, ...] = ()
    hides_thinking: bool = False
    prefill: bool = False
    call_rule: CallRule = FREE_CALLS


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """The body of POST /v1/completions: prompts, each a text or token ids.

    `echo` repeats a prompt before its reply, with its log probabilities if the reply has some.
    """

    options: RequestOptions
    prompts: list[TextOrIds]
    echo: bool

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the log probabilities of a prompt precede those of its reply."""
        return self.echo and self.options.params.logprobs is not None


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """The body of POST /tokenize: a text, or messages that are rendered as in a chat completion."""

    model: str | None
    prompt: str | None
    messages: list[Message] | None
    tools: list[JsonObject] | None
    template_options: tuple[TemplateOption, ...] = ()
    prefill: bool = False


def read_chat(body: JsonObject, ignored: IgnoredFields | None = None) -> ChatRequest:
    """Check the body of a chat completion; raise ApiError, which names the wrong field.

    Fields without effect are added to `ignored`; without it, unknown fields are refused.
    """
    fields = Fields(body, ignored=ignored)
    messages = read_messages(fields.need("messages"), ignored)
    tools = read_tools(fields.list("tools"), ignored)
    rule, reads_calls = read_call_rule(fields, tool_names(tools), strict_tools(tools), nested=True)
    wanted = _chat_logprobs(fields)
    bound = _chat_bound(fields)
    _refuse_what_chat_lacks(fields)
    thinking, hides_thinking = read_template_options(fields)
    prefill = _prefill(fields, messages)
    options = _options(fields, bound, wanted)
    if options.params.beam_width > 1 and rule.constrains(options.params):
        fields.refuse("use_beam_search", "cannot be combined with a rule for tool calls: beams have no constraint")
    return ChatRequest(options, messages, tools, reads_calls, thinking, hides_thinking, prefill, rule)


def read_completion(body: JsonObject, ignored: IgnoredFields | None = None) -> CompletionRequest:
    """Check the body of a text completion, as `read_chat` does."""
    fields = Fields(body, ignored=ignored)
    prompts = _prompts(fields)
    echo = fields.flag("echo")
    wanted = fields.integer("logprobs", *wire_range("logprobs"))
    bound = fields.integer("max_tokens", *wire_range("max_tokens", low=0))
    fields.only("suffix", (), "only what follows a prompt is written")
    best_of = fields.integer("best_of", *wire_range("n"))
    options = _options(fields, 16 if bound is None else bound, wanted, echo=echo)  # 16 is OpenAI's own default
    options = _best_of(fields, options, best_of, beams=bool(body.get("use_beam_search")))
    if len(prompts) * options.params.width > MOST_PROMPTS:
        fields.refuse("n", f"times the number of prompts must be at most {MOST_PROMPTS}")
    if not options.samples and not echo and options.prompt_logprobs is None:
        fields.refuse("max_tokens", "can be 0 only with echo or prompt_logprobs: there is nothing else to return")
    if not options.samples and options.params.width > 1:
        fields.refuse("n", "must be 1 with max_tokens 0: there are no replies")
    return CompletionRequest(options, prompts, echo)


def read_tokenize(body: JsonObject, ignored: IgnoredFields | None = None) -> TokenizeRequest:
    """Check the body of a tokenisation, as `read_chat` does."""
    fields = Fields(body, ignored=ignored)
    model, prompt = fields.text("model"), fields.text("prompt")
    fields.text("prompt_cache_key")  # without effect: nothing is computed
    given, tools = fields.list("messages"), read_tools(fields.list("tools"), ignored)
    messages = None if given is None else read_messages(given, ignored)
    if (prompt is None) == (messages is None):
        raise bad_request("give either prompt or messages", "prompt", "missing_required_parameter")
    thinking, _ = read_template_options(fields)
    prefill = _prefill(fields, messages or [])
    fields.close()
    return TokenizeRequest(model, prompt, messages, tools, thinking, prefill)


# ---- fields that chat and text completions share


def _options(fields: Fields, bound: int | None, logprobs: int | None, *, echo: bool = False) -> RequestOptions:
    """Read the shared fields, which are the last. A `bound` of 0 tokens computes only the prompt."""
    model = fields.needed_text("model")
    stream = fields.flag("stream")
    include_usage, running_usage = _stream_options(fields, stream)
    constraint = read_constraint(fields, read_response_format(fields, "response_format"))
    prompt_logprobs = fields.integer("prompt_logprobs", *wire_range("prompt_logprobs"))
    if stream and prompt_logprobs is not None:
        fields.refuse("prompt_logprobs", "has no place in a stream")
    scores = [each for each in (prompt_logprobs, logprobs if echo else None) if each is not None]
    params = sampling_params(
        fields,
        bound or None,
        logprobs,
        constraint=constraint,
        prompt_logprobs=max(scores, default=None),
        beams=fields.flag("use_beam_search"),
    )
    if bound == 0 and params.min_tokens:
        fields.refuse("min_tokens", "must be 0 with max_tokens 0: there is no reply")
    session_key = fields.text("prompt_cache_key")
    for name, (allowed, why) in IGNORED_VALUES.items():
        fields.prefer(name, allowed, why)
    fields.ignore(*WITHOUT_EFFECT)
    fields.close()
    constraint_field = None if constraint is None else constraint.field
    return RequestOptions(
        model,
        params,
        bound is not None,
        stream,
        include_usage,
        session_key,
        running_usage,
        constraint_field,
        replies=params.width,
        samples=bound != 0,
        prompt_logprobs=prompt_logprobs,
    )


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Return `include_usage` and `running_usage` of RequestOptions."""
    given = fields.take("stream_options")
    if given is None:
        return False, False
    options = fields.nested(given, "stream_options")
    options.flag("include_obfuscation")  # accepted without effect: events are not padded
    wanted = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.close()
    if not stream:
        fields.has_no_effect("stream_options", "has a meaning only with stream=true")
        return False, False
    return wanted


# ---- chat completions only


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", *wire_range("logprobs"))
    if top is not None and not wanted:
        fields.refuse("top_logprobs", "has a meaning only with logprobs=true")
    return (top or 0) if wanted else None


def _chat_bound(fields: Fields) -> int | None:
    older, newer = (fields.integer(name, *wire_range("max_tokens")) for name in ("max_tokens", "max_completion_tokens"))
    if older is not None and newer is not None and older != newer:
        fields.refuse("max_tokens", "differs from max_completion_tokens: give one of them")
    return older if newer is None else newer


def _refuse_what_chat_lacks(fields: Fields) -> None:
    fields.only("modalities", (["text"],), "this server reads and writes text")
    for name, why in NOT_OF_CHAT.items():
        fields.only(name, (), why)
    for name, why in IGNORED_IN_CHAT.items():
        fields.prefer(name, (), why)


def _prefill(fields: Fields, messages: Sequence[Message]) -> bool:
    """Return whether the reply continues the last message, as vLLM's two fields request."""
    continues, begins = (_optional_flag(fields, name) for name in ("continue_final_message", "add_generation_prompt"))
    if continues and begins:
        fields.refuse("add_generation_prompt", "cannot be combined with continue_final_message")
    if not (continues or begins is False):
        return False
    name = "continue_final_message" if continues else "add_generation_prompt"
    if not messages or messages[-1]["role"] != "assistant":
        fields.refuse(name, "needs a last message of the assistant, which the reply continues")
    if messages[-1].get("tool_calls"):
        fields.refuse(name, "cannot be used after a message with tool calls: it is complete")
    return True


def read_template_options(fields: Fields) -> tuple[tuple[TemplateOption, ...], bool]:
    """Read the options of thinking, and `chat_template_kwargs`; the last one takes precedence in a template.

    The second value is `reasoning.exclude`: the response has no thinking.
    """
    options = []
    if (effort := read_effort(fields, "reasoning_effort")) is not None:
        options.append(effort_option("reasoning_effort", effort))
    excluded = False
    if (given := fields.take("reasoning")) is not None:
        reasoning = fields.nested(given, "reasoning")
        if (effort := read_effort(reasoning, "effort")) is not None:
            options.append(effort_option("reasoning.effort", effort))
        if (enabled := _optional_flag(reasoning, "enabled")) is not None:
            options.append(thinking_option("reasoning.enabled", enabled=enabled))
        excluded = reasoning.flag("exclude")
        reasoning.close()
    options += _thinking(fields)
    if (enabled := _optional_flag(fields, "enable_thinking")) is not None:
        options.append(thinking_option("enable_thinking", enabled=enabled))
    return (*options, *_template_values(fields)), excluded


def read_effort(fields: Fields, name: str) -> str | None:
    """Read a reasoning effort, None if it is absent; raise ApiError unless it is one word."""
    effort = fields.text(name)
    if effort is not None and not re.fullmatch(EFFORT, effort):
        fields.refuse(name, 'must be 1 to 32 letters, such as "low"')
    return effort


def _optional_flag(fields: Fields, name: str) -> bool | None:
    value = fields.take(name)
    if value is not None and not isinstance(value, bool):
        fields.wrong(name, "true or false", value)
    return value


def _thinking(fields: Fields) -> list[TemplateOption]:
    """Read `thinking`: true, false, or an object whose `type` is "enabled", "disabled", "adaptive" or "auto"."""
    given = fields.take("thinking")
    if given is None or isinstance(given, bool):
        return [] if given is None else [thinking_option("thinking", enabled=given)]
    thinking = fields.nested(given, "thinking")
    kind = thinking.text("type")
    thinking.close()
    if kind is None or kind not in THINKING_TYPES:
        fields.refuse("thinking.type", f"must be one of {', '.join(THINKING_TYPES)}")
    return [thinking_option("thinking", enabled=kind != "disabled")]


def _template_values(fields: Fields) -> list[TemplateOption]:
    given = fields.take("chat_template_kwargs")
    if given is None:
        return []
    if not isinstance(given, dict):
        fields.wrong("chat_template_kwargs", "an object", given)
    options = []
    for name, value in given.items():
        path = f"chat_template_kwargs.{shown(name).strip(chr(34))}"
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= LONGEST_VALUE):
            options.append(TemplateOption(path, ((name, value),)))
        elif value is not None:
            fields.refuse(path, f"must be true, false, a number or a string of at most {LONGEST_VALUE} characters")
    return options


# ---- text completions only


def _best_of(fields: Fields, options: RequestOptions, best_of: int | None, *, beams: bool) -> RequestOptions:
    """Return options with `best_of` beams, of which `n` are returned; without a beam search both are equal."""
    if best_of is None or best_of == options.replies:
        return options
    if not beams:
        fields.refuse("best_of", f"must be equal to n ({options.replies}): no reply is thrown away")
    if best_of < options.replies:
        fields.refuse("best_of", f"must be at least n ({options.replies})")
    if options.constraint_field is not None:
        fields.refuse("best_of", f"cannot be combined with {options.constraint_field}: beams have no constraint")
    return replace(options, params=options.params.but(beam_width=best_of))


def _prompts(fields: Fields) -> list[TextOrIds]:
    """Read OpenAI's four forms: a text, texts, token ids, lists of token ids."""
    given = fields.need("prompt")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        fields.refuse("prompt", "must be a string, or an array of strings, of token ids, or of arrays of token ids")
    if are_token_ids(given):
        return [given]
    if len(given) > MOST_PROMPTS:
        fields.refuse("prompt", f"must be at most {MOST_PROMPTS} prompts")
    for at, prompt in enumerate(given):
        if not (isinstance(prompt, str) or (isinstance(prompt, list) and prompt and are_token_ids(prompt))):
            fields.refuse(f"prompt[{at}]", "must be a string or an array of token ids that is not empty")
    return list(given)
