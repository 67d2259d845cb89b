"""Each wrong field has one error, with a code and a path; values that look alike are told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv.serve.anthropic.schemas import Dialect, read_count, read_message
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import IgnoredFields
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
}
FUNCTION = {"type": "function", "function": {"name": "f"}}
ONE_TOOL = {"tools": [FUNCTION]}


def said(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", **fields}]}


def asked(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def items(*given: Any) -> dict[str, Any]:
    return {"input": list(given)}


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat", {"model": None}, MISSING, "model"),
    ("chat", {"messages": []}, TYPE, "messages"),
    ("chat", {"messages": [None]}, TYPE, "messages[0]"),
    ("chat", {"messages": [{"content": "x"}]}, MISSING, "messages[0].role"),
    ("chat", {"messages": [{"role": ["user"], "content": "x"}]}, VALUE, "messages[0].role"),
    ("chat", {"messages": [*ASKED, {"role": "user"}, {"role": "x"}]}, MISSING, "messages[1].content"),
    ("chat", {"messages": [{"role": "tool", "content": "x", "tool_call_id": ""}]}, MISSING, "messages[0].tool_call_id"),
    ("chat", asked({"type": "text", "text": None}), MISSING, "messages[0].content[0].text"),
    ("chat", said(), MISSING, "messages[0].content"),
    ("chat", said(content="x", tool_calls=[5]), TYPE, "messages[0].tool_calls[0]"),
    ("chat", said(content="x", audio={}), VALUE, "messages[0].audio"),
    ("chat", {"temperature": 10**400}, VALUE, "temperature"),
    ("chat", {"temperature": "1"}, TYPE, "temperature"),
    ("chat", {"n": True}, TYPE, "n"),
    ("chat", {"n": "1"}, TYPE, "n"),
    ("chat", {"n": 129}, VALUE, "n"),
    ("chat", {"early_stopping": 1}, VALUE, "early_stopping"),
    ("chat", {"stop": ["x", 5]}, VALUE, "stop"),
    ("chat", {"stop_token_ids": 5}, TYPE, "stop_token_ids"),
    ("chat", {"stop_token_ids": [2.0]}, VALUE, "stop_token_ids"),
    ("chat", {"logit_bias": [1]}, TYPE, "logit_bias"),
    ("chat", {"logit_bias": {"5": True}}, VALUE, "logit_bias"),
    ("chat", {"thinking": 5}, TYPE, "thinking"),
    ("chat", {"thinking": {}}, VALUE, "thinking.type"),
    ("chat", {"chat_template_kwargs": {'a"b': []}}, VALUE, 'chat_template_kwargs.a\\"b'),
    ("chat", {"tools": [{**FUNCTION, "function": {"name": 5}}]}, VALUE, "tools[0].function.name"),
    ("chat", {**ONE_TOOL, "tool_choice": 5}, VALUE, "tool_choice"),
    ("chat", {**ONE_TOOL, "tool_choice": {}}, MISSING, "tool_choice.type"),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        MISSING,
        "response_format.json_schema.schema",
    ),
    ("chat", {"structured_outputs": {"choice": []}}, VALUE, "structured_outputs.choice"),
    ("text", {"prompt": 5}, VALUE, "prompt"),
    ("text", {"prompt": [1, "x"]}, VALUE, "prompt[0]"),
    ("text", {"prompt": ["x", [True]]}, VALUE, "prompt[1]"),
    ("tokens", {"prompt": "x"}, MISSING, "prompt"),
    ("message", asked({"type": "tool_use"}), VALUE, "messages[0].content[0].type"),
    ("message", asked({"type": "tool_result"}), MISSING, "messages[0].content[0].tool_use_id"),
    ("message", {"system": [{"type": "image"}]}, VALUE, "system[0].type"),
    ("message", {"tools": [5]}, TYPE, "tools[0]"),
    ("message", {"tool_choice": {"type": "tool"}}, MISSING, "tool_choice.name"),
    ("message", {"n": True}, VALUE, "n"),
    ("count", {"output_config": {"effort": 5}}, TYPE, "output_config.effort"),
    ("response", {"input": 5}, TYPE, "input"),
    ("response", items({"role": "x", "content": "a"}), VALUE, "input[0].role"),
    ("response", items({"role": "user", "content": [{"type": "input_text"}]}), TYPE, "input[0].content[0].text"),
    ("response", items({"type": "item_reference", "id": "x"}), VALUE, "input[0].type"),
    ("response", {"tools": [{"name": "f"}]}, MISSING, "tools[0].type"),
    ("response", {"previous_response_id": "x"}, "previous_response_not_found", "previous_response_id"),
]


@pytest.mark.parametrize("strict", [False, True])
def test_a_wrong_field_is_named_with_its_code(strict: bool) -> None:
    for endpoint, change, code, param in WRONG:
        body, read = READERS[endpoint]
        with pytest.raises(ApiError) as caught:
            read({**body, **change}, None if strict else IgnoredFields())
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param), (endpoint, change)
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("endpoint", READERS)
def test_a_whole_number_may_have_a_point_and_null_is_absent(endpoint: str) -> None:
    body, read = READERS[endpoint]
    for field, value in (("max_tokens", 5.0), ("seed", 7.0), ("stream", None), ("tools", None), ("stop", None)):
        read({**body, field: value}, IgnoredFields())


@pytest.mark.parametrize("endpoint", READERS)
def test_only_unknown_fields_that_are_not_null_are_named(endpoint: str) -> None:
    body, read = READERS[endpoint]
    ignored = IgnoredFields()
    read({**body, "odd": {"a": [1]}, "none": None}, ignored)
    assert ignored.text() == "odd"
    if endpoint not in ("tokens", "count"):  # fields that become values of other types
        read({**body, "odd": 1, "guided_choice": ["a"], "logit_bias": {"5": 1}}, IgnoredFields())
    with pytest.raises(ApiError, match="unknown field none"):
        read({**body, "none": None}, None)
