"""Chat sessions on a scripted model: appended turns, cache hits, and undone turns."""

from __future__ import annotations

import json

import pytest

from radixkv import SamplingParams, ToolCall, ToolResult
from radixkv.errors import (
    ChatError,
    ContextOverflow,
    EngineClosed,
    InvalidInput,
    RequestCancelled,
    RequestFailed,
    SessionClosed,
)
from tests.chat.worlds import CHATML, byte_tokenizer, chat_engine, rendered
from tests.engine.fakes import FakeModel, check, make_engine

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]


def test_turns_hit_all_but_the_last_sampled_token_of_what_was_there():
    with chat_engine() as engine, engine.chat("Be brief.") as chat:
        before: list[int] = []
        for turn in range(15):
            reply = chat.send(f"hello number {turn}")
            assert reply.text == f"You said hello number {turn}!"
            assert reply.usage.cached_tokens == max(len(before) - 1, 0)
            assert chat.token_ids[: len(before)] == before
            before = chat.token_ids
        assert before == rendered(engine, chat.history)
        assert engine.stats().computed_tokens == len(before) - 1
        check(engine)


def test_streaming_gives_the_reply_piece_by_piece():
    with chat_engine() as engine, engine.chat() as chat:
        stream = chat.stream("ünïcödé 🎈")
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == stream.reply.text == "You said ünïcödé 🎈!"
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == stream.reply.token_ids
        assert chunks[-1].finish_reason == "stop"
        assert chat.turns == 1


def test_a_stream_that_is_closed_or_left_is_undone():
    with chat_engine() as engine, engine.chat() as chat:
        chat.send("one")
        before = (chat.history, chat.token_ids)
        stream = chat.stream("two " * 40)
        next(iter(stream))
        stream.close()
        assert (chat.history, chat.token_ids) == before
        left = chat.stream("three " * 40)
        next(iter(left))
        assert chat.send("four").text == "You said four!"
        with pytest.raises(RequestCancelled):
            left.wait()
        assert [message["content"] for message in chat.history if message["role"] == "user"] == ["one", "four"]


def test_tool_calls_and_their_results():
    def reply(text: str) -> str:
        if text.startswith("{"):
            return f"It is {json.loads(text)['sky']}."
        calls = [{"name": "weather", "arguments": {"city": city}} for city in text.split(",")]
        return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)

    with chat_engine(reply) as engine, engine.chat("Look it up.", tools=TOOLS) as chat:
        asked = chat.send("Paris,Oslo")
        assert asked.text == ""
        assert asked.tool_calls == (
            ToolCall("call_0_0", "weather", {"city": "Paris"}),
            ToolCall("call_0_1", "weather", {"city": "Oslo"}),
        )
        before = chat.token_ids
        for wrong in ([], [ToolResult("call_0_0", "")], [ToolResult("a", ""), ToolResult("b", "")]):
            with pytest.raises(InvalidInput, match="each need one result"):
                chat.tool_results(wrong)
        with pytest.raises(InvalidInput, match="JSON"):
            chat.tool_results([ToolResult("call_0_0", object()), ToolResult("call_0_1", "")])
        answer = chat.tool_results([ToolResult("call_0_1", {"sky": "grey"}), ToolResult("call_0_0", {"sky": "blue"})])
        assert answer.text == "It is grey."
        assert answer.usage.cached_tokens == len(before) - 1
        assert chat.token_ids == rendered(engine, chat.history, TOOLS)
        assert [message["role"] for message in chat.history] == [
            "system",
            "user",
            "assistant",
            "tool",
            "tool",
            "assistant",
        ]
        assert chat.history[3] == {
            "role": "tool",
            "tool_call_id": "call_0_0",
            "name": "weather",
            "content": '{"sky": "blue"}',
        }
        with pytest.raises(InvalidInput, match="no tool call"):
            chat.tool_results([])
        with pytest.raises(InvalidInput, match="answers tool calls"):
            chat.edit(2, "x")


def test_forks_share_the_past_and_part_ways():
    with chat_engine() as engine, engine.chat("You count.") as chat:
        chat.send("one")
        past = chat.token_ids
        agents = chat.fork(8)
        streams = [agent.stream(f"task {n}") for n, agent in enumerate(agents)]  # eight at once
        for n, stream in enumerate(streams):
            assert stream.wait().text == f"You said task {n}!"
            assert stream.reply.usage.cached_tokens >= len(past) - 1  # more if another's "task" was there before
        assert chat.token_ids == past
        assert [len(agent.history) for agent in agents] == [5] * 8
        for agent in agents:
            agent.close()
        assert chat.send("two").usage.cached_tokens >= len(past) - 1
        with pytest.raises(InvalidInput, match="n must be an int >= 1"):
            chat.fork(0)


def test_rewinding_forgets_turns():
    with chat_engine() as engine, engine.chat() as chat:
        states = [(chat.history, chat.token_ids)]
        for text in ("one", "two", "three"):
            chat.send(text)
            states.append((chat.history, chat.token_ids))
        chat.rewind()
        assert (chat.history, chat.token_ids) == states[2]
        chat.rewind(2)
        assert (chat.history, chat.token_ids) == states[0]
        chat.send("one")
        assert (chat.history, chat.token_ids) == states[1]
        check(engine)


def test_editing_replaces_a_turn_and_what_followed():
    with chat_engine() as engine, engine.chat() as chat:
        for text in ("one", "two", "three"):
            chat.send(text)
        start = len(rendered(engine, chat.history[:2]))
        reply = chat.edit(2, "zwei")
        assert reply.text == "You said zwei!"
        assert reply.usage.cached_tokens >= start
        assert [message["content"] for message in chat.history] == ["one", "You said one!", "zwei", "You said zwei!"]
        assert chat.token_ids == rendered(engine, chat.history)
        check(engine)


