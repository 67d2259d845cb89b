"""A caller's arguments, or a fault of one request, end that request at most; other requests are not affected."""

from __future__ import annotations

import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from radixkv import SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.request import SAMPLED, Request, Stream
from radixkv.engine.steps import Halves
from radixkv.errors import DeviceLost, EngineClosed, InvalidInput, RequestCancelled, RequestFailed
from radixkv.models.loaded import SequenceInput
from tests.chat.worlds import chat_engine
from tests.engine.fakes import VOCAB, FakeModel, check, greedy_reply, make_engine
from tests.selection import mostly_long

LONG = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


class Letters:
    """A tokenizer that cannot decode 9, 48, as a slow one cannot decode ids beyond its vocabulary."""

    chat_template = None

    def encode(self, text: str, **options: Any) -> list[int]:
        return [1]

    def decode(self, ids: list[int], **options: Any) -> str:
        if ids[:2] == [9, 48]:
            raise IndexError("piece id is out of range")
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": "high"},
        {"priority": None},
        {"priority": 1.5},
        {"priority": True},
        {"namespace": ([],)},
        {"params": {"temperature": 0}},
        {"params": {}},
        {"params": LONG.but(min_tokens=3, stop_token_ids=range(VOCAB))},
    ],
)
def test_a_wrong_request_is_refused_at_once(wrong: dict[str, Any]) -> None:
    engine, _ = make_engine()
    with engine:
        with pytest.raises(InvalidInput):
            engine.submit([1, 2, 3], **wrong)
        assert engine.stats().requests == 0


@pytest.mark.parametrize("params", [3, "x", [{"temperature": 0}]])
def test_generate_takes_sampling_params_or_a_list_of_them(params: Any) -> None:
    engine, _ = make_engine()
    with engine, pytest.raises(InvalidInput):
        engine.generate([[1, 2]], params)


def test_namespaces_and_lengths_are_checked_wherever_they_are_passed() -> None:
    engine, _ = make_engine()
    unhashable: Any = ([],)
    with engine:
        for verb in (engine.probe, engine.warm, engine.demote):
            with pytest.raises(InvalidInput, match="hashable"):
                verb([1, 2, 3], namespace=unhashable)
        for keep in (-1, "x", 1.5):
            with pytest.raises(InvalidInput, match="keep"):
                engine.demote([1, 2, 3], keep=keep)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", ["8", None, 1.5, True])
def test_limits_are_ints(limit: Any) -> None:
    with pytest.raises(InvalidInput, match="prefill_chunk"):
        EngineConfig(prefill_chunk=limit)


def _beside(bad: dict[str, Any], model: FakeModel | None = None, prompt: list[int] | None = None) -> None:
    """Submit a request that fails on the engine's thread between two that must not be affected."""
    engine, runner = make_engine(model=model)
    runner.gate = threading.Semaphore(0)
    with engine:
        good = [engine.submit([i, 2, 3], LONG) for i in range(2)]
        runner.gate.release(2)
        next(iter(good[0]))
        worse = engine.submit(prompt or [9, 9], **bad)
        late = engine.submit([7, 2, 3], LONG)
        runner.gate.release(1000)
        with pytest.raises(RequestFailed) as caught:
            worse.result(timeout=10)
        assert caught.value.__cause__ is not None
        for handle, first in zip([*good, late], (0, 1, 7), strict=True):
            assert list(handle.result(timeout=10).token_ids) == greedy_reply([first, 2, 3], 30)
        check(engine)
        assert engine.stats().failed == 1


def test_a_request_that_cannot_be_admitted_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = PrefixCache.open

    def refusing(cache: PrefixCache, tokens: Any, *more: Any, **options: Any) -> Any:
        if tokens[0] == 9:
            raise ZeroDivisionError
        return opens(cache, tokens, *more, **options)

    monkeypatch.setattr(PrefixCache, "open", refusing)
    _beside({"params": LONG})


