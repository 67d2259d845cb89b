"""Logs whose lines repeat a growing conversation, AIPerf's delays, and Bailian's seconds and sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv_traces.formats import ChatRequest, TraceError, TraceRequest, open_trace
from radixkv_traces.simulate import replay
from radixkv_traces.text_blocks import text_blocks
from radixkv_traces.workload import prepare

SYSTEM = {"role": "system", "content": "You answer questions about a garden. " * 12}


def conversation(turns: int, topic: str = "roses") -> list[dict[str, Any]]:
    """Messages of so many turns, with all answers."""
    messages = [SYSTEM]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {turn} about {topic}: how deep do I plant it?"})
        messages.append({"role": "assistant", "content": f"Answer {turn}: as deep as its pot, and water it well."})
    return messages


def read(path: Path, rows: list[dict[str, Any]], format: str = "auto") -> list[Any]:
    path.write_text("\n".join(map(json.dumps, rows)))
    return list(open_trace(path, format))


def prompts(found: list[ChatRequest]) -> list[tuple[str, int, int]]:
    return [(each.session, each.turn, len(each.messages)) for each in found]


ROWS = [conversation(turn + 1)[:-1] for turn in range(6)]  # each ends with a question


@pytest.mark.parametrize("more", [{"session_id": "s", "output_length": 20}, {"session_id": "s"}, {}])
def test_six_rows_of_one_growing_session_are_six_requests(tmp_path: Path, more: dict[str, Any]) -> None:
    found = read(tmp_path / "log", [{**more, "messages": row} for row in ROWS])
    session = "s" if more else "line 1"
    assert prompts(found) == [(session, turn, 2 * turn) for turn in range(1, 7)]
    assert {each.output_length for each in found} == {more.get("output_length", 0)}
    blocks = prepare(text_blocks(found, 16), 16)
    whole = prepare(text_blocks(read(tmp_path / "whole", [{"messages": ROWS[-1]}]), 16), 16)
    assert [each.input_length for each in blocks.requests] == [each.input_length for each in whole.requests]
    rate = replay(blocks, blocks.unique_blocks).token_hit_rate
    assert rate == replay(whole, whole.unique_blocks).token_hit_rate
    assert 0.7 < rate < 0.8  # it was above 0.9, because each row counted all earlier turns again


def test_logs_of_two_conversations_stay_apart(tmp_path: Path) -> None:
    other = [conversation(turn + 1, "beans")[:-1] for turn in range(2)]
    rows = [ROWS[0], other[0], ROWS[1], other[1]]
    found = read(tmp_path / "log", [{"messages": row} for row in rows])
    assert prompts(found) == [("line 1", 1, 2), ("line 2", 1, 2), ("line 1", 2, 4), ("line 2", 2, 4)]


def test_a_retry_is_one_request_and_separate_conversations_are_whole(tmp_path: Path) -> None:
    retried = read(tmp_path / "log", [{"messages": ROWS[1]}, {"messages": ROWS[1]}])
    assert prompts(retried) == [("line 1", 1, 2), ("line 1", 2, 4), ("line 1", 2, 4)]
    alike = [{"messages": conversation(2)}, {"messages": [*conversation(1), {"role": "user", "content": "Why?"}]}]
    assert prompts(read(tmp_path / "data", alike)) == [
        ("line 1", 1, 2), ("line 1", 2, 4), ("line 2", 1, 2), ("line 2", 2, 4),
    ]  # fmt: skip


def test_an_edited_answer_in_a_named_session_is_one_new_request(tmp_path: Path) -> None:
    edited = [*ROWS[1]]
    edited[2] = {"role": "assistant", "content": "Another answer."}
    found = read(tmp_path / "log", [{"session": "s", "messages": row} for row in (ROWS[0], ROWS[1], edited)])
    assert prompts(found) == [("s", 1, 2), ("s", 2, 4), ("s", 2, 4)]
    assert found[2].messages[2]["content"] == "Another answer."


def test_delays_follow_the_preceding_request_of_their_session(tmp_path: Path) -> None:
    rows = [
        {"session_id": session, "output_length": 9, "delay": delay, "messages": ROWS[turn]}
        for turn, delay in ((0, None), (1, 500), (2, 700))
        for session in ("a", "b")
    ]
    assert [each.timestamp for each in read(tmp_path / "log", rows)] == [0.0, 0.0, 500.0, 500.0, 1200.0, 1200.0]
    blocks = [
        {"session_id": "a", "input_length": 9, "output_length": 1, "hash_ids": [1]},
        {"session_id": "a", "delay": 40, "input_length": 9, "output_length": 1, "hash_ids": [1]},
    ]
    assert [each.timestamp for each in read(tmp_path / "blocks", blocks)] == [0.0, 40.0]
    with pytest.raises(TraceError, match="delay needs a session"):
        read(tmp_path / "log", [{"delay": 5, "output_length": 9, "messages": ROWS[0]}])


BAILIAN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.25, "turn": 1, "type": "text"},
    {"chat_id": 2, "parent_chat_id": -1, "timestamp": 62, "turn": 1, "type": "text"},
    {"chat_id": 3, "parent_chat_id": 1, "timestamp": 90.5, "turn": 2, "type": "text"},
    {"chat_id": 4, "parent_chat_id": 3, "timestamp": 120, "turn": 3, "type": "text"},
    {"chat_id": 9, "parent_chat_id": 8, "timestamp": 121, "turn": 4, "type": "text"},  # its parent is not in the file
]


def test_bailians_times_are_seconds_and_its_sessions_are_chains_of_chats(tmp_path: Path) -> None:
    rows = [{**row, "input_length": 20, "output_length": 5, "hash_ids": [7, 8]} for row in BAILIAN]
    found: list[TraceRequest] = read(tmp_path / "trace", rows)
    assert [each.timestamp for each in found] == [61250.0, 62000.0, 90500.0, 120000.0, 121000.0]
    assert [each.session for each in found] == ["1", "2", "1", "1", "8"]
    assert {each.block_tokens for each in found} == {16}
    with pytest.raises(TraceError, match="chat_id: missing"):
        read(tmp_path / "trace", [*rows, {name: rows[0][name] for name in rows[0] if name != "chat_id"}])


def test_a_broken_line_names_its_column_once(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(json.dumps({"messages": ROWS[0]}) + '\n\n{"messages":\n')
    with pytest.raises(TraceError) as caught:
        list(open_trace(tmp_path / "trace"))
    assert str(caught.value).endswith("trace:3: not JSON: Expecting value, at column 13")
