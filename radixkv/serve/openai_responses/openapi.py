"""Describe the endpoints of the Responses API for the OpenAPI document."""

from __future__ import annotations

from radixkv.serve.fields import JsonObject
from radixkv.serve.json_schemas import COUNT, STRING, TEXT, answer, array, maybe, ref
from radixkv.serve.openai_responses.schemas import ResponseBody
from radixkv.serve.openapi_operations import event_stream, header, post, stored

_ID = {**header("response_id", "path", "The id of a stored response."), "required": True}
_LIMIT = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}}
_ORDER = {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}
_AFTER = header("after", "query", "The id of the item before the first one.")


def paths() -> JsonObject:
    """Return the paths."""
    events = event_stream("ResponseEvent", None, "response.completed, response.incomplete or response.failed")
    return {
        "/v1/responses": post("Respond to a conversation", ResponseBody, "Response", events),
        "/v1/responses/input_tokens": post("Length of a conversation", ResponseBody, "InputTokens"),
        "/v1/responses/{response_id}": {
            "get": stored("A stored response", "Response", _ID),
            "delete": stored("Delete a stored response", "DeletedResponse", _ID),
        },
        "/v1/responses/{response_id}/cancel": {
            "post": stored("Stop a response that is being streamed", "Response", _ID)
        },
        "/v1/responses/{response_id}/input_items": {
            "get": stored("The conversation before a stored response", "ResponseItems", _ID, _LIMIT, _ORDER, _AFTER)
        },
    }


def answers() -> JsonObject:
    """Return the schemas of all responses, by the names that `ref` takes."""
    item: JsonObject = answer({"type": TEXT})
    usage = {
        "input_tokens": COUNT,
        "input_tokens_details": answer(
            {"cached_tokens": COUNT, "cache_write_tokens": COUNT}, host_tokens=COUNT, disk_tokens=COUNT
        ),
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
        "InputTokens": answer({"object": {"const": "response.input_tokens"}, "input_tokens": COUNT}),
        "DeletedResponse": answer({"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
        "ResponseItems": answer({**page, "first_id": STRING, "last_id": STRING}),
    }
