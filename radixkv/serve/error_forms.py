"""The form of an error is that of the API to which its path belongs; OpenAI's for other paths."""

from __future__ import annotations

import json

from starlette.responses import Response

from radixkv.serve.anthropic.errors import error_response as anthropics
from radixkv.serve.errors import ApiError


def error_response(path: str, error: ApiError, request_id: str) -> Response:
    """Return the response to a request of this path that failed."""
    if path.startswith("/api/") and path != "/api/hello":
        return Response(ollama_error(error), error.status, error.headers, "application/json")
    return anthropics(error, request_id) if path.removeprefix("/v1").startswith("/messages") else error.response()


def ollama_error(error: ApiError) -> bytes:
    """Return an error as the JSON of Ollama's API, in one line."""
    return json.dumps({"error": error.body()["error"]["message"]}).encode()  # ASCII: half of a pair may be in it
