"""Compressed prefixes: requests after them, their ends, and all parts of an engine that leave them out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from radixkv import AsyncEngine, Engine, LogitsProcessor, SampleRow, SamplingParams
from radixkv.cache.block_events import BlockEvents
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
from tests.engine.fakes import FakeRunner, check, greedy_reply, make_engine

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


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_with_all_kv_the_answers_are_those_of_the_exact_prefix(kind: str) -> None:
    with Engine.load("tiny", dtype="float64", num_blocks=256, monitor=False) as engine:
        text, codec = "The sea is deep and the hills are high. " * 12, engine.model.codec
        ids, question = codec.encode(text), " What is high?"
        prefix = engine.compress(text if kind == "text" else ids, keep=1)
        after = codec.encode(question, add_special_tokens=False)
        options: dict[str, Any] = {"max_tokens": 20, "logprobs": 3, "ignore_eos": True, "seed": 3}
        each = [SamplingParams(n=2, **options), SamplingParams(temperature=0, stop=["e"], **options)]
        exact = engine.generate([[*ids, *after]] * 2, each)
        found = engine.generate([question if kind == "text" else after] * 2, each, prefix=prefix)
        assert [one.token_ids for one in found] == [one.token_ids for one in exact]
        for one, other in zip(found, exact, strict=True):
            assert one.text == other.text and one.logprobs and other.logprobs
            assert np.allclose([x.chosen for x in one.logprobs], [x.chosen for x in other.logprobs], atol=1e-9, rtol=0)
        assert found[0].usage.cached_tokens >= prefix.tokens == prefix.slots
        half, before = engine.compress(text, 0.5), engine.stats().cache.pinned_blocks
        assert half.bytes == prefix.bytes * half.slots // half.tokens and half.slots == round(half.tokens / 2)
        report = engine.audit(40)
        assert report.blocks >= 40 and not report.differ and str(report).endswith("compressed prefixes left out: 2")
        assert str(engine.probe(question, prefix=half)).startswith(
            f"{half.slots} of {half.slots + len(after)} tokens are cached, with "
            f"{half.slots} slots of a compressed prefix of {half.tokens} tokens"
        )
        engine.release_prefix(half)
        assert engine.stats().cache.pinned_blocks < before


def test_requests_in_parallel_share_it_and_no_other_request_reads_it(engine: Engine) -> None:
    prefix = engine.compress(TEXT, 2 / 3)
    prompts = [[number, 7, number] for number in range(20)]
    for _ in range(2):
        for before, options in ((KEPT, {"prefix": prefix}), (TEXT, {})):
            given = prompts if options else [[*TEXT, *each] for each in prompts]
            assert replies(engine, given, 40, **options) == [greedy_reply([*before, *each], 40) for each in prompts]
    assert engine.stats().preemptions and engine.stats().cache.evicted_blocks
    assert engine.compress(TEXT, 2 / 3) is engine.client.prefixes.find(prefix.name, None)
    with pytest.raises(InvalidInput, match="outside the vocabulary"):
        engine.generate([prefix.ids])


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


def test_a_request_that_waits_for_a_lost_prefix_gets_the_same_error() -> None:
    engine, runner = make_engine(64, max_sequences=1)
    with engine:
        prefix = engine.compress(TEXT, 2 / 3)
        request = engine.client.inputs.request([1], GREEDY, prefix=prefix)
        engine.release_prefix(prefix)
        engine.clear_cache()
        with pytest.raises(PrefixGone):
            engine.client.start(request).result()
        assert runner.tokens.max() < FIRST_PSEUDO, "an id of a compressed prefix was computed"


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


@pytest.mark.parametrize("keep", [float("nan"), 0, 1.5, -1, "x", True, None])
def test_a_share_is_above_0_and_at_most_1(keep: Any) -> None:
    engine, _ = make_engine()
    with engine, pytest.raises(InvalidInput, match=r"keep=.*at most 1"):
        engine.compress(TEXT, keep)


def test_where_nothing_can_be_compressed_it_is_said() -> None:
    for settings, reason in (({"prefix_cache": False}, "no prefixes"), ({"deterministic": True}, "deterministic")):
        engine, _ = make_engine(**settings)  # type: ignore[arg-type]
        with engine, pytest.raises(InvalidInput, match=reason):
            engine.compress(TEXT)
    engine, _ = make_engine()
    with engine:
        for wrong, options in (([1] * 7, {}), (TEXT, {"method": "recent"}), (TEXT, {"method": []})):
            with pytest.raises(InvalidInput, match=r"two blocks|reconstruct, snapkv, h2o"):
                engine.compress(wrong, **options)
        prefix = engine.compress(TEXT)
        for prompt, params, reason in (
            ([1], SamplingParams(prompt_logprobs=1), "prompt_logprobs"),
            ([], GREEDY, "empty"),
            ([{"role": "user", "content": "x"}], GREEDY, "chat messages"),
        ):
            with pytest.raises(InvalidInput, match=reason):
                engine.generate([prompt], params, prefix=prefix)
        with pytest.raises(InvalidInput, match=r"engine\.compress"):
            engine.generate([[1]], prefix=prefix.name)  # type: ignore[arg-type]


class Histories(LogitsProcessor):
    """Records the histories that it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], int]] = []

    def applies(self, params: SamplingParams) -> bool:
        return True

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        self.seen += [(list(row.history), row.prompt_length) for row in rows]


