"""Operations of the OpenAPI document: their parameters, responses, errors and headers."""

from __future__ import annotations

from radixkv.serve.access import LONGEST_NAME, NAMESPACE_HEADER
from radixkv.serve.bodies import Body
from radixkv.serve.fields import JsonObject
from radixkv.serve.json_schemas import TEXT, answer, ref

DONE = "[DONE]"  # the data of the last event of completions


def post(
    about: str, body: type[Body], answer: str, stream: JsonObject | None = None, error: str = "Error"
) -> JsonObject:
    """An operation that reads a body; `answer` and `error` name the schemas of responses, `stream` is its events'."""
    found = json_of(answer)
    if stream is not None:
        found["text/event-stream"] = {"schema": stream}
    return {
        "post": {
            "summary": about,
            "parameters": [NAMESPACE, REQUEST_ID],
            "requestBody": {"required": True, "content": json_of(body.__name__)},
            "responses": responses_of(about, found, 400, 401, 404, 408, 413, 415, 429, 503, 504, error=error),
        }
    }


def get(
    about: str, found: JsonObject, *statuses: int, parameters: list[JsonObject] | None = None, error: str = "Error"
) -> JsonObject:
    """An operation without a body, and its errors."""
    responses = responses_of(about, found, *statuses, error=error)
    return {"get": {"summary": about, "parameters": [*(parameters or []), REQUEST_ID], "responses": responses}}


def stored(about: str, found: str, *parameters: JsonObject) -> JsonObject:
    """The method of a path about one thing that the server stores for the caller."""
    found_or_not = responses_of(about, json_of(found), 400, 401, 404)
    return {"summary": about, "parameters": [*parameters, NAMESPACE, REQUEST_ID], "responses": found_or_not}


def without_key(path: JsonObject) -> JsonObject:
    """Mark a path as needing no key."""
    return {"get": {**path["get"], "security": []}}


def responses_of(about: str, found: JsonObject, *statuses: int, error: str = "Error") -> JsonObject:
    """The response of success, and the responses of errors; 403 and 500 are possible everywhere."""
    errors = {str(status): {"description": _WHY[status], "content": json_of(error)} for status in (*statuses, 403, 500)}
    for status, sent in _HEADERS.items():
        if str(status) in errors:
            errors[str(status)]["headers"] = sent
    return {"200": {"description": about, "content": found}, **errors}


def json_of(name: str) -> JsonObject:
    """The content of a response that is JSON of this schema."""
    return {"application/json": {"schema": ref(name)}}


def event_stream(chunk: str, error: str | None, last: str) -> JsonObject:
    """A stream of events, as far as OpenAPI 3.1 can describe one; `chunk` and `error` name the schemas of its JSON.

    Tools read the schema for the whole body, a text, or for each event: it has both.
    """
    content: JsonObject = {"anyOf": [ref(name) for name in (chunk, error) if name is not None]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    named = last not in (DONE, "stop: true")  # of /infill
    event = answer({"data": data if named else {"anyOf": [{"const": DONE}, data]}}, event=TEXT)
    begin = "`event: `, its type, " if named else ""
    fault = "" if error is None else f" A fault in the middle is the last event instead: {error}."
    return {
        "anyOf": [{"type": "string", "contentMediaType": "text/event-stream", "contentSchema": content}, event],
        "description": f"With stream=true. Each event is {begin}`data: `, one {chunk} as JSON, and an empty line; the "
        f"last is `{last}`.{fault}",
    }


def header(name: str, place: str, about: str, **schema: object) -> JsonObject:
    """A parameter of an operation that is a text."""
    return {"name": name, "in": place, "description": about, "schema": {**TEXT, **schema}}


IN_PATH = {**header("model", "path", "What clients call the model."), "required": True}
PREFIX_IN_PATH = {**header("name", "path", "The id of a compressed prefix."), "required": True}
NAMESPACE = header(NAMESPACE_HEADER, "header", "A part of the key's cache.", maxLength=LONGEST_NAME, pattern="^[ -~]*$")
REQUEST_ID = header("X-Request-Id", "header", "Of the client's choice: letters, digits, `.`, `_`, `-`; else ignored.")
PROMETHEUS = {"text/plain": {"schema": TEXT}}
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
    404: "No such model, response or prefix",
    408: "The body did not arrive in time",
    409: "The model has running requests",
    413: "The body is too large",
    415: "The body is compressed",
    429: "Too much is being answered already",
    500: "A fault of the server's; its log says which",
    501: "This server does not do that; the message says what to do instead",
    503: "The server is shutting down",
    504: "The request took longer than this server allows",
}
