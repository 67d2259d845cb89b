"""Overlapped steps on a simulated GPU: nothing waits between two launches, and the answers are those of a CPU.

The model is a table of bigrams, so all work of a step that is not attention is real: the relay of sampled tokens, the
sampler, the masks, the download.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixkv import SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.device import device_of
from radixkv.engine.core import Core
from radixkv.engine.input_processor import replies_of
from radixkv.engine.request import Request
from radixkv.engine.scores import NO_SCORES, PromptScores, Scores
from radixkv.models.loaded import SequenceInput
from radixkv.models.step_batch import StepBatch
from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.sampler import HostSampler
from radixkv.sampling.token_mask import TokenMatcher
from tests.plain_runner import PlainRunner
from tests.selection import mostly_long
from tests.simulation.constraint import Rule, RuleMatcher
from tests.simulation.model import VOCAB
from tests.virtual_gpu import VirtualGpu, installed
from tests.virtual_gpu.engines import Doubled

TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
Answer = list[tuple[tuple[int, ...], str, Any, Any, Any]]


class Bigrams(PlainRunner):
    """Launches forwards whose logits depend on the last token only."""

    def __init__(self, place: torch.device) -> None:
        self.device = device_of(place)
        self.table = self.device.upload(TABLE)

    def run(
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: Tensor | None = None
    ) -> Tensor:
        batch = StepBatch(chunks, self.device, sampled)
        return self.table.index_select(0, batch.tokens.index_select(0, batch.logit_rows))


def request(
    prompt: Any,
    params: SamplingParams,
    most: int,
    number: int,
    stop_ids: frozenset[int] = frozenset(),
    matcher: TokenMatcher | None = None,
) -> Request:
    """Return a request as the engine makes it; bad words and prompt scores follow from the parameters."""
    scores: Scores = NO_SCORES
    if params.prompt_logprobs is not None and len(prompt) > 1:
        scores = PromptScores(prompt, 1, params.prompt_logprobs, most_rows=6)
    words = tuple(tuple(map(int, word.split())) for word in params.bad_words)
    replies = replies_of(params, most, stop_ids, words, matcher)
    return Request(prompt, params, most, stop_ids, number, replies=replies, scores=scores)


def requests(seed: int) -> list[Request]:
    """Return requests of every kind of sampling; some are constrained, some stop by a token."""
    rng = random.Random(seed)
    tokens = [str(token) for token in range(VOCAB)]
    pairs = [f"{first} {second}" for first in tokens for second in rng.sample(tokens, 3)]
    params = [
        SamplingParams(temperature=0, extra_args={"doubled": 5}),
        SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.5, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.8, n=3, min_tokens=3),
        SamplingParams(temperature=1.2, top_k=5, frequency_penalty=0.6, logit_bias={3: 2.0}),
        SamplingParams(beam_width=3, repetition_penalty=1.3, logprobs=1, prompt_logprobs=1),
        SamplingParams(temperature=0, bad_words=rng.sample(tokens, 5)),
        SamplingParams(beam_width=2, early_stopping=True, bad_words=pairs),
        SamplingParams(temperature=0.9, frequency_penalty=0.3, bad_words=pairs, n=2),
        SamplingParams(temperature=0, prompt_logprobs=2),
    ]
    found = []
    for number in range(18):
        prompt = np.array(rng.choices(range(VOCAB), k=rng.randint(1, 12)), np.int32)
        stop_ids = frozenset(rng.choice(((), (), (5,), (1, 2))))
        most = rng.randint(1, 12)
        each = params[number % len(params)]
        matcher = RuleMatcher(Rule(number)) if each.top_k and not stop_ids else None
        found.append(request(prompt, each, most, number, stop_ids, matcher))
    return found


def answers(core: Core, asked: list[Request]) -> list[Answer]:
    """Run all requests, which arrive one by one; cancel nothing."""
    for each in asked:
        core.add(each)
        core.step()
    while core.idle_for() is not None:
        core.step()
        core.cache.check()
    done = [each.channel.wait(0) for each in asked]
    return [
        [
            (one.token_ids, one.finish_reason, one.logprobs, one.prompt_logprobs, one.score)
            for one in (first, *first.alternatives)
        ]
        for first in done
    ]


def core_on(place: torch.device, config: EngineConfig) -> Core:
    """Return a core with a custom logits processor, and the sampler of its device."""
    overlap, processors = device_of(place).is_gpu, [Doubled()]
    sampler = DeviceSampler(place, processors=processors) if overlap else HostSampler(processors)
    return Core(PrefixCache(60, 4), Bigrams(place), config, sampler=sampler, depth=int(overlap))


CONFIG = EngineConfig(max_sequences=8, max_batch_tokens=24, prefill_chunk=8)


@pytest.mark.parametrize("seed", mostly_long(range(4), 0, 1))
def test_nothing_waits_and_the_answers_match_the_cpu(seed: int) -> None:
    expected = answers(core_on(torch.device("cpu"), CONFIG), requests(seed))
    with installed(VirtualGpu(seed)) as gpu:
        core = core_on(gpu.place, CONFIG)
        assert core.depth == 1
        with gpu.serving():
            found = answers(core, requests(seed))
        assert not gpu.findings
    assert [[one[:2] for one in each] for each in found] == [[one[:2] for one in each] for each in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[0][4] == pytest.approx(theirs[0][4], abs=1e-6)
        for part in (2, 3):
            logprobs = [[each.chosen for each in one[part] or () if each] for one in (mine[0], theirs[0])]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-6)
    assert core.counters.wasted_tokens and core.counters.host_bound_rows


def test_each_step_waits_for_one_download() -> None:
    with installed(VirtualGpu(0)) as gpu:
        core = core_on(gpu.place, CONFIG)
        for number in range(8):
            params = SamplingParams(temperature=number % 2, max_tokens=40, ignore_eos=True)
            core.add(Request(np.array([number], np.int32), params, 40, frozenset(), number))
        for _ in range(4):
            core.step()
        counted = partial(map, gpu.counts.__getitem__, ("event wait", "synchronisation"))
        with gpu.serving():
            before = list(counted())
            for _ in range(20):
                core.step()
            # `finite` and `result` wait for the same event.
            assert [after - each for after, each in zip(counted(), before, strict=True)] == [2 * 20, 0]
        core.finish_step()
        assert not gpu.findings
