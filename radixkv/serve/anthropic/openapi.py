"""Schemas of the responses of the Messages API, for the OpenAPI document."""

from __future__ import annotations

from radixkv.serve.fields import JsonObject
from radixkv.serve.json_schemas import COUNT, STRING, TEXT, answer, array, ref

_STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded")


def answers() -> JsonObject:
    """The schemas of the responses, by the names that `ref` takes."""
    return {
        "Message": _message([ref("MessageBlock")], {"enum": list(_STOP_REASONS)}),
        "MessageBlock": {"anyOf": [_said(text=TEXT), _said(thinking=TEXT, signature=TEXT), _called()]},
        "MessageEvent": {"anyOf": _events()},
        "MessageUsage": answer(
            dict.fromkeys(
                ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"), COUNT
            )
        ),
        "MessageError": answer(
            {"type": {"const": "error"}, "error": answer({"type": TEXT, "message": TEXT}), "request_id": TEXT}
        ),
        "TokenCount": answer({"input_tokens": COUNT}),
    }


def _message(blocks: list[JsonObject], reason: JsonObject) -> JsonObject:
    fields = {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": array({"anyOf": blocks}),
        "stop_reason": reason,
        "stop_sequence": STRING,
        "usage": ref("MessageUsage"),
    }
    return answer(fields)


def _said(**fields: JsonObject) -> JsonObject:
    """A block with the fields of its kind, which is the name of the first."""
    return answer({"type": {"const": next(iter(fields))}, **fields})


def _called() -> JsonObject:
    return answer({"type": {"const": "tool_use"}, "id": TEXT, "name": TEXT, "input": {"type": "object"}})


def _events() -> list[JsonObject]:
    index = {"index": COUNT}
    deltas = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    delta = [_event(kind, **{field: TEXT}) for kind, field in {**deltas, "input_json_delta": "partial_json"}.items()]
    ended = answer({"stop_reason": {"enum": list(_STOP_REASONS)}, "stop_sequence": STRING})
    return [
        _event("message_start", message=_message([ref("MessageBlock")], {"type": "null"})),
        _event("content_block_start", **index, content_block=ref("MessageBlock")),
        _event("content_block_delta", **index, delta={"anyOf": delta}),
        _event("content_block_stop", **index),
        _event("message_delta", delta=ended, usage=ref("MessageUsage")),
        _event("message_stop"),
        _event("ping"),
    ]


def _event(kind: str, **fields: JsonObject) -> JsonObject:
    return answer({"type": {"const": kind}, **fields})
