"""Models that verify drafts of an adversary give the tokens and log probabilities of single decodes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from radixkv.chat import Engine
from radixkv.engine.output import Completion
from radixkv.models.quantized.kernels import kernels
from radixkv.sampling.params import SamplingParams
from tests.engine.test_speculation import _steps_of_a_second, drafted, engine_of, known  # noqa: F401  # a fixture
from tests.models.conftest import FAMILIES, make
from tests.models.step_runner import prompts
from tests.models.test_logit_rows import BUILT
from tests.models.test_rounded_kv import wide
from tests.selection import mostly_long

PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=2),
    SamplingParams(temperature=1, max_tokens=24, logprobs=1, seed=3, n=2, repetition_penalty=1.2),
    SamplingParams(temperature=1, max_tokens=24, logprobs=0, seed=4, stop_token_ids=tuple(range(20))),
    SamplingParams(temperature=0.7, max_tokens=9, logprobs=0, seed=5, min_tokens=5),
]
TEXTS = [[at + 3, *text[:40]] for at, text in enumerate(prompts(random.Random(8), 4))]


def streams(done: list[Completion]) -> list[Completion]:
    return [each for first in done for each in (first, *first.alternatives)]


def assert_the_same(make_engine: Callable[..., Engine], tolerance: float) -> Engine:
    """Compare engines with and without drafts; returns the one with drafts, which was closed."""
    with engine_of(make_engine) as plain:
        done = plain.generate(TEXTS, PARAMS)
    with engine_of(make_engine, known(TEXTS, done, vocab=97)) as engine:
        for found, alone in zip(streams(engine.generate(TEXTS, PARAMS)), streams(done), strict=True):
            assert (found.token_ids, found.finish_reason) == (alone.token_ids, alone.finish_reason)
            scores = [[each.chosen for each in one.logprobs or ()] for one in (found, alone)]
            assert scores[0] == pytest.approx(scores[1], abs=tolerance, rel=0) and scores[0]
        assert drafted(engine.stats()) > 20
        report = engine.audit(blocks=8)
        assert report.differ == 0 < report.blocks
        engine.client.thread.ask(engine.core.cache.check)
        return engine


@pytest.mark.parametrize("name", mostly_long([*FAMILIES, "gpt2"], "llama", "gemma2", "gpt2"))
def test_replies_with_drafts_equal_those_without_in_float64(name: str) -> None:
    load = partial(Engine.load, BUILT[name]().to(torch.float64), monitor=False, num_blocks=200, block_size=4)
    assert_the_same(load, 1e-9)


OPTIONS: dict[str, dict[str, Any]] = {
    "8 bits and host memory": {"kv_dtype": "int8", "host_memory": "4MiB", "num_blocks": 50},
    "compiled": {"attention": "compiled"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_replies_with_drafts_equal_those_without_in_float32(name: str) -> None:
    options: dict[str, Any] = {"num_blocks": 200, "block_size": 4, **OPTIONS[name]}
    assert_the_same(partial(Engine.load, make(wide("llama")), monitor=False, **options), 1e-4)


@pytest.mark.skipif(kernels() is None, reason="no compiler, or a CPU without AVX2")
@pytest.mark.parametrize("mode", ["ngram", "tree"])
def test_a_retry_with_small_weights_has_the_bits_of_single_decodes(mode: str) -> None:
    """The KV of its prompt's last token is computed again, in a block of its own: it rounds as a decode does."""
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=0, ignore_eos=True)
    found = []
    for speculate in (None, mode):
        with Engine.load("tiny", weights="int8", speculate=speculate, monitor=False, num_blocks=100) as engine:
            if speculate:
                engine.core.speculation._length.costs.__init__(((1, 1.0), (2, 1.001)))
            prompt = [5 + at % 90 for at in range(39)]
            done = [engine.generate([prompt], params)[0] for _ in range(3)]
            found.append([[each.chosen for each in one.logprobs or ()] for one in done])
            stats = engine.stats()
    assert found[0] == found[1] and drafted(stats) > 20
