"""The OpenAPI document at /openapi.json: endpoints, request bodies, responses, errors and headers.

Sampling parameters are described by their declarations. schemas.py and message_schemas.py do the checks that this
document describes; tests compare the two.
"""

from __future__ import annotations

from radixkv import __version__
from radixkv.serve import message_schemas, schemas
from radixkv.serve.access import KEY_HEADER
from radixkv.serve.anthropic import openapi as anthropic
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
    TOKEN_ID,
    answer,
    array,
    closed,
    integer,
    maybe,
    obj,
    ref,
    sampling,
)
from radixkv.serve.openai_responses import openapi as openai_responses
from radixkv.serve.openapi_constraints import guided, response_format, tool_choice
from radixkv.serve.openapi_operations import DONE, IN_PATH, PROMETHEUS, event_stream, get, json_of, post, without_key
from radixkv.serve.sampling_fields import wire_range
from radixkv.serve.settings import Settings

# ---- the document

_ABOUT = """OpenAI's and Anthropic's endpoints over one engine whose prefix cache can be seen.

A path that is not here gets 404, and a method that is not here 405, with the methods in `Allow`; both with an Error.
A path that begins with `/v1` works without it too, and each path with GET takes HEAD. Every answer has the request's id
in `X-Request-Id` and `Request-Id`. Unknown fields of a body are ignored, and named in the answer's `Warning`; with
`--strict-fields` they are refused."""


def document(model_name: str, settings: Settings) -> JsonObject:
    """Return the whole document, for a server of this model."""
    model = {"type": "string", "enum": [model_name], "description": "The model that this server has."}
    strict = settings.strict_fields
    chat, completion, tokenize = _chat_body(model, strict), _completion_body(model, strict), _tokenize_body(model)
    message, count = anthropic.message_body(), anthropic.count_body()
    if strict:
        chat, completion, tokenize, message, count = map(closed, (chat, completion, tokenize, message, count))
    return {
        "openapi": "3.1.0",
        "info": {"title": "radixkv", "version": __version__, "description": _ABOUT},
        "security": [{"apiKey": []}, {"keyHeader": []}] if settings.api_keys else [],
        "paths": {
            "/v1/chat/completions": post(
                "Continue a conversation", chat, "ChatCompletion", event_stream("ChatCompletionChunk", "Error", DONE)
            ),
            "/v1/completions": post(
                "Continue texts", completion, "Completion", event_stream("CompletionChunk", "Error", DONE)
            ),
            "/v1/messages": post(
                "Continue a conversation, in the form of Anthropic's API",
                message,
                "Message",
                event_stream("MessageEvent", "MessageError", "message_stop"),
                "MessageError",
            ),
            "/v1/messages/count_tokens": post("Length of a conversation", count, "TokenCount", error="MessageError"),
            **openai_responses.paths(model, strict),
            "/tokenize": post("Token ids of a text or of a conversation", tokenize, "Tokens"),
            "/v1/models": get("The model, as a list", json_of("Models"), 401, 403),
            "/v1/models/{model}": get("The model", json_of("Model"), 401, 403, 404, parameters=[IN_PATH]),
            "/": without_key(get("Name and version of the server", json_of("About"))),
            "/health": without_key(get("Whether the engine answers", json_of("Health"), 503)),
            "/metrics": get("Counters and gauges, as Prometheus reads them", PROMETHEUS, 401, 403, 503),
            "/openapi.json": without_key(get("This document", {"application/json": {"schema": {"type": "object"}}})),
        },
        "components": {
            "schemas": {**_answers(), **anthropic.answers(), **openai_responses.answers()},
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer"},
                "keyHeader": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
            },
        },
    }


# ---- request bodies


def _chat_body(model: JsonObject, strict: bool) -> JsonObject:
    """The body of POST /v1/chat/completions."""
    fields = {
        **_options(model, strict),
        "messages": array(_message(), least=1),
        "tools": maybe(array(_tool())),
        "tool_choice": tool_choice(nested=True),
        "parallel_tool_calls": BOOLEAN,
        "logprobs": BOOLEAN,
        "top_logprobs": integer(*wire_range("logprobs")),
        "max_tokens": integer(*wire_range("max_tokens")),
        "max_completion_tokens": integer(*wire_range("max_tokens")),
        "modalities": {"enum": [["text"], None]},
        **_thinking(),
        **_PREFILL,
        **{name: {"type": "null"} for name in schemas.NOT_OF_CHAT},
        **{name: {"type": "null"} if strict else IGNORED for name in schemas.IGNORED_IN_CHAT},
    }
    return obj(fields, "model", "messages")


