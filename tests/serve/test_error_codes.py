"""Each wrong field has one error, with a code and a path; values that look alike are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.chat.calls.formats import HERMES
from radixkv.serve.anthropic.schemas import Dialect, read_count, read_message
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import IgnoredFields
from radixkv.serve.ollama import schemas as ollama
from radixkv.serve.openai_responses.schemas import read_response
from radixkv.serve.role_order import ANY_ORDER
from radixkv.serve.schemas import read_chat, read_completion, read_tokenize
from tests.serve.served import ASKED

VALUE, TYPE, MISSING = "invalid_value", "invalid_type", "missing_required_parameter"
READERS: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "chat": ({"model": "m", "messages": ASKED}, read_chat),
    "text": ({"model": "m", "prompt": "x"}, read_completion),
    "tokens": ({"messages": ASKED}, read_tokenize),
    "message": ({"model": "m", "messages": ASKED}, lambda body, ignored: read_message(body, ignored, Dialect())),
    "count": ({"model": "m", "messages": ASKED}, lambda body, ignored: read_count(body, ignored, Dialect())),
    "response": (
        {"model": "m", "input": "x"},
        lambda body, ignored: read_response(body, ignored, lambda _: None, ANY_ORDER),
    ),
    "ollama": ({"model": "m", "messages": ASKED}, lambda body, ignored: ollama.read_chat(body, ignored, HERMES)),
    "generate": ({"model": "m", "prompt": "x"}, ollama.read_generate),
}
FUNCTION = {"type": "function", "function": {"name": "f"}}
ONE_TOOL = {"tools": [FUNCTION]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "a"}]}
OPENAI = [name for name in READERS if name not in ("ollama", "generate")]


def said(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", **fields}]}


def asked(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def items(*given: Any) -> dict[str, Any]:
    return {"input": list(given)}


Rows = list[tuple[dict[str, Any], str]]
NAMESPACE = {"type": "namespace", "name": "a b", "tools": [{"type": "function", "name": "f"}]}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}

WRONG: dict[tuple[str, str], Rows] = {  # bodies with one wrong field, and its path, by reader and code
    ("chat", MISSING): [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [*ASKED, {"role": "user"}, {"role": "x"}]}, "messages[1].content"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": ""}]}, "messages[0].tool_call_id"),
        (asked({"type": "text", "text": None}), "messages[0].content[0].text"),
        (said(), "messages[0].content"),
        (said(tool_calls=[{"id": "a"}]), "messages[0].tool_calls[0].function"),
        ({**ONE_TOOL, "tool_choice": {}}, "tool_choice.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ],
    ("chat", TYPE): [
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (said(content="x", tool_calls=[5]), "messages[0].tool_calls[0]"),
        ({"temperature": "1"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"n": True}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"reasoning": {"enabled": "yes"}}, "reasoning.enabled"),
    ],
    ("chat", VALUE): [
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        (asked({"type": "image_url"}), "messages[0].content[0].type"),
        (said(content="x", audio={}), "messages[0].audio"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"stop": ["x", 5]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x", "x" * 4097]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"bad_words": ["x"] * 1025}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"thinking": {}}, "thinking.type"),
        ({"reasoning": {"effort": "<|im_end|>"}}, "reasoning.effort"),
        ({"chat_template_kwargs": {'a"b': []}}, 'chat_template_kwargs.a\\"b'),
        ({"tools": [{**FUNCTION, "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": []}, "functions"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ],
    ("text", VALUE): [
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt[0]"),
        ({"prompt": ["x", [True]]}, "prompt[1]"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "suffix": "y", "echo": True}, "suffix"),
        ({"prompt": ["x"] * 600, "n": 2}, "n"),
    ],
    ("tokens", MISSING): [({"prompt": "x"}, "prompt")],
    ("message", MISSING): [
        (asked({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
    ("message", TYPE): [({"tools": [5]}, "tools[0]"), ({"system": 5}, "system")],
    ("message", VALUE): [
        (asked({"type": "tool_use"}), "messages[0].content[0].type"),
        ({"messages": [*ASKED, USED]}, "messages[1]"),
        ({"messages": [{"role": "system", "content": "only this"}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "no"}, "tools": [{"name": "a", "input_schema": {}}]}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"n": True}, "n"),
    ],
    ("count", TYPE): [({"output_config": {"effort": 5}}, "output_config.effort")],
    ("response", MISSING): [
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        (items({"type": "function_call_output", "output": "a"}), "input[0].call_id"),
    ],
    ("response", TYPE): [
        ({"input": 5}, "input"),
        (items({"role": "user", "content": [{"type": "input_text"}]}), "input[0].content[0].text"),
    ],
    ("response", VALUE): [
        ({"input": []}, "input"),
        (items({"role": "x", "content": "a"}), "input[0].role"),
        (items(IMAGE), "input[0].content[0].type"),
        (items({"type": "item_reference", "id": "x"}), "input[0].type"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name"),
        ({"tools": [NAMESPACE]}, "tools[0].name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
    ("response", "previous_response_not_found"): [({"previous_response_id": "x"}, "previous_response_id")],
    ("ollama", VALUE): [
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "mood", "content": "x"}]}, "messages[0].role"),
        ({"format": "xml"}, "format"),
        ({"think": "often"}, "think"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"options": {"num_ctx": 0}}, "options.num_ctx"),
    ],
    ("generate", VALUE): [({"context": [1]}, "context"), ({"raw": True, "system": "x"}, "system")],
}


@pytest.mark.parametrize("strict", [False, True])
def test_a_wrong_field_is_named_with_its_code(strict: bool) -> None:
    for (endpoint, code), rows in WRONG.items():
        body, read = READERS[endpoint]
        for change, param in rows:
            with pytest.raises(ApiError) as caught:
                read({**body, **change}, None if strict else IgnoredFields())
            wrong = caught.value
            assert (wrong.status, wrong.code, wrong.param) == (400, code, param), (endpoint, change)
            assert "\n" not in wrong.message


@pytest.mark.parametrize("endpoint", OPENAI)
def test_a_whole_number_may_have_a_point_and_null_is_absent(endpoint: str) -> None:
    body, read = READERS[endpoint]
    for field, value in (("max_tokens", 5.0), ("seed", 7.0), ("stream", None), ("tools", None), ("stop", None)):
        read({**body, field: value}, IgnoredFields())
    if endpoint not in ("tokens", "count"):
        read({**body, "cache_salt": "x"}, None)


@pytest.mark.parametrize("endpoint", OPENAI)
def test_only_unknown_fields_that_are_not_null_are_named(endpoint: str) -> None:
    body, read = READERS[endpoint]
    ignored = IgnoredFields()
    read({**body, "odd": {"a": [1]}, "none": None}, ignored)
    assert ignored.text() == "odd"
    if endpoint not in ("tokens", "count"):  # fields that become values of other types
        read({**body, "odd": 1, "guided_choice": ["a"], "logit_bias": {"5": 1}}, IgnoredFields())
    with pytest.raises(ApiError, match="unknown field none"):
        read({**body, "none": None}, None)
