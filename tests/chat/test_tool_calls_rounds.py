"""A call, its result, and on: each turn begins with exactly the ids that were sampled, in each format of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from radixkv import Engine, SamplingParams, ToolResult
from tests.chat.tool_call_dialects import DIALECTS, TOOLS, Dialect
from tests.engine.fakes import FakeModel, check, make_engine

GREEDY = SamplingParams(temperature=0, max_tokens=2000)
CALLS = [("weather", {"city": 'Osl"o} [ARGS] </tool_call>', "days": [1, {"é": None}]}), ("now", {})]


@contextmanager
def speaking(dialect: Dialect, reply: Callable[[str], str]) -> Iterator[Engine]:
    tokenizer = dialect.tokenizer()
    model = FakeModel(tokenizer, len(tokenizer), 10_000, dialect.stops())
    engine, _ = make_engine(2000, 16, model=model, brain=dialect.brain(reply))
    with engine:
        yield engine
        check(engine)


@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize("name", DIALECTS)
def test_results_are_put_after_the_calls_as_they_were_sampled(name: str, history: str) -> None:
    dialect = DIALECTS[name]
    calls = CALLS[: dialect.most_calls]

    def reply(said: str) -> str:
        return "It is grey." if "grey" in said.rsplit("look", 1)[-1] else dialect.write(calls)

    with speaking(dialect, reply) as engine, engine.chat(tools=TOOLS, history=history) as chat:
        ids: set[str] = set()
        for _ in range(2):
            asked = chat.send("look", GREEDY)
            assert [(call.name, call.arguments) for call in asked.tool_calls] == calls
            assert (asked.text, asked.finish_reason) == ("", "stop")
            assert ids.isdisjoint(call.id for call in asked.tool_calls)
            ids.update(call.id for call in asked.tool_calls)
            sampled = chat.token_ids
            answer = chat.tool_results([ToolResult(call.id, "grey") for call in asked.tool_calls], GREEDY)
            assert (answer.text, answer.tool_calls) == ("It is grey.", ())
            assert chat.token_ids[: len(sampled)] == sampled
            assert answer.usage.cached_tokens == len(sampled) - 1
        assert len(ids) == 2 * len(calls)
        whole = engine.model.tokenizer.apply_chat_template(chat.history, tools=TOOLS, tokenize=False)
        assert engine.model.tokenizer.decode(chat.token_ids) == whole.removesuffix("\n")


@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
def test_a_tag_of_thinking_among_the_arguments_is_an_argument(thought: str, history: str) -> None:
    dialect = DIALECTS["Qwen"]
    call = ("weather", {"city": "a <think> b</think> c"})
    with speaking(dialect, lambda _: thought + dialect.write([call])) as engine:
        chat = engine.chat(tools=TOOLS, history=history)
        for _ in range(2):
            asked = chat.send("look", GREEDY)
            assert [(each.name, each.arguments) for each in asked.tool_calls] == [call]
            assert (asked.text, bool(asked.thinking)) == ("", bool(thought))
        said = engine.model.tokenizer.decode(chat.token_ids)
        assert said.count(dialect.write([call])) == 2  # no part of a call is taken for thinking that may go


@pytest.mark.parametrize("history", ["append", "template"])
def test_calls_that_a_template_would_not_write_in_one_turn_are_answered_all_the_same(history: str) -> None:
    """Llama's takes one call a turn; its models write several."""
    dialect = DIALECTS["Llama"]
    with speaking(dialect, lambda said: "Grey." if "ipython" in said else dialect.write(CALLS)) as engine:
        chat = engine.chat(tools=TOOLS, history=history)
        asked = chat.send("look", GREEDY)
        sampled = chat.token_ids
        answer = chat.tool_results([ToolResult(call.id, call.name) for call in asked.tool_calls], GREEDY)
        assert (answer.text, answer.usage.cached_tokens) == ("Grey.", len(sampled) - 1)
        behind = engine.model.tokenizer.decode(chat.token_ids[len(sampled) :])
        said = (
            "<|start_header_id|>ipython<|end_header_id|>\n\n" + call.name + "<|eot_id|>" for call in asked.tool_calls
        )
        assert behind.startswith("".join(said) + "<|start_header_id|>assistant")


def test_ids_of_calls_stay_apart_when_the_oldest_turns_are_dropped() -> None:
    dialect = DIALECTS["Qwen"]
    tokenizer = dialect.tokenizer()
    model = FakeModel(tokenizer, len(tokenizer), 1000, dialect.stops())
    engine, _ = make_engine(2000, 16, model=model, brain=dialect.brain(lambda _: dialect.write([("now", {})])))
    with engine, engine.chat(tools=TOOLS, overflow="drop_oldest") as chat:
        for _ in range(18):
            chat.send("look", SamplingParams(temperature=0, max_tokens=80))
            ids = [call["id"] for message in chat.history for call in message.get("tool_calls", ())]
            assert len(set(ids)) == len(ids)
        assert chat.turns < 18
