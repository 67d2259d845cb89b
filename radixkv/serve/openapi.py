"""The OpenAPI document at /openapi.json: endpoints, request bodies, responses, errors and headers.

Bodies are described by their models, which check them. Of a response, the document has the status, the headers and the
fields that it always has: the rest is the form of the API.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from radixkv import __version__
from radixkv.serve.access import KEY_HEADER, LONGEST_NAME, NAMESPACE_HEADER
from radixkv.serve.anthropic.schemas import MessageBody, PromptBody
from radixkv.serve.bodies import LENIENT, STRICT, Body
from radixkv.serve.fields import JsonObject
from radixkv.serve.infill import InfillBody
from radixkv.serve.ollama.library import REFUSED
from radixkv.serve.ollama.lines import MEDIA_TYPE
from radixkv.serve.ollama.schemas import GenerateBody, OllamaChatBody, ShowBody
from radixkv.serve.openai_responses.schemas import ResponseBody
from radixkv.serve.schemas import ChatBody, CompletionBody, DetokenizeBody, ModelBody, PrefixBody, TokenizeBody
from radixkv.server_settings import Settings

_TEXT = {"type": "string"}
_REFERENCE = "#/components/schemas/{model}"
_ABOUT = """OpenAI's, Anthropic's and Ollama's endpoints over one engine whose prefix cache can be seen.

A path that is not here gets 404, and a method that is not here 405, with the methods in `Allow`; both with an Error.
More than 200 headers get 431. A path that begins with `/v1` works without it too, and each path with GET takes HEAD.
Every answer has the request's id in `X-Request-Id` and `Request-Id`. Unknown fields of a body are ignored, and named
in the answer's `Warning`; with `--strict-fields` they are refused."""

# ---- endpoints

_USED = ("id", "object", "created", "model", "choices", "usage")
_MESSAGE = ("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage")
_RESPONSE = ("id", "object", "created_at", "status", "error", "model", "output", "usage", "tools", "tool_choice")
_PREFIX = ("id", "object", "tokens", "slots", "bytes", "method", "keep")
_DELETED = ("id", "object", "deleted")
_LINE = ("model", "created_at", "done")
_Post = tuple[str, type[Body], tuple[str, ...]]

_POSTS: dict[str, _Post] = {  # summary, body, fields that each response has
    "/v1/chat/completions": ("Continue a conversation", ChatBody, _USED),
    "/v1/completions": ("Continue texts", CompletionBody, _USED),
    "/v1/prefixes": ("Compress a prefix, which later requests name", PrefixBody, _PREFIX),
    "/infill": ("Fill in the middle of a text", InfillBody, ()),
    "/v1/messages": ("Continue a conversation, in the form of Anthropic's API", MessageBody, _MESSAGE),
    "/v1/messages/count_tokens": ("Length of a conversation", PromptBody, ("input_tokens",)),
    "/v1/responses": ("Respond to a conversation", ResponseBody, _RESPONSE),
    "/v1/responses/input_tokens": ("Length of a conversation", ResponseBody, ("object", "input_tokens")),
    "/api/chat": ("Continue a conversation, in the form of Ollama's API", OllamaChatBody, (*_LINE, "message")),
    "/api/generate": ("Answer a prompt, or continue a text", GenerateBody, (*_LINE, "response")),
    "/api/show": ("One model", ShowBody, ("modified_at", "details", "template", "model_info", "capabilities")),
    "/tokenize": ("Token ids of a text or of a conversation", TokenizeBody, ("count", "max_model_len", "tokens")),
    "/detokenize": ("Text of token ids", DetokenizeBody, ("prompt",)),
}
_OF_SEVERAL: dict[str, _Post] = {
    "/models/load": ("Load a model, and wait for that", ModelBody, ("success",)),
    "/models/unload": ("Unload a model, and wait for that", ModelBody, ("success",)),
}
_STREAMS = {  # the last event
    "/v1/chat/completions": "[DONE]",
    "/v1/completions": "[DONE]",
    "/infill": "stop: true",
    "/v1/messages": "message_stop",
    "/v1/responses": "response.completed, response.incomplete or response.failed",
}
_GETS: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {  # summary, fields, statuses of errors
    "/v1/models": ("The models", ("object", "data", "has_more", "first_id", "last_id"), (401,)),
    "/v1/models/{model}": ("One model", ("id", "object", "created", "owned_by", "status"), (401, 404)),
    "/api/tags": ("The models, by all their names", ("models",), (401,)),
    "/api/ps": ("The loaded models", ("models",), (401,)),
    "/load": ("Number of replies that are requested now", ("server_load",), (401,)),
    "/metrics": ("Counters and gauges, as Prometheus reads them", (), (401, 503)),
}
_WITHOUT_KEY: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("/", "/api/hello", "/v1/version"), ("Name and version of the server", ("name", "version"), ())),
    **dict.fromkeys(("/health", "/ping"), ("Whether the engine takes requests", ("status",), (503,))),
    "/api/version": ("Version of Ollama's API", ("version", "radixkv"), ()),
    "/openapi.json": ("This document", ("openapi", "info", "paths", "components"), ()),
}
_STORED: list[tuple[str, str, str, tuple[str, ...], tuple[str, ...]]] = [  # path, method, summary, fields, parameters
    ("/v1/responses/{response_id}", "get", "A stored response", _RESPONSE, ()),
    ("/v1/responses/{response_id}", "delete", "Delete a stored response", _DELETED, ()),
    ("/v1/responses/{response_id}/cancel", "post", "Stop a response that is being streamed", _RESPONSE, ()),
    (
        "/v1/responses/{response_id}/input_items",
        "get",
        "The conversation before a stored response",
        ("object", "data", "has_more", "first_id", "last_id"),
        ("limit", "order", "after"),
    ),
    ("/v1/prefixes/{name}", "delete", "Release a compressed prefix", _DELETED, ()),
]


