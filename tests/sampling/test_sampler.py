"""The vectorised sampler equals a sampler of one row in plain Python, and transformers where the two agree."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixkv.errors import InvalidInput
from radixkv.sampling import sampler
from radixkv.sampling.params import Parameter, SampleRow, SamplingParams, parameters
from radixkv.sampling.sampler import sample
from radixkv.settings.kinds import Integer, Number, TokenBias
from tests.selection import mostly_long

STOPS = frozenset({4, 9})


def by_hand(logits: list[float], row: SampleRow) -> tuple[list[float], int, float]:
    """Return (probabilities, sampled token, its lead over the second one) of one row, in plain Python."""
    p = row.params
    values = list(logits)
    reply = list(row.history[row.prompt_length :])
    for token in set(row.history):
        values[token] = (
            values[token] / p.repetition_penalty if values[token] > 0 else values[token] * p.repetition_penalty
        )
    for token, count in Counter(reply).items():
        values[token] -= p.presence_penalty + count * p.frequency_penalty
    for token, bias in p.logit_bias.items():
        values[token] += bias
    if len(reply) < p.min_tokens:
        for token in row.stop_token_ids:
            values[token] = -math.inf
    best = max(values)
    if p.temperature == 0 or p.top_k == 1:
        return [], values.index(best), 1.0
    weights = [math.exp((value - best) / p.temperature) for value in values]
    if p.top_k > 0:
        smallest = sorted(weights, reverse=True)[min(p.top_k, len(weights)) - 1]
        weights = [weight if weight >= smallest else 0.0 for weight in weights]
    if p.top_p < 1:
        mass, total = 0.0, sum(weights)
        for weight in sorted(weights, reverse=True):
            if mass >= p.top_p * total:
                break
            mass, smallest = mass + weight, weight
        weights = [weight if weight >= smallest else 0.0 for weight in weights]
    weights = [weight if weight >= p.min_p else 0.0 for weight in weights]
    probabilities = [weight / sum(weights) for weight in weights]
    digest = hashlib.blake2b(struct.pack("<QQ", row.seed % 2**64, row.position), digest_size=8).digest()
    key, tokens, lead = int.from_bytes(digest, "little"), list(range(len(values))), math.inf
    if not p.filtered:  # first a page of 256 tokens
        pages = [tokens[start : start + 256] for start in range(0, len(tokens), 256)]
        page, lead = race(key, {-1 - at: sum(weights[token] for token in page) for at, page in enumerate(pages)})
        tokens = pages[-1 - page]
    token, second = race(key, {token: weights[token] for token in tokens})
    return probabilities, token, min(lead, second)


def race(key: int, weights: dict[int, float]) -> tuple[int, float]:
    """Return the id with the largest ratio of weight and random number, and how much larger it is than the second."""
    ratios = {id: weight / exponential(key, id) for id, weight in weights.items()}
    first, *others = sorted(ratios, key=ratios.__getitem__, reverse=True)
    return first, 1 - ratios[others[0]] / ratios[first] if others else math.inf


def exponential(key: int, id: int) -> float:
    """Return -log of a uniform number, by SplitMix64 (https://prng.di.unimi.it/splitmix64.c)."""
    state = (key + id * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    state ^= state >> 31
    return -math.log(((state >> 12) + 0.5) / 2**52)


def values(declared: Parameter, default: Any) -> st.SearchStrategy[Any]:
    """Return values of a parameter: its default and its example often, and quarters, which float32 represents."""
    kind, edges = declared.kind, st.sampled_from([default, declared.example])
    if isinstance(kind, TokenBias):
        return st.dictionaries(st.integers(0, 149), st.integers(-40, 40).map(lambda number: number / 4), max_size=3)
    assert isinstance(kind, Number)
    if isinstance(kind, Integer):
        return edges | st.integers(int(kind.low), int(min(kind.high, kind.low + 200)))
    quarters = st.integers(math.ceil(4 * kind.low), int(4 * min(kind.high, 2)))
    return edges | quarters.map(lambda number: number / 4).filter(kind.accepts)


PARAMS = st.builds(
    SamplingParams,
    **{
        name: values(declared, getattr(SamplingParams(), name))
        for name, declared in parameters(SamplingParams).items()
        if (declared.column or declared.adjusts_logits) and isinstance(declared.kind, Number)
    },
)
ROWS = st.builds(
    SampleRow,
    params=PARAMS,
    seed=st.integers(-5, 2**70),
    position=st.integers(0, 10_000),
    history=st.lists(st.integers(0, 149), max_size=12),
    prompt_length=st.integers(0, 6),
    stop_token_ids=st.just(STOPS),
)


def logits_for(count: int, seed: int, vocab: int = 150, spread: float = 3.0) -> torch.Tensor:
    """Return random logits, coarse enough that some are equal."""
    noise = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return (noise * 32).round() / 32


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_every_row_is_what_it_is_by_hand(rows: list[SampleRow], seed: int) -> None:
    logits = logits_for(len(rows), seed)
    untouched = logits.clone()
    found = sample(logits, rows).tokens
    assert torch.equal(logits, untouched)
    for token, row, values in zip(found, rows, logits, strict=True):
        probabilities, expected, lead = by_hand(values.tolist(), row)
        if lead > 1e-5:  # else the two are too close for float32
            assert token == expected
        assert not probabilities or probabilities[token] > 0


def test_a_large_vocabulary_is_drawn_as_by_hand() -> None:
    rows = [SampleRow(SamplingParams(temperature=1.3), 3, position) for position in range(40)]
    logits = logits_for(40, 2, vocab=1000)
    for token, row, values in zip(sample(logits, rows).tokens, rows, logits, strict=True):
        _, expected, lead = by_hand(values.tolist(), row)
        assert lead > 1e-5
        assert token == expected


@pytest.mark.parametrize("options", mostly_long([{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 1e-3}]), ids=str)
def test_rounding_of_the_logits_changes_no_token(options: dict[str, Any]) -> None:
    """Logits of a hit and of a miss differ by about 1e-5. Vocabularies are large, and most tokens are very unlikely."""
    generator, draws = torch.Generator().manual_seed(8), 60 if options else 600
    rows = [SampleRow(SamplingParams(temperature=1.5, **options), 5, position) for position in range(draws)]
    logits = torch.randn(1, 30_000, generator=generator) * 3
    rounded = logits + torch.randn(1, 30_000, generator=generator) * 1e-5
    assert sample(rounded.expand(draws, -1), rows).tokens == sample(logits.expand(draws, -1), rows).tokens


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(ROWS, min_size=2, max_size=6), seed=st.integers(0, 99), data=st.data())
def test_a_row_does_not_feel_the_others(rows: list[SampleRow], seed: int, data: st.DataObject) -> None:
    logits = logits_for(len(rows), seed)
    together = sample(logits, rows).tokens
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample(logits[order], [rows[i] for i in order]).tokens
    assert [together[i] for i in order] == shuffled
    assert together == [sample(logits[i : i + 1], [row]).tokens[0] for i, row in enumerate(rows)]


@pytest.mark.parametrize("top_k", mostly_long([0, 7, 40], 0, 7))
@pytest.mark.parametrize("top_p", mostly_long([1.0, 0.9, 0.3], 0.9))
@pytest.mark.parametrize("min_p", mostly_long([0.0, 0.1], 0.1))
def test_the_kept_tokens_match_transformers(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(4)) * 2
    history = [3, 8, 8, 77]
    warpers: list[Any] = [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.8)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    expected = torch.softmax(LogitsProcessorList(warpers)(torch.tensor([history]), logits.clone())[0].double(), -1)
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=1.2)
    draws = 4000
    rows = [SampleRow(params, seed=1, position=i, history=history, prompt_length=4) for i in range(draws)]
    counts = np.bincount(sample(logits.expand(draws, -1), rows).tokens, minlength=500)
    assert not counts[(expected == 0).numpy()].any()
    # Each frequency within five standard deviations of its probability.
    probability = expected.numpy()
    assert (np.abs(counts - draws * probability) <= 5 * np.sqrt(draws * probability) + 1).all()