def _completion_body(model: JsonObject, strict: bool) -> JsonObject:
    """The body of POST /v1/completions."""
    ids = array(TOKEN_ID, least=1)
    prompts = array({"anyOf": [{"type": "string"}, ids]}, least=1, most=schemas.MOST_PROMPTS)
    fields = {
        **_options(model, strict),
        "prompt": {"anyOf": [{"type": "string"}, ids, prompts]},
        "echo": BOOLEAN,
        "logprobs": integer(*wire_range("logprobs")),
        "max_tokens": {**integer(*wire_range("max_tokens", low=0)), "description": _NO_REPLY},
        "best_of": {**integer(*wire_range("n")), "description": _BEST_OF},
        "suffix": {"type": "null"},
    }
    return obj(fields, "model", "prompt")


_BEAMS = "Search for the `n` most likely replies, and return them best first."
_BEST_OF = "The number of beams of a beam search, `n` at least; else equal to `n`."
_NO_REPLY = "0 computes only the prompt, for `echo` or `prompt_logprobs`."
_NOT_STREAMED = "Log probabilities of the prompt's tokens, with so many alternatives; not in a stream."


def _tokenize_body(model: JsonObject) -> JsonObject:
    """The body of POST /tokenize."""
    fields = {
        "model": maybe(model),
        "prompt": STRING,
        "messages": maybe(array(_message(), least=1)),
        "tools": maybe(array(_tool())),
        "prompt_cache_key": SESSION_KEY,
        **_thinking(),
        **_PREFILL,
    }
    return obj(fields)


def _thinking() -> JsonObject:
    """The options of thinking, and other variables of the chat template."""
    effort = {"type": ["string", "null"], "pattern": f"^{schemas.EFFORT}$", "description": _IF_READ}
    kind = {"enum": list(schemas.THINKING_TYPES)}
    text = {"type": "string", "maxLength": schemas.LONGEST_VALUE}
    value = {"anyOf": [{"type": ["boolean", "number", "null"]}, text]}
    switch = {**BOOLEAN, "description": _IF_READ}
    hidden = {**BOOLEAN, "description": "Leave the thinking out of the answer."}
    return {
        "reasoning_effort": effort,
        "reasoning": maybe(obj({"effort": effort, "enabled": switch, "exclude": hidden})),
        "thinking": {"anyOf": [switch, obj({"type": kind}, "type")]},
        "enable_thinking": switch,
        "chat_template_kwargs": maybe({"type": "object", "additionalProperties": value, "description": _IF_READ}),
    }


_PREFILL = {
    "continue_final_message": {**BOOLEAN, "description": "The reply continues the last message, an assistant's."},
    "add_generation_prompt": {**BOOLEAN, "description": "False is the same as `continue_final_message`."},
}
_IF_READ = "For the model's chat template; ignored if the template does not read it, and then named in `Warning`."


def _options(model: JsonObject, strict: bool) -> JsonObject:
    """The fields that chat and text completions share."""
    options = obj(dict.fromkeys(("include_usage", "continuous_usage_stats", "include_obfuscation"), BOOLEAN))
    values = {name: {"enum": [*allowed, None]} for name, (allowed, _) in schemas.IGNORED_VALUES.items()}
    return {
        "model": model,
        "stream": BOOLEAN,
        "stream_options": maybe(options),
        **sampling(),
        "use_beam_search": {**BOOLEAN, "description": _BEAMS},
        "prompt_logprobs": {**integer(*wire_range("prompt_logprobs")), "description": _NOT_STREAMED},
        "response_format": response_format(),
        **guided(),
        "prompt_cache_key": SESSION_KEY,
        **(values if strict else dict.fromkeys(values, IGNORED)),
        **dict.fromkeys(schemas.WITHOUT_EFFECT, ANYTHING),
    }


def _message() -> JsonObject:
    named = {"name": STRING, "cache_control": ANYTHING}
    roles = [role for role in message_schemas.ROLES if role not in ("assistant", "tool")]
    spoken = {"role": {"enum": roles}, "content": _content()}
    answered = {"role": {"const": "tool"}, "content": _content(), "tool_call_id": NOT_EMPTY}
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
    """An assistant's message, as servers return it and clients send it back."""
    arguments = {"type": ["string", "object", "null"], "description": "JSON as a text, or the object itself."}
    function = obj({"name": NOT_EMPTY, "arguments": arguments}, "name")
    kind = {"enum": ["function", None]}
    call = obj({"id": NOT_EMPTY, "type": kind, "function": function, "index": ANYTHING}, "id", "function")
    return {
        "role": {"const": "assistant"},
        "content": maybe(_content()),
        "tool_calls": maybe(array(call)),
        "reasoning_content": STRING,
        "reasoning": {**STRING, "description": "Another name of `reasoning_content`, which goes before it."},
        "refusal": STRING,
        "annotations": {"type": ["array", "null"], **ANYTHING},
        "audio": {"type": "null"},
        "function_call": {"type": "null"},
    }


def _tool() -> JsonObject:
    function = {
        "name": {"type": "string", "pattern": f"^{message_schemas.TOOL_NAME}$"},
        "description": STRING,
        "parameters": {"type": ["object", "null"]},
        "strict": BOOLEAN,
    }
    tool = {"type": {"const": "function"}, "function": obj(function, "name"), "cache_control": ANYTHING}
    return obj(tool, "type", "function")


