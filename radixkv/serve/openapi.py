"""The OpenAPI document at /openapi.json: what each endpoint takes and returns.

Knows: JSON schemas. The checks themselves are in schemas.py; tests hold the two against each other.
"""

from __future__ import annotations

from typing import Any

from radixkv import __version__
from radixkv.serve import schemas
from radixkv.serve.auth import LONGEST_NAME, NAMESPACE_HEADER
from radixkv.serve.fields import JsonObject
from radixkv.serve.messages import ROLES, TOOL_NAME
from radixkv.serve.settings import Settings


def document(model_name: str, settings: Settings) -> JsonObject:
    """The whole document, for a server of this model."""
    model = {"type": "string", "enum": [model_name], "description": "The model that this server has."}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "radixkv",
            "version": __version__,
            "description": "OpenAI's endpoints over one engine whose prefix cache can be seen.",
        },
        "security": [{"apiKey": []}] if settings.api_keys else [],
        "paths": {
            "/v1/chat/completions": _post("Continue a conversation", _chat(model), "ChatCompletion", streams=True),
            "/v1/completions": _post("Continue texts", _completion(model), "Completion", streams=True),
            "/tokenize": _post("Token ids of a text or of a conversation", _tokenize(model), "Tokens"),
            "/v1/models": _get("The model, as a list", "Models"),
            "/v1/models/{model}": _get("The model", "Model", _path_parameter("model")),
            "/health": _open(_get("Whether the engine answers", "Health")),
            "/metrics": _metrics(),
        },
        "components": {"schemas": _answers(), "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}}},
    }


# ---- bodies


def _chat(model: JsonObject) -> JsonObject:
    fields = {
        **_asked(model),
        "messages": _list(_message(), least=1),
        "tools": _maybe(_list(_tool())),
        "tool_choice": {"enum": ["auto", "none", None]},
        "parallel_tool_calls": _BOOLEAN,
        "logprobs": _BOOLEAN,
        "top_logprobs": _integer(0, schemas.MOST_TOP_LOGPROBS),
        "max_tokens": _integer(1),
        "max_completion_tokens": _integer(1),
        "response_format": {"enum": [{"type": "text"}, None]},
        "modalities": {"enum": [["text"], None]},
        **{name: {"type": "null"} for name in schemas.NOT_OF_CHAT},
    }
    return _object(fields, "model", "messages")


