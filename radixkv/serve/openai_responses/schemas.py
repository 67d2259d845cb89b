"""Read the body of POST /v1/responses.

A field that the server cannot honour is refused only if ignoring it would change the meaning of the request.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.chat.template_arguments import effort_option
from radixkv.serve.constraints import ReplyConstraint, read_call_rule, read_constraint, read_text_format
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import Fields, IgnoredFields, JsonObject
from radixkv.serve.message_schemas import RoleOrder
from radixkv.serve.openai_responses.items import read_input, read_messages
from radixkv.serve.openai_responses.store import Items, StoredResponse
from radixkv.serve.openai_responses.tools import read_tools
from radixkv.serve.sampling_fields import sampling_params, wire_range
from radixkv.serve.schemas import ChatRequest, RequestOptions, read_effort

ENCRYPTED = "reasoning.encrypted_content"
SUMMARIES = ("auto", "concise", "detailed")
REFUSED = {
    "conversation": "this server has no conversations: use previous_response_id",
    "prompt": "this server has no stored prompts: send instructions and input",
}
# Fields whose other values are ignored with a warning: the values with an effect, and why others are refused.
IGNORED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "the response is returned when it is complete"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "truncation": (("disabled",), "a prompt is never shortened"),
}
WITHOUT_EFFECT = ("user", "safety_identifier", "prompt_cache_retention", "client_metadata", "max_tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(ChatRequest):
    """The body of POST /v1/responses, as a request of the neutral core.

    `input` has the new items, and `previous` the items of the stored conversation before them. `names` maps qualified
    names of functions to a namespace and a name. `echo` has the fields of the response that repeat the request. The
    response is stored if `store` is true. `encrypted` adds `encrypted_content` to reasoning items, and `summary`
    returns reasoning as a summary.
    """

    input: Items
    previous: tuple[Items, ...]
    names: Mapping[str, tuple[str, str]]
    echo: JsonObject
    store: bool
    encrypted: bool
    summary: bool


def read_response(
    body: JsonObject,
    ignored: IgnoredFields | None,
    stored: Callable[[str], StoredResponse | None],
    order: RoleOrder,
) -> ResponseRequest:
    """Check the body of POST /v1/responses; raise ApiError, which names the wrong field.

    `stored` looks up a response by its id. `order` is that of the chat template. Fields without effect are added to
    `ignored`; without it, unknown fields are refused.
    """
    fields = Fields(body, ignored=ignored)
    previous = _previous(fields, stored)
    instructions = fields.text("instructions")
    items = [_with_id(item) for item in read_input(fields.need("input"))]
    before = [item for part in previous for item in part.items]
    messages = read_messages(instructions, before, items, ignored, order)
    tools = read_tools(fields)
    choice = body.get("tool_choice")
    rule, reads_calls = read_call_rule(fields, tools.taken, tools.strict, nested=False)
    reasoning = _reasoning(fields)
    effort = reasoning["effort"]
    form, constraint = _text_format(fields)
    constraint = read_constraint(fields, constraint)
    for name, why in REFUSED.items():
        fields.only(name, (), why)
    fields.only("n", (1,), "a response has one reply")
    fields.only("use_beam_search", (False,), "a response has one reply")
    for name, (allowed, why) in IGNORED_VALUES.items():
        fields.prefer(name, allowed, why)
    encrypted = _encrypted(fields)
    store = fields.flag("store", True)
    metadata = fields.take("metadata")
    options = _options(fields, constraint)
    fields.ignore(*WITHOUT_EFFECT)
    fields.close()
    echo = {
        "background": False,
        "instructions": instructions,
        "max_output_tokens": options.params.max_tokens if options.bounded else None,
        "metadata": metadata if isinstance(metadata, dict) else {},
        "parallel_tool_calls": rule.parallel,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": options.session_key,
        "reasoning": reasoning,
        "service_tier": "default",
        "temperature": options.params.temperature,
        "text": {"format": form},
        "tool_choice": choice or "auto",
        "tools": tools.shown,
        "top_p": options.params.top_p,
        "truncation": "disabled",
    }
    return ResponseRequest(
        options,
        messages,
        tools.functions or None,
        reads_calls,
        input=Items(items),
        previous=previous,
        names=tools.names,
        echo=echo,
        store=store,
        encrypted=encrypted,
        summary=reasoning["summary"] is not None,
        call_rule=rule,
        template_options=() if effort is None else (effort_option("reasoning.effort", effort),),
    )


def _previous(fields: Fields, stored: Callable[[str], StoredResponse | None]) -> tuple[Items, ...]:
    number = fields.text("previous_response_id")
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


def _reasoning(fields: Fields) -> JsonObject:
    """Return `reasoning` for the response."""
    given = fields.take("reasoning")
    if given is None:
        return {"effort": None, "summary": None}
    reasoning = fields.nested(given, "reasoning")
    effort, summary = read_effort(reasoning, "effort"), reasoning.text("summary")
    older = reasoning.text("generate_summary")
    reasoning.close()
    summary = summary or older
    return {"effort": effort, "summary": summary if summary in SUMMARIES else None}


def _encrypted(fields: Fields) -> bool:
    """Whether reasoning items have `encrypted_content`. Other values of `include` are ignored."""
    include = fields.list("include") or []
    others = fields.nested({"include": [each for each in include if each != ENCRYPTED]}, "")
    others.prefer("include", ([],), f"only {ENCRYPTED} is available")
    return ENCRYPTED in include


def _text_format(fields: Fields) -> tuple[JsonObject, ReplyConstraint | None]:
    """Return the format of the text as the response repeats it, and its constraint."""
    given = fields.take("text")
    if given is None:
        return {"type": "text"}, None
    text = fields.nested(given, "text")
    constraint = read_text_format(text, "format")
    text.close()
    return given.get("format") or {"type": "text"}, constraint


def _options(fields: Fields, constraint: ReplyConstraint | None) -> RequestOptions:
    model = fields.needed_text("model")
    bound = fields.integer("max_output_tokens", *wire_range("max_tokens"))
    stream = fields.flag("stream")
    fields.ignore("stream_options")  # only for padding of events, which are not padded
    params = sampling_params(fields, bound, None, constraint=constraint)
    return RequestOptions(
        model,
        params,
        bound is not None,
        stream,
        include_usage=False,
        session_key=fields.text("prompt_cache_key"),
        constraint_field=None if constraint is None else constraint.field,
    )
