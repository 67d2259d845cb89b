"""Candidates of beam searches: processed log probabilities, in batches with rows that are sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import transformers

from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import HostSampler, sample

BEAMS = SamplingParams(beam_width=4, logprobs=3)
ROW = SampleRow(BEAMS, 0, 5, (3, 7, 7, 9), 2, frozenset({4}), candidates=6)


def logits(rows: int, vocab: int = 40) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 3


class Only:
    """Excludes all tokens but those of `extra_args`; records the logits that it was given."""

    reads_history = False

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def applies(self, params: SamplingParams) -> bool:
        return "only" in params.extra_args

    def __call__(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        self.given.append(logits.clone())
        for values, row in zip(logits, rows, strict=True):
            kept = values[row.params.extra_args["only"]]
            values[:] = -math.inf
            values[row.params.extra_args["only"]] = kept


def test_candidates_are_the_best_tokens_by_log_probability() -> None:
    values = logits(1)
    found = sample(values, [ROW])
    assert found.candidates is not None and found.logprobs is not None and found.broken == frozenset()
    (each,), table = found.candidates, torch.log_softmax(values[0], dim=-1)
    assert each is not None
    assert each.tokens == table.topk(6).indices.tolist()
    assert each.scores == each.logprobs == table.topk(6).values.tolist()
    report = found.logprobs[0]
    assert report is not None
    assert (report.chosen, [token for token, _ in report.top]) == (each.logprobs[0], each.tokens[:3])


def test_penalties_change_log_probabilities_as_in_transformers() -> None:
    values, penalty = logits(1), 1.7
    row = SampleRow(BEAMS.but(repetition_penalty=penalty), 0, 5, (3, 7, 7, 9), 2, candidates=40)
    own = torch.log_softmax(values, dim=-1)
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[3, 7, 7, 9]]), own.clone())[0]
    (each,) = sample(values, [row]).candidates or ()
    assert each is not None
    assert each.tokens == expected.topk(40).indices.tolist()
    assert each.scores == pytest.approx(expected.topk(40).values.tolist(), abs=1e-6)
    assert each.logprobs == own[0][each.tokens].tolist()


def test_excluded_tokens_are_no_candidates() -> None:
    process = Only()
    rows = [
        SampleRow(BEAMS.but(extra_args={"only": [8, 2]}), 0, 5, candidates=6),
        SampleRow(BEAMS.but(extra_args={"only": []}), 0, 5, candidates=6),
        SampleRow(BEAMS.but(min_tokens=3), 0, 5, (1,), 1, frozenset(range(1, 40)), candidates=6),
    ]
    found = HostSampler([process]).begin(logits(3), rows).result()
    assert found.candidates is not None
    tokens = [each.tokens for each in found.candidates if each is not None]
    assert (sorted(tokens[0]), tokens[1:], found.broken) == ([2, 8], [[], [0]], frozenset())
    assert torch.equal(process.given[0], torch.log_softmax(logits(3)[:2], dim=-1))


def test_a_processor_that_leaves_nan_breaks_its_row_alone() -> None:
    class Spoils(Only):
        def __call__(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
            logits[:, 3] = math.nan

    rows = [ROW, SampleRow(BEAMS.but(extra_args={"only": [1]}), 0, 5, candidates=6)]
    found = HostSampler([Spoils()]).begin(logits(2), rows).result()
    assert found.candidates is not None
    assert found.broken == {1} and found.candidates[0] is not None and found.candidates[1] is None


@pytest.mark.parametrize("places", [(0,), (2, 3), (1, 4, 5)])
def test_other_rows_of_the_batch_are_sampled_as_without_it(places: tuple[int, ...]) -> None:
    kinds = [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=5, repetition_penalty=1.2),
        SamplingParams(),
        SamplingParams(min_p=0.01, logprobs=0),
        SamplingParams(temperature=0, logit_bias={3: 2.0}),
    ]
    values = logits(6)
    plain = [SampleRow(params, 7 + at, 5, (3, 7, 9), 2) for at, params in enumerate(kinds)]
    mixed = [ROW if at in places else row for at, row in enumerate(plain)]
    alone, found = sample(values.clone(), plain), sample(values.clone(), mixed)
    assert found.candidates is not None and alone.candidates is None
    assert alone.logprobs is not None and found.logprobs is not None
    for at in range(6):
        assert (found.candidates[at] is not None) == (at in places)
        if at not in places:
            assert (found.tokens[at], found.logprobs[at]) == (alone.tokens[at], alone.logprobs[at])


def test_a_drawn_row_with_nan_is_broken_with_a_beam() -> None:
    values, drawn = logits(3), SampleRow(SamplingParams(seed=1), 5, 5, (3, 7), 2)
    values[0, 8] = math.nan
    found = sample(values, [drawn, ROW, drawn])
    assert found.broken == {0} and found.candidates is not None
    assert found.candidates[1] is not None and found.candidates[0] is found.candidates[2] is None
    assert found.tokens[2] == sample(values[2:], [drawn]).tokens[0]
