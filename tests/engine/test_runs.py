"""Runs that move between engines: files, refusals, room, and the answers of the importing engine."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import stat
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import AsyncEngine, Engine, SamplingParams
from radixkv.engine import Run, runs
from radixkv.engine.runs import RunExchange
from radixkv.errors import EngineClosed, InvalidInput, WeightsChanged
from tests.engine.fakes import check, greedy_reply, make_engine
from tests.engine.worlds import GREEDY, SIZE, tokens

SHARED = tokens(40)
FOURTH = np.array([0, 0, 0, 1, 0, 0, 0, 0], np.uint32)


class Exchange(RunExchange):
    def fingerprint_of(self, *_: Any) -> str:
        return "f" * 24  # a fake model has no weights


def fake(num_blocks: int = 64, block_size: int = SIZE, **more: Any) -> Engine:
    engine, _ = make_engine(num_blocks, block_size, **more)
    engine.client.runs = Exchange(engine.core, engine.client.thread.ask, str)
    return engine


def answered(engine: Engine, prompt: list[int], namespace: Hashable = None) -> int:
    """Check the answer to a prompt, and return its hit."""
    [done] = engine.generate([prompt], GREEDY, namespace=namespace)
    assert list(done.token_ids) == greedy_reply(prompt, 6)
    check(engine)
    return done.usage.cached_tokens


def exported(count: int = 30) -> Run:
    with fake() as engine:
        answered(engine, SHARED)
        return engine.export_run(SHARED[:count])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "STAGED", 2)


# ---- round trips


@given(st.data())
def test_engines_that_exchange_runs_answer_as_engines_that_compute(data: st.DataObject) -> None:
    counts, seeds, spaces = st.integers(0, 40), st.integers(1, 3), st.sampled_from([None, "a"])
    texts = st.builds(lambda shared, own, seed: SHARED[:shared] + tokens(own, seed), counts, counts, seeds)
    options: list[Any] = [{}, {"host_blocks": 30, "num_blocks": 24}, {"num_blocks": 24}]
    engines = [fake(**data.draw(st.sampled_from(options))) for _ in range(2)]
    with engines[0], engines[1], pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "STAGED", data.draw(st.integers(1, 4)))
        for _ in range(data.draw(st.integers(1, 12))):
            here, there = data.draw(st.permutations(engines))
            text, name, other = data.draw(texts.filter(bool)), data.draw(spaces), data.draw(spaces)
            answered(here, text, name)
            run = here.export_run(text, name)
            assert run.tokens.tolist() == text[: len(run.tokens)]
            before = there.probe(run.tokens, namespace=other).length
            assert there.import_run(run, other) == there.probe(run.tokens, namespace=other).length >= before
            check(here)
            check(there)
            if data.draw(st.booleans()):
                answered(there, text + tokens(3, 9), other)
            if data.draw(st.booleans()):
                there.clear_cache()


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"deterministic": True, "prefill_chunk": 32}], ids=str)
def test_an_imported_run_gives_the_bits_of_the_exporting_engine(settings: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=5)
    load, exact = partial(Engine.load, "tiny", num_blocks=64, monitor=False, **settings), "deterministic" in settings
    with load() as first, load() as second:
        prompt = [*range(5, 300)]
        if exact:  # bits of other engines depend on the order of blocks
            first.generate([[*prompt[:200], *range(300, 350)]], params)  # another text of the last block
        first.generate([prompt[:206]], replace(params, max_tokens=1))
        run = first.export_run(prompt)
        cached, hit = (200, 192) if exact else (206, 206)  # chunks of 32 tokens
        assert second.import_run(run) == len(run.tokens) == cached
        a, b = (engine.generate([prompt], params)[0] for engine in (first, second))
        assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
        assert a.usage.cached_tokens == b.usage.cached_tokens == hit
        assert second.generate([prompt], params, namespace="other")[0].usage.cached_tokens == 0
        check(second)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_slots_of_other_texts_never_leave_the_engine(kv_dtype: Any) -> None:
    with Engine.load("tiny", num_blocks=64, monitor=False, kv_dtype=kv_dtype) as engine:
        engine.generate([SHARED], GREEDY)
        whole, part = (engine.export_run(SHARED[:count]).images[-1] for count in (32, 17))
        kept, store = np.empty(0, dtype=bool), engine.core.runner.store  # type: ignore[attr-defined]
        for pool in store.tensors:
            first = np.arange(pool.nbytes // store.num_blocks // pool.shape[0]) < pool.shape[-1] * pool.itemsize
            kept = np.concatenate([kept, *[first] * pool.shape[0]])
        assert (part == np.where(kept, whole, 0)).all()


# ---- room, clears, tiers


def test_host_resident_tokens_are_exported(small_pieces: None) -> None:
    with fake(24, host_blocks=100) as engine:
        for seed in range(6):
            answered(engine, tokens(40, seed))
        assert engine.probe(SHARED).host
        assert len(engine.export_run(SHARED).tokens) == 40
        check(engine)


def test_a_full_pool_takes_what_fits(small_pieces: None) -> None:
    run = exported()
    with fake(12) as engine:
        core, ask = engine.core, engine.client.thread.ask
        held = ask(lambda: core.cache.open([]))
        ask(lambda: held.extend(tokens(7 * SIZE, 5)))
        assert engine.import_run(run) == engine.probe(run.tokens).length == 5 * SIZE
        assert engine.import_run(run, "other") == 5 * SIZE  # in place of the first
        ask(core.cache.check)
        ask(held.close)
        assert answered(engine, SHARED, "other") == 5 * SIZE


def before_call(engine: Engine, number: int, event: Callable[[RunExchange], object]) -> None:
    """Let an event come before a call on the engine's thread; after the first call, each is a piece."""
    calls = iter([lambda _: None] * number + [event] + [lambda _: None] * 99)
    engine.client.runs = Exchange(
        engine.core, lambda piece: (next(calls)(engine.client.runs), engine.client.thread.ask(piece))[1], str
    )


