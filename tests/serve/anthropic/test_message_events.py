"""Messages and their events: blocks, their order, every required field, stop reasons, usage, pings and errors."""

from __future__ import annotations

import json

import pytest

from radixkv.chat.calls.block import CallDelta
from radixkv.chat.messages import ToolCall
from radixkv.serve.anthropic.events import BlockEvents, signature
from radixkv.serve.reply import Piece
from tests.serve.anthropic.messages import CALL, LOOK, MARK, assembled, events, message, prompt_tokens, stream
from tests.serve.served import fake_model, says, served


def test_a_stream_has_each_event_in_its_order_and_each_required_field():
    with served(brain=says(f"<think>\nhm\n</think>\n\nOK. {CALL}")) as server:
        found = stream(server, tools=[LOOK])
    kinds = [each["type"] for each in found]
    order = [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert order == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    started = [each["content_block"] for each in found if each["type"] == "content_block_start"]
    call_id = started[2].pop("id")
    assert started == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "name": "look", "input": {}},
    ]
    begun = found[0]["message"]
    assert set(begun) == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert (begun["type"], begun["role"], begun["model"]) == ("message", "assistant", "claude-any")
    assert begun["id"].startswith("msg_") and call_id
    assert prompt_tokens(begun["usage"]) > 20 and begun["usage"]["output_tokens"] == 0
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] > 20


def test_blocks_follow_the_order_in_which_the_model_wrote_them():
    call = ToolCall("c1", "look", {"path": "ä"})
    begun, ended = CallDelta(0, "c1", "look", '{"path"', opens=True), CallDelta(0, "c1", "look", ': "ä"}', call)
    blocks = BlockEvents(omits_thinking=False)
    written = blocks.pieces([Piece(content="a"), Piece(call=begun)])
    written += blocks.pieces([Piece(call=ended), Piece(content='b"\n')])
    written += blocks.pieces([Piece(thinking="x"), Piece(thinking="y"), Piece(content="c")]) + blocks.close()
    start = {
        "type": "message_start",
        "message": {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {}},
    }
    end = [{"type": "message_delta", "delta": {}, "usage": {}}, {"type": "message_stop"}]
    answer = assembled([start, *events(written.decode()), *end])
    assert answer["content"] == [
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"path": "ä"}},
        {"type": "text", "text": 'b"\n'},
        {"type": "thinking", "thinking": "xy", "signature": signature("xy")},
        {"type": "text", "text": "c"},
    ]
    assert not blocks.close() and signature("xy") != signature("x")


def test_thinking_can_be_sent_without_its_text():
    with served(brain=says("<think>\nsecret\n</think>\n\nSo.")) as server:
        omitted = {"type": "adaptive", "display": "omitted"}
        whole, streamed = message(server, thinking=omitted), stream(server, thinking=omitted)
        shown = message(server, thinking={"type": "enabled", "budget_tokens": 1024})
    assert shown["content"][0]["thinking"] == "secret"
    assert "secret" not in json.dumps(streamed)
    for answer in (whole, assembled(streamed)):
        assert answer["content"] == [
            {"type": "thinking", "thinking": "", "signature": signature("secret")},
            {"type": "text", "text": "So."},
        ]


@pytest.mark.parametrize("streamed", [True, False])
def test_the_reason_for_the_end(streamed: bool):
    with served(brain=says("One two three."), model=fake_model(max_length=60)) as server:

        def ended(**fields):
            answer = assembled(stream(server, **fields)) if streamed else message(server, **fields)
            text = "".join(each["text"] for each in answer["content"])
            return answer["stop_reason"], answer["stop_sequence"], text

        assert ended() == ("end_turn", None, "One two three.")
        assert ended(stop_sequences=["never", " three"]) == ("stop_sequence", " three", "One two")
        assert ended(max_tokens=1)[:2] == ("max_tokens", None)
        endless = {"ignore_eos": True, "max_tokens": 32000}  # more than the context has
        assert ended(**endless)[:2] == ("model_context_window_exceeded", None)


@pytest.mark.parametrize("streamed", [True, False])
def test_usage_counts_hits_and_with_cache_marks_what_was_written(streamed: bool):
    def usage(server, **fields):
        return (assembled(stream(server, **fields)) if streamed else message(server, **fields))["usage"]

    with served(brain=says("Fine.")) as server:
        first, second = usage(server), usage(server)
        marked = [{"role": "user", "content": [{"type": "text", "text": "Something else entirely.", **MARK}]}]
        third = usage(server, messages=marked)
    length = first["input_tokens"]
    assert (first["cache_creation_input_tokens"], first["cache_read_input_tokens"]) == (0, 0)
    assert (second["input_tokens"], second["cache_read_input_tokens"]) == (1, length - 1)
    assert third["input_tokens"] == 0 < third["cache_creation_input_tokens"]
    assert third["cache_read_input_tokens"] > 0  # the template's beginning
    assert first["output_tokens"] == second["output_tokens"] > 1
