"""Declare the body of POST /v1/responses, and convert it to a request of the neutral core.

A field that the server cannot honour is refused only if ignoring it would change the meaning of the request.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any

from radixkv.chat.template_arguments import effort_option
from radixkv.serve.bodies import (
    Body,
    ByType,
    CacheSalt,
    Only,
    Prefer,
    SessionKey,
    optional,
    read,
    taking,
    without_effect,
)
from radixkv.serve.constraints import AnyFormat, Guided, ReplyConstraint, constraint_of, of_format
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import IgnoredFields, JsonObject
from radixkv.serve.openai_responses.items import Items, messages_of, raw_items, stored_items
from radixkv.serve.openai_responses.store import Items as SharedItems
from radixkv.serve.openai_responses.store import StoredResponse
from radixkv.serve.openai_responses.tools import ToolList, read_tools
from radixkv.serve.role_order import RoleOrder
from radixkv.serve.sampling_fields import sampling_params, wire
from radixkv.serve.schemas import NO_PREFIX, ChatRequest, Dialogue, Effort, RequestOptions, Sampling
from radixkv.serve.tool_choices import Choice, call_rule

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"  # values of `include`
SUMMARIES = ("auto", "concise", "detailed")
_ONE_REPLY = "a response has one reply"


# ---- the body


class ResponseReasoning(Body):
    """How the model reasons, and what the response shows of it."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = optional("The older name of `summary`.")


class TextOptions(Body):
    """The form of the reply."""

    format: AnyFormat | None = None


@taking(
    "stream_options",
    "user",
    "safety_identifier",
    "prompt_cache_retention",
    "client_metadata",
    "max_tool_calls",
    prefix=NO_PREFIX,
    n=Only(1, why=_ONE_REPLY),
    use_beam_search=Only(False, why=_ONE_REPLY),
    conversation=Only(why="this server has no conversations: use previous_response_id"),
    prompt=Only(why="this server has no stored prompts: send instructions and input"),
    background=Prefer(False, why="the response is returned when it is complete"),
    service_tier=Prefer("auto", "default", why="there is one tier"),
    truncation=Prefer("disabled", why="a prompt is never shortened"),
)
class ResponseBody(Sampling, Guided):
    """The body of POST /v1/responses."""

    model: str
    input: Annotated[str | Items, ByType("a string or an array of items")]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, wire("max_tokens")] | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: ToolList | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None
    text: TextOptions | None = None
    include: list[Any] | None = None
    top_logprobs: Annotated[int, wire("logprobs")] | None = None
    metadata: Any = optional("An object, which the response repeats.")
    prompt_cache_key: SessionKey | None = None
    cache_salt: CacheSalt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(ChatRequest):
    """The body of POST /v1/responses, as a request of the neutral core.

    `input` has the new items, and `previous` the items of the stored conversation before them. `names` maps qualified
    names of functions to a namespace and a name. `echo` has the fields of the response that repeat the request. The
    response is stored if `store` is true. `encrypted` adds `encrypted_content` to reasoning items, and `summary`
    returns reasoning as a summary.
    """

    input: SharedItems
    previous: tuple[SharedItems, ...]
    names: Mapping[str, tuple[str, str]]
    echo: JsonObject
    store: bool
    encrypted: bool
    summary: bool