def document(names: Sequence[str], settings: Settings, *, several: bool = False) -> JsonObject:
    """Return the whole document, for a server of models with these names, which it loads and unloads if `several`."""
    posts = {**_POSTS, **(_OF_SEVERAL if several else {})}
    models = list(dict.fromkeys(body for _, body, _ in posts.values()))
    schemas = _bodies(models, strict=settings.strict_fields)
    model = {"type": "string", "enum": [*names], "description": "A model that this server has."}
    for named in (ChatBody, CompletionBody, ResponseBody, PrefixBody, OllamaChatBody, GenerateBody):
        schemas[named.__name__]["properties"]["model"] = model
    for optional in (TokenizeBody, DetokenizeBody):
        schemas[optional.__name__]["properties"]["model"] = {"anyOf": [model, {"type": "null"}]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "radixkv", "version": __version__, "description": _ABOUT},
        "security": [{"apiKey": []}, {"keyHeader": []}] if settings.api_keys else [],
        "paths": _paths(posts),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer"},
                "keyHeader": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
            },
        },
    }


def _paths(posts: dict[str, _Post]) -> JsonObject:
    paths: defaultdict[str, JsonObject] = defaultdict(dict)
    for path, (about, body, fields) in posts.items():
        statuses = [400, 401, 404, 408, 413, 415, 429, 503, 504, *([409] if path == "/models/unload" else [])]
        operation = _operation(path, about, _content(path, fields), statuses, [_NAMESPACE])
        reference = {"$ref": _REFERENCE.format(model=body.__name__)}
        read = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[path]["post"] = {**operation, "requestBody": read}
    for path, (about, fields, errors) in {**_GETS, **_WITHOUT_KEY}.items():
        content = {"text/plain": {"schema": _TEXT}} if path == "/metrics" else _json(fields)
        operation = _operation(path, about, content, errors)
        paths[path]["get"] = operation if path in _GETS else {**operation, "security": []}
    for path, method, about, fields, more in _STORED:
        parameters = [*(_PARAMETERS[name] for name in more), _NAMESPACE]
        paths[path][method] = _operation(path, about, _json(fields), (400, 401, 404), parameters)
    for path, method in REFUSED:
        about, status = "Refused; the error says what to do instead", 400 if "embed" in path else 501
        paths[path][method.lower()] = operation = _operation(path, about, {}, (401, status))
        del operation["responses"]["200"]
    return paths