def _completion(model: JsonObject) -> JsonObject:
    ids = _list({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, least=1)
    prompts = _list({"anyOf": [{"type": "string"}, ids]}, least=1, most=schemas.MOST_PROMPTS)
    fields = {
        **_asked(model),
        "prompt": {"anyOf": [{"type": "string"}, ids, prompts]},
        "echo": _BOOLEAN,
        "logprobs": _integer(0, schemas.MOST_COMPLETION_LOGPROBS),
        "max_tokens": _integer(1),
        "best_of": _integer(1, schemas.MOST_N),
        "suffix": {"type": "null"},
    }
    return _object(fields, "model", "prompt")


def _tokenize(model: JsonObject) -> JsonObject:
    fields = {
        "model": _maybe(model),
        "prompt": _STRING,
        "messages": _maybe(_list(_message(), least=1)),
        "tools": _maybe(_list(_tool())),
        "prompt_cache_key": _CACHE_KEY,
    }
    return _object(fields)


def _asked(model: JsonObject) -> JsonObject:
    """What chat and text completions share."""
    options = _object({"include_usage": _BOOLEAN, "include_obfuscation": _BOOLEAN})
    stop = {"type": "string", "minLength": 1, "maxLength": schemas.LONGEST_STOP}
    stops = _list(stop, most=schemas.MOST_STOPS)
    bias = {"type": "object", "patternProperties": {"^[0-9]{1,10}$": _number(-100, 100)}, "additionalProperties": False}
    return {
        "model": model,
        "stream": _BOOLEAN,
        "stream_options": _maybe(options),
        "n": _integer(1, schemas.MOST_N),
        "temperature": _maybe(_number(0, 2)),
        "top_p": _maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "top_k": _integer(-1),
        "min_p": _maybe(_number(0, 1)),
        "repetition_penalty": _maybe(_number(0.01, 100)),
        "presence_penalty": _maybe(_number(-2, 2)),
        "frequency_penalty": _maybe(_number(-2, 2)),
        "logit_bias": _maybe(bias),
        "seed": _integer(-schemas.BIGGEST - 1),
        "stop": _maybe({"anyOf": [stop, stops]}),
        "stop_token_ids": _maybe(_list({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})),
        "min_tokens": _integer(0),
        "ignore_eos": _BOOLEAN,
        "prompt_cache_key": _CACHE_KEY,
        "store": {"enum": [False, None]},
        "service_tier": {"enum": ["auto", "default", None]},
        **{name: {"description": "Taken, and without effect."} for name in schemas.WITHOUT_EFFECT},
    }


def _message() -> JsonObject:
    part = _object({"type": {"const": "text"}, "text": {"type": "string"}}, "type", "text")
    part["properties"]["cache_control"] = {"description": "Taken, and without effect."}
    function = _object({"name": {"type": "string", "minLength": 1}, "arguments": _STRING}, "name")
    call = _object(
        {"id": {"type": "string", "minLength": 1}, "type": {"const": "function"}, "function": function},
        "id",
        "function",
    )
    content: JsonObject = {"anyOf": [{"type": "string"}, _list(part)]}
    name = {"name": _STRING}
    spoken = {"role": {"enum": [role for role in ROLES if role not in ("assistant", "tool")]}, "content": content}
    answered = {"role": {"const": "tool"}, "content": content, "tool_call_id": {"type": "string", "minLength": 1}}
    said = {
        "role": {"const": "assistant"},
        "content": _maybe(content),
        "tool_calls": _maybe(_list(call)),
        "reasoning_content": _STRING,
        "refusal": _STRING,
    }
    return {
        "anyOf": [
            _object({**spoken, **name}, "role", "content"),
            _object({**said, **name}, "role"),
            _object({**answered, **name}, "role", "content", "tool_call_id"),
        ]
    }


def _tool() -> JsonObject:
    function = {
        "name": {"type": "string", "pattern": f"^{TOOL_NAME}$"},
        "description": _STRING,
        "parameters": {"type": ["object", "null"]},
        "strict": _BOOLEAN,
    }
    return _object({"type": {"const": "function"}, "function": _object(function, "name")}, "type", "function")


# ---- answers


def _answers() -> JsonObject:
    count = {"type": "integer", "minimum": 0}
    usage = {
        "type": "object",
        "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
        "properties": {
            **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), count),
            "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": count}},
        },
    }
    head = {"id": {"type": "string"}, "created": {"type": "integer"}, "model": {"type": "string"}, "usage": usage}
    model = {"id": {"type": "string"}, "object": {"const": "model"}, "created": count, "owned_by": {"type": "string"}}
    error = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _STRING, "code": _STRING}
    return {
        "ChatCompletion": _answer({**head, "object": {"const": "chat.completion"}, "choices": _choices("message")}),
        "Completion": _answer({**head, "object": {"const": "text_completion"}, "choices": _choices("text")}),
        "Model": _answer(model),
        "Models": _answer({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
        "Tokens": _answer({"count": count, "max_model_len": count, "tokens": _list(count)}),
        "Health": _answer({"status": {"const": "ok"}}),
        "Error": _answer({"error": _answer(error)}),
    }


def _choices(said: str) -> JsonObject:
    properties = {
        "index": {"type": "integer"},
        said: {"type": "object"} if said == "message" else {"type": "string"},
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    }
    return _list(_answer(properties))


def _answer(properties: JsonObject) -> JsonObject:
    """An object that has all of these, and may have more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


# ---- operations


def _post(about: str, body: JsonObject, answer: str, *, streams: bool = False) -> JsonObject:
    found: JsonObject = {"application/json": {"schema": _ref(answer)}}
    if streams:
        found["text/event-stream"] = {"schema": {"type": "string"}}
    namespace = {
        "name": NAMESPACE_HEADER,
        "in": "header",
        "schema": {"type": "string", "maxLength": LONGEST_NAME, "pattern": "^[ -~]*$"},
    }
    return {
        "post": {
            "summary": about,
            "parameters": [namespace],
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {
                "200": {"description": about, "content": found},
                **_errors(400, 401, 403, 404, 408, 413, 415, 429, 503, 504),
            },
        }
    }


def _get(about: str, answer: str, *parameters: JsonObject) -> JsonObject:
    found = {"application/json": {"schema": _ref(answer)}}
    return {
        "get": {
            "summary": about,
            "parameters": list(parameters),
            "responses": {"200": {"description": about, "content": found}, **_errors(401, 403, 404, 503)},
        }
    }


def _open(path: JsonObject) -> JsonObject:
    """A path that needs no key."""
    return {"get": {**path["get"], "security": []}}


def _metrics() -> JsonObject:
    found = {"text/plain": {"schema": {"type": "string"}}}
    answer = {"description": "Prometheus' text format", "content": found}
    return {"get": {"summary": "Counters and gauges", "responses": {"200": answer, **_errors(401, 403, 503)}}}


def _errors(*statuses: int) -> JsonObject:
    found = {"application/json": {"schema": _ref("Error")}}
    return {str(status): {"description": _WHY[status], "content": found} for status in statuses}


def _path_parameter(name: str) -> JsonObject:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


# ---- schemas


def _object(properties: JsonObject, *required: str) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: JsonObject, *, least: int = 0, most: int | None = None) -> JsonObject:
    bounds = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": least, **bounds}


def _maybe(schema: JsonObject) -> JsonObject:
    """The schema, or null, which counts as absent."""
    return {"anyOf": [schema, {"type": "null"}]}


def _integer(low: int, high: int = schemas.BIGGEST) -> JsonObject:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(low: float, high: float) -> JsonObject:
    return {"type": "number", "minimum": low, "maximum": high}


def _ref(name: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}"}


_BOOLEAN: dict[str, Any] = {"type": ["boolean", "null"]}
_STRING: dict[str, Any] = {"type": ["string", "null"]}
_CACHE_KEY: dict[str, Any] = {
    "type": ["string", "null"],
    "maxLength": LONGEST_NAME,
    "description": "A namespace of the cache within the API key's; X-RadixKV-Namespace goes before it.",
}
_WHY = {
    400: "What was sent is wrong; the message says what, and how to put it right",
    401: "No API key that is known here",
    403: "A server without API keys was asked by a name that is not this machine's",
    404: "No such path or model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is compressed",
    429: "Too much is being answered already; Retry-After says when to try again",
    503: "The server is shutting down",
    504: "The request took longer than this server allows",
}
