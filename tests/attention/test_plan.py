"""A work list has every visible pair once and shared runs once, and `previous` changes only its cost.

With chunked attention, each row reads the keys of its own chunk up to itself, each once.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention import plan
from radixkv.errors import InvalidInput
from radixkv_kernels.work_list import WorkList
from tests.attention.batches import tree_tables

SETTINGS = settings(max_examples=60, deadline=None)


def covered(work: WorkList) -> Counter[tuple[int, int, int]]:
    """Count how often each visible (row, key position, slot of that key) is in the list."""
    pairs: Counter[tuple[int, int, int]] = Counter()
    for item in range(len(work.tokens)):
        start, first = int(work.kv_start[item]), int(work.kv_start[item]) // work.block_size
        rows = work.row_ids[work.row_offset[item] : work.row_offset[item] + work.rows[item]].tolist()
        for key in range(start, start + int(work.tokens[item])):
            block = int(work.block_ids[work.block_offset[item] + key // work.block_size - first])
            for row in rows:
                position = int(work.positions[row])
                visible = key <= position and (work.window is None or key > position - work.window)
                assert visible or not work.fully_visible[item]
                if visible:
                    pairs[row, key, block * work.block_size + key % work.block_size] += 1
    return pairs


def expected(
    tables: list[list[int]], kv: list[int], queries: list[int], window: int | None, block_size: int
) -> Counter[tuple[int, int, int]]:
    pairs: Counter[tuple[int, int, int]] = Counter()
    row = 0
    for table, length, count in zip(tables, kv, queries, strict=True):
        for position in range(length - count, length):
            for key in range(0 if window is None else max(0, position - window + 1), position + 1):
                pairs[row, key, table[key // block_size] * block_size + key % block_size] += 1
            row += 1
    return pairs


def check_merge(work: WorkList) -> None:
    """Check that every partial belongs to one row's merge, in the order of keys."""
    starts = np.repeat(work.kv_start, work.rows)
    assert sorted(work.merge_ids.tolist()) == list(range(len(work.row_ids)))
    for row in range(work.num_rows):
        parts = work.merge_ids[work.merge_offset[row] : work.merge_offset[row + 1]]
        assert (work.row_ids[parts] == row).all()
        assert (np.diff(starts[parts]) > 0).all()


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int], int]:
    rng = random.Random(draw(st.integers(0, 10**9)))
    block_size = draw(st.sampled_from([1, 2, 3, 16]))
    tables, kv = tree_tables(rng, block_size, draw(st.integers(0, 7)), adjacent=draw(st.booleans()))
    queries = [min(length, rng.choice([0, 1, 1, 2, 9, 70])) for length in kv]
    return tables, kv, queries, block_size


windows = st.sampled_from([None, 1, 2, 7, 16, 40, 10_000])


@given(batches(), windows, st.sampled_from([1, 8, 256]), st.sampled_from([None, 16, 33]), st.sampled_from([1, 9, 16]))
@SETTINGS
def test_every_visible_pair_stands_in_exactly_one_item(
    batch: tuple[list[list[int]], list[int], list[int], int],
    window: int | None,
    min_saving: int,
    max_tokens: int | None,
    short_chunk: int,
) -> None:
    tables, kv, queries, block_size = batch
    limits = {"min_saving": min_saving, "max_tokens": max_tokens, "short_chunk": short_chunk}
    work = plan.build(tables, kv, queries, window, block_size=block_size, **limits)
    assert covered(work) == expected(tables, kv, queries, window, block_size)
    check_merge(work)
    assert (work.tokens > 0).all()
    assert (work.rows > 0).all()
    if max_tokens is not None:
        assert (work.tokens <= max_tokens).all()


