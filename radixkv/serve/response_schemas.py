"""JSON schemas of the responses of all APIs, by the names that the OpenAPI document gives them."""

from __future__ import annotations

from radixkv.serve.fields import JsonObject

REFERENCE = "#/components/schemas/{model}"
TEXT: JsonObject = {"type": "string"}
_STRING: JsonObject = {"type": ["string", "null"]}
_COUNT: JsonObject = {"type": "integer", "minimum": 0}
_NUMBER: JsonObject = {"type": "number"}
_OBJECT: JsonObject = {"type": "object"}
_NULL: JsonObject = {"type": "null"}
_FLAG: JsonObject = {"type": "boolean"}
_ASSISTANT: JsonObject = {"const": "assistant"}


def ref(name: str) -> JsonObject:
    """Return a reference to one of the document's schemas."""
    return {"$ref": REFERENCE.format(model=name)}


def maybe(schema: JsonObject) -> JsonObject:
    """Return a schema, or null."""
    return {"anyOf": [schema, _NULL]}


def answer(properties: JsonObject, **optional: JsonObject) -> JsonObject:
    """Return an object with all of these properties, perhaps some of the optional ones, and perhaps others."""
    return {"type": "object", "properties": {**properties, **optional}, "required": list(properties)}


def response_schemas() -> JsonObject:
    """Return the schemas of all responses, and of the parts that they share."""
    return {**_openais(), **_of_responses(), **_of_messages(), **_ollamas(), **_of_models()}


def _array(items: JsonObject, *, least: int = 0) -> JsonObject:
    return {"type": "array", "items": items, "minItems": least}


def _texts(*names: str) -> JsonObject:
    return dict.fromkeys(names, TEXT)


def _counts(*names: str) -> JsonObject:
    return dict.fromkeys(names, _COUNT)


def _of_models() -> JsonObject:
    """Return the schemas of models, of the server, and of texts and token ids."""
    model = {**_texts("id", "owned_by", "display_name"), "object": {"const": "model"}, "created": _COUNT}
    model |= {"type": {"const": "model"}, "created_at": {**TEXT, "format": "date-time"}}
    model |= {"lifecycle": {"const": "active"}, "aliases": _array(TEXT)}
    states: JsonObject = {"enum": ["unloaded", "loading", "loaded", "unloading", "failed"]}
    model["status"] = answer({"value": states}, error=TEXT)
    page = {"has_more": {"const": False}, **_texts("first_id", "last_id")}
    infill = _counts("index", "tokens_predicted", "tokens_evaluated", "tokens_cached")
    infill |= {**_texts("content", "stopping_word"), "stop": _FLAG, "timings": _OBJECT, "truncated": {"const": False}}
    prefix: JsonObject = {"id": TEXT, "object": {"const": "prefix"}}
    made = {**prefix, **_counts("tokens", "slots", "bytes"), "method": TEXT, "keep": _NUMBER}
    return {
        "Infill": answer({}, stop_type={"enum": ["eos", "word", "limit"]}, **infill),
        "Model": answer(model, **_counts("max_model_len", "max_input_tokens")),
        "Models": answer({"object": {"const": "list"}, "data": _array(ref("Model")), **page}),
        "Tokens": answer({**_counts("count", "max_model_len"), "tokens": _array(_COUNT)}),
        "Detokenized": answer({"prompt": TEXT}),
        "Load": answer({"server_load": _COUNT}),
        "About": answer({"name": {"const": "radixkv"}, "version": TEXT}),
        "Done": answer({"success": {"const": True}}),
        "Health": answer({"status": {"const": "ok"}}),
        "Prefix": answer(made),
        "DeletedPrefix": answer({**prefix, "deleted": {"const": True}}),
        "OpenApi": _OBJECT,
    }


# ---- completions

_ENDS: JsonObject = {"enum": ["stop", "length", "tool_calls"]}
_RANK: JsonObject = {"type": "integer", "minimum": 1}


