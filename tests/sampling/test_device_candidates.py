"""Candidates of beam searches equal those of plain Python, on the host and on a device, next to rows that are drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.params import Candidates, SampleRow, SamplingParams
from radixkv.sampling.sampler import HostSampler, Sampled, Sampler, sample
from radixkv.sampling.token_mask import TokenMasks
from tests.sampling.test_sampler import PARAMS, STOPS, logits_for
from tests.sampling.test_token_mask import row as constrained
from tests.virtual_gpu import VirtualGpu, installed

CPU = torch.device("cpu")
VOCAB = 150
CASES = 20


class Parity:
    """A custom processor: doubles the scores of tokens that are not of the parity `keep`, and counts its calls."""

    reads_history = False

    def __init__(self) -> None:
        self.batches: list[int] = []

    def applies(self, params: SamplingParams) -> bool:
        return "keep" in params.extra_args

    def __call__(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        self.batches.append(len(rows))
        for values, row in zip(logits, rows, strict=True):
            values[1 - row.params.extra_args["keep"] :: 2] *= 2


def by_hand(logits: list[float], row: SampleRow) -> tuple[list[float], list[float]]:
    """Return the scores and the log probabilities of all tokens of one row, in plain Python."""
    p = row.params
    largest = max(logits)
    total = largest + math.log(sum(math.exp(value - largest) for value in logits))
    own = [value - total for value in logits]
    scores = list(own)
    reply = tuple(row.history[row.prompt_length :])
    for token in set(row.history):
        above = scores[token] > 0
        scores[token] = scores[token] / p.repetition_penalty if above else scores[token] * p.repetition_penalty
    for token, count in Counter(reply).items():
        scores[token] -= p.presence_penalty + count * p.frequency_penalty
    for token, bias in p.logit_bias.items():
        scores[token] += bias
    masked = set(row.stop_token_ids) if len(reply) < p.min_tokens else set()
    masked |= {word[-1] for word in row.bad_words if reply[len(reply) - len(word) + 1 :] == word[:-1]}
    for token in masked:
        scores[token] = -math.inf
    if "keep" in p.extra_args:
        scores = [score * (1 if token % 2 == p.extra_args["keep"] else 2) for token, score in enumerate(scores)]
    return scores, own


def beam_row(rng: Random, params: SamplingParams, number: int) -> SampleRow:
    prompt, reply = ([rng.randrange(10) for _ in range(rng.randint(0, 6))] for _ in range(2))
    words = [tuple(rng.randrange(10) for _ in range(rng.choice([1, 2, 2, 3]))) for _ in range(rng.choice([0, 8]))]
    params = params.but(bad_words=["word"] * bool(words), extra_args=rng.choice([{}, {}, {"keep": 0}, {"keep": 1}]))
    return SampleRow(
        params,
        number,
        len(prompt) + len(reply),
        prompt + reply,
        len(prompt),
        STOPS,
        stream=number,
        candidates=rng.choice([0, 1, 2, 7, VOCAB, VOCAB + 9]),
        bad_words=tuple(words),
    )


def check(found: Sampled, logits: torch.Tensor, rows: Sequence[SampleRow], sources: Sequence[int]) -> None:
    assert (found.candidates is not None) == any(row.candidates for row in rows)
    for each, row, source in zip(found.candidates or [None] * len(rows), rows, sources, strict=True):
        assert (each is not None) == bool(row.candidates)
        if each is not None:
            scores, own = by_hand(logits[source].tolist(), row)
            best = [score for score in sorted(scores, reverse=True)[: row.candidates] if score > -math.inf]
            assert each.scores == pytest.approx(best, abs=2e-4)
            assert len(set(each.tokens)) == len(each.tokens)
            assert each.scores == pytest.approx([scores[token] for token in each.tokens], abs=2e-4)
            assert each.logprobs == pytest.approx([own[token] for token in each.tokens], abs=1e-5)


@settings(max_examples=CASES, deadline=None)
@given(params=st.lists(PARAMS, min_size=1, max_size=7), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("kind", ["host", "device"])
def test_they_equal_a_loop_over_the_tokens(kind: str, params: list[SamplingParams], seed: int) -> None:
    rng = Random(seed)
    rows = [beam_row(rng, each, number) for number, each in enumerate(params)]
    logits = logits_for(len(rows) + 1, seed % 1000)
    sources = rng.sample(range(len(logits)), len(rows))
    sampler: Sampler = HostSampler([Parity()]) if kind == "host" else DeviceSampler(CPU, processors=[Parity()])
    found = sampler.begin(logits.clone(), rows, sources).result()
    check(found, logits, rows, sources)
    drawn = [at for at, row in enumerate(rows) if not row.candidates]
    alone = sample(logits[[sources[at] for at in drawn]], [rows[at] for at in drawn], None, [Parity()])
    assert [found.tokens[at] for at in drawn] == alone.tokens


@settings(max_examples=CASES // 8, deadline=None)
@given(params=st.lists(PARAMS, min_size=1, max_size=7), seed=st.integers(0, 10**6))
def test_a_device_finds_them_in_its_one_download(params: list[SamplingParams], seed: int) -> None:
    rng = Random(seed)
    rows = [beam_row(rng, each, number) for number, each in enumerate(params)]
    logits = logits_for(len(rows), seed % 1000)
    with installed(VirtualGpu(seed)) as gpu:
        sampler = DeviceSampler(gpu.place, processors=[Parity()])
        with gpu.serving():
            pending = sampler.begin(gpu.upload(logits), rows)
            assert gpu.counts["event wait"] == 0
            assert pending.result() == sample(logits, rows, None, [Parity()])
        assert gpu.counts["event wait"] == 1 and not gpu.findings


def test_a_custom_processor_is_called_once_for_the_beams_and_once_for_the_others() -> None:
    custom = Parity()
    params = SamplingParams(temperature=0, extra_args={"keep": 0})
    rows = [SampleRow(params, 0, 0, candidates=3 * (number % 2)) for number in range(5)]
    logits = logits_for(5, 1)
    found = DeviceSampler(CPU, processors=[custom]).begin(logits, rows).result()
    check(found, logits, rows, range(5))
    assert custom.batches == [2, 3]


def test_rows_of_all_kinds_report_their_log_probabilities() -> None:
    alternatives = [None, 2, 0, 5, None, 3]
    rows = [
        SampleRow(
            SamplingParams(temperature=0, logprobs=count, frequency_penalty=1.0), 0, 0, [1, 2], 1, candidates=some
        )
        for count, some in zip(alternatives, [2, 3, 4, 0, 0, 0], strict=True)
    ]
    logits = logits_for(6, 3)
    for part in (slice(None), slice(0, 3), slice(3, 6), slice(0, 1), slice(2, 5)):
        found = DeviceSampler(CPU).begin(logits[part], rows[part]).result()
        assert found == sample(logits[part], rows[part])
        for each, count in zip(found.logprobs or [], alternatives[part], strict=False):
            assert (None if each is None else len(each.top)) == count


def test_a_row_with_a_nan_is_broken_and_one_without_tokens_is_not() -> None:
    logits = logits_for(3, 3)
    logits[1, 5] = torch.nan
    nothing = SamplingParams(bad_words=["all"])
    rows = [
        SampleRow(SamplingParams(), 0, 0, candidates=2),
        SampleRow(SamplingParams(), 0, 0, candidates=2),
        SampleRow(nothing, 0, 0, candidates=2, bad_words=tuple((token,) for token in range(VOCAB))),
    ]
    pending = DeviceSampler(CPU).begin(logits, rows)
    found = pending.result()
    assert pending.finite() == [True, False, True]
    assert found == sample(logits, rows) and found.broken == {1}
    assert found.candidates is not None
    assert found.candidates[1:] == [None, Candidates([], [], [])]


def test_masks_hold_for_constrained_rows_with_beams() -> None:
    logits, greedy = logits_for(4, 1), SamplingParams(temperature=0)
    rows = [SampleRow(greedy, 0, 0, candidates=some) for some in (2, 0, 2, 0)]
    step = TokenMasks().begin({"b": constrained(3, 8), "d": constrained(7)})
    step.wait()
    keys = [None, "b", None, "d"]
    found = DeviceSampler(CPU).begin(logits, rows, None, step.select(keys)).result()
    assert found.tokens[1] in (3, 8) and found.tokens[3] == 7
    check(found, logits, rows, range(4))
    assert found == sample(logits.clone(), rows, step.select(keys))
