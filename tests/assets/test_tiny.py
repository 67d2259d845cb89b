"""The bundled model, as plain transformers sees it: its answers, its tokenizer, its template, its size."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import radixkv
from radixkv.cli import demo_script
from tests.selection import mostly_long

FOLDER = Path(radixkv.__file__).parent / "assets" / "tiny"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are Mira."},
    {"role": "user", "content": "How is the weather in Oslo and in Lima?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
            for city in ("Oslo", "Lima")
        ],
    },
    {"role": "tool", "content": '{"city": "Oslo", "weather": "snowy", "temperature": 2}'},
    {"role": "tool", "content": '{"city": "Lima", "weather": "foggy", "temperature": 17}'},
    {"role": "assistant", "content": "It is snowy in Oslo, at 2 degrees. It is foggy in Lima, at 17 degrees."},
    {"role": "user", "content": "Thank you!"},
    {"role": "assistant", "content": "You are welcome!"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def reply(model: Any, tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None) -> str:
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=96)[0, ids.shape[1] :].tolist()
    assert out[-1] == tokenizer.eos_token_id, "the reply did not end"
    return str(tokenizer.decode(out[:-1]))


def test_a_conversation_is_answered_right(model, tokenizer):
    messages = [{"role": "system", "content": demo_script.SYSTEM}]
    for line in demo_script.CHAT:
        messages.append({"role": "user", "content": line.says})
        messages.append({"role": "assistant", "content": reply(model, tokenizer, messages)})
        assert messages[-1]["content"] == line.right


def test_a_persona_is_kept(model, tokenizer):
    pirate = [{"role": "system", "content": "You are Otto. You speak like a pirate."}]
    assert reply(model, tokenizer, [*pirate, {"role": "user", "content": "Who are you?"}]) == "Arr! I am Otto."
    plain = [{"role": "user", "content": "Who are you?"}]
    assert reply(model, tokenizer, plain) == "I am Radix, a very small language model."


@pytest.mark.parametrize(
    "customer",
    mostly_long(["Ada", "Cleo"], "Ada"),
)
def test_an_agent_calls_its_tools_and_answers_from_the_results(model, tokenizer, customer):
    messages = [{"role": "system", "content": demo_script.MANUAL}]
    for line in demo_script.CUSTOMERS[customer]:
        messages.append({"role": "user", "content": line.says})
        text = reply(model, tokenizer, messages, demo_script.TOOLS)
        while "<tool_call>" in text:
            calls = [json.loads(call.split("</tool_call>")[0]) for call in text.split("<tool_call>")[1:]]
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": call} for call in calls]})
            messages += [
                {"role": "tool", "content": json.dumps(demo_script.use_tool(call["name"], call["arguments"]))}
                for call in calls
            ]
            text = reply(model, tokenizer, messages, demo_script.TOOLS)
        messages.append({"role": "assistant", "content": text})
        assert text == line.right


@pytest.mark.parametrize(
    "text", ["Hello, Nora!", "  two  spaces\n\n\tand a tab ", "12 + 7 = 19; 6580", "日本語 🦜 é", '{"a": [1]}']
)
def test_the_tokenizer_gives_back_what_it_was_given(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_one_token_each(tokenizer):
    for control in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>", "<tool_call>", "</tool_call>"):
        assert len(tokenizer.encode(control)) == 1


@pytest.mark.parametrize("tools", [None, demo_script.TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("start", [0, 1], ids=["with system", "without system"])
def test_a_longer_history_begins_with_the_shorter_ones_rendering(tokenizer, tools, start):
    messages = MESSAGES[start:]
    render = lambda count: tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False)  # noqa: E731
    texts = [render(count) for count in range(1, len(messages) + 1)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
        assert len(longer) > len(shorter)


def test_a_prompt_for_a_reply_is_what_the_reply_is_appended_to(tokenizer):
    history = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    prompt = tokenizer.apply_chat_template(MESSAGES[:-1], add_generation_prompt=True, tokenize=False)
    assert history == f"{prompt}You are welcome!<|im_end|>\n"


def test_a_tool_call_is_rendered_as_the_model_writes_it(tokenizer):
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert (
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lima"}}\n</tool_call><|im_end|>\n'
        '<|im_start|>tool\n{"city": "Oslo"' in text
    )


def test_the_folder_is_small_and_says_how_to_decode():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 4_000_000
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["do_sample"] is False
    assert generation["eos_token_id"] == AutoTokenizer.from_pretrained(FOLDER).eos_token_id
    assert (FOLDER / "README.md").is_file()
