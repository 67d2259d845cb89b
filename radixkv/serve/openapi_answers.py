"""What each endpoint returns, whole and as events, as JSON schemas."""

from __future__ import annotations

from radixkv.serve.fields import JsonObject
from radixkv.serve.json_schema import COUNT, STRING, TEXT, answer, array, maybe, ref

_INDEX: JsonObject = {"type": "integer", "minimum": 0}
_ENDS: JsonObject = {"enum": ["stop", "length", "tool_calls"]}


def schemas() -> JsonObject:
    """All of them, by the names that `ref` takes."""
    model = {"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT, "max_model_len": COUNT}
    return {
        "ChatCompletion": _whole("chat.completion", answer(_chat_choice())),
        "ChatCompletionChunk": _chunk("chat.completion.chunk", answer(_chat_delta())),
        "Completion": _whole("text_completion", answer(_text_choice(_ENDS))),
        "CompletionChunk": _chunk("text_completion", answer(_text_choice(maybe(_ENDS)))),
        "Usage": _usage(),
        "Model": answer(model),
        "Models": answer({"object": {"const": "list"}, "data": array(ref("Model"))}),
        "Tokens": answer({"count": COUNT, "max_model_len": COUNT, "tokens": array(COUNT)}),
        "Health": answer({"status": {"const": "ok"}}),
        "Error": answer({"error": answer({"message": TEXT, "type": TEXT, "param": STRING, "code": STRING})}),
    }


def _whole(kind: str, choice: JsonObject) -> JsonObject:
    return answer({**_head(kind, choice), "usage": ref("Usage")})


def _chunk(kind: str, choice: JsonObject) -> JsonObject:
    """One event; the one with the usage, if it was asked for, has no choices."""
    return answer(_head(kind, choice), usage=maybe(ref("Usage")))


def _head(kind: str, choice: JsonObject) -> JsonObject:
    return {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT, "choices": array(choice)}


def _chat_choice() -> JsonObject:
    call = answer({"id": TEXT, "type": {"const": "function"}, "function": _function()})
    said = {"role": {"const": "assistant"}, "content": STRING, "refusal": {"type": "null"}}
    message = answer(said, reasoning_content=TEXT, tool_calls=array(call, least=1))
    return {"index": _INDEX, "message": message, "logprobs": maybe(_chat_logprobs()), "finish_reason": _ENDS}


def _chat_delta() -> JsonObject:
    """What was said since the last event of this choice: one of the fields, or none at its end."""
    call = answer({"index": _INDEX, "id": TEXT, "type": {"const": "function"}, "function": _function()})
    delta = answer({}, role={"const": "assistant"}, content=TEXT, reasoning_content=TEXT, tool_calls=array(call))
    return {"index": _INDEX, "delta": delta, "logprobs": maybe(_chat_logprobs()), "finish_reason": maybe(_ENDS)}


def _function() -> JsonObject:
    return answer({"name": TEXT, "arguments": {"type": "string", "contentMediaType": "application/json"}})


def _text_choice(ends: JsonObject) -> JsonObject:
    numbers, offsets = array({"type": "number"}), array(COUNT)
    top = array({"type": "object", "additionalProperties": {"type": "number"}})
    logprobs = {"tokens": array(TEXT), "token_logprobs": numbers, "top_logprobs": top, "text_offset": offsets}
    return {"index": _INDEX, "text": TEXT, "logprobs": maybe(answer(logprobs)), "finish_reason": ends}


def _chat_logprobs() -> JsonObject:
    token = {"token": TEXT, "logprob": {"type": "number"}, "bytes": maybe(array(COUNT))}
    each = answer({**token, "top_logprobs": array(answer(token))})
    return answer({"content": array(each), "refusal": {"type": "null"}})


def _usage() -> JsonObject:
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT)
    return answer({**counts, "prompt_tokens_details": answer({"cached_tokens": COUNT})})
