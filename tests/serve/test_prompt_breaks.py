"""A changed prompt of a known conversation is named in a header, the log, the metrics and the monitor's records."""

from __future__ import annotations

import logging
import tracemalloc
from functools import partial
from typing import Any

import pytest

from radixkv.engine.observers.request_recorder import RequestRecorder
from radixkv.serve import Settings
from radixkv.serve.break_index import BreakIndex
from radixkv.telemetry.recorder import Recorder
from tests.serve.served import ASKED, CHAT, Served, says, served, tokenizer


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


system, assistant, user = (partial(said, role) for role in ("system", "assistant", "user"))
SYSTEM = system("Be kind. Today is 2026-11-28.")
MORE = user("And where?")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("who", "where")]


def ask(server: Served, messages: Any, path: str = "/v1/chat/completions", **fields: Any) -> str | None:
    """Send a conversation; returns the part that the response names."""
    answer = server.post(path, {**CHAT, "max_tokens": 8, "messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    miss: str | None = answer.headers.get("X-RadixKV-Miss")
    return miss


def continued(*messages: Any) -> list[Any]:
    return [*messages, assistant("Me."), MORE]


FIRST = [SYSTEM, *ASKED]
SECOND = continued(*FIRST)
RUDE = [system("Be rude."), *SECOND[1:]]
CHANGES: dict[str, tuple[list[Any], list[Any], str, str]] = {
    "tools in another order": (SECOND, TOOLS[::-1], "tools[0]", "tools-order"),
    "another system prompt": (RUDE, TOOLS, "system", "system-changed"),
    "another reply": ([*FIRST, assistant("You."), MORE], TOOLS, "messages[2]", "message-changed"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    messages, tools, part, rule = CHANGES[name]
    caplog.set_level(logging.INFO, "radixkv.serve")
    with served(brain=says("Me.")) as server:
        for _ in range(2):
            assert ask(server, FIRST, tools=TOOLS) is None
        assert ask(server, [*SECOND, *continued(MORE)[1:]], tools=TOOLS) is None
        assert ask(server, messages, tools=tools) == part
        line = caplog.messages[-1]
        assert ask(server, messages, tools=tools) is None, "a repeat of the changed prompt is no break"
        assert ask(server, continued(*messages), tools=tools) is None
        metrics = server.client.get("/metrics").text
        server.service.conversations._index.breaks.check()
    kind = part.partition("[")[0].removesuffix("s")
    assert f" miss={part}" in line and "Today" not in line
    assert f'radixkv:prefix_breaks_total{{part="{kind}",rule="{rule}"}} 1.0' in metrics
    assert sum(" miss=" in each for each in caplog.messages) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"])
def test_each_protocol_has_the_header(path: str, stream: bool) -> None:
    with served(brain=says("Me.")) as server:
        for text, miss in (("Hello!", None), ("Hello again!", "messages[0]")):
            messages = continued(user(text))
            given = {"input": [{**each, "type": "message"} for each in messages]} if "responses" in path else {}
            assert ask(server, messages, path, stream=stream, **given) == miss


def test_other_questions_and_counted_prompts_are_no_breaks() -> None:
    with served(brain=says("Me.")) as server:
        for messages in ([assistant("Me")], FIRST, SECOND, [SYSTEM, MORE], [*FIRST, MORE]):
            assert ask(server, messages) is None
        body = {"model": "fake", "system": "Be rude.", "messages": SECOND[1:]}
        assert server.post("/v1/messages/count_tokens", body).status_code == 200
        assert ask(server, RUDE) == "system", "the counted prompt was no request"


CLOCKS = [system(f"It is 12:00:0{second}.") for second in (1, 2)]
LONG = [[user(f"Text {number}. {'Sum it up. ' * 90}")] for number in (1, 2)]
MAIN = [SYSTEM, NOTES := user("Notes."), *ASKED]
IN_TURN: dict[str, list[tuple[str | None, list[Any], str | None]]] = {
    # sessions, prompts, and the part that each changes
    "a clock before another question": [(None, [CLOCKS[0], *ASKED], None), (None, [CLOCKS[1], MORE], "system")],
    "an id in another question": [(None, each, None) for each in LONG],
    "a session that goes on": [("a", FIRST, None), ("a", RUDE, "system")],
    "a beginning that another session shares": [
        ("a", FIRST, None), ("b", continued(RUDE[0], *ASKED), None),
        ("a", [RUDE[0], *ASKED, assistant("Hi."), MORE], None)],
    "a session whose beginning another session sends": [
        ("a", MAIN, None), ("b", MAIN[:2], None), ("a", [RUDE[0], *MAIN[1:], MORE], "system")],
    "a title and a sub-agent of a session": [
        ("a", MAIN, None), ("a", [system("Write a title."), *ASKED], None),
        ("a", [system("Search."), NOTES, MORE], None), ("a", continued(*MAIN), None)],
    "the earlier prompt that shares most": [
        (None, SECOND, None), (None, RUDE, "system"),
        (None, continued(SYSTEM, user("Hello again!"), *SECOND[2:]), "messages[1]")],
}  # fmt: skip


@pytest.mark.parametrize("name", IN_TURN)
def test_each_prompt_in_turn_changes_a_part_or_none(name: str) -> None:
    index = BreakIndex(1 << 20)
    for session, messages, part in IN_TURN[name]:
        found = index.compared(None, messages, [], session).found
        assert (found and found.part) == part


@pytest.mark.parametrize("ids", ["abc", "abcdefghijkl"])
def test_equal_prompts_go_on_with_a_reply_each(ids: str) -> None:
    index, function = BreakIndex(1 << 20), {"name": "who", "arguments": "{}"}
    calls = [{**assistant(""), "tool_calls": [{"id": each, "function": function}]} for each in ids]
    for call in calls:
        index.answered(index.compared(None, FIRST, [], None).place, call)
    for call in calls:
        assert index.compared(None, [*FIRST, call, MORE], [], None).found is None


def test_namespaces_are_apart_and_memory_is_bounded() -> None:
    with served(brain=says("Me.")) as server:
        assert ask(server, SECOND, cache_salt="a") is None
        assert ask(server, RUDE, cache_salt="b") is None
        assert ask(server, RUDE, cache_salt="a") == "system"
    with served(Settings(history_bytes=0), brain=says("Me.")) as server:
        assert [ask(server, each) for each in (SECOND, RUDE)] == [None, None]
    tracemalloc.start()
    index = BreakIndex(400_000)
    for at in range(800):
        index.answered(index.compared(None, [user(f"Who is number {at}?")], None, f"{at}").place, assistant(f"{at}"))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used <= 440_000
    index = BreakIndex(40_000)
    for at in range(200):
        index.compared(at % 3, [SYSTEM, user(f"Who is number {at}?"), *SECOND[2:]], TOOLS, None)
        index.check()


@pytest.mark.parametrize("exposed", [True, False])
def test_the_record_has_the_part_and_the_texts_if_they_are_exposed(exposed: bool) -> None:
    changed = [system("Be kind. Today is\x1b 2026-11-29."), *SECOND[1:]]
    with served(brain=says("Me.")) as server:
        thread, core, decode = server.engine.client.thread, server.engine.client.core, tokenizer().decode
        cache_recorder = Recorder(decode=decode if exposed else None)
        cache_recorder.attach(core.cache)
        recorder = thread.call(lambda: RequestRecorder(core, cache_recorder, {})).result()
        ask(server, SECOND)
        assert ask(server, changed) == "system"
        first, second = thread.call(recorder.collect).result().requests
    assert (first.changed_part, first.cached_text) == (None, None)
    assert (second.changed_part, second.changed_rule, second.miss_reason) == ("system", "system-changed", "diverged")
    if exposed:
        own, cached = str(second.own_text), str(second.cached_text)
        at = next(at for at, (one, two) in enumerate(zip(own, cached, strict=False)) if one != two)
        assert own[at:].startswith("\\x1b 2026-11-29.") and cached[at:].startswith(" 2026-11-28.")
        assert own[:at].endswith("Be kind. Today is") and max(len(own), len(cached)) <= 80
    else:
        assert (second.own_text, second.cached_text) == (None, "")
