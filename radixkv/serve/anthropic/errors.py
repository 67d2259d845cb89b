"""Errors in the form of Anthropic's API."""

from __future__ import annotations

import json

from starlette.responses import Response
from starlette.types import Scope

from radixkv.errors import PromptTooLong
from radixkv.serve.errors import TOO_LONG, ApiError
from radixkv.serve.fields import JsonObject

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, request_id: str) -> JsonObject:
    """Return the JSON of a response, or of a stream's last event."""
    details = {"type": _TYPES.get(error.status, "invalid_request_error"), "message": _message(error)}
    return {"type": "error", "error": details, "request_id": request_id}


def error_response(error: ApiError, request_id: str) -> Response:
    """Return the whole response."""
    # Escaped to ASCII, since a message may quote half of a surrogate pair.
    return Response(json.dumps(error_body(error, request_id)), error.status, error.headers, "application/json")


def response_of(error: ApiError, scope: Scope) -> Response:
    """Return the whole response in the form of the API to which the requested path belongs."""
    is_anthropic = scope["path"].removeprefix("/v1").startswith("/messages")
    return error_response(error, scope["state"]["request_id"]) if is_anthropic else error.response()


def _message(error: ApiError) -> str:
    """Return the message. Clients shorten their conversation when it begins with "prompt is too long"."""
    cause = error.__cause__
    if error.code != TOO_LONG:
        return str(error.body()["error"]["message"])
    if isinstance(cause, PromptTooLong) and cause.tokens is not None:
        return f"prompt is too long: {cause.tokens} tokens > {cause.limit} maximum"
    return f"prompt is too long: {error.message}"
