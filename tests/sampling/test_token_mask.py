"""Masks of a batch: filled on a thread, applied to constrained rows only, with the stop tokens of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.device import device_of
from radixkv.errors import InvalidConstraint
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import sample
from radixkv.sampling.token_mask import Bits, ConstrainedRow, TokenMasks
from tests.sampling.launches import Launches

VOCAB, STOP = 100, 99


class OnlyThese:
    """Allows fixed tokens, and the stop token if `accepts`."""

    vocab_size, stop_ids, finished = VOCAB, frozenset({STOP}), False

    def __init__(self, *tokens: int, accepts: bool = False, error: str = "") -> None:
        self.tokens, self.accepts, self.error = tokens, accepts, error

    def consume(self, tokens: Sequence[int]) -> None: ...

    def forced(self) -> list[int]:
        return []

    def rollback(self, count: int) -> None: ...

    def fork(self) -> OnlyThese:
        return self

    @classmethod
    def fill(cls, matchers: Sequence[OnlyThese], bits: Bits) -> dict[int, InvalidConstraint]:
        for row, each in zip(bits, matchers, strict=True):
            allowed = np.zeros(len(row) * 32, bool)
            allowed[[*each.tokens, *((STOP,) if each.accepts else ())]] = True
            row[:] = np.packbits(allowed, bitorder="little").view(np.int32)
        return {at: InvalidConstraint(each.error) for at, each in enumerate(matchers) if each.error}


def allowed(rows: dict[Any, ConstrainedRow], keys: Sequence[Any], width: int = VOCAB) -> list[list[int] | None]:
    """Return the tokens that a batch's mask leaves in each row, None for all."""
    step = TokenMasks().begin(rows)
    assert not step.wait()
    mask = step.select(keys)
    logits = torch.randn(len(keys), width)
    before = logits.clone()
    if mask is not None:
        mask.limit(logits)
    left = [torch.isfinite(row).nonzero()[:, 0].tolist() for row in logits]
    for row, kept in zip(range(len(keys)), left, strict=True):
        assert torch.equal(logits[row, kept], before[row, kept])
    return [None if len(each) == width else each for each in left]


def row(*tokens: int, accepts: bool = False, stops: frozenset[int] = OnlyThese.stop_ids) -> ConstrainedRow:
    return ConstrainedRow(OnlyThese(*tokens, accepts=accepts), stops)


def test_rows_come_in_any_order_with_unconstrained_ones() -> None:
    rows = {"a": row(1), "b": row(2, accepts=True), "c": row()}
    assert allowed(rows, ["b", None, "a", "c", "b"]) == [[2, STOP], None, [1], [], [2, STOP]]
    assert allowed(rows, [None, None]) == [None, None]
    assert allowed(rows, ["a"]) == [[1]]  # the first rows of a step alone, whose batch failed and is drawn in parts
    assert allowed(rows, ["a", "b"]) == [[1], [2, STOP]]


@pytest.mark.parametrize("width", [VOCAB - 30, VOCAB, VOCAB + 1, VOCAB + 70])
def test_logits_may_be_wider_or_narrower_than_the_tokenizer(width: int) -> None:
    assert allowed({"a": row(0, 5, accepts=True)}, ["a"], width) == [[0, 5] + [STOP] * (width > STOP)]


def test_the_stop_tokens_match_the_request() -> None:
    own = frozenset({3, 64})
    assert allowed({"a": row(1, 3, stops=own)}, ["a"]) == [[1]]
    assert allowed({"a": row(1, accepts=True, stops=own)}, ["a"]) == [[1, 3, 64]]
    assert allowed({"a": row(1, accepts=True, stops=frozenset())}, ["a"]) == [[1]]


def test_buffers_are_used_again_with_more_and_with_fewer_rows() -> None:
    masks = TokenMasks()
    for count in (1, 5, 2, 9, 1):
        step = masks.begin({number: row(number) for number in range(count)})
        step.wait()
        mask = step.select(range(count))
        assert mask is not None
        logits = torch.zeros(count, VOCAB)
        mask.limit(logits)
        assert torch.isfinite(logits).nonzero().tolist() == [[number, number] for number in range(count)]


@pytest.mark.parametrize("width", [VOCAB - 30, VOCAB, VOCAB + 1, VOCAB + 70])
def test_a_mask_made_on_the_device_equals_one_made_on_the_host(width: int) -> None:
    masks = TokenMasks()
    rows = {at: row(*range(at, VOCAB, 7), accepts=True) for at in range(4)}
    found = []
    for on_host in (True, False):
        masks.limits_on_host = on_host
        step = masks.begin(rows)
        step.wait()
        mask = step.select([2, None, 0, 2])
        assert mask is not None
        if not on_host:
            step.bits_on(device_of("cpu"))
            masks.begin({0: row(1)}).wait()  # the next step fills the same bits
        logits = torch.randn(4, width, generator=torch.Generator().manual_seed(1))
        with Launches() as launches:
            mask.limit(logits)
        found.append(logits)
        assert launches.found.total() <= (0 if on_host else 11), launches.found
    assert torch.equal(*found)


def test_log_probabilities_are_those_before_the_mask() -> None:
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    step = TokenMasks().begin({"a": row(4, 5)})
    step.wait()
    params = SamplingParams(temperature=0, logprobs=2)
    sampled = sample(logits, [SampleRow(params, 0, 0)] * 3, step.select(["a", None, "a"]))
    assert sampled.tokens[0] in (4, 5) and sampled.tokens[1] == int(before[1].argmax())
    assert sampled.logprobs is not None
    table = torch.log_softmax(before, dim=-1)
    for at, found in enumerate(sampled.logprobs):
        assert found is not None and found.chosen == pytest.approx(float(table[at, sampled.tokens[at]]))
        assert found.top[0][0] == int(before[at].argmax())
    assert torch.equal(logits, before)  # a batch that raises is drawn again, in parts, from the same logits
