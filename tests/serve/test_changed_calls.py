"""A tool call that a client sends back changed is rendered as sent: only the tokens of that reply miss."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from radixkv.chat.calls.formats import HERMES
from radixkv.serve.conversations import Conversations, Mode
from radixkv.serve.history import HistoryIndex, shared_length
from tests.chat.worlds import byte_tokenizer
from tests.serve.served import fake_model, read_messages, served, tokenizer
from tests.serve.styles import QWEN, STYLES

TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATES = {"ChatML": STYLES["ChatML"], "Mistral": STYLES["Mistral"], "Qwen": QWEN}
OPENING = "<|im_start|>assistant\n"


def changed(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as Claude Code sends it back: with a default first, and the arguments in another order."""
    function = call["function"]
    arguments = function["arguments"]
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    other = {"replace_all": False, **dict(reversed(values.items()))}
    sent = json.dumps(other) if isinstance(arguments, str) else other
    return {**call, "function": {**function, "arguments": sent}}


def asks(number: int) -> str:
    arguments = {"path": f"file {number}", "old": f"word {number}", "new": "other word"}
    return f'<tool_call>\n{{"name": "edit", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize("mode", ["auto", "template"])
@pytest.mark.parametrize("style", TEMPLATES)
def test_the_history_finds_the_replies_before_and_after_a_changed_one(style: str, mode: Mode) -> None:
    reader = byte_tokenizer(TEMPLATES[style])
    stops = frozenset(reader.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    told = Conversations(reader, stops, HistoryIndex(1 << 20), mode)
    end = reader.convert_tokens_to_ids("<|im_end|>")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Edit the files."}]
    before, ids = array("i"), array("i")
    for turn in range(6):
        prompt = told.prompt("x", messages, TOOLS)
        if turn:
            wanted = len(before) if turn == 3 else len(before) + len(ids)  # turn 2's reply was changed
            assert shared_length(before + ids, prompt.ids) >= wanted - 1
            assert prompt.known == len(messages) - (3 if turn == 3 else 1)
        said = asks(turn) if style != "Mistral" else f"[TOOL_CALLS]{asks(turn)}"
        ids = array("i", [*reader.encode(said, add_special_tokens=False), end])
        before = prompt.ids
        arguments = json.loads(said.partition("\n")[2].partition("\n")[0])["arguments"]
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "edit", "arguments": arguments}}
        told.remember(prompt, {"role": "assistant", "content": "", "tool_calls": [call]}, ids)
        sent = changed(call) if turn == 2 else call
        reply = {"role": "assistant", "content": None, "tool_calls": [sent]}
        messages += read_messages([reply, {"role": "tool", "tool_call_id": call["id"], "content": f"ok {turn}"}])


def script(replies: list[str]) -> Callable[[list[int]], int]:
    """Return a brain that gives the next of these replies in each turn of a conversation."""
    opening = tokenizer().encode(OPENING, add_special_tokens=False)
    spoken = [[*tokenizer().encode(text, add_special_tokens=False), 2] for text in replies]

    def brain(tokens: list[int]) -> int:
        size = len(opening)
        starts = [at for at in range(size, len(tokens) + 1) if tokens[at - size : at] == opening]
        reply = spoken[len(starts) - 1]
        return reply[min(len(tokens) - starts[-1], len(reply) - 1)]

    return brain


def costs(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("changes", [{1}, {0}, {0, 1, 2, 3}])
def test_only_the_tokens_of_a_changed_reply_are_computed_again(changes: set[int]) -> None:
    said = [*(asks(number) for number in range(5)), "Done."]
    messages: list[Any] = [{"role": "user", "content": "Edit the files."}]
    with served(brain=script(said), num_blocks=2000, model=fake_model(max_length=8000)) as server:
        server.service.call_format = HERMES
        before = (0, 0, 1)
        for turn in range(len(said)):
            answer = server.chat(messages=messages, tools=TOOLS, max_tokens=200)
            prompt, cached, output = costs(answer["usage"])
            hits = before[0] + (0 if turn - 1 in changes else before[2])
            assert hits - 1 <= cached < before[0] + before[2]
            if turn - 1 in changes:
                sent = server.service.conversations.prompt(None, read_messages(messages), TOOLS)
                text = tokenizer().decode(list(sent.ids), skip_special_tokens=False)
                assert f'{{"replace_all": false, "new": "other word", "old": "word {turn - 1}"' in text
            before = (prompt, cached, output)
            message = answer["choices"][0]["message"]
            if turn == len(said) - 1:
                assert message["content"] == "Done."
                break
            (call,) = message["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"ok {turn}"}
            messages += [{**message, "tool_calls": [changed(call) if turn in changes else call]}, result]