def test_sampling_sees_the_text_after_the_prefix_only() -> None:
    processor = Histories()
    engine, _ = make_engine(logits_processors=[processor])
    with engine:
        prefix = engine.compress(TEXT)
        params = GREEDY.but(repetition_penalty=1.5, min_tokens=3, max_tokens=4)
        reply = engine.generate([[5, 6]], params, prefix=prefix)[0].token_ids
    assert processor.seen == [([5, 6, *reply[:count]], 2) for count in range(4)]


def test_the_context_counts_positions_and_not_slots() -> None:
    engine, _ = make_engine()
    with engine:
        prefix = engine.compress(TEXT, 2 / 3)
        limit = 100 - prefix.tokens
        inputs = engine.client.inputs
        inputs._model.max_length = 100  # type: ignore[misc]
        assert inputs.request([1] * (limit - 9), SamplingParams(max_tokens=50), prefix=prefix).max_tokens == 9
        with pytest.raises(InvalidInput, match="no room"):
            inputs.request([1] * limit, prefix=prefix)


def test_threads_that_compress_one_text_get_one_prefix(engine: Engine) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: engine.compress(TEXT, 2 / 3), range(4)))
    assert len({id(each) for each in found}) == 1 and engine.stats().cache.pinned_blocks == 10
    assert asyncio.run(_compressed(engine)) is found[0]


async def _compressed(engine: Engine) -> Any:
    return await AsyncEngine(engine).compress(TEXT, 2 / 3)


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
            asyncio.run(asyncio.wait_for(_compressed(engine), 0.2))
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
        stream = engine.submit([9] * 28, GREEDY.but(max_tokens=16))
        with pytest.raises((OutOfBlocks, PinBudgetExceeded)):
            engine.compress(TEXT[:48], 1)
        stream.result()
        check(engine)
        assert not engine.stats().cache.pinned_blocks


def test_a_request_that_needs_the_whole_pool_keeps_the_prefix() -> None:
    engine, _ = make_engine(24)
    with engine:
        prefix = engine.compress(TEXT[:42], 1)
        for token in (1, 2, 3):
            found = replies(engine, [[token] * 41], 9, prefix=prefix)
            assert found == [greedy_reply([*TEXT[:42], *[token] * 41], 9)]
        with pytest.raises(PromptTooLong, match="pinned"):
            replies(engine, [[2] * 41], 12, prefix=prefix)


def test_events_and_past_text_leave_it_out() -> None:
    with Engine.load("tiny", num_blocks=64, monitor=False, speculate="tree") as engine:
        events = engine.client.thread.ask(lambda: BlockEvents(engine.core.cache, lambda namespace: None))
        prefix = engine.compress(list(range(100, 200)))
        engine.generate([list(range(300, 360))], GREEDY, prefix=prefix)
        stored = engine.client.thread.ask(events.take).stored
        assert stored and max(max(each.tokens) for each in stored) < FIRST_PSEUDO
        engine.client.thread.ask(events.check)
        index = engine.core.cache.past_text._index
        assert index.length >= 160 and index.tokens.max() < FIRST_PSEUDO
