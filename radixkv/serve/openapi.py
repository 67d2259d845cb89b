"""The OpenAPI document at /openapi.json: endpoints, request bodies, responses, errors and headers.

Bodies are described by their models, which check them. Responses are described here, and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixkv import __version__
from radixkv.serve.access import KEY_HEADER
from radixkv.serve.anthropic import openapi as anthropic
from radixkv.serve.anthropic.schemas import MessageBody, PromptBody
from radixkv.serve.bodies import Body
from radixkv.serve.fields import JsonObject
from radixkv.serve.infill import InfillBody
from radixkv.serve.json_schemas import COUNT, STRING, TEXT, answer, array, bodies, maybe, ref
from radixkv.serve.ollama import openapi as ollama
from radixkv.serve.ollama.schemas import GenerateBody, OllamaChatBody
from radixkv.serve.openai_responses import openapi as openai_responses
from radixkv.serve.openai_responses.schemas import ResponseBody
from radixkv.serve.openapi_operations import (
    DONE,
    IN_PATH,
    PREFIX_IN_PATH,
    PROMETHEUS,
    event_stream,
    get,
    json_of,
    post,
    responses_of,
    stored,
    without_key,
)
from radixkv.serve.schemas import ChatBody, CompletionBody, DetokenizeBody, ModelBody, PrefixBody, TokenizeBody
from radixkv.server_settings import Settings

_OPENAIS = (ChatBody, CompletionBody, ResponseBody, PrefixBody)
_OTHERS = (InfillBody, TokenizeBody, DetokenizeBody, MessageBody, PromptBody)
_BODIES: tuple[type[Body], ...] = (*_OPENAIS, *_OTHERS, *ollama.BODIES)

# ---- the document

_ABOUT = """OpenAI's, Anthropic's and Ollama's endpoints over one engine whose prefix cache can be seen.

A path that is not here gets 404, and a method that is not here 405, with the methods in `Allow`; both with an Error.
More than 200 headers get 431. A path that begins with `/v1` works without it too, and each path with GET takes HEAD.
Every answer has the request's id in `X-Request-Id` and `Request-Id`. Unknown fields of a body are ignored, and named
in the answer's `Warning`; with `--strict-fields` they are refused."""


def document(names: Sequence[str], settings: Settings, *, several: bool = False) -> JsonObject:
    """Return the whole document, for a server of models with these names, which it loads and unloads if `several`."""
    schemas = bodies((*_BODIES, *((ModelBody,) if several else ())), strict=settings.strict_fields)
    model = {"type": "string", "enum": [*names], "description": "A model that this server has."}
    for named in (*_OPENAIS, OllamaChatBody, GenerateBody):
        schemas[named.__name__]["properties"]["model"] = model
    for optional in (TokenizeBody, DetokenizeBody):
        schemas[optional.__name__]["properties"]["model"] = maybe(model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "radixkv", "version": __version__, "description": _ABOUT},
        "security": [{"apiKey": []}, {"keyHeader": []}] if settings.api_keys else [],
        "paths": {
            "/v1/chat/completions": post(
                "Continue a conversation",
                ChatBody,
                "ChatCompletion",
                event_stream("ChatCompletionChunk", "Error", DONE),
            ),
            "/v1/completions": post(
                "Continue texts", CompletionBody, "Completion", event_stream("CompletionChunk", "Error", DONE)
            ),
            "/v1/prefixes": post("Compress a prefix, which later requests name", PrefixBody, "Prefix"),
            "/v1/prefixes/{name}": {"delete": stored("Release a compressed prefix", "DeletedPrefix", PREFIX_IN_PATH)},
            "/infill": post(
                "Fill in the middle of a text", InfillBody, "Infill", event_stream("Infill", "Error", "stop: true")
            ),
            "/v1/messages": post(
                "Continue a conversation, in the form of Anthropic's API",
                MessageBody,
                "Message",
                event_stream("MessageEvent", "MessageError", "message_stop"),
                "MessageError",
            ),
            "/v1/messages/count_tokens": post(
                "Length of a conversation", PromptBody, "TokenCount", error="MessageError"
            ),
            **openai_responses.paths(),
            **ollama.paths(),
            "/tokenize": post("Token ids of a text or of a conversation", TokenizeBody, "Tokens"),
            "/detokenize": post("Text of token ids", DetokenizeBody, "Detokenized"),
            "/v1/models": get("The models", json_of("Models"), 401),
            "/v1/models/{model}": get("One model", json_of("Model"), 401, 404, parameters=[IN_PATH]),
            **dict.fromkeys(
                ("/", "/api/hello", "/v1/version"), without_key(get("Name and version of the server", json_of("About")))
            ),
            **dict.fromkeys(
                ("/health", "/ping"), without_key(get("Whether the engine takes requests", json_of("Health"), 503))
            ),
            "/load": get("Number of replies that are requested now", json_of("Load"), 401),
            "/metrics": get("Counters and gauges, as Prometheus reads them", PROMETHEUS, 401, 503),
            **(_loads() if several else {}),
            "/openapi.json": without_key(get("This document", {"application/json": {"schema": {"type": "object"}}})),
        },
        "components": {
            "schemas": {
                **schemas,
                **_answers(),
                **anthropic.answers(),
                **openai_responses.answers(),
                **ollama.answers(),
            },
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer"},
                "keyHeader": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
            },
        },
    }