def _openais() -> JsonObject:
    """Return the schemas of chat and text completions."""
    counts = _counts("prompt_tokens", "completion_tokens", "total_tokens")
    cached = answer({"cached_tokens": _COUNT}, **_counts("host_tokens", "disk_tokens"))
    predicted = answer(_counts("accepted_prediction_tokens", "rejected_prediction_tokens"))
    error = {**_texts("message", "type"), "param": _STRING, "code": _STRING}
    score: JsonObject = {"type": "number", "description": "Of a beam: see `length_penalty`."}
    scored = {"prompt_logprobs": _prompt_logprobs()}
    usage = {"usage": ref("Usage")}  # the last event has it without choices, and others may have counts
    running = maybe({"anyOf": [ref("Usage"), answer(counts)]})
    text = answer(_text_choice(_ENDS), score=score, **scored)
    return {
        "ChatCompletion": answer({**_head("chat.completion", answer(_chat_choice(), score=score)), **usage}, **scored),
        "ChatCompletionChunk": answer(_head("chat.completion.chunk", answer(_chat_delta())), usage=running),
        "Completion": answer({**_head("text_completion", text), **usage}),
        "CompletionChunk": answer(_head("text_completion", answer(_text_choice(maybe(_ENDS)))), usage=running),
        "Usage": answer({**counts, "prompt_tokens_details": cached}, completion_tokens_details=predicted),
        "Error": answer({"error": answer(error)}),
    }


def _head(kind: str, choice: JsonObject) -> JsonObject:
    return {**_texts("id", "model"), "object": {"const": kind}, "created": _COUNT, "choices": _array(choice)}


def _chat_choice() -> JsonObject:
    function = answer({"name": TEXT, "arguments": {"type": "string", "contentMediaType": "application/json"}})
    call = answer({"id": TEXT, "type": {"const": "function"}, "function": function})
    said = {"role": _ASSISTANT, "content": _STRING, "refusal": _NULL}
    message = answer(said, reasoning_content=TEXT, tool_calls=_array(call, least=1))
    return {"index": _COUNT, "message": message, "logprobs": maybe(_chat_logprobs()), "finish_reason": _ENDS}


def _chat_delta() -> JsonObject:
    """Return a choice with the text since its last event: one of the fields, or none at its end.

    The first event of a call has its id, type and name, and each of them more of its arguments.
    """
    more = answer({"arguments": TEXT}, name=TEXT)
    call = answer({"index": _COUNT, "function": more}, id=TEXT, type={"const": "function"})
    delta = answer({}, role=_ASSISTANT, tool_calls=_array(call), **_texts("content", "reasoning_content"))
    return {"index": _COUNT, "delta": delta, "logprobs": maybe(_chat_logprobs()), "finish_reason": maybe(_ENDS)}


def _text_choice(ends: JsonObject) -> JsonObject:
    numbers = _array({"type": ["number", "null"]})
    top = _array(maybe({"type": "object", "additionalProperties": _NUMBER}))
    logprobs = {"tokens": _array(TEXT), "token_logprobs": numbers, "top_logprobs": top, "text_offset": _array(_COUNT)}
    return {"index": _COUNT, "text": TEXT, "logprobs": maybe(answer(logprobs)), "finish_reason": ends}


def _prompt_logprobs() -> JsonObject:
    """Return the log probabilities of a prompt, an object of token ids for each token after the first."""
    entry = answer({"logprob": _NUMBER, "rank": maybe(_RANK), "decoded_token": TEXT})
    return _array(maybe({"type": "object", "patternProperties": {"^[0-9]+$": entry}, "additionalProperties": False}))


def _chat_logprobs() -> JsonObject:
    token = {"token": TEXT, "logprob": _NUMBER, "bytes": maybe(_array(_COUNT))}
    scored = answer({**token, "top_logprobs": _array(answer(token))})
    return answer({"content": _array(scored), "refusal": _NULL})


# ---- other APIs


