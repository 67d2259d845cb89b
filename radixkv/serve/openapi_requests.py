"""What each endpoint takes, as JSON schemas. The checks themselves are in schemas.py and messages.py."""

from __future__ import annotations

from radixkv.serve import schemas
from radixkv.serve.auth import LONGEST_NAME
from radixkv.serve.fields import JsonObject
from radixkv.serve.json_schema import ANYTHING, BOOLEAN, STRING, TEXT, array, integer, maybe, number, obj
from radixkv.serve.messages import ROLES, TOOL_NAME

_NOT_EMPTY: JsonObject = {"type": "string", "minLength": 1}
_CACHE_KEY: JsonObject = {
    "type": ["string", "null"],
    "maxLength": LONGEST_NAME,
    "description": "A namespace of the cache within the API key's; X-RadixKV-Namespace goes before it.",
}


def chat(model: JsonObject) -> JsonObject:
    """POST /v1/chat/completions."""
    fields = {
        **_asked(model),
        "messages": array(_message(), least=1),
        "tools": maybe(array(_tool())),
        "tool_choice": {"enum": ["auto", "none", None]},
        "parallel_tool_calls": BOOLEAN,
        "logprobs": BOOLEAN,
        "top_logprobs": integer(0, schemas.MOST_TOP_LOGPROBS),
        "max_tokens": integer(1),
        "max_completion_tokens": integer(1),
        "response_format": {"enum": [{"type": "text"}, None]},
        "modalities": {"enum": [["text"], None]},
        **{name: {"type": "null"} for name in schemas.NOT_OF_CHAT},
    }
    return obj(fields, "model", "messages")


def completion(model: JsonObject) -> JsonObject:
    """POST /v1/completions."""
    ids = array({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, least=1)
    prompts = array({"anyOf": [{"type": "string"}, ids]}, least=1, most=schemas.MOST_PROMPTS)
    fields = {
        **_asked(model),
        "prompt": {"anyOf": [{"type": "string"}, ids, prompts]},
        "echo": BOOLEAN,
        "logprobs": integer(0, schemas.MOST_COMPLETION_LOGPROBS),
        "max_tokens": integer(1),
        "best_of": integer(1, schemas.MOST_N),
        "suffix": {"type": "null"},
    }
    return obj(fields, "model", "prompt")


def tokenize(model: JsonObject) -> JsonObject:
    """POST /tokenize."""
    fields = {
        "model": maybe(model),
        "prompt": STRING,
        "messages": maybe(array(_message(), least=1)),
        "tools": maybe(array(_tool())),
        "prompt_cache_key": _CACHE_KEY,
    }
    return obj(fields)


def _asked(model: JsonObject) -> JsonObject:
    """What chat and text completions share."""
    options = obj({"include_usage": BOOLEAN, "include_obfuscation": BOOLEAN})
    stop = {"type": "string", "minLength": 1, "maxLength": schemas.LONGEST_STOP}
    stops = array(stop, most=schemas.MOST_STOPS)
    bias = {"type": "object", "patternProperties": {"^[0-9]{1,10}$": number(-100, 100)}, "additionalProperties": False}
    return {
        "model": model,
        "stream": BOOLEAN,
        "stream_options": maybe(options),
        "n": integer(1, schemas.MOST_N),
        "temperature": maybe(number(0, 2)),
        "top_p": maybe({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "top_k": integer(-1),
        "min_p": maybe(number(0, 1)),
        "repetition_penalty": maybe(number(0.01, 100)),
        "presence_penalty": maybe(number(-2, 2)),
        "frequency_penalty": maybe(number(-2, 2)),
        "logit_bias": maybe(bias),
        "seed": integer(-schemas.BIGGEST - 1),
        "stop": maybe({"anyOf": [stop, stops]}),
        "stop_token_ids": maybe(array({"type": "integer", "minimum": 0, "maximum": 2**31 - 1})),
        "min_tokens": integer(0),
        "ignore_eos": BOOLEAN,
        "prompt_cache_key": _CACHE_KEY,
        "store": {"enum": [False, None]},
        "service_tier": {"enum": ["auto", "default", None]},
        **dict.fromkeys(schemas.WITHOUT_EFFECT, ANYTHING),
    }


def _message() -> JsonObject:
    named = {"name": STRING}
    spoken = {"role": {"enum": [role for role in ROLES if role not in ("assistant", "tool")]}, "content": _content()}
    answered = {"role": {"const": "tool"}, "content": _content(), "tool_call_id": _NOT_EMPTY}
    return {
        "anyOf": [
            obj({**spoken, **named}, "role", "content"),
            obj({**_said(), **named}, "role"),
            obj({**answered, **named}, "role", "content", "tool_call_id"),
        ]
    }


def _content() -> JsonObject:
    hints = {"cache_control": ANYTHING, "annotations": ANYTHING}
    parts = [obj({"type": {"const": kind}, kind: TEXT, **hints}, "type", kind) for kind in ("text", "refusal")]
    return {"anyOf": [TEXT, array({"anyOf": parts})]}


def _said() -> JsonObject:
    """What an assistant said, as servers tell it and clients send it back."""
    arguments = {"type": ["string", "object", "null"], "description": "JSON as a text, or the object itself."}
    function = obj({"name": _NOT_EMPTY, "arguments": arguments}, "name")
    kind = {"enum": ["function", None]}
    call = obj({"id": _NOT_EMPTY, "type": kind, "function": function, "index": ANYTHING}, "id", "function")
    return {
        "role": {"const": "assistant"},
        "content": maybe(_content()),
        "tool_calls": maybe(array(call)),
        "reasoning_content": STRING,
        "refusal": STRING,
        "annotations": {"type": ["array", "null"], **ANYTHING},
        "audio": {"type": "null"},
        "function_call": {"type": "null"},
    }


def _tool() -> JsonObject:
    function = {
        "name": {"type": "string", "pattern": f"^{TOOL_NAME}$"},
        "description": STRING,
        "parameters": {"type": ["object", "null"]},
        "strict": BOOLEAN,
    }
    return obj({"type": {"const": "function"}, "function": obj(function, "name")}, "type", "function")
