"""Describe the endpoints of the Responses API for the OpenAPI document."""

from __future__ import annotations

from radixkv.serve.fields import JsonObject
from radixkv.serve.json_schemas import (
    ANYTHING,
    BOOLEAN,
    COUNT,
    IGNORED,
    NOT_EMPTY,
    SESSION_KEY,
    STRING,
    TEXT,
    answer,
    array,
    closed,
    integer,
    maybe,
    obj,
    ref,
    sampling,
)
from radixkv.serve.message_schemas import TOOL_NAME
from radixkv.serve.openai_responses import items, schemas
from radixkv.serve.openapi_constraints import guided, text_format, tool_choice
from radixkv.serve.openapi_operations import NAMESPACE, REQUEST_ID, event_stream, header, json_of, post, responses_of
from radixkv.serve.sampling_fields import wire_range
from radixkv.serve.schemas import EFFORT

_ID = {**header("response_id", "path", "The id of a stored response."), "required": True}
_TOOL_NAME: JsonObject = {"type": "string", "pattern": f"^{TOOL_NAME}$"}
_LIMIT = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}}
_ORDER = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}
_AFTER = header("after", "query", "The id of the item before the first one.")


def paths(model: JsonObject, strict: bool) -> JsonObject:
    """Return the paths; `model` is the schema of the model's name."""
    create = _body(model, strict)
    events = event_stream("ResponseEvent", None, "response.completed, response.incomplete or response.failed")
    return {
        "/v1/responses": post("Respond to a conversation", closed(create) if strict else create, "Response", events),
        "/v1/responses/{response_id}": {
            "get": _stored("A stored response", "Response", 400),
            "delete": _stored("Delete a stored response", "DeletedResponse", 400),
        },
        "/v1/responses/{response_id}/cancel": {
            "post": _stored("Stop a response that is being streamed", "Response", 400)
        },
        "/v1/responses/{response_id}/input_items": {
            "get": _stored("The conversation before a stored response", "ResponseItems", 400, _LIMIT, _ORDER, _AFTER)
        },
    }