@given(batches(), windows)
@SETTINGS
def test_rows_of_a_short_chunk_read_as_decodes_do(
    batch: tuple[list[list[int]], list[int], list[int], int], window: int | None
) -> None:
    tables, kv, queries, block_size = batch
    options = {"block_size": block_size, "min_saving": plan.NEVER_SHARE}
    work = plan.build(tables, kv, queries, window, short_chunk=9, **options)
    single = {int(work.row_ids[work.row_offset[item]]): item for item in np.flatnonzero(work.rows == 1)}
    row = 0
    for table, length, count in zip(tables, kv, queries, strict=True):
        for end in range(length - count + 1, length + 1):
            if count <= 9:
                alone = plan.build([table], [end], [1], window, **options)
                item = single[row]
                assert len(alone.tokens) == 1 and work.fully_visible[item]
                assert (work.kv_start[item], work.tokens[item]) == (alone.kv_start[0], alone.tokens[0])
            row += 1


@given(batches(), windows, st.lists(st.integers(0, 40), min_size=7, max_size=7))
@SETTINGS
def test_a_list_grown_from_the_previous_one_covers_what_a_fresh_one_covers(
    batch: tuple[list[list[int]], list[int], list[int], int], window: int | None, growth: list[int]
) -> None:
    tables, kv, queries, block_size = batch
    before = plan.build(tables, kv, queries, window, block_size=block_size, min_saving=1)
    later = [length + more for length, more in zip(kv, growth, strict=False)]
    fresh_blocks = iter(range(10_000, 20_000))
    grown = [
        table + [next(fresh_blocks) for _ in range(-(-length // block_size) - len(table))]
        for table, length in zip(tables, later, strict=True)
    ]
    work = plan.build(grown, later, queries, window, before, block_size=block_size, min_saving=1)
    assert covered(work) == expected(grown, later, queries, window, block_size)
    check_merge(work)
    assert work.origin.runs is before.origin.runs  # type: ignore[attr-defined]


@given(batches(), windows, st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_merged_runs_have_the_rows_that_are_allowed_and_cover_what_all_runs_cover(
    batch: tuple[list[list[int]], list[int], list[int], int], window: int | None, most: int
) -> None:
    tables, kv, queries, block_size = batch
    free = plan.build(tables, kv, queries, window, block_size=block_size, min_saving=1)
    work = plan.build(tables, kv, queries, window, block_size=block_size, min_saving=1, max_shared_rows=most)
    rows, merged = (sum(queries[each] for each in found.origin.runs.members) for found in (free, work))  # type: ignore[attr-defined]
    assert merged <= most
    assert covered(work) == expected(tables, kv, queries, window, block_size)
    if rows <= most:
        assert items(work) == items(free)


def items(work: WorkList) -> list[tuple[int, int, int]]:
    return list(zip(work.kv_start.tolist(), work.tokens.tolist(), work.rows.tolist(), strict=True))


def test_a_list_with_another_bound_is_not_grown_from_the_previous_one() -> None:
    tables = [[0, 1, 2], [0, 1, 3]]
    before = plan.build(tables, [40, 40], [1, 1], block_size=16, min_saving=1)
    work = plan.build(tables, [41, 41], [1, 1], None, before, block_size=16, min_saving=1, max_shared_rows=0)
    assert items(work) == [(0, 41, 1)] * 2


def test_a_list_with_more_rows_of_the_same_sequences_is_not_grown_beyond_its_bound() -> None:
    tables = [[0, 1, 2], [0, 1, 3]]
    before = plan.build(tables, [40, 40], [1, 1], block_size=16, min_saving=1, max_shared_rows=2)
    assert items(before) == [(0, 32, 2), *[(32, 8, 1)] * 2]
    work = plan.build(tables, [42, 41], [2, 1], None, before, block_size=16, min_saving=1, max_shared_rows=2)
    assert max(work.rows) == 2 and work.origin.runs.members.size == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(3))
def test_runs_are_merged_as_if_all_costs_were_computed_after_each_merge(seed: int) -> None:
    rng, fresh, tables = random.Random(seed), itertools.count(), [np.empty(0, dtype=np.int32)]
    for _ in range(25):
        before = rng.choice(tables)
        own = [next(fresh) for _ in range(rng.randint(1, 6))]
        tables.append(np.concatenate([before[: len(before) - rng.randint(0, 2)], np.array(own, dtype=np.int32)]))
    del tables[0]
    kv, queries = np.array([4 * len(table) for table in tables]), np.array([rng.choice([1, 1, 3]) for _ in tables])
    starts = np.cumsum([0, *map(len, tables)])
    grouped = plan.group(plan.Batch(np.concatenate(tables), starts, kv, queries), 4, 1).runs
    members = np.split(grouped.members, np.cumsum(grouped.counts)[:-1])
    runs = list(zip(grouped.start.tolist(), grouped.stop.tolist(), members, strict=True))
    rows = sum(int(queries[each].sum()) for each in members)
    for most in range(0, rows, 1 + rows // 8):
        found, _ = plan.merge_runs(runs, np.zeros(len(kv), np.int64), queries, most)
        left = [(stop, each) for _, stop, each in runs]
        while sum(queries[each].sum() for _, each in left) > most:
            del left[cheapest(left, queries)]
        assert [(stop, each.tolist()) for _, stop, each in found] == [(stop, each.tolist()) for stop, each in left]


def cheapest(runs: list[tuple[int, plan.Int]], queries: plan.Int) -> int:
    """Return the place of the run, of (stop, members), whose merge costs the fewest additional reads for each row."""
    starts = [
        max([stop for stop, each in runs if stop < end and np.isin(members, each).all()], default=0)
        for end, members in runs
    ]
    costs = []
    for start, (end, members) in zip(starts, runs, strict=True):
        below = [
            each for low, (_, each) in zip(starts, runs, strict=True) if low == end and np.isin(each, members).all()
        ]
        readers = len(below) + len(members) - sum(map(len, below))
        costs.append((end - start) * (readers - 1) / queries[members].sum())
    return costs.index(min(costs))


@pytest.mark.parametrize(
    ("tables", "kv", "queries"),
    [
        ([[0, 1, 2, 9], [0, 4, 3]], [7, 6], [1, 1]),  # a block was exchanged, and a table has grown
        ([[0, 1, 2], [0, 4, 3]], [6, 6], [1, 1]),  # a block was exchanged
        ([[0, 1, 2, 3], [0, 1]], [7, 4], [1, 1]),  # one has grown by the other's loss
        ([[0, 1, 2], [0, 1, 3]], [6, 3], [1, 1]),  # truncated
        ([[0, 1, 2], [0, 1, 3]], [6, 6], [1, 0]),  # one has no query rows
        ([[0, 1, 2], [0, 1, 3]], [6, 6], [0, 0]),  # no member of a shared run has query rows
        ([[0, 1, 2]], [6], [1]),  # one has left
    ],
)
def test_any_change_but_growth_is_noticed(tables: list[list[int]], kv: list[int], queries: list[int]) -> None:
    before = plan.build([[0, 1, 2], [0, 1, 3]], [6, 6], [1, 1], block_size=2, min_saving=1)
    after = plan.build(tables, kv, queries, None, before, block_size=2, min_saving=1)
    fresh = plan.build(tables, kv, queries, block_size=2, min_saving=1)
    assert covered(after) == expected(tables, kv, queries, None, 2)
    assert after.read_tokens == fresh.read_tokens


def test_a_shared_prefix_is_read_once() -> None:
    shared = list(range(256))
    tables = [[*shared, 1000 + 2 * i, 1001 + 2 * i] for i in range(8)]
    work = plan.build(tables, [4096 + 20] * 8, [1] * 8, block_size=16)
    assert work.read_tokens == 4096 + 8 * 20
    assert len(work.tokens) == 9
    assert work.fully_visible.all()


def test_a_small_shared_run_is_not_worth_an_item_and_goes_with_its_children() -> None:
    tables = [[0, 1, 10], [0, 1, 11]]
    assert len(plan.build(tables, [40, 40], [1, 1], block_size=16).tokens) == 2
    assert len(plan.build(tables, [40, 40], [1, 1], block_size=16, min_saving=32).tokens) == 3


def test_chunks_over_a_shared_prefix_read_it_once_and_unmasked() -> None:
    shared = list(range(64))
    tables = [[*shared, 100, 101], [*shared, 102, 103]]
    work = plan.build(tables, [1024 + 20, 1024 + 30], [20, 30], block_size=16)
    assert work.tokens.tolist() == [1024, 20, 30]
    assert work.rows.tolist() == [50, 20, 30]
    assert work.fully_visible.tolist() == [True, False, False]


def test_under_a_window_only_what_can_be_seen_is_read() -> None:
    shared = list(range(64))
    tables = [[*shared, *range(100 + 100 * i, 164 + 100 * i)] for i in range(4)]
    decode = plan.build(tables, [2048] * 4, [1] * 4, 512, block_size=16)
    assert decode.read_tokens == 4 * 512
    common = plan.build([[*shared, 100], [*shared, 101]], [1025, 1030], [1, 1], 512, block_size=16)
    assert common.read_tokens == (1024 - (1025 - 512)) + 1 + 6
    chunk = plan.build([list(range(512))], [8192], [8192], 256, block_size=16)
    assert int((chunk.tokens * chunk.rows).sum()) <= 8192 * 3 * 256


def test_a_long_list_of_nested_prefixes_does_not_recurse() -> None:
    chain = list(range(1500))
    tables = [[*chain[: i + 1], 5000 + i] for i in range(1500)]
    work = plan.build(tables, [2 * (i + 2) for i in range(1500)], [1] * 1500, block_size=2, min_saving=1)
    assert work.read_tokens == 1499 * 2 + 2 + 1500 * 2


@pytest.mark.parametrize(
    ("tables", "kv", "queries", "options"),
    [
        ([[0]], [1, 2], [1], {}),
        ([[0]], [17], [1], {}),
        ([[0]], [2], [3], {}),
        ([[0]], [2], [-1], {}),
        ([[0]], [2], [1], {"window": 0}),
        ([[0]], [2], [1], {"max_tokens": 0}),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    tables: list[list[int]], kv: list[int], queries: list[int], options: dict[str, int]
) -> None:
    with pytest.raises(InvalidInput):
        plan.build(tables, kv, queries, block_size=16, **options)  # type: ignore[arg-type]


def slots_read(work: WorkList) -> Counter[tuple[int, int]]:
    """Count how often each visible (row, slot) is in the list."""
    pairs: Counter[tuple[int, int]] = Counter()
    for (row, _, slot), times in covered(work).items():
        pairs[row, slot] += times
    return pairs


@given(batches(), st.integers(1, 6), st.sampled_from([1, 256]))
@SETTINGS
def test_every_row_reads_its_own_chunk(
    batch: tuple[list[list[int]], list[int], list[int], int], blocks: int, min_saving: int
) -> None:
    _, _, _, size = batch
    chosen = [(np.array(table, np.int32), n, rows) for table, n, rows in zip(*batch[:3], strict=True) if rows]
    chunk, row, expected = blocks * size, 0, Counter[tuple[int, int]]()
    for table, length, rows in chosen:
        for position in range(length - rows, length):
            keys = range(position // chunk * chunk, position + 1)
            expected.update((row, int(table[key // size]) * size + key % size) for key in keys)
            row += 1
    if not chosen:
        return
    tables, lengths, queries = (list(part) for part in zip(*chosen, strict=True))
    sequences = plan.cut_chunks(tables, lengths, queries, chunk, size)
    work = plan.build(*sequences, block_size=size, min_saving=min_saving)
    assert slots_read(work) == expected
    check_merge(work)


def test_chunks_are_whole_blocks() -> None:
    with pytest.raises(InvalidInput, match="chunks of 8192 tokens, which block_size=24 must divide"):
        plan.check_chunk(8192, 24)
    plan.check_chunk(8192, 16)
