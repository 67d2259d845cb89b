"""Templates that do not write tools: the prompt lists them, and calls and results are text."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from radixkv import SamplingParams, ToolResult, Usage
from radixkv.chat.calls.formats import HERMES
from radixkv.chat.calls.reader import split_calls
from radixkv.chat.constrained import CallRule, constrained
from radixkv.chat.template import ChatTemplate
from tests.chat.matched import drawn
from tests.chat.worlds import THINKING, byte_tokenizer, chat_engine
from tests.selection import mostly_long

# Refuses system prompts, and turns that do not alternate, as Gemma's.
GEMMA = """{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Writes a system prompt, and no other roles than these three.
PLAIN = """{%- for m in messages if m.role in ('system', 'user', 'assistant') %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {"thinking": THINKING, "Gemma": GEMMA, "plain": PLAIN}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": CITY}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>'
GREEDY = SamplingParams(temperature=0, max_tokens=200)


def reply(message: str) -> str:
    if "tool_response" in message:
        return "It is grey." if "grey" in message else "No."
    return f"Let me see.\n{CALL}" if message.endswith("Weather?") else "Hello!"


def _total(usage: Usage) -> int:
    return usage.prompt_tokens + usage.output_tokens


@pytest.mark.parametrize("history", ["auto", "template"])
@pytest.mark.parametrize("template", mostly_long(TEMPLATES, "Gemma"))
def test_a_session_calls_tools(template: str, history: Any) -> None:
    with chat_engine(reply, template=TEMPLATES[template]) as engine:
        system = None if template == "Gemma" else "Be brief."
        with engine.chat(system, tools=[LOOK], history=history) as chat:
            asked = chat.send("Weather?", GREEDY)
            [call] = asked.tool_calls
            assert (asked.text, call.name, call.arguments) == ("Let me see.", "look", {"city": "Oslo"})
            told = chat.tool_results([ToolResult(call.id, {"sky": "grey"})], GREEDY)
            assert told.text == "It is grey." and told.usage.cached_tokens == _total(asked.usage) - 1
            assert chat.send("Hi", GREEDY).text == "Hello!"
            text = engine.model.tokenizer.decode(chat.token_ids)
        assert json.dumps(LOOK) in text and (system is None or f"{system}\n\n# Tools" in text)
        result = '<tool_response>\n{"sky": "grey"}\n</tool_response>'
        assert f"{CALL}<|im_end|>\n<|im_start|>user\n{result}<|im_end|>" in text


def test_a_rendered_history_has_the_calls_and_results_as_text() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "grey"},
        {"role": "tool", "tool_call_id": "c2", "content": "cold"},
        {"role": "user", "content": "And?"},
    ]
    tokenizer = byte_tokenizer(GEMMA)
    template = ChatTemplate(tokenizer, frozenset({tokenizer.eos_token_id}), [LOOK])
    first, said, told, begun = template.rendering.render(messages).split("<|im_start|>")[1:]
    assert first.startswith("user\n# Tools\n") and first.endswith("\n\nWeather?<|im_end|>\n")
    assert said == f"assistant\nLet me see.\n{CALL}<|im_end|>\n"
    results = "\n".join(f"<tool_response>\n{each}\n</tool_response>" for each in ("grey", "cold"))
    assert told == f"user\n{results}\nAnd?<|im_end|>\n" and begun == "assistant\n"


@pytest.mark.parametrize("template", TEMPLATES)
def test_required_calls_are_constrained(template: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[template])
    chat = ChatTemplate(tokenizer, frozenset({tokenizer.eos_token_id}), [LOOK])
    params = constrained(SamplingParams(), chat, CallRule(required=True, parallel=False), "over")
    for seed in range(3):
        text = drawn(tokenizer, chat.stop_ids, params, seed)
        rest, [call] = split_calls(text or "", HERMES, {"look": {}}, "0")
        assert rest == "" and call.name == "look"
        jsonschema.validate(call.arguments, CITY)