def _loads() -> JsonObject:
    """The paths by which models are loaded and unloaded."""
    load = post("Load a model, and wait for that", ModelBody, "Done")
    unload = post("Unload a model, and wait for that", ModelBody, "Done")
    unload["post"]["responses"]["409"] = responses_of("", {}, 409)["409"]
    return {"/models/load": load, "/models/unload": unload}


# ---- responses

_INDEX: JsonObject = {"type": "integer", "minimum": 0}
_COUNTS = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT)
_RANK: JsonObject = {"type": "integer", "minimum": 1}
_SCORE: JsonObject = {"type": "number", "description": "Of a beam: see `length_penalty`."}
_ENDS: JsonObject = {"enum": ["stop", "length", "tool_calls"]}
_INFILL: JsonObject = dict.fromkeys(("index", "tokens_predicted", "tokens_evaluated", "tokens_cached"), COUNT)
_INFILL |= {"truncated": {"const": False}, "stop_type": {"enum": ["eos", "word", "limit"]}, "stopping_word": TEXT}
_PREFIX: JsonObject = {"id": TEXT, "object": {"const": "prefix"}}
_PREFIX_SIZES = dict.fromkeys(("tokens", "slots", "bytes"), COUNT)


def _answers() -> JsonObject:
    """The schemas of all responses, by the names that `ref` takes."""
    model = {"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT}
    model |= {"type": {"const": "model"}, "display_name": TEXT, "created_at": {**TEXT, "format": "date-time"}}
    model |= {"lifecycle": {"const": "active"}, "aliases": array(TEXT)}
    states: JsonObject = {"enum": ["unloaded", "loading", "loaded", "unloading", "failed"]}
    model["status"] = answer({"value": states}, error=TEXT)
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
        "Infill": answer({}, content=TEXT, stop={"type": "boolean"}, timings={"type": "object"}, **_INFILL),
        "Usage": _usage(),
        "Model": answer(model, max_model_len=COUNT, max_input_tokens=COUNT),
        "Models": answer({"object": {"const": "list"}, "data": array(ref("Model")), **page}),
        "Tokens": answer({"count": COUNT, "max_model_len": COUNT, "tokens": array(COUNT)}),
        "Detokenized": answer({"prompt": TEXT}),
        "Load": answer({"server_load": COUNT}),
        "About": answer({"name": {"const": "radixkv"}, "version": TEXT}),
        "Done": answer({"success": {"const": True}}),
        "Health": answer({"status": {"const": "ok"}}),
        "Prefix": answer({**_PREFIX, **_PREFIX_SIZES, "method": TEXT, "keep": {"type": "number"}}),
        "DeletedPrefix": answer({**_PREFIX, "deleted": {"const": True}}),
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
    function = answer({"name": TEXT, "arguments": {"type": "string", "contentMediaType": "application/json"}})
    call = answer({"id": TEXT, "type": {"const": "function"}, "function": function})
    said = {"role": {"const": "assistant"}, "content": STRING, "refusal": {"type": "null"}}
    message = answer(said, reasoning_content=TEXT, tool_calls=array(call, least=1))
    return {"index": _INDEX, "message": message, "logprobs": maybe(_chat_logprobs()), "finish_reason": _ENDS}


def _chat_delta() -> JsonObject:
    """The text since the last event of this choice: one of the fields, or none at its end.

    The first event of a call has its id, type and name, and each of them more of its arguments.
    """
    more = answer({"arguments": TEXT}, name=TEXT)
    call = answer({"index": _INDEX, "function": more}, id=TEXT, type={"const": "function"})
    delta = answer({}, role={"const": "assistant"}, content=TEXT, reasoning_content=TEXT, tool_calls=array(call))
    return {"index": _INDEX, "delta": delta, "logprobs": maybe(_chat_logprobs()), "finish_reason": maybe(_ENDS)}


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
    details = answer({"cached_tokens": COUNT}, host_tokens=COUNT, disk_tokens=COUNT)
    predicted = answer({"accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT})
    return answer({**_COUNTS, "prompt_tokens_details": details}, completion_tokens_details=predicted)