def test_a_seed_and_a_position_name_a_draw() -> None:
    logits = torch.zeros(1, 1000)
    draw = lambda seed, position: sample(logits, [SampleRow(SamplingParams(), seed, position)]).tokens  # noqa: E731
    assert draw(5, 1) == draw(5, 1)
    assert len({tuple(draw(5, position)) for position in range(20)}) > 15
    assert len({tuple(draw(seed, 1)) for seed in range(20)}) > 15


def test_extreme_temperatures_and_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 9.9e3, 0.0]])
    for temperature in (5e-324, 1e-46, 1e-40, 1e-3, 1e30, 1e300):
        for top_k in (0, 3, 10**30, 10**400):
            [token] = sample(logits, [SampleRow(SamplingParams(temperature=temperature, top_k=top_k), 3, 3)]).tokens
            assert token == 0 or temperature >= 1e30


def test_stop_tokens_wait_for_the_minimum() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4] = 50.0
    row = SampleRow(SamplingParams(temperature=0, min_tokens=2), 0, 0, [1, 1, 4], 2, STOPS)
    assert sample(logits, [row]).tokens != [4]
    assert sample(logits, [SampleRow(row.params, 0, 0, [1, 1, 4, 4], 2, STOPS)]).tokens == [4]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = logits_for(3, 1)
    params = SamplingParams(temperature=0.5, top_k=3, logprobs=4, frequency_penalty=1.0)
    rows = [
        SampleRow(params, 0, 0, [1, 2, 3], 1),
        SampleRow(SamplingParams(temperature=0), 0, 0),
        SampleRow(SamplingParams(temperature=0, logprobs=0), 0, 0),
    ]
    sampled = sample(logits, rows)
    assert sampled.logprobs is not None
    first, second, third = sampled.logprobs
    table = torch.log_softmax(logits.double(), -1)
    assert first is not None
    assert second is None
    assert third is not None
    assert third.top == ()
    assert first.chosen == pytest.approx(float(table[0, sampled.tokens[0]]), abs=1e-5)
    assert third.chosen == pytest.approx(float(table[2].max()), abs=1e-5)
    assert [value for _, value in first.top] == pytest.approx(table[0].topk(4).values.tolist(), abs=1e-5)
    assert [float(table[0, token]) for token, _ in first.top] == pytest.approx(table[0].topk(4).values.tolist())
    assert sample(logits[1:2], rows[1:2]).logprobs is None


def test_greedy_rows_cost_one_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object) -> None:
        raise AssertionError("a greedy batch draws nothing")

    monkeypatch.setattr(sampler, "_draw", forbidden)
    logits = logits_for(4, 2)
    rows = [SampleRow(SamplingParams(temperature=0), 0, 0)] * 4
    assert sample(logits, rows).tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_logits_are_named_and_break_no_other_row(value: float) -> None:
    logits = logits_for(3, 0)
    logits[1, 5] = value
    rows = [SampleRow(SamplingParams(top_k=top_k), 0, 0) for top_k in (0, 5, 0)]
    found = sample(logits, rows)
    assert found.broken == {1}
    for row in (0, 2):
        assert found.tokens[row] == sample(logits[row : row + 1], [rows[row]]).tokens[0]


def test_a_bias_beyond_the_vocabulary_is_named() -> None:
    with pytest.raises(InvalidInput, match="names token 5; this model's ids end at 4"):
        sample(torch.zeros(1, 5), [SampleRow(SamplingParams(logit_bias={5: 1.0}), 0, 0)])