def answers() -> JsonObject:
    """Return the schemas of all responses, by the names that `ref` takes."""
    item: JsonObject = answer({"type": TEXT})
    usage = {
        "input_tokens": COUNT,
        "input_tokens_details": answer({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": answer({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
    response = {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "completed_at": maybe(COUNT),
        "status": {"enum": ["in_progress", "completed", "incomplete", "failed", "cancelled"]},
        "error": maybe(answer({"code": TEXT, "message": TEXT})),
        "incomplete_details": maybe(answer({"reason": {"const": "max_output_tokens"}})),
        "model": TEXT,
        "output": array(item),
        "usage": maybe(answer(usage)),
        "previous_response_id": STRING,
        "instructions": STRING,
        "tools": array(answer({"type": {"enum": ["function", "namespace"]}, "name": TEXT})),
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, answer({"type": TEXT})]},
        "parallel_tool_calls": {"type": "boolean"},
    }
    page = {"object": {"const": "list"}, "data": array(item), "has_more": {"type": "boolean"}}
    return {
        "Response": answer(response),
        "ResponseEvent": answer({"type": TEXT, "sequence_number": COUNT}, response=ref("Response")),
        "DeletedResponse": answer({"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
        "ResponseItems": answer({**page, "first_id": STRING, "last_id": STRING}),
    }


def _stored(about: str, found: str, status: int, *query: JsonObject) -> JsonObject:
    return {
        "summary": about,
        "parameters": [_ID, *query, NAMESPACE, REQUEST_ID],
        "responses": responses_of(about, json_of(found), status, 401, 403, 404),
    }


def _body(model: JsonObject, strict: bool) -> JsonObject:
    """The body of POST /v1/responses."""
    preferred = {name: {"enum": [*allowed, None]} for name, (allowed, _) in schemas.IGNORED_VALUES.items()}
    effort = maybe({"type": "string", "pattern": f"^{EFFORT}$"})
    reasoning = obj({"effort": effort, "summary": STRING, "generate_summary": STRING})
    text = obj({"format": text_format(), "verbosity": IGNORED})
    if strict:
        del text["properties"]["verbosity"]
    fields = {
        **sampling(),
        **guided(),
        "n": {"enum": [1, None]},
        "use_beam_search": {"enum": [False, None]},
        "model": model,
        "input": {"anyOf": [TEXT, array(_item(strict))]},
        "instructions": STRING,
        "previous_response_id": STRING,
        "max_output_tokens": integer(*wire_range("max_tokens")),
        "stream": BOOLEAN,
        "stream_options": ANYTHING,
        "store": BOOLEAN,
        "tools": maybe(array(_tool(strict))),
        "tool_choice": tool_choice(nested=False),
        "parallel_tool_calls": BOOLEAN,
        "reasoning": maybe(reasoning),
        "text": maybe(text),
        "include": maybe(array({"enum": [schemas.ENCRYPTED]} if strict else {})),
        "metadata": {"description": "An object, which the response repeats."},
        "prompt_cache_key": SESSION_KEY,
        **(preferred if strict else dict.fromkeys(preferred, IGNORED)),
        **{name: {"type": "null"} for name in schemas.REFUSED},
        **dict.fromkeys(schemas.WITHOUT_EFFECT, ANYTHING),
    }
    return obj(fields, "model", "input")


def _item(strict: bool) -> JsonObject:
    """One item of `input`; items of other types are ignored."""
    texts = [kind for kind in items.TEXTS if kind != "refusal"]
    hints = dict.fromkeys(items.HINTS_OF_PARTS, ANYTHING)
    parts = [
        obj({"type": {"enum": texts}, "text": TEXT, **hints}, "type", "text"),
        obj({"type": {"const": "refusal"}, "refusal": TEXT, **hints}, "type", "refusal"),
    ]
    written = {"anyOf": [TEXT, array({"anyOf": parts})]}
    arguments: JsonObject = {"type": ["string", "object", "null"]}
    common = dict.fromkeys((*items.OF_ITEMS, *items.HINTS), ANYTHING)
    call = {"call_id": NOT_EMPTY, "name": NOT_EMPTY, **common}
    result = {"call_id": NOT_EMPTY, "output": written, **common, "name": ANYTHING, "namespace": ANYTHING}
    said = {"type": {"enum": ["message", None]}, "role": {"enum": list(items.ROLES)}, "content": written}
    thought = {"content": maybe(written), "summary": maybe(written), "encrypted_content": STRING}
    called = {"type": {"const": "function_call"}, "arguments": arguments, "namespace": STRING}
    results = [f"{kind}_call_output" for kind in ("function", "custom_tool")]
    kinds = [
        obj({**said, **common}, "role", "content"),
        obj({"type": {"const": "reasoning"}, **thought, **common}, "type"),
        obj({**call, **called}, "type", "call_id", "name"),
        obj({**call, "type": {"const": "custom_tool_call"}, "input": arguments}, "type", "call_id", "name"),
        obj({"type": {"enum": results}, **result}, "type", "call_id", "output"),
    ]
    if not strict:
        kinds.append(obj({"type": {"not": {"enum": [*items.KINDS, None]}}}, "type"))
    return {"anyOf": kinds}


def _tool(strict: bool) -> JsonObject:
    """One tool; tools of other types are ignored."""
    function = obj(
        {
            "type": {"const": "function"},
            "name": _TOOL_NAME,
            "description": STRING,
            "parameters": {"type": ["object", "null"]},
            **dict.fromkeys(("strict", "defer_loading", "allowed_callers", "output_schema", "async"), ANYTHING),
        },
        "type",
        "name",
    )
    other = obj({"type": {"not": {"enum": ["function", "namespace", None]}}}, "type")
    inner = function if strict else {"anyOf": [function, other]}
    space = {"type": {"const": "namespace"}, "name": _TOOL_NAME, "description": STRING, "tools": maybe(array(inner))}
    kinds = [function, obj(space, "type", "name")]
    return {"anyOf": kinds if strict else [*kinds, other]}
