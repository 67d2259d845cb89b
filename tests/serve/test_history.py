"""The history index finds exactly the remembered replies, within a namespace, and keeps to its capacity."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.serve.history import HistoryIndex
from tests.serve.served import read_messages

WORDS = st.sampled_from(["", "a", "ab", "b"])
IDS = st.lists(st.integers(0, 3), min_size=1, max_size=6)
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CONVERSATIONS = st.lists(st.builds(said, st.sampled_from(["user", "assistant"]), WORDS), min_size=1, max_size=5)
ROOMS = st.tuples(st.sampled_from([None, "x", ("x", "y")]), st.sampled_from([None, TOOLS]))
ACTS = st.lists(st.tuples(st.booleans(), ROOMS, CONVERSATIONS, WORDS, IDS, IDS), max_size=25)


def frozen(messages: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((each["role"], each["content"]) for each in messages)


def said_before(
    truth: dict[Any, tuple[list[int], list[int]]], room: Any, messages: list[dict[str, Any]]
) -> dict[int, tuple[list[int], list[int]]]:
    """Return position -> (prompt, ids) of each known reply, from a plain dict of whole conversations."""
    keys = {at: (repr(room), frozen(messages[: at + 1])) for at in range(len(messages))}
    return {at: truth[key] for at, key in keys.items() if key in truth}


@settings(max_examples=60)
@given(acts=ACTS)
def test_what_is_found_is_what_was_remembered_of_these_very_messages(acts: list[Any]) -> None:
    index, truth = HistoryIndex(1 << 30), {}
    for remembers, room, messages, words, prompt, emitted in acts:
        namespace, tools = room
        if remembers:
            key = (repr(room), frozen([*messages, said("assistant", words)]))
            built_upon = any(
                known != key and known[0] == key[0] and known[1][: len(key[1])] == key[1] for known in truth
            )
            if key not in truth or not built_upon:
                truth[key] = (prompt, emitted)
            index.remember(namespace, messages, said("assistant", words), prompt, emitted, tools=tools)
        index.check()
        known = index.ids_for(namespace, messages, tools)
        expected = said_before(truth, room, messages)
        assert {at: list(ids) for at, ids in known.reply_ids.items()} == {at: ids for at, (_, ids) in expected.items()}
        assert known.messages == max(expected, default=-1) + 1
        last = expected.get(known.messages - 1, ([], []))
        assert list(known.ids) == last[0] + last[1]
        index.check()


@settings(max_examples=60)
@given(acts=ACTS, capacity=st.integers(0, 12_000))
def test_bytes_are_bounded_and_what_is_left_is_right(acts: list[Any], capacity: int) -> None:
    index, truth = HistoryIndex(capacity), {}
    for remembers, room, messages, words, prompt, emitted in acts:
        namespace, tools = room
        if remembers:
            key = (repr(room), frozen([*messages, said("assistant", words)]))
            truth.setdefault(key, []).append((prompt, emitted))
            index.remember(namespace, messages, said("assistant", words), prompt, emitted, tools=tools)
            index.check()
        known = index.ids_for(namespace, messages, tools)
        for at, ids in known.reply_ids.items():
            assert list(ids) in [emitted for _, emitted in truth[(repr(room), frozen(messages[: at + 1]))]]
        if known.messages:
            whole = truth[(repr(room), frozen(messages[: known.messages]))]
            assert list(known.ids) in [prompt + emitted for prompt, emitted in whole]
        index.check()


def test_what_conversations_share_is_stored_once() -> None:
    index = HistoryIndex(1 << 30)
    messages, ids = [said("user", "hello" * 1000)], list(range(10_000))
    for turn in range(20):
        reply = said("assistant", f"reply {turn}")
        index.remember("x", messages, reply, ids, [1, 2, 3])
        messages, ids = [*messages, reply, said("user", f"turn {turn}")], [*ids, 1, 2, 3, 7, 8, 9]
    assert index.stats.bytes < 90_000  # 5,000 characters, 10,000 ids of 4 bytes, and 40 nodes
    assert list(index.ids_for("x", messages).ids) == ids[:-3]
    index.check()


def test_the_oldest_conversation_goes_first_and_looking_one_up_keeps_it() -> None:
    index = HistoryIndex(14_000)
    opening, reply = said("user", "q" * 2000), said("assistant", "a")
    for namespace in range(3):
        index.remember(namespace, [opening], reply, [1], [2])
    assert index.stats.replies == 3
    assert index.ids_for(0, [opening, reply]).messages == 2
    index.remember(3, [opening], reply, [1], [2])
    index.check()
    assert [index.ids_for(namespace, [opening, reply]).messages for namespace in range(4)] == [2, 0, 2, 2]
    assert (index.stats.replies, index.stats.forgotten) == (3, 1)


def call(arguments: Any, call_id: str = "call_0_0") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def test_a_reply_comes_back_as_a_client_writes_it() -> None:
    """Empty fields do not count, nor does white space in a JSON object; thinking may be omitted."""
    index, asked = HistoryIndex(1 << 20), said("user", "Paris?")
    reply = {"role": "assistant", "content": "", "tool_calls": [call({"city": "Paris", "days": 2})]}
    index.remember("x", [asked], {**reply, "reasoning_content": "so"}, [1], [2])

    def found(**changes: Any) -> bool:
        sent = [asked, {**reply, **changes}]
        return index.ids_for("x", read_messages(sent)).messages == 2

    assert found() and found(content=None, refusal=None, annotations=[])
    assert found(tool_calls=[call('{"city":"Paris",  "days":2}')])
    assert found(reasoning_content="so") and found(reasoning_content=None)
    assert not found(reasoning_content="otherwise")
    assert not found(tool_calls=[call({"city": "Paris", "days": 3})])
    assert not found(tool_calls=[call({"days": 2, "city": "Paris"})])  # a template would render this differently
    assert not found(tool_calls=[call({"city": "Paris", "days": 2}, "call_9_9")])
    assert not found(tool_calls=[call('{"city": "Paris", "days": 2')])
    assert not found(content="Paris.") and not found(tool_calls=None)


@pytest.mark.parametrize(
    "arguments", ["[1,2]", "[1,2", "5", '"Paris"', '{"a":' * 200 + "1" + "}" * 200], ids=lambda text: text[:6]
)
def test_arguments_that_are_no_object_are_the_same_only_letter_by_letter(arguments: str) -> None:
    """A template writes such arguments unchanged, so other white space gives other tokens."""
    index, asked = HistoryIndex(1 << 20), said("user", "Paris?")

    def sent(arguments: str) -> list[Any]:
        return read_messages([asked, {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}])

    *messages, reply = sent(arguments)
    index.remember("x", messages, reply, [1], [2])
    assert index.ids_for("x", sent(arguments)).messages == 2
    for other in (arguments + "\n", f" {arguments}", arguments.replace(",", ", ") + " ", json.dumps(arguments)):
        assert index.ids_for("x", sent(other)).messages == 0