def _of_responses() -> JsonObject:
    """Return the schemas of the Responses API."""
    item = answer({"type": TEXT})
    details = answer(_counts("cached_tokens", "cache_write_tokens"), **_counts("host_tokens", "disk_tokens"))
    usage = _counts("input_tokens", "output_tokens", "total_tokens")
    usage |= {"input_tokens_details": details, "output_tokens_details": answer(_counts("reasoning_tokens"))}
    response = {
        **_texts("id", "model"),
        "object": {"const": "response"},
        "created_at": _COUNT,
        "completed_at": maybe(_COUNT),
        "status": {"enum": ["in_progress", "completed", "incomplete", "failed", "cancelled"]},
        "error": maybe(answer(_texts("code", "message"))),
        "incomplete_details": maybe(answer({"reason": {"const": "max_output_tokens"}})),
        "output": _array(item),
        "usage": maybe(answer(usage)),
        "previous_response_id": _STRING,
        "instructions": _STRING,
        "tools": _array(answer({"type": {"enum": ["function", "namespace"]}, "name": TEXT})),
        "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, item]},
        "parallel_tool_calls": _FLAG,
    }
    page = {"object": {"const": "list"}, "data": _array(item), "has_more": _FLAG}
    return {
        "Response": answer(response),
        "ResponseEvent": answer({"type": TEXT, "sequence_number": _COUNT}, response=ref("Response")),
        "InputTokens": answer({"object": {"const": "response.input_tokens"}, "input_tokens": _COUNT}),
        "DeletedResponse": answer({"id": TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
        "ResponseItems": answer({**page, "first_id": _STRING, "last_id": _STRING}),
    }


def _of_messages() -> JsonObject:
    """Return the schemas of the Messages API."""
    reasons = {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]}
    cached = _counts("cache_creation_input_tokens", "cache_read_input_tokens")
    blocks = [
        _typed("text", text=TEXT),
        _typed("thinking", **_texts("thinking", "signature")),
        _typed("tool_use", **_texts("id", "name"), input=_OBJECT),
    ]
    deltas = {"text": "text", "thinking": "thinking", "signature": "signature", "input_json": "partial_json"}
    delta = [_typed(f"{kind}_delta", **{field: TEXT}) for kind, field in deltas.items()]
    ended = answer({"stop_reason": reasons, "stop_sequence": _STRING})
    begun, block = _message(_NULL), ref("MessageBlock")
    events = [
        _typed("message_start", message=begun),
        _typed("content_block_start", index=_COUNT, content_block=block),
        _typed("content_block_delta", index=_COUNT, delta={"anyOf": delta}),
        _typed("content_block_stop", index=_COUNT),
        _typed("message_delta", delta=ended, usage=ref("MessageUsage")),
        _typed("message_stop"),
        _typed("ping"),
    ]
    return {
        "Message": _message(reasons),
        "MessageBlock": {"anyOf": blocks},
        "MessageEvent": {"anyOf": events},
        "MessageUsage": answer({**_counts("input_tokens", "output_tokens"), **cached}),
        "MessageError": _typed("error", error=answer(_texts("type", "message")), request_id=TEXT),
        "TokenCount": answer({"input_tokens": _COUNT}),
    }


def _typed(kind: str, **fields: JsonObject) -> JsonObject:
    return answer({"type": {"const": kind}, **fields})


def _message(reason: JsonObject) -> JsonObject:
    fields = {**_texts("id", "model"), "role": _ASSISTANT, "content": _array(ref("MessageBlock"))}
    return _typed("message", **fields, stop_reason=reason, stop_sequence=_STRING, usage=ref("MessageUsage"))


def _ollamas() -> JsonObject:
    """Return the schemas of Ollama's API."""
    call = answer({"id": TEXT, "function": answer({"name": TEXT, "arguments": _OBJECT})})
    message = answer({"role": _ASSISTANT, "content": TEXT}, thinking=TEXT, tool_calls=_array(call, least=1))
    details = _texts("parent_model", "format", "family", "parameter_size", "quantization_level")
    card = {"modified_at": TEXT, "details": answer({**details, "families": _array(TEXT)})}
    listed = {**card, **_texts("name", "model", "digest"), "size": _COUNT}
    running = {**listed, "expires_at": TEXT, **_counts("size_vram", "context_length")}
    can: JsonObject = {"enum": ["completion", "tools", "thinking", "insert"]}
    shown = {**card, "template": TEXT, "model_info": _OBJECT, "capabilities": _array(can)}
    return {
        "OllamaChat": _line({"message": message}),
        "Generation": _line({"response": TEXT}, thinking=TEXT),
        "OllamaModel": answer(shown),
        "Tags": answer({"models": _array(answer(listed))}),
        "Processes": answer({"models": _array(answer(running))}),
        "OllamaVersion": answer(_texts("version", "radixkv")),
        "OllamaError": answer({"error": TEXT}),
    }


def _line(said: JsonObject, **optional: JsonObject) -> JsonObject:
    """Return a line or a whole response; the last line and the response have counts, and durations in nanoseconds."""
    counts = _counts(
        *("prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"),
        *("total_duration", "load_duration", "cached_prompt_count"),
    )
    return answer({**_texts("model", "created_at"), "done": _FLAG, **said}, **counts, done_reason=_STRING, **optional)
