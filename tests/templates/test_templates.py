"""What real chat templates write for tool calls is read back equal. `make templates` unpacks them and runs this."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.chat.calls.reader import CallReader
from radixkv.chat.calls.tools import tools_by_name
from radixkv.chat.reply_form import shared
from radixkv.chat.template import ChatTemplate
from radixkv.chat.thinking import split_thinking
from radixkv.errors import ChatError
from tests.chat.worlds import CHATML, byte_tokenizer
from tests.templates.install import FOLDER

TEMPLATES = {path.stem: path for path in sorted(FOLDER.glob("*.jinja"))}
UNREAD = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "it refuses tools without Python types",
    "Kimi-K2-Instruct": "it calls list.append, which the sandbox refuses, as that of transformers does",
    "Kimi-K2-Thinking": "it calls list.append, which the sandbox refuses, as that of transformers does",
    "MiniMax-M3": "nested values are nested tags, which no shape has",
    "fireworks-ai-llama-3-firefunction-v2": "it takes tools in a variable of its own",
    "meetkai-functionary-medium-v3.2": "the prompt ends inside the tag of the first call",
    "muse-glimmer": "the name of the tool is in the header of a message, before the call",
}
ONE_CALL = ("GigaChat", "openai-gpt-oss", "meta-llama-Llama")  # these refuse more calls in a turn, or drop them
NO_QUOTES = ("LFM2.5-8B-A1B",)  # it writes texts between quotes without escapes, so a quote ends them
KINDS = {"place": "string", "days": "integer", "share": "number", "wind": "boolean", "more": "object"}
PARAMETERS = {
    "type": "object",
    "properties": {key: {"type": kind, "description": key} for key, kind in KINDS.items()},
    "required": ["place"],
}
FUNCTION = {"name": "weather", "description": "Look.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
USER = {"role": "user", "content": "radixkv.user."}
ARGUMENTS: list[dict[str, Any]] = [
    {"place": "Oslo", "days": 3},
    {},
    {"place": "7", "wind": True, "share": 0.5},
    {"place": "a \"b\" 'c' \\d {e} [f], g=h: é日🎈", "more": {"a": [1, {"b": "x'\"\\}]"}]}},
    {"place": "<tool_call>{</tool_call> [TOOL_CALLS] <|tool_call> <b> </s>", "many": ["", "<think>", 2]},
    {"place": "two\nlines\n\n  indented", "wind": False, "many": []},
]


def written(template: ChatTemplate, arguments: list[dict[str, Any]]) -> str:
    """The reply that the template writes for calls. Raises ChatError if it refuses them."""
    calls = [
        {"id": f"call0000{at}", "type": "function", "function": {"name": "weather", "arguments": given}}
        for at, given in enumerate(arguments)
    ]
    messages = template.form.taken([USER, {"role": "assistant", "content": "", "tool_calls": calls}])
    whole, begun = template.rendering.render(messages, reply=False), template.rendering.render(messages[:1])
    opened = begun.rstrip().endswith(template.form.thinking_tags[0])
    text = whole[shared(whole, begun) :]
    return text.rpartition(template.form.thinking_tags[1])[2] if opened else split_thinking(text)[1]


def read(template: ChatTemplate, text: str, size: int) -> list[dict[str, Any]]:
    assert template.call_format is not None
    reader = CallReader(template.call_format, tools_by_name(TOOLS), "0")
    for at in range(0, len(text), size):
        reader.push(text[at : at + size])
    reader.finish()
    assert all(call.complete for call in reader.calls)
    return [call.arguments for call in reader.calls]


def of(name: str) -> ChatTemplate:
    tokenizer = byte_tokenizer()
    source = TEMPLATES[name].read_text()
    tokenizer.chat_template = {"default": CHATML, "tool_use": source} if name.endswith("tool_use") else source
    return ChatTemplate(tokenizer, frozenset({tokenizer.convert_tokens_to_ids("<|im_end|>")}), TOOLS)


def test_there_are_templates() -> None:
    assert len(TEMPLATES) > 60 and UNREAD.keys() <= TEMPLATES.keys()


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in UNREAD])
def test_what_a_template_writes_is_read_back(name: str) -> None:
    template = of(name)
    if not template.rendering.writes_tools and "weather" not in written(template, ARGUMENTS[:1]):
        pytest.skip("it writes no tools")
    one = any(part in name for part in ONE_CALL)
    given = [each for each in ARGUMENTS if name not in NO_QUOTES or "'" not in each.get("place", "")]
    for calls in [[each] for each in given] + ([] if one else [given[:3], given[-3:]]):
        text = written(template, calls)
        if "weather" not in text:
            pytest.skip("it writes tools, but no calls")
        for size in (len(text), *range(1, 8)):
            assert read(template, text, size) == calls, text


@pytest.mark.parametrize("name", UNREAD)
def test_templates_on_the_list_are_not_read(name: str) -> None:
    """A template that is read leaves the list."""
    template = of(name)
    with pytest.raises((ChatError, AssertionError)):
        assert read(template, written(template, ARGUMENTS[:1]), 9) == ARGUMENTS[:1]
