"""Scores of rows are torch's log-softmax, whichever slices they are computed in, and travel in one download."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from radixkv.errors import InvalidInput
from radixkv.sampling import row_scores
from radixkv.sampling.row_scores import RowScores, begin_scores
from tests.virtual_gpu import VirtualGpu

VOCAB = 50


def logits_for(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 4).to(dtype)


def expected(logits: torch.Tensor, targets: list[int], top: int) -> RowScores:
    """Return the scores by the whole table of log probabilities."""
    table = torch.log_softmax(logits.float(), dim=-1).numpy()
    chosen = np.array([row[target] for row, target in zip(table, targets, strict=True)], np.float32)
    ranks = np.array([1 + (row > own).sum() for row, own in zip(table, chosen, strict=True)], np.int32)
    ids = np.argsort(-table, axis=1, kind="stable")[:, :top]
    return RowScores(chosen, ranks, ids.astype(np.int32), np.take_along_axis(table, ids, axis=1))


def check_equal(found: RowScores, wanted: RowScores) -> None:
    for name in ("chosen", "ranks", "ids", "values"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        np.testing.assert_array_equal(mine, theirs, err_msg=name)


@pytest.mark.parametrize("slice_logits", [1, 3 * VOCAB, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scores_match_the_whole_table(slice_logits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scores, "SLICE_LOGITS", slice_logits)
    logits = logits_for(7, torch.float32).to(dtype)
    if dtype == torch.bfloat16:
        logits += torch.arange(VOCAB).to(dtype) * 0.25  # few ties
    before, targets = logits.clone(), [3, 49, 0, 7, 7, 20, 31]
    found = begin_scores(logits, targets, 4).result()
    wanted = expected(logits, targets, 4)
    np.testing.assert_array_equal(found.chosen, wanted.chosen)
    np.testing.assert_array_equal(found.ranks, wanted.ranks)
    np.testing.assert_array_equal(found.values, wanted.values)
    table = torch.log_softmax(logits.float(), dim=-1).numpy()
    np.testing.assert_array_equal(np.take_along_axis(table, found.ids.astype(np.int64), axis=1), wanted.values)
    assert torch.equal(logits, before)


class Sizes(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            self.most = max(self.most, each.numel() if isinstance(each, torch.Tensor) else 0)
        return found


@pytest.mark.parametrize("sources", [None, list(range(30))])
def test_no_tensor_is_larger_than_a_slice(sources: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scores, "SLICE_LOGITS", 4 * VOCAB)
    logits = logits_for(30, torch.bfloat16)
    with Sizes() as sizes:
        begin_scores(logits, [3] * 30, 2, sources).result()
    assert sizes.most == 4 * VOCAB


def test_rows_without_a_target_and_without_alternatives() -> None:
    logits = logits_for(3)
    found = begin_scores(logits, [5, -1, 7], 0).result()
    assert np.isnan(found.chosen).tolist() == [False, True, False]
    assert found.ranks[1] == 0 and found.ids.shape == found.values.shape == (3, 0)
    check_equal(found[2:], expected(logits[2:], [7], 0))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_named_and_the_others_can_be_read(number: float) -> None:
    logits = logits_for(4)
    logits[2, 11] = number
    pending = begin_scores(logits, [1, 2, 3, -1], 2)
    with pytest.raises(InvalidInput, match=r"row 2 of 4 .* no finite maximum"):
        pending.result()
    with pytest.raises(InvalidInput, match=r"row 2 of 4"):
        pending.result(slice(1, 3))
    check_equal(pending.result(slice(0, 2)), expected(logits[:2], [1, 2], 2))
    masked = torch.full((1, VOCAB), -torch.inf)
    with pytest.raises(InvalidInput, match="row 0 of 1"):
        begin_scores(masked, [-1], 0).result()


@pytest.mark.parametrize("targets", [[0], [0, VOCAB], [0, -2]])
def test_targets_that_do_not_fit_are_refused(targets: list[int]) -> None:
    with pytest.raises(InvalidInput, match="target"):
        begin_scores(logits_for(2), targets, 1)


def test_nothing_waits_for_a_gpu_before_the_results_are_read(
    virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches of scores are in flight at once, each of several slices, and each has one download."""
    monkeypatch.setattr(row_scores, "SLICE_LOGITS", 2 * VOCAB)
    logits, targets, sources = logits_for(5), [4, 3, -1, 1, 0], [4, 0, 2, 2]
    with virtual_gpu.serving():
        there = virtual_gpu.upload(logits)
        whole = begin_scores(there, targets, 3)
        some = begin_scores(there, targets[:4], 1, sources)
    waits = virtual_gpu.counts["event wait"]
    check_equal(some.result(slice(0, 2)), expected(logits[sources[:2]], targets[:2], 1))
    assert virtual_gpu.counts["event wait"] == waits + 1 and not virtual_gpu.counts["synchronisation"]
    found = whole.result()
    check_equal(found[3:], expected(logits[3:], targets[3:], 3))
    assert np.isnan(found.chosen[2])
