"""Messages and their events: blocks, their order, every required field, stop reasons, usage, pings and errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from radixkv.chat.calls.block import CallDelta
from radixkv.chat.messages import ToolCall
from radixkv.serve.anthropic.events import BlockEvents, signature
from radixkv.serve.reply import Piece
from tests.serve.anthropic.messages import BODY, CALL, LOOK, MARK, assembled, events, message, prompt_tokens, stream
from tests.serve.served import fake_model, hosted, says, served


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


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ("Hello there.", ["text"]),
        ("", []),
        (CALL, ["tool_use"]),
        (f"Two. {CALL}{CALL}", ["text", "tool_use", "tool_use"]),
        ("<think>\nlong thoughts\n</think>\n\nSo.", ["thinking", "text"]),
        (f"<think>\nhm\n</think>\n\n{CALL}", ["thinking", "tool_use"]),
    ],
)
def test_a_stream_and_a_whole_message_are_equal(said: str, kinds: list[str]):
    with served(brain=says(said)) as server:
        whole, streamed = message(server, tools=[LOOK]), assembled(stream(server, tools=[LOOK]))
    assert [each["type"] for each in whole["content"]] == kinds
    for each in (whole, streamed):
        del each["id"]
        assert prompt_tokens(each.pop("usage")) > 20
    assert whole == streamed
    assert whole["stop_reason"] == ("tool_use" if CALL in said else "end_turn")


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


@pytest.mark.parametrize("marks", [MARK, {}])
def test_counts_add_up_for_clients_that_keep_a_first_count_where_the_last_is_0(marks: dict[str, Any]):
    """As Claude Code reads a stream; else its context would seem to be filled twice."""
    with served(brain=says("Hi.")) as server:
        for _ in range(2):
            found = stream(server, **marks)
            first, last = found[0]["message"]["usage"], found[-2]["usage"]
            kept = {name: count if count > 0 else first[name] for name, count in last.items()}
            assert prompt_tokens(kept) == prompt_tokens(last) == prompt_tokens(first)
            assert kept["cache_read_input_tokens"] == last["cache_read_input_tokens"]


def test_an_error_in_the_middle_is_an_event():
    with hosted(fault=lambda chunks: 1 / 0 if chunks[0].start > 20 else None) as host:
        body = {**BODY, "stream": True, "ignore_eos": True}
        answer = httpx.post(f"{host.url}/v1/messages", json=body, timeout=20)
    found = events(answer.text)
    assert [each["type"] for each in found][-1] == "error" and found[0]["type"] == "message_start"
    assert found[-1]["error"]["type"] == "api_error"
    assert found[-1]["request_id"] == answer.headers["request-id"]
    assert "message_stop" not in answer.text