@pytest.mark.parametrize("how", ["rewind", "edit", "close"])
def test_dead_branches_are_the_first_to_be_evicted(how):
    with chat_engine(num_blocks=50) as engine:
        other, chat = engine.chat(), engine.chat()
        other.send("the other one, " * 10)
        chat.send("a beginning")
        kept = chat.token_ids
        chat.send("a long second turn, " * 8)
        dead = chat.token_ids
        if how == "rewind":
            chat.rewind()
        elif how == "edit":
            chat.edit(2, "better")
        else:
            chat.close()
        assert engine.stats().cache.query_tokens == engine.stats().prompt_tokens  # marking is no look-up
        engine.warm([1] * 300)
        assert engine.probe(other.token_ids).matched == len(other.token_ids) - 1
        assert engine.probe(dead).matched < len(dead) - 100
        if how != "close":
            assert engine.probe(kept).matched >= len(kept) - 1


def test_a_full_context_drops_the_oldest_turns():
    with chat_engine(max_length=600) as engine, engine.chat("Sys.", overflow="drop_oldest") as chat:
        hits = 0
        for turn in range(30):
            before = chat.token_ids
            reply = chat.send(f"message {turn}")
            assert reply.text == f"You said message {turn}!"
            assert len(chat.token_ids) <= 600
            assert chat.token_ids == rendered(engine, chat.history)
            hits += reply.usage.cached_tokens == len(before) - 1
        assert chat.history[0] == {"role": "system", "content": "Sys."}
        assert chat.history[-2]["content"] == "message 29"
        assert hits >= 20  # dropping leaves room, so most turns still hit everything
        chat.rewind()
        assert chat.token_ids == rendered(engine, chat.history)
        with pytest.raises(ContextOverflow):
            chat.send("z" * 700)


def test_a_turn_that_fails_changes_nothing():
    def fault(chunks):
        if any(len(chunk.tokens) > 40 for chunk in chunks):
            raise MemoryError("too much")

    with chat_engine(fault=fault) as engine, engine.chat() as chat:
        chat.send("one")
        before = (chat.history, chat.token_ids)
        for fails in (lambda: chat.send("x" * 50), lambda: list(chat.stream("x" * 50)), lambda: chat.edit(1, "x" * 50)):
            with pytest.raises(RequestFailed):
                fails()
            assert (chat.history, chat.token_ids) == before
        assert chat.send("two").usage.cached_tokens == len(before[1]) - 1
        check(engine)


def test_closed_sessions_and_engines_refuse():
    with chat_engine() as engine:
        chat, other = engine.chat(), engine.chat()
        chat.send("one")
        chat.close()
        chat.close()
        for call in (
            lambda: chat.send("x"),
            chat.rewind,
            chat.fork,
            lambda: chat.save("x"),
            lambda: chat.tool_results([]),
        ):
            with pytest.raises(SessionClosed):
                call()
        assert len(chat.history) == 2
    with pytest.raises(EngineClosed):
        other.send("x")
    other.close()


@pytest.mark.parametrize(
    ("reply", "thinking", "text"),
    [
        ("<think>hm</think>Yes. END of story", "hm", "Yes. "),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call> So END tail', "", "So"),
        ("<think>the END is far</think>Yes.", "the", ""),
    ],
)
def test_a_stop_string_is_never_part_of_a_reply_with_thinking_or_tool_calls(reply, thinking, text):
    with chat_engine(lambda _: reply) as engine, engine.chat(tools=[{"name": "f"}], history="append") as chat:
        got = chat.send("x", SamplingParams(stop=["of", "END"], temperature=0))
        assert (got.thinking, got.text, got.finish_reason) == (thinking, text, "stop")
        assert chat.history[-1]["content"] == text


def test_what_is_wrong_with_a_call_is_named_and_changes_nothing():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    with chat_engine(lambda _: call) as engine, engine.chat(tools=[{"name": "f"}]) as chat:
        chat.send("x")
        calls = [
            lambda: chat.send("x", {"temperature": 0}),
            lambda: chat.send("x", {}),
            lambda: chat.send(""),
            lambda: chat.send("x", SamplingParams(n=2)),
            lambda: chat.send("\ud800"),
            *(lambda n=n: chat.fork(n) for n in ("2", 1.5, True, 0)),
            *(lambda n=n: chat.rewind(n) for n in ("1", 1.0, None, 0)),
            *(lambda n=n: chat.edit(n, "x") for n in ("1", 1.0, None, -1, 0)),
            lambda: chat.tool_results(["x"]),
            lambda: chat.tool_results(None),
            lambda: engine.chat(messages=["hi"]),
            lambda: engine.chat(messages=3),
            lambda: engine.chat(tools=5),
            lambda: engine.chat(tools=[print]),
        ]
        for wrong in calls:
            with pytest.raises(InvalidInput):
                wrong()
        assert chat.turns == 1
        assert engine.stats().requests == 1
        assert chat.tool_results([ToolResult("call_0_0", 1)]).tool_calls


def test_models_without_a_template_and_messages_that_one_refuses_are_told():
    for model in (FakeModel(), FakeModel(byte_tokenizer(None))):
        engine, _ = make_engine(model=model)
        with engine, pytest.raises(ChatError, match="no chat template"):
            engine.chat()
    refusing = CHATML + "{{ raise_exception('no third turn') if messages | length > 3 }}"
    with chat_engine(template=refusing) as engine, pytest.raises(ChatError, match="no third turn"):
        engine.chat(messages=[{"role": "user", "content": "x"}] * 4).send("y")
