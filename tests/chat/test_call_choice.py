"""The format of calls is the one that the chat template writes, or the tokenizer brings, or a setting names."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from radixkv import Engine
from radixkv.chat.calls.choice import chosen, own_format
from radixkv.chat.calls.formats import FORMATS
from radixkv.chat.calls.reader import split_calls
from radixkv.chat.template import ChatTemplate
from radixkv.errors import InvalidInput
from tests.chat.test_call_formats import PARAMETERS, WRITERS, Calls
from tests.chat.worlds import CHATML, byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "", "parameters": PARAMETERS}}]
STOPS = frozenset({0})
CODER = """{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
JSON_IN = "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"


def calling(text: str) -> str:
    """A template that writes calls as `text`."""
    start, end = CODER.index("<tool_call>"), CODER.index("{% endfor %}<|im_end|>")
    return CODER[:start] + text + CODER[end:]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (CODER, "qwen3-coder"),
        (calling(f"<tool_call>\n{JSON_IN}\n</tool_call>"), "hermes"),
        (calling(f"<|tool_call|>[{JSON_IN}]"), "granite"),
        (calling(f"<|tool_call|>[{JSON_IN}]<|/tool_call|>"), "phi-4-mini"),
        (calling("[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"), "mistral"),
        (calling(f"<tool_call>run {JSON_IN}</tool_call>"), None),  # an unknown family with Hermes's tag
        (calling(f"run {JSON_IN}"), None),
        (CHATML, "hermes"),
    ],
)
def test_the_row_that_reads_a_trial_call_back_is_taken(template: str, name: str | None) -> None:
    found = ChatTemplate(byte_tokenizer(template), STOPS, TOOLS).call_format
    assert (found.name if found else None) == name


def test_a_setting_overrides_the_trial_and_an_unknown_one_is_refused_with_the_list() -> None:
    found = ChatTemplate(byte_tokenizer(CODER), STOPS, TOOLS, tool_format="hermes").call_format
    assert found is FORMATS[0]
    with Engine.load("tiny", num_blocks=8, tool_format="hermis") as engine, pytest.raises(InvalidInput) as caught:
        engine.chat()
    assert str(caught.value).startswith("tool_format='hermis': allowed are 'auto', 'hermes', 'mistral'")


# ---- rows of tokenizers, in the form that transformers documents


def template_with(**calls: Any) -> dict[str, Any]:
    return {"start_anchor": "assistant\n", "fields": {"content": {}, "tool_calls": {"repeats": True, **calls}}}


NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
QWEN = template_with(
    open_pattern=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    close_pattern=r"</function>\s*</tool_call>",
    content="xml-inline",
    content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"},
    transform=NAMED,
)
GEMMA = template_with(
    open_pattern=r"<\|tool_call>call:(?P<name>\w+)",
    close="<tool_call|>",
    content="json",
    content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    transform=NAMED,
)
HERMES = template_with(
    open="<tool_call>",
    close="</tool_call>",
    content="json",
    transform={"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
)
PYTHON = template_with(
    open="<|tool_call_start|>",
    close="<|tool_call_end|>",
    content="python-call-list",
    transform={"function": {"name": "{name}", "arguments": "{arguments}"}},
    transform_each=True,
)
# As transformers serves models whose tokenizers bring none.
QWEN2 = template_with(
    open_pattern=r"\s*<tool_call>\s*",
    close="</tool_call>",
    content="json",
    transform={"type": "function", "function": "{content}"},
)
QWEN_3_5 = template_with(
    open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    close_pattern=r"</function>\s*</tool_call>",
    content="xml-inline",
    content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    transform=NAMED,
)
CALLS: Calls = [("look_up", {"text": "a \"b\" 'c' {d}\ne", "count": 7, "many": [1, {"a": "é"}]}), ("look_up", {})]


@pytest.mark.parametrize(
    ("given", "family"),
    [
        *((QWEN, "qwen3-coder"), (QWEN_3_5, "qwen3-coder"), (GEMMA, "gemma4")),
        *((HERMES, "hermes"), (QWEN2, "hermes"), (PYTHON, "lfm2")),
    ],
)
def test_a_row_of_a_tokenizer_reads_what_transformers_reads(given: dict[str, Any], family: str) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing", reason="transformers before 5.13")
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.response_template = given
    own = own_format(tokenizer)
    assert own is not None and chosen(tokenizer, None) == own
    text = WRITERS[family](CALLS)
    read = split_calls(text, own, {"look_up": {"parameters": PARAMETERS}}, "0")[1]
    theirs = parsing.parse_response(text, given, prefix="assistant\n", tools=TOOLS)["tool_calls"]
    flat = [call for each in theirs for call in (each if isinstance(each, list) else [each])]
    assert [(each["function"]["name"], each["function"]["arguments"]) for each in flat] == CALLS
    assert [(call.name, call.arguments) for call in read] == CALLS
    assert ChatTemplate(tokenizer, STOPS, TOOLS).call_format == (own if family == "hermes" else FORMATS[0])


@pytest.mark.parametrize(
    "change",
    [
        {**HERMES["fields"]["tool_calls"], "open": "<tool_call> call", "open_pattern": None},
        {**HERMES["fields"]["tool_calls"], "open_pattern": None, "transform": {"function": {"name": "{content.fn}"}}},
        {"content": "json", "transform": {"function": {"name": "{name}", "arguments": "{content.args}"}}},
        {"open_pattern": r"<tool_call>.*(?P<name>\w+)"},
        {"content_args": {"tag_pattern": "(a+)+$"}},
        {"open_pattern": 3},
    ],
)
def test_a_row_that_maps_to_no_shape_is_left_out_with_one_warning(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.response_template = template_with(**{**QWEN["fields"]["tool_calls"], **change})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = ChatTemplate(tokenizer, STOPS, TOOLS).call_format
            assert found is not None and found.name == "hermes"
            assert own_format(tokenizer) is None
    assert json.dumps(caplog.text).count("maps to no shape") == 1


@pytest.mark.parametrize("given", [3, {}, {"fields": 3}, {"fields": {"tool_calls": 3}}, {"fields": {"content": {}}}])
def test_a_response_template_without_calls_is_no_row(given: Any) -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.response_template = given
    assert own_format(tokenizer) is None