# ---- operations


def _operation(
    path: str, about: str, content: JsonObject, statuses: Iterable[int], parameters: Iterable[JsonObject] = ()
) -> JsonObject:
    """Return an operation with its errors; 403 and 500 are possible everywhere."""
    responses: JsonObject = {"200": {"description": about, "content": content}}
    for status in (*statuses, 403, 500):
        headers = {"headers": _HEADERS[status]} if status in _HEADERS else {}
        responses[str(status)] = {"description": _WHY[status], "content": _json(("error",)), **headers}
    named = [_PARAMETERS[name] for name in _PARAMETERS if f"{{{name}}}" in path]
    return {"summary": about, "parameters": [*named, *parameters, _REQUEST_ID], "responses": responses}


def _json(fields: Sequence[str]) -> JsonObject:
    """Return the content of a response that is an object with some fields, and perhaps others."""
    return {"application/json": {"schema": {"type": "object", "required": [*fields]}}}


def _content(path: str, fields: Sequence[str]) -> JsonObject:
    """Return the content of a response, whole and as a stream if there are streams."""
    content = _json(fields)
    if path in _STREAMS:
        about = f"With stream=true, events in the form of the API; the last is `{_STREAMS[path]}`, or an error."
        events = {"type": ["string", "object"], "required": ["data"]}  # tools check the whole text, or each event
        content["text/event-stream"] = {"schema": {**events, "description": about}}
    if path in ("/api/chat", "/api/generate"):
        about = "Unless stream=false: one JSON object in each line."
        content[MEDIA_TYPE] = {"schema": {**_TEXT, "description": about}}
    return content


def _parameter(name: str, place: str, about: str, **schema: object) -> JsonObject:
    needed = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "description": about, "schema": {**_TEXT, **schema}, **needed}


_NAMESPACE = _parameter(
    NAMESPACE_HEADER, "header", "A part of the key's cache.", maxLength=LONGEST_NAME, pattern="^[ -~]*$"
)
_REQUEST_ID = _parameter(
    "X-Request-Id", "header", "Of the client's choice: letters, digits, `.`, `_`, `-`; else ignored."
)
_PARAMETERS = {
    "model": _parameter("model", "path", "What clients call the model."),
    "name": _parameter("name", "path", "The id of a compressed prefix."),
    "digest": _parameter("digest", "path", "Of a file."),
    "response_id": _parameter("response_id", "path", "The id of a stored response."),
    "limit": {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    "order": {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    "after": _parameter("after", "query", "The id of the item before the first one."),
}
_SECONDS = {"schema": {"type": "integer", "minimum": 1}}
_HEADERS = {
    401: {"WWW-Authenticate": {"description": "Bearer", "schema": _TEXT}},
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


# ---- bodies


class _Generator(GenerateJsonSchema):
    """Leave out titles, which repeat the names of fields, and defaults, which are null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False for each field."""
        return False

    def default_schema(self, schema: Any) -> JsonObject:
        """Return the schema of a field without its default."""
        return self.generate_inner(schema["schema"])


def _bodies(models: Sequence[type[Body]], *, strict: bool) -> JsonObject:
    """Return the schemas of bodies and of their parts by name, for a strict or a lenient server."""
    wanted: Any = [(model, "validation") for model in models]
    _, found = models_json_schema(wanted, ref_template=_REFERENCE, schema_generator=_Generator)
    schemas: JsonObject = _for_server(found["$defs"], strict)
    return schemas


def _for_server(schema: Any, strict: bool) -> Any:
    """Return a schema with the fields of one kind of server; objects of a strict one have declared fields only."""
    if isinstance(schema, list):
        return [_for_server(each, strict) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if LENIENT in schema:
        chosen = schema[STRICT if strict else LENIENT]
        return {**chosen, **{name: each for name, each in schema.items() if name not in (LENIENT, STRICT)}}
    whole = {name: _for_server(each, strict) for name, each in schema.items()}
    return {**whole, "additionalProperties": False} if strict and "properties" in whole else whole
