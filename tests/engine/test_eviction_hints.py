"""The engine gives the eviction policy a hint when a stream ends, and runs under every policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv import Engine, SamplingParams
from radixkv.cache import PrefixCache
from radixkv.cache.predictive.index import PredictiveIndex
from radixkv.config import EngineConfig
from radixkv.errors import UnknownPolicy
from tests.engine.fakes import STOP, FakeModel, FakeRunner, check

Ends = list[tuple[str | None, int]]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Return the kind and the size class of the output of each closed access."""
    told: Ends = []
    close = PredictiveIndex.close

    def note(index: PredictiveIndex, tree: Any, node: Any, record: Any, generated: int, hint: Any) -> None:
        told.append((hint.kind, generated if hint.output_length is None else hint.output_length))
        close(index, tree, node, record, generated, hint)

    monkeypatch.setattr(PredictiveIndex, "close", note)
    return told


def predictive_engine(num_blocks: int, brain: Any = None) -> Engine:
    model = FakeModel()
    runner = FakeRunner(num_blocks, 4, model.vocab_size, brain, None)
    parts: Any = (model, runner, PrefixCache(num_blocks, 4, "predictive"), EngineConfig(monitor=False))
    return Engine(*parts)


def test_a_learning_policy_gets_the_end_and_the_length_of_a_stream(ends: Ends) -> None:
    with predictive_engine(64, lambda tokens: STOP if len(tokens) >= 12 else 1) as engine:
        engine.generate([[5] * 9], SamplingParams(max_tokens=20, temperature=0))
        engine.generate([[6] * 9], SamplingParams(max_tokens=2, temperature=0))
        engine.generate([[7] * 9], SamplingParams(max_tokens=2, temperature=0, n=2))
        check(engine)
    assert ends == [("stop", 4), ("length", 2), ("length", 2), ("length", 2)]


def test_it_keeps_its_books_while_little_fits() -> None:
    rng = np.random.default_rng(1)
    with predictive_engine(16) as engine:
        for _ in range(40):
            engine.generate([rng.integers(0, 3, rng.integers(3, 30)).tolist()], SamplingParams(max_tokens=5))
            check(engine)
        assert engine.stats().cache.evicted_blocks > 50


def test_it_loads_by_name() -> None:
    with Engine.load("tiny", eviction="predictive", num_blocks=32, monitor=False) as engine:
        assert engine.core.cache.eviction == "predictive"
        engine.generate("Hello", SamplingParams(max_tokens=3))
        check(engine)
    with pytest.raises(UnknownPolicy, match="predictive"):
        Engine.load("tiny", eviction="clairvoyant", num_blocks=32)