def test_a_request_that_cannot_be_announced_harms_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(cache: PrefixCache, *text: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(PrefixCache, "announce", refusing)
    engine, _ = make_engine(max_sequences=1)
    with engine:
        handles = [engine.submit([first, 2, 3], LONG) for first in range(4)]
        for first, handle in enumerate(handles):
            assert list(handle.result(timeout=10).token_ids) == greedy_reply([first, 2, 3], 30)
        check(engine)


def test_a_prompt_whose_text_cannot_be_decoded_fails_alone() -> None:
    _beside({"params": LONG}, FakeModel(tokenizer=Letters()), prompt=[9, 48])


def test_a_stream_that_cannot_be_forked_fails_alone() -> None:
    _beside({"params": LONG.but(n=3, seed=10**5000)})  # no derived seed: Python does not print ints of that length


def test_a_sampled_token_that_cannot_be_decoded_fails_alone() -> None:
    engine, _ = make_engine(model=FakeModel(tokenizer=Letters()), brain=lambda ids: 48 if ids[0] == 9 else 5)
    with engine:
        done = [engine.submit([first], LONG) for first in (1, 9, 2)]
        with pytest.raises(RequestFailed, match="out of range"):
            done[1].result(timeout=10)
        assert [done[i].result(timeout=10).token_ids for i in (0, 2)] == [(5,) * 30] * 2
        check(engine)


def test_a_row_without_a_finite_logit_fails_alone() -> None:
    engine, runner = make_engine()
    whole = runner._logits

    def logits(chunk: SequenceInput, end: int) -> np.ndarray:
        first = runner.tokens[runner._slot(chunk, 0)]
        return whole(chunk, end) * (float("nan") if first == 9 else 1)

    runner._logits = logits  # type: ignore[method-assign]
    with engine:
        handles = [engine.submit([first, 2, 3], LONG.but(n=n)) for first, n in ((1, 1), (9, 1), (9, 2), (3, 1))]
        for bad in handles[1:3]:
            with pytest.raises(RequestFailed, match="no finite maximum"):
                bad.result(timeout=10)
        for handle, first in ((handles[0], 1), (handles[3], 3)):
            assert list(handle.result(timeout=10).token_ids) == greedy_reply([first, 2, 3], 30)
        check(engine)
        assert engine.stats().failed == 2


@pytest.mark.parametrize("params", [{"temperature": 1e-46}, {"temperature": 1e39}, {"top_k": 10**30}])
def test_extreme_sampling_params_are_served_with_others(params: dict[str, Any]) -> None:
    engine, _ = make_engine()
    with engine:
        extreme = SamplingParams(max_tokens=5, ignore_eos=True, **{"top_k": 5, **params})
        done = engine.generate([[1, 2], [3, 4]], [extreme, LONG])
        assert [len(each.token_ids) for each in done] == [5, 30]


def test_computed_tokens_of_a_cancelled_request_that_filled_the_pool_stay_cached() -> None:
    engine, runner = make_engine(num_blocks=4, block_size=4)
    runner.gate = threading.Semaphore(0)
    with engine:
        prompt = list(range(10))
        handle = engine.submit(prompt, LONG.but(max_tokens=6))
        runner.gate.release(1)
        next(iter(handle))
        handle.cancel()
        runner.gate.release(100)
        with pytest.raises(RequestCancelled):
            handle.result(timeout=10)
        assert engine.probe(prompt).matched == 10
        check(engine)


def test_a_fault_of_the_pool_itself_hangs_no_caller() -> None:
    def broken(*ignored: object) -> None:
        raise AssertionError("the pool is broken")

    engine, runner = make_engine()
    runner.gate = threading.Semaphore(0)
    handles = [engine.submit([i, 2, 3], LONG) for i in range(3)]
    runner.gate.release(1)
    next(iter(handles[0]))
    engine.core.scheduler.remove = broken  # type: ignore[method-assign]
    runner.run = broken  # type: ignore[method-assign,assignment]
    runner.gate.release(100)
    for handle in handles:
        with pytest.raises((RequestFailed, EngineClosed)):
            handle.result(timeout=10)
    with pytest.raises(EngineClosed):
        engine.stats()
    engine.close()


def test_the_kv_of_a_broken_forward_is_never_published() -> None:
    engine, runner = make_engine(prefill_chunk=8)
    whole, broken = runner._logits, [True]
    runner._logits = lambda *part: whole(*part) * (float("nan") if broken[0] else 1)  # type: ignore[method-assign]
    prompt = list(range(20))
    with engine:
        for n in (1, 2):
            with pytest.raises(RequestFailed, match="no finite maximum"):
                engine.submit(prompt, LONG.but(n=n)).result(timeout=10)
        assert engine.probe(prompt).matched == 0
        broken[0] = False
        assert list(engine.submit(prompt, LONG).result(timeout=10).token_ids) == greedy_reply(prompt, 30)
        check(engine)


def test_invalid_unicode_is_refused_by_name() -> None:
    with chat_engine() as engine:
        for verb in (engine.submit, engine.probe, engine.warm):
            with pytest.raises(InvalidInput, match="Unicode"):
                verb("a \ud800 b")
            with pytest.raises(InvalidInput, match="Unicode"):
                verb([{"role": "user", "content": "\udcff"}])


@pytest.mark.parametrize("seeds", mostly_long([range(15), range(15, 60)], range(15)), ids=str)
def test_one_user_of_a_small_pool_is_never_refused_a_fitting_prompt(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        size, blocks = rng.choice([2, 3, 4, 16]), rng.choice([4, 5, 7])
        base = rng.choices(range(48), k=size * blocks)
        engine, _ = make_engine(blocks, size)
        with engine:
            for _ in range(14):
                prompt = base[: rng.randint(1, len(base) - 1)]
                if rng.random() < 0.5:
                    prompt = [*prompt[: rng.randint(0, len(prompt) - 1)], *rng.choices(range(48), k=2)][: len(base) - 1]
                done = engine.submit(prompt, LONG.but(max_tokens=rng.randint(1, len(base)))).result(timeout=10)
                assert list(done.token_ids) == greedy_reply(prompt, len(done.token_ids))
            check(engine)


def test_calls_of_a_broken_engine_raise_the_cause() -> None:
    def leave(chunks: object) -> None:
        raise SystemExit("the model wants to leave")

    engine, _ = make_engine(fault=leave)
    handle = engine.submit([1, 2, 3], LONG)
    for call in (lambda: handle.result(timeout=10), engine.stats, lambda: engine.submit([1], LONG)):
        with pytest.raises(EngineClosed, match="wants to leave") as caught:
            call()
        assert isinstance(caught.value.__cause__, SystemExit)
    engine.close()


def test_tensors_of_a_failed_forward_are_freed_before_its_halves_run() -> None:
    """Otherwise a step that ran out of memory would run out of it again."""
    tensors: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def call(items: list[int]) -> list[int]:
        alive.append(sum(each() is not None for each in tensors))
        tensor = torch.zeros(1)
        if len(items) > 1:
            tensors.append(weakref.ref(tensor))
            raise MemoryError
        return items

    request = Request(np.zeros(1, np.int32), SamplingParams(), 1, frozenset(), 0)
    items = [1, 2, 3, 4]
    with PrefixCache(1).open([]) as sequence:
        stream = Stream(request, 0, sequence, SAMPLED)
        parts = Halves(lambda request, failed: None).run(items, call, lambda item: stream)
    assert [part for part, _ in parts] == [[1], [2], [3], [4]]
    assert len(tensors) == 3 and not any(alive)


# ---- errors of the device


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceLost("gone")]
)
def test_an_engine_ends_at_once_when_its_device_is_lost(error: Exception) -> None:
    engine, model = make_engine()
    runs: list[int] = []

    def lost(chunks: list[SequenceInput], copies: Any) -> torch.Tensor:
        runs.append(len(chunks))
        raise error

    model.run = lost  # type: ignore[method-assign]
    with engine:
        handles = engine.client.thread.ask(lambda: [engine.submit([1, 2, number], LONG) for number in range(4)])
        for handle in handles:
            with pytest.raises(
                EngineClosed, match=r"the engine has closed, because .*(restart the process|gone)"
            ) as ended:
                handle.result()
            assert isinstance(ended.value.__cause__, DeviceLost)
        with pytest.raises(EngineClosed, match="because"):
            engine.submit([1, 2], LONG)
    assert runs == [4]  # not tried again, and not in halves


def test_an_error_that_a_device_survives_ends_its_request_only() -> None:
    engine, model = make_engine()
    run = model.run

    def refused(chunks: list[SequenceInput], copies: Any) -> torch.Tensor:
        if any(len(each.tokens) == 5 for each in chunks):
            error = torch.AcceleratorError("CUDA error: out of memory")
            error.error_code = 2  # type: ignore[attr-defined]  # torch sets it
            raise error
        return run(chunks, copies)

    model.run = refused  # type: ignore[method-assign]
    with engine:
        bad, good = engine.client.thread.ask(lambda: [engine.submit(list(range(count)), LONG) for count in (5, 3)])
        with pytest.raises(RequestFailed, match="out of memory"):
            bad.result()
        assert len(good.result().token_ids) == 30
