"""The attention kernels in edge cases: lengths around blocks and tiles, masks that leave nothing, sinks, 64 bits.

Each case is small and fixed: it covers one line of the kernels, and fails without it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from radixkv.attention import plan
from radixkv.attention.kv_store import LayerShape
from radixkv_kernels import attention, reference
from radixkv_kernels.attention import Kind
from radixkv_kernels.triton_kernels import merge_partials
from tests.kernels.interpreted.attending import CPU, SMALL, attend, close, expected_output, separate

ONE = (Kind(16, 16, 4, 1, 1),)
"""Sixteen rows over sixteen keys an iteration."""


def test_runs_that_all_see_lie_between_runs_that_some_see() -> None:
    case = separate([126], [5], shape=LayerShape(1, 16, 16), group=3)
    work = plan.build(case.tables, case.kv_lengths, case.query_lengths, 70, block_size=16)
    step = attention.plan(work, heads=3, kv_heads=1, chosen=ONE, device=CPU, processors=1)
    clear_from, clear_to, stop = (int(step.tiles[0][16 + field]) for field in (6, 7, 3))
    assert 0 < clear_from < clear_to < -(-stop // 16)
    for kinds, split in ((SMALL, None), (ONE, 16)):
        found = attend(case, 70, kinds=kinds, split=split, scale=0.3)
        close(found, expected_output(case, scale=0.3, window=70), torch.float32)


def test_partials_of_very_different_weight_are_merged() -> None:
    """One key outweighs all others by far more than float32 holds; first it is among the last, then among the first."""
    for heavy in (40, 3):
        case = separate([48], [1], shape=LayerShape(1, 16, 16), group=1)
        case.query.fill_(1.0)
        key = case.store.keys[0]
        key[:, case.tables[0]] = 0.0
        key[:, case.tables[0][heavy // 16], heavy % 16] = 100.0
        output = attend(case, kinds=ONE, split=16, scale=1.0)
        expected = case.store.values[0][0, case.tables[0][heavy // 16], heavy % 16]
        torch.testing.assert_close(output[0, 0], expected, rtol=0, atol=1e-6)


def test_more_partials_than_a_merge_loads_at_once() -> None:
    """The heaviest key is among the last, so that earlier sums must fade."""
    case = separate([16 * attention.AT_ONCE + 40], [1], shape=LayerShape(1, 16, 24), group=2)
    case.store.keys[0][:, case.tables[0][-1], 7] = 4 * case.query.mean(0)
    for sinks in (None, torch.tensor([6.0, 0.0])):
        wide = None if sinks is None else sinks.double()
        output = attend(case, kinds=ONE, split=16, scale=1.0, sinks=sinks)
        close(output, expected_output(case, scale=1.0, sinks=wide), torch.float32)


def test_partials_that_saw_nothing_are_merged_as_nothing() -> None:
    """More empty partials than a merge loads at once come first, so that there is no weight yet."""
    count = attention.AT_ONCE + 2
    partial, lse = torch.zeros(count, 1, 16), torch.full((count, 1), -torch.inf)
    partial[-1], lse[-1] = torch.arange(16.0), 3.0
    rows = torch.zeros(17, dtype=torch.int32)
    rows[0] = 1
    offsets, ids = torch.tensor([0, count], dtype=torch.int32), torch.arange(count, dtype=torch.int32)
    output = torch.full((1, 1, 16), torch.nan)
    sizes = {"HEADS": 1, "DV": 16, "DV_PADDED": 16, "AT_ONCE": attention.AT_ONCE, "SINKS": False}
    merge_partials[(1,)](partial, lse, rows, offsets, ids, partial, output, 16, 16, **sizes)
    assert torch.equal(output[0, 0], torch.arange(16.0))


def test_a_merge_has_as_many_programs_as_the_device_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs take sixteen (row, head) pairs, or one program takes each."""
    case = separate([64, 33, 20, 48], [1, 1, 1, 1], group=2)
    outputs = []
    for at_once in (1, 1 << 10):
        monkeypatch.setattr(attention, "MERGES_AT_ONCE", at_once)
        outputs.append(attend(case, kinds=ONE, processors=3, split=16, scale=0.3))
    close(outputs[0], expected_output(case, scale=0.3), torch.float32)
    assert torch.equal(*outputs)


def test_a_row_of_sinks_alone_gets_zeros() -> None:
    case = separate([20], [1], group=1)
    work = plan.build(case.tables, case.kv_lengths, [1], block_size=16)
    work = dataclasses.replace(work, positions=np.append(work.positions, 0).astype(np.int32))
    step = attention.plan(work, heads=2, kv_heads=2, chosen=ONE, device=CPU, processors=2)
    query = torch.cat([case.query, case.query], dim=1)
    pools = case.store.keys[0], case.store.values[0]
    for sinks in (None, torch.zeros(2)):
        output = torch.full((2, 2, 16), torch.nan)
        attention.attend(query, *pools, step, scale=0.3, sinks=sinks, output=output)
        assert not output[1].any()


def test_how_many_tiles_of_a_kind_there_are_is_read_by_the_kernel() -> None:
    """Each kind of tile has a count on the device, and tiles after it are not computed."""
    case = separate([20, 40, 33], [1, 20, 1], shape=LayerShape(2, 16, 16), group=2)
    work = plan.build(case.tables, case.kv_lengths, case.query_lengths, block_size=16, min_saving=plan.NEVER_SHARE)
    step = attention.plan(work, heads=4, kv_heads=2, chosen=SMALL, device=CPU, processors=2)
    assert [int(tiles[0]) for tiles in step.tiles] == [2, 0, 1]
    pools, expected = (case.store.keys[0], case.store.values[0]), expected_output(case, scale=0.3)
    decodes, chunk = [0, 21], list(range(1, 21))
    longest = 21  # tiles of a kind are in order of their length
    for counts, done in (((2, 0, 0), decodes), ((0, 0, 1), chunk), ((1, 0, 0), [longest])):
        for tiles, count in zip(step.tiles, counts, strict=True):
            tiles[0] = count
        output = attention.attend(case.query, *pools, step, scale=0.3, output=torch.full((22, 4, 16), torch.nan))
        close(output[done], expected[done], torch.float32)
        assert output[[row for row in range(22) if row not in done]].isnan().all()


def test_a_head_beyond_two_gigabytes_is_reached() -> None:
    """In a pool that keeps heads outermost, head 3 lies beyond 2^31 numbers, though no stride does."""
    count = (1 << 31) // (3 * 16 * 16) + 2
    big = torch.empty(4, count, 16, 16, dtype=torch.float16)
    assert big.stride(0) < 1 << 31 < 3 * big.stride(0)
    tables = [[1, count - 1]]
    big[:, tables[0]] = torch.randn(4, 2, 16, 16, generator=torch.Generator().manual_seed(0)).half()
    query = torch.randn(4, 1, 16, generator=torch.Generator().manual_seed(1)).half()
    work = plan.build(tables, [20], [1], block_size=16)
    step = attention.plan(work, heads=4, kv_heads=4, chosen=ONE, device=CPU, processors=2)
    output = attention.attend(query, big, big, step, scale=0.1)
    pool = big[:, tables[0]].double()
    expected = reference.attend(query.double(), pool, pool, [[0, 1]], [20], [1], scale=0.1)
    close(output, expected, torch.float16)
