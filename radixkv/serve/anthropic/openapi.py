"""Schemas of the Messages API for the OpenAPI document; schemas.py does the checks that they describe."""

from __future__ import annotations

from radixkv.serve.anthropic.schemas import BLOCK_HINTS, FORMATS, REFERENCE, TOOL_CHOICES, TOOL_NAME, WITHOUT_EFFECT
from radixkv.serve.fields import JsonObject
from radixkv.serve.json_schemas import (
    ANYTHING,
    BOOLEAN,
    COUNT,
    STRING,
    TEXT,
    answer,
    array,
    integer,
    maybe,
    obj,
    ref,
    sampling,
)
from radixkv.serve.openapi_constraints import guided, text_format
from radixkv.serve.sampling_fields import wire_range
from radixkv.serve.schemas import EFFORT

_MODEL: JsonObject = {"type": "string", "description": "Any name: there is one model. The response repeats it."}
_HINTS: JsonObject = dict.fromkeys(BLOCK_HINTS, ANYTHING)
_STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded")


def message_body() -> JsonObject:
    """The body of POST /v1/messages."""
    parameters = sampling()
    parameters["stop_sequences"] = parameters.pop("stop")
    del parameters["n"]
    fields = {
        **_prompt(),
        "max_tokens": integer(*wire_range("max_tokens")),
        "stream": BOOLEAN,
        **parameters,
        **guided(),
        "n": {"enum": [1, None]},
        "use_beam_search": {"enum": [False, None]},
        "metadata": maybe(obj({"user_id": {**STRING, "description": "Names the session for the monitor."}})),
        **dict.fromkeys(WITHOUT_EFFECT, ANYTHING),
    }
    return obj(fields, "model", "messages")


def count_body() -> JsonObject:
    """The body of POST /v1/messages/count_tokens."""
    return obj({**_prompt(), **dict.fromkeys(WITHOUT_EFFECT, ANYTHING)}, "model", "messages")


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


# ---- requests


def _prompt() -> JsonObject:
    """The fields that both endpoints share."""
    kinds = {"enum": ["enabled", "adaptive", "disabled"]}
    several = {"disable_parallel_tool_use": BOOLEAN}
    choices = [obj({"type": {"enum": [kind for kind in TOOL_CHOICES if kind != "tool"]}, **several}, "type")]
    choices.append(obj({"type": {"const": "tool"}, "name": TEXT, **several}, "type", "name"))
    return {
        "model": _MODEL,
        "system": maybe(_texts()),
        "messages": array({"anyOf": _messages()}, least=1),
        "tools": maybe(array({"anyOf": [_tool(), obj({"type": {"not": {"enum": ["custom", None]}}}, "type")]})),
        "tool_choice": maybe({"anyOf": choices}),
        "thinking": maybe(obj({"type": kinds, "budget_tokens": ANYTHING, "display": ANYTHING}, "type")),
        "output_config": maybe(obj({"format": text_format(FORMATS), "effort": {**STRING, "pattern": f"^{EFFORT}$"}})),
        "output_format": text_format(FORMATS),
        "cache_control": ANYTHING,
    }


def _messages() -> list[JsonObject]:
    """The forms of a message, by their roles."""
    contents = {"anyOf": [TEXT, array({"anyOf": [_text(), _block(REFERENCE, "tool_name", tool_name=TEXT)]})]}
    result = _block("tool_result", "tool_use_id", tool_use_id=TEXT, content=maybe(contents), is_error=BOOLEAN)
    call = _block("tool_use", "id", "name", id=TEXT, name=TEXT, input={"type": ["object", "null"]})
    thinking = _block("thinking", "thinking", thinking=TEXT, signature=ANYTHING)
    blocks = {
        "user": [_text(), result],
        "assistant": [_text(), call, thinking, _block("redacted_thinking", data=ANYTHING)],
        "system": [_text()],
    }
    return [
        obj({"role": {"const": role}, "content": {"anyOf": [TEXT, array({"anyOf": of})]}}, "role", "content")
        for role, of in blocks.items()
    ]


def _texts() -> JsonObject:
    return {"anyOf": [TEXT, array(_text())]}


def _text() -> JsonObject:
    return _block("text", "text", text=TEXT)


def _block(kind: str, *required: str, **fields: JsonObject) -> JsonObject:
    return obj({"type": {"const": kind}, **fields, **_HINTS}, "type", *required)


def _tool() -> JsonObject:
    fields = {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "pattern": f"^{TOOL_NAME}$"},
        "description": STRING,
        "input_schema": {"type": "object"},
        **dict.fromkeys(("strict", "defer_loading", "eager_input_streaming"), BOOLEAN),
    }
    return obj(fields, "name", "input_schema")


# ---- responses


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