# ---- responses

_INDEX: JsonObject = {"type": "integer", "minimum": 0}
_COUNTS = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT)
_RANK: JsonObject = {"type": "integer", "minimum": 1}
_SCORE: JsonObject = {"type": "number", "description": "Of a beam: see `length_penalty`."}
_ENDS: JsonObject = {"enum": ["stop", "length", "tool_calls"]}


def _answers() -> JsonObject:
    """The schemas of all responses, by the names that `ref` takes."""
    model = {"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT, "max_model_len": COUNT}
    model |= {"type": {"const": "model"}, "display_name": TEXT, "created_at": {**TEXT, "format": "date-time"}}
    model |= {"lifecycle": {"const": "active"}, "max_input_tokens": COUNT}
    page = {"has_more": {"const": False}, "first_id": TEXT, "last_id": TEXT}
    return {
        "ChatCompletion": _whole(
            "chat.completion", answer(_chat_choice(), score=_SCORE), prompt_logprobs=_prompt_logprobs()
        ),
        "ChatCompletionChunk": _chunk("chat.completion.chunk", answer(_chat_delta())),
        "Completion": _whole(
            "text_completion", answer(_text_choice(_ENDS), score=_SCORE, prompt_logprobs=_prompt_logprobs())
        ),
        "CompletionChunk": _chunk("text_completion", answer(_text_choice(maybe(_ENDS)))),
        "Usage": _usage(),
        "Model": answer(model),
        "Models": answer({"object": {"const": "list"}, "data": array(ref("Model")), **page}),
        "Tokens": answer({"count": COUNT, "max_model_len": COUNT, "tokens": array(COUNT)}),
        "About": answer({"name": {"const": "radixkv"}, "version": TEXT}),
        "Health": answer({"status": {"const": "ok"}}),
        "Error": answer({"error": answer({"message": TEXT, "type": TEXT, "param": STRING, "code": STRING})}),
    }


def _whole(kind: str, choice: JsonObject, **optional: JsonObject) -> JsonObject:
    return answer({**_head(kind, choice), "usage": ref("Usage")}, **optional)


def _chunk(kind: str, choice: JsonObject) -> JsonObject:
    """One event. The last one with the usage, if the client requested it, has no choices; others may have counts."""
    return answer(_head(kind, choice), usage=maybe({"anyOf": [ref("Usage"), answer(_COUNTS)]}))


def _head(kind: str, choice: JsonObject) -> JsonObject:
    return {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT, "choices": array(choice)}


def _chat_choice() -> JsonObject:
    call = answer({"id": TEXT, "type": {"const": "function"}, "function": _function()})
    said = {"role": {"const": "assistant"}, "content": STRING, "refusal": {"type": "null"}}
    message = answer(said, reasoning_content=TEXT, tool_calls=array(call, least=1))
    return {"index": _INDEX, "message": message, "logprobs": maybe(_chat_logprobs()), "finish_reason": _ENDS}


def _chat_delta() -> JsonObject:
    """The text since the last event of this choice: one of the fields, or none at its end."""
    call = answer({"index": _INDEX, "id": TEXT, "type": {"const": "function"}, "function": _function()})
    delta = answer({}, role={"const": "assistant"}, content=TEXT, reasoning_content=TEXT, tool_calls=array(call))
    return {"index": _INDEX, "delta": delta, "logprobs": maybe(_chat_logprobs()), "finish_reason": maybe(_ENDS)}


def _function() -> JsonObject:
    return answer({"name": TEXT, "arguments": {"type": "string", "contentMediaType": "application/json"}})


def _text_choice(ends: JsonObject) -> JsonObject:
    numbers, offsets = array({"type": ["number", "null"]}), array(COUNT)
    top = array(maybe({"type": "object", "additionalProperties": {"type": "number"}}))
    logprobs = {"tokens": array(TEXT), "token_logprobs": numbers, "top_logprobs": top, "text_offset": offsets}
    return {"index": _INDEX, "text": TEXT, "logprobs": maybe(answer(logprobs)), "finish_reason": ends}


def _prompt_logprobs() -> JsonObject:
    """The log probabilities of a prompt, an object of token ids for each token after the first."""
    entry = answer({"logprob": {"type": "number"}, "rank": maybe(_RANK), "decoded_token": TEXT})
    return array(maybe({"type": "object", "patternProperties": {"^[0-9]+$": entry}, "additionalProperties": False}))


def _chat_logprobs() -> JsonObject:
    token = {"token": TEXT, "logprob": {"type": "number"}, "bytes": maybe(array(COUNT))}
    each = answer({**token, "top_logprobs": array(answer(token))})
    return answer({"content": array(each), "refusal": {"type": "null"}})


def _usage() -> JsonObject:
    return answer({**_COUNTS, "prompt_tokens_details": answer({"cached_tokens": COUNT})})