def read_response(
    given: JsonObject, ignored: IgnoredFields | None, stored: Callable[[str], StoredResponse | None], order: RoleOrder
) -> ResponseRequest:
    """Read the body of POST /v1/responses; raise ApiError, which names the wrong field.

    `stored` looks up a response by its id. `order` is the chat template's. Fields without effect are added to
    `ignored`; without it, unknown fields are refused.
    """
    body = read(ResponseBody, given, ignored)
    previous, items = _previous(body, stored), [_with_id(item) for item in raw_items(given["input"])]
    before = stored_items([item for part in previous for item in part.items])
    new = stored_items(raw_items(body.input)) if isinstance(body.input, str) else body.input
    messages = messages_of(body.instructions, chain(before, new), order)
    tools = read_tools(body.tools)
    rule, reads_calls = call_rule(body.tool_choice, body.parallel_tool_calls, tools.functions, tools.strict, ignored)
    own = None if body.text is None else of_format(body.text.format, "text.format")
    encrypted, reasoning = _encrypted(body, ignored), _reasoning(body)
    options = _options(body, constraint_of(body, own), ignored)
    effort = reasoning["effort"]
    return ResponseRequest(
        messages=messages,
        tools=list(tools.functions.values()) or None,
        options=options,
        reads_calls=reads_calls,
        input=SharedItems(items),
        previous=previous,
        names=tools.names,
        echo={
            **_echo(body, given, options),
            "parallel_tool_calls": rule.parallel,
            "reasoning": reasoning,
            "tools": tools.shown,
        },
        store=body.store is not False,
        encrypted=encrypted,
        summary=reasoning["summary"] is not None,
        call_rule=rule,
        template_options=() if effort is None else (effort_option("reasoning.effort", effort),),
    )


def ended(stored: StoredResponse, order: RoleOrder) -> Dialogue:
    """Return the conversation up to the end of a stored response, as a prompt that its reply ends."""
    fields = {name: stored.response[name] for name in ("model", "instructions", "reasoning", "tools")}
    given = {**fields, "input": [], "previous_response_id": stored.response["id"]}
    return replace(read_response(given, IgnoredFields(), lambda _: stored, order), prefill=True)


def _echo(body: ResponseBody, given: JsonObject, options: RequestOptions) -> JsonObject:
    """Return the fields of the response that repeat the request."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata if isinstance(body.metadata, dict) else {},
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "service_tier": "default",
        "temperature": options.params.temperature,
        "text": {"format": (given.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": given.get("tool_choice") or "auto",
        "top_p": options.params.top_p,
        "truncation": "disabled",
    }


def _previous(body: ResponseBody, stored: Callable[[str], StoredResponse | None]) -> tuple[SharedItems, ...]:
    number = body.previous_response_id
    if number is None:
        return ()
    found = stored(number)
    if found is None:
        message = f"Previous response with id '{number[:100]}' not found."
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    return found.conversation


def _with_id(item: Any) -> Any:
    """Return an item with an id, since each item of a list of input items has one."""
    if not isinstance(item, dict) or item.get("id"):
        return item
    return {**item, "id": f"item_{uuid.uuid4().hex}"}


def _reasoning(body: ResponseBody) -> JsonObject:
    """Return `reasoning` for the response."""
    reasoning = body.reasoning or ResponseReasoning()
    summary = reasoning.summary or reasoning.generate_summary
    return {"effort": reasoning.effort, "summary": summary if summary in SUMMARIES else None}


def _encrypted(body: ResponseBody, ignored: IgnoredFields | None) -> bool:
    """Whether reasoning items have `encrypted_content`. Other values of `include` are ignored."""
    include = body.include or []
    if any(each not in (ENCRYPTED, LOGPROBS) for each in include):
        without_effect("include", f"can only be [{ENCRYPTED!r}, {LOGPROBS!r}] here", ignored)
    if body.top_logprobs and LOGPROBS not in include:
        without_effect("top_logprobs", f"has a meaning only with include=[{LOGPROBS!r}]", ignored)
    return ENCRYPTED in include


def _options(body: ResponseBody, constraint: ReplyConstraint | None, ignored: IgnoredFields | None) -> RequestOptions:
    bound = body.max_output_tokens
    logprobs = (body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None
    return RequestOptions(
        body.model,
        sampling_params(body, bound, ignored, logprobs=logprobs, constraint=constraint),
        bounded=bound is not None,
        stream=bool(body.stream),
        include_usage=False,
        session_key=body.prompt_cache_key,
        constraint_field=None if constraint is None else constraint.field,
    )