def test_a_clear_ends_an_import_and_an_export(small_pieces: None) -> None:
    run = exported(40)
    with fake() as engine:
        before_call(engine, 3, lambda _: engine.clear_cache())
        assert engine.import_run(run) == engine.probe(SHARED).length == 0
        answered(engine, SHARED)
        before_call(engine, 3, lambda _: engine.clear_cache())
        assert len(engine.export_run(SHARED).tokens) == 2 * 2 * SIZE
        check(engine)


def test_new_weights_end_an_import_and_an_export(small_pieces: None) -> None:
    run = exported(40)
    with fake() as engine:
        for call in (lambda: engine.import_run(run), lambda: engine.export_run(SHARED)):
            before_call(engine, 2, RunExchange.weights_changed)
            with pytest.raises(WeightsChanged, match="reloaded while"):
                call()


def test_new_weights_during_a_digest_end_an_export() -> None:
    class Reloaded(Exchange):
        def fingerprint_of(self, *_: Any) -> str:
            self.weights_changed()
            return super().fingerprint_of()

    with fake() as engine:
        answered(engine, SHARED)
        engine.client.runs = Reloaded(engine.core, engine.client.thread.ask, str)
        with pytest.raises(WeightsChanged, match="reloaded while"):
            engine.export_run(SHARED)


def test_reloaded_weights_have_another_fingerprint() -> None:
    with Engine.load("tiny", num_blocks=64, monitor=False) as engine:
        engine.generate([SHARED], GREEDY)
        run = engine.export_run(SHARED)
        engine.reload_weights({name: 1.5 * each for name, each in engine.model.model.state_dict().items()})
        with pytest.raises(InvalidInput, match="other weights"):
            engine.import_run(run)
        with pytest.raises(InvalidInput, match="nothing of this text"):
            engine.export_run(SHARED)


def test_a_closed_engine_frees_its_model() -> None:
    with Engine.load("tiny", num_blocks=64, monitor=False) as engine:
        engine.generate([SHARED], GREEDY)
        run, model = engine.export_run(SHARED), weakref.ref(engine.model.model)
    gc.collect()
    assert model() is None
    with pytest.raises(EngineClosed):
        engine.import_run(run)


# ---- refusals


def test_other_objects_and_text_streams_are_no_runs() -> None:
    with fake() as engine, pytest.raises(InvalidInput, match="a run is what export_run returns"):
        engine.import_run("x")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="binary mode"):
        Run.read(io.StringIO("x"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "options", "change"),
    [
        ("blocks of 4 tokens, and this engine of 8", {"block_size": 8}, lambda run: {}),
        ("other weights", {}, lambda run: {"fingerprint": "e" * 24}),
        ("is damaged", {}, lambda run: {"images": run.images[:-1]}),
        ("is damaged", {}, lambda run: {"images": run.images[:, 1:]}),
        ("is damaged", {}, lambda run: {"checksums": run.checksums[:-1]}),
        ("is damaged", {}, lambda run: {"checksums": run.checksums ^ FOURTH}),
        ("outside the vocabulary", {}, lambda run: {"tokens": run.tokens + 50}),
        ("recurrent state", {"snapshots": 4, "max_sequences": 2}, lambda run: {}),
        ("prefix_cache=False", {"prefix_cache": False}, lambda run: {}),
    ],
)
def test_refused_runs_change_nothing(message: str, options: Any, change: Callable[[Run], Any]) -> None:
    run = exported()
    with fake(**options) as engine:
        before = engine.stats().cache
        with pytest.raises(InvalidInput, match=message):
            engine.import_run(replace(run, **change(run)))
        assert engine.stats().cache == before
        with pytest.raises(InvalidInput):
            engine.export_run(SHARED)


# ---- files


def as_bytes(run: Run) -> bytes:
    run.write(stream := io.BytesIO())
    return stream.getvalue()


def test_damage_at_every_byte_is_found() -> None:
    data = as_bytes(exported(6))
    with fake() as engine:
        for at in range(len(data)):
            for damaged in (data[:at], data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]):
                with pytest.raises(InvalidInput):
                    engine.import_run(Run.read(io.BytesIO(damaged)))
        stream = io.BytesIO(data + b"next")
        assert engine.import_run(Run.read(stream)) == 6
        assert stream.read() == b"next"


def test_a_run_file_is_private_and_belongs_to_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = exported(), tmp_path / "run"
    run.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert as_bytes(Run.read(path)) == path.read_bytes() == as_bytes(run)
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "pipe", tmp_path / "missing"):
        with pytest.raises(OSError):
            Run.read(wrong)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user"):
        Run.read(path)


def test_asyncio_moves_runs() -> None:
    async def moved() -> int:
        async with AsyncEngine(fake()) as first, AsyncEngine(fake()) as second:
            await first.generate([SHARED], GREEDY)
            return await second.import_run(await first.export_run(SHARED), "a")

    assert asyncio.run(moved()) == 40
