"""The OpenAPI document at /openapi.json: the endpoints, what may go wrong at each, and which headers have a meaning.

Knows: paths, statuses and headers. What bodies look like is in openapi_requests.py and openapi_answers.py; tests hold
all of it against what the server does.
"""

from __future__ import annotations

from radixkv import __version__
from radixkv.serve import openapi_answers, openapi_requests
from radixkv.serve.auth import LONGEST_NAME, NAMESPACE_HEADER
from radixkv.serve.fields import JsonObject
from radixkv.serve.json_schema import TEXT, ref
from radixkv.serve.settings import Settings

_ABOUT = """OpenAI's endpoints over one engine whose prefix cache can be seen.

A path that is not here gets 404, and a method that is not here 405, with the methods in `Allow`; both with an Error.
Every answer has the request's id in `X-Request-Id`."""


def document(model_name: str, settings: Settings) -> JsonObject:
    """The whole document, for a server of this model."""
    model = {"type": "string", "enum": [model_name], "description": "The model that this server has."}
    chat, completion = openapi_requests.chat(model), openapi_requests.completion(model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "radixkv", "version": __version__, "description": _ABOUT},
        "security": [{"apiKey": []}] if settings.api_keys else [],
        "paths": {
            "/v1/chat/completions": _post("Continue a conversation", chat, "ChatCompletion", "ChatCompletionChunk"),
            "/v1/completions": _post("Continue texts", completion, "Completion", "CompletionChunk"),
            "/tokenize": _post("Token ids of a text or of a conversation", openapi_requests.tokenize(model), "Tokens"),
            "/v1/models": _get("The model, as a list", _json("Models"), 401, 403),
            "/v1/models/{model}": _get("The model", _json("Model"), 401, 403, 404, parameters=[_IN_PATH]),
            "/health": _open(_get("Whether the engine answers", _json("Health"), 503)),
            "/metrics": _get("Counters and gauges, as Prometheus reads them", _PROMETHEUS, 401, 403, 503),
            "/openapi.json": _open(_get("This document", {"application/json": {"schema": {"type": "object"}}})),
        },
        "components": {
            "schemas": openapi_answers.schemas(),
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(about: str, body: JsonObject, answer: str, chunk: str | None = None) -> JsonObject:
    found = _json(answer)
    if chunk is not None:
        found["text/event-stream"] = {"schema": _events(chunk)}
    return {
        "post": {
            "summary": about,
            "parameters": [_NAMESPACE, _REQUEST_ID],
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": _responses(about, found, 400, 401, 403, 404, 408, 413, 415, 429, 503, 504),
        }
    }


def _get(about: str, found: JsonObject, *statuses: int, parameters: list[JsonObject] | None = None) -> JsonObject:
    responses = _responses(about, found, *statuses)
    return {"get": {"summary": about, "parameters": [*(parameters or []), _REQUEST_ID], "responses": responses}}


def _open(path: JsonObject) -> JsonObject:
    """A path that needs no key."""
    return {"get": {**path["get"], "security": []}}


def _responses(about: str, found: JsonObject, *statuses: int) -> JsonObject:
    """What is found, and what may go wrong; a fault of ours may happen anywhere."""
    errors = {str(status): {"description": _WHY[status], "content": _json("Error")} for status in (*statuses, 500)}
    for status, header in _HEADERS.items():
        if str(status) in errors:
            errors[str(status)]["headers"] = header
    return {"200": {"description": about, "content": found}, **errors}


def _json(name: str) -> JsonObject:
    return {"application/json": {"schema": ref(name)}}


def _events(chunk: str) -> JsonObject:
    """A stream of events as OpenAPI 3.1 can say it: the schema is that of the JSON in each."""
    return {
        "type": "string",
        "contentMediaType": "text/event-stream",
        "contentSchema": {"anyOf": [ref(chunk), ref("Error")]},
        "description": f"With stream=true. Each event is `data: `, one {chunk} as JSON, and an empty line; the last is "
        "`data: [DONE]`. A fault in the middle is the last event instead: an Error.",
    }


def _header(name: str, place: str, about: str, **schema: object) -> JsonObject:
    return {"name": name, "in": place, "description": about, "schema": {**TEXT, **schema}}


_IN_PATH = {**_header("model", "path", "What clients call the model."), "required": True}
_NAMESPACE = _header(
    NAMESPACE_HEADER, "header", "A part of the key's cache.", maxLength=LONGEST_NAME, pattern="^[ -~]*$"
)
_REQUEST_ID = _header("X-Request-Id", "header", "Of the client's choice: letters, digits, `.`, `_`, `-`; else ignored.")
_PROMETHEUS = {"text/plain": {"schema": TEXT}}
_SECONDS = {"schema": {"type": "integer", "minimum": 1}}
_HEADERS = {
    401: {"WWW-Authenticate": {"description": "Bearer", "schema": TEXT}},
    429: {"Retry-After": {"description": "Seconds.", **_SECONDS}},
    503: {"Retry-After": {"description": "Seconds until another server may have taken over.", **_SECONDS}},
}
_WHY = {
    400: "What was sent is wrong; the message says what, and how to put it right",
    401: "No API key that is known here",
    403: "A server without API keys was asked by a name that is not this machine's",
    404: "No such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is compressed",
    429: "Too much is being answered already",
    500: "A fault of the server's; its log says which",
    503: "The server is shutting down",
    504: "The request took longer than this server allows",
}
