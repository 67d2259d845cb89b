"""Compressed prefixes: requests after them, their ends, and all parts of an engine that leave them out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from radixkv import AsyncEngine, Engine, SamplingParams
from radixkv.cache.tokens import FIRST_PSEUDO
from radixkv.errors import (
    EngineClosed,
    InvalidInput,
    OutOfBlocks,
    PinBudgetExceeded,
    PrefixGone,
    PromptTooLong,
    RequestTimedOut,
    WeightsChanged,
)
from tests.cache.verbs import held
from tests.engine.fakes import VOCAB, FakeRunner, check, greedy_reply, make_engine

TEXT = [number % 47 for number in range(60)]
KEPT = TEXT[-40:]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(params=[{}, {"speculate": "tree"}, {"host_blocks": 40}], ids=["plain", "drafts", "host"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made, _ = make_engine(56, max_sequences=6, **request.param)
    with made:
        yield made
        check(made)


def replies(engine: Engine, prompts: Sequence[list[int]], count: int = 12, **options: Any) -> list[list[int]]:
    return [list(each.token_ids) for each in engine.generate(prompts, GREEDY.but(max_tokens=count), **options)]


def test_with_all_kv_the_answers_are_those_of_the_exact_prefix() -> None:
    """The first prompt after the prefix is a text, the second one has the same ids."""
    with Engine.load("tiny", dtype="float64", num_blocks=256, monitor=False) as engine:
        text, codec = "The sea is deep and the hills are high. " * 12, engine.model.codec
        ids, question = codec.encode(text), " What is high?"
        prefix = engine.compress(text, keep=1)
        after = codec.encode(question, add_special_tokens=False)
        options: dict[str, Any] = {"max_tokens": 20, "logprobs": 3, "ignore_eos": True, "seed": 3}
        each = [SamplingParams(n=2, **options), SamplingParams(temperature=0, stop=["e"], **options)]
        exact = engine.generate([[*ids, *after]] * 2, each)
        found = engine.generate([question, after], each, prefix=prefix)
        assert [one.token_ids for one in found] == [one.token_ids for one in exact]
        for one, other in zip(found, exact, strict=True):
            assert one.text == other.text and one.logprobs and other.logprobs
            assert np.allclose([x.chosen for x in one.logprobs], [x.chosen for x in other.logprobs], atol=1e-9, rtol=0)
        assert found[0].usage.cached_tokens >= prefix.tokens == prefix.slots
        half, before = engine.compress(ids, 0.5), engine.stats().cache.pinned_blocks
        assert half.bytes == prefix.bytes * half.slots // half.tokens and half.slots == round(half.tokens / 2)
        report = engine.audit(40)
        assert report.blocks >= 40 and not report.differ and str(report).endswith("compressed prefixes left out: 2")
        assert str(engine.probe(question, prefix=half)).startswith(
            f"{half.slots} of {half.slots + len(after)} tokens are cached, with "
            f"{half.slots} slots of a compressed prefix of {half.tokens} tokens"
        )
        engine.release_prefix(half)
        assert engine.stats().cache.pinned_blocks < before


def test_a_prefix_that_is_gone_names_the_way_back(engine: Engine) -> None:
    again = r"engine\.compress\(prefix\.text, keep=1\.0, method='h2o'"

    def release() -> None:
        engine.release_prefix(prefix)

    def forget() -> None:
        engine.client.thread.ask(lambda: engine.core.forget(WeightsChanged("by a reload")))

    def clear() -> None:
        engine.client.thread.ask(lambda: engine.core.clear_namespace(None))

    for drop in (release, forget, clear):
        prefix = engine.compress(TEXT, 1, method="h2o")
        assert replies(engine, [[1]], prefix=prefix) == [greedy_reply([*TEXT, 1], 12)]
        drop()
        with pytest.raises(PrefixGone, match=again):
            engine.generate([[1]], prefix=prefix)
        with pytest.raises(PrefixGone, match=again):
            engine.probe([1], prefix=prefix)
        assert not engine.stats().cache.pinned_blocks
    other, _ = make_engine()
    with other, pytest.raises(PrefixGone, match="another engine"):
        other.generate([[1]], prefix=engine.compress(TEXT))


def test_namespaces_have_prefixes_of_their_own(engine: Engine) -> None:
    ours, theirs = (engine.compress(TEXT, 2 / 3, namespace=name) for name in ("a", "b"))
    number = engine.client.inputs.namespaces.number
    assert ours.name == theirs.name and engine.client.prefixes.find(ours.name, number("a")) is ours
    assert engine.client.prefixes.find(ours.name, None) is engine.client.prefixes.find("x", number("a")) is None
    for wrong in ("b", None):
        with pytest.raises(InvalidInput, match="same namespace"):
            engine.generate([[1]], namespace=wrong, prefix=ours)
    engine.release_prefix(ours)
    assert replies(engine, [[1]], namespace="b", prefix=theirs) == [greedy_reply([*KEPT, 1], 12)]


Verb = Callable[[Engine], object]
CHAT = [{"role": "user", "content": "x"}]
REFUSED: list[tuple[str, dict[str, Any], Verb]] = [
    *(
        (r"keep=.*at most 1", {}, lambda engine, keep=keep: engine.compress(TEXT, keep))
        for keep in (float("nan"), 0, 1.5, -1, "x", True, None)
    ),
    ("timeout must be", {}, lambda engine: engine.compress(TEXT, timeout="soon")),  # type: ignore[arg-type]
    ("no prefixes", {"prefix_cache": False}, lambda engine: engine.compress(TEXT)),
    ("deterministic", {"deterministic": True}, lambda engine: engine.compress(TEXT)),
    ("two blocks", {}, lambda engine: engine.compress([1] * 7)),
    ("reconstruct, snapkv, h2o", {}, lambda engine: engine.compress(TEXT, method="recent")),
    ("reconstruct, snapkv, h2o", {}, lambda engine: engine.compress(TEXT, method=[])),  # type: ignore[arg-type]
    ("outside the vocabulary", {}, lambda engine: engine.generate([engine.compress(TEXT).ids])),
    ("outside the vocabulary", {}, lambda engine: engine.generate([[VOCAB]], prefix=engine.compress(TEXT))),
    ("empty", {}, lambda engine: engine.generate([[]], prefix=engine.compress(TEXT))),
    ("chat messages", {}, lambda engine: engine.generate([CHAT], prefix=engine.compress(TEXT))),
    (r"engine\.compress", {}, lambda engine: engine.generate([[1]], prefix="name")),  # type: ignore[arg-type]
    (
        "prompt_logprobs",
        {},
        lambda engine: engine.generate([[1]], SamplingParams(prompt_logprobs=1), prefix=engine.compress(TEXT)),
    ),
]


@pytest.mark.parametrize(("reason", "settings", "verb"), REFUSED)
def test_what_is_refused_is_refused_with_a_reason(reason: str, settings: dict[str, Any], verb: Verb) -> None:
    engine, _ = make_engine(**settings)
    with engine, pytest.raises(InvalidInput, match=reason):
        verb(engine)


def test_the_context_counts_positions_and_not_slots(engine: Engine) -> None:
    prefix, inputs = engine.compress(TEXT, 2 / 3), engine.client.inputs
    inputs._model.max_length = 100  # type: ignore[misc]
    assert inputs.request([1] * 31, SamplingParams(max_tokens=50), prefix=prefix).max_tokens == 9
    with pytest.raises(InvalidInput, match="no room"):
        inputs.request([1] * 40, prefix=prefix)


def test_past_text_leaves_it_out() -> None:
    with Engine.load("tiny", num_blocks=64, monitor=False, speculate="tree") as engine:
        engine.generate([range(300, 360)], GREEDY, prefix=engine.compress(range(100, 200)))
        index = engine.core.cache.past_text._index
        assert index.length >= 160 and index.tokens.max() < FIRST_PSEUDO


def test_threads_that_compress_one_text_get_one_prefix(engine: Engine) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: engine.compress(TEXT, 2 / 3), range(4)))
    assert len({id(each) for each in found}) == 1 and engine.stats().cache.pinned_blocks == 10


class Endless(FakeRunner):
    """Never ends to score."""

    def compression(self, tokens: np.ndarray, method: str) -> Any:
        made = super().compression(tokens, method)
        made.pieces = 1 << 30
        return made


def test_what_ends_early_leaves_no_pin() -> None:
    engine, _ = make_engine(runner_class=Endless)
    with engine:
        with pytest.raises(RequestTimedOut):
            engine.compress(TEXT, timeout=0.2)
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(AsyncEngine(engine).compress(TEXT), 0.2))
        assert not engine.stats().cache.pinned_blocks
        check(engine)
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(engine.compress, TEXT)
            while not engine.stats().cache.pinned_blocks:
                assert not made.done()
            engine.close()
            with pytest.raises(EngineClosed):
                made.result()


def test_a_full_pool_and_a_full_pin_budget_are_said() -> None:
    engine, _ = make_engine(24)
    with engine:
        with engine.warm(list(range(20)), pin=True), pytest.raises(PinBudgetExceeded):
            engine.compress(TEXT[:32], 1)
        ask = engine.client.thread.ask
        blocker = ask(lambda: held(engine.core.cache, [9] * 44))
        with pytest.raises(OutOfBlocks):
            engine.compress(TEXT[:48], 1)
        ask(blocker.close)
        assert not engine.stats().cache.pinned_blocks
        check(engine)


def test_a_request_that_needs_the_whole_pool_keeps_the_prefix() -> None:
    engine, _ = make_engine(24)
    with engine:
        prefix = engine.compress(TEXT[:42], 1)
        for token in (1, 2, 3):
            found = replies(engine, [[token] * 41], 9, prefix=prefix)
            assert found == [greedy_reply([*TEXT[:42], *[token] * 41], 9)]
        with pytest.raises(PromptTooLong, match="pinned"):
            replies(engine, [[2] * 41], 12, prefix=prefix)
