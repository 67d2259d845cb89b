"""A tool call that a client sends back changed is rendered as sent: only the tokens of that reply miss."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from radixkv.serve.conversations import Conversations, Mode
from radixkv.serve.history import HistoryIndex, shared_length
from tests.chat.worlds import byte_tokenizer
from tests.serve.served import read_messages
from tests.serve.styles import QWEN, STYLES

TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATES = {"ChatML": STYLES["ChatML"], "Mistral": STYLES["Mistral"], "Qwen": QWEN}


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
