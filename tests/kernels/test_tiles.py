"""A tiling has every visible pair in one tile, omits masks only if all rows see all keys, and merges in order."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention import plan
from radixkv.attention.plan import Grouping
from radixkv_kernels import graph_capacity
from radixkv_kernels import tiles as tiling
from radixkv_kernels.graph_capacity import Bucket, GraphCapacity
from radixkv_kernels.tiles import FIELDS, HEADER, Shape, Tiles
from radixkv_kernels.work_list import WorkList
from tests.attention.batches import tree_tables
from tests.attention.test_plan import covered, expected

SETTINGS = settings(max_examples=100, deadline=None)
SHAPES = (Shape(4, 4), Shape(8, 8), Shape(16, 4))


def records(tiles: Tiles, kind: int) -> list[list[int]]:
    flat = tiles.kinds[kind]
    found = flat[HEADER:].reshape(-1, FIELDS).tolist()
    assert flat[0] == len(found) == tiles.num_tiles(kind)
    return found


def check(tiles: Tiles, work: WorkList, shapes: tuple[Shape, ...], group: int) -> None:
    """Recount all properties on which the kernels rely."""
    pairs: Counter[tuple[int, int, int]] = Counter()
    partial_of: dict[int, tuple[int, int]] = {}
    done: list[int] = []
    for kind, shape in enumerate(shapes):
        lengths = []
        for block, position, first, stop, row_offset, count, clear_from, clear_to, partial, *padding in records(
            tiles, kind
        ):
            assert not any(padding)
            assert 0 <= first < work.block_size and first < stop and 0 < count * group <= shape.rows
            assert kind == 0 or count * group > shapes[kind - 1].rows
            assert 0 <= clear_from <= clear_to <= -(-stop // shape.keys)
            lengths.append(stop - first)
            rows = tiles.row_ids[row_offset : row_offset + count].tolist()
            for row in rows:
                at = int(tiles.positions[row])
                for slot in range(min(first, clear_from * shape.keys), max(stop, clear_to * shape.keys)):
                    key = position + slot
                    visible = key <= at and (work.window is None or key > at - work.window)
                    if clear_from <= slot // shape.keys < clear_to:
                        assert visible and first <= slot < stop
                    if visible and first <= slot < stop:
                        id_ = int(tiles.block_ids[block + slot // work.block_size])
                        pairs[row, key, id_ * work.block_size + slot % work.block_size] += 1
            if partial < 0:
                done += rows
            for ordinal, row in enumerate(rows if partial >= 0 else []):
                assert partial + ordinal not in partial_of
                partial_of[partial + ordinal] = (row, position + first)
        assert lengths == sorted(lengths, reverse=True)
    assert pairs == listed(work)
    check_merges(tiles, partial_of, done)


def listed(work: WorkList) -> Counter[tuple[int, int, int]]:
    """Return the visible pairs of the work list: (row, key position, slot)."""
    pairs: Counter[tuple[int, int, int]] = Counter()
    for item in range(len(work.tokens)):
        start = int(work.kv_start[item])
        for row in work.row_ids[work.row_offset[item] : work.row_offset[item] + work.rows[item]].tolist():
            at = int(work.positions[row])
            for key in range(start, start + int(work.tokens[item])):
                if key <= at and (work.window is None or key > at - work.window):
                    place = work.block_offset[item] + key // work.block_size - start // work.block_size
                    pairs[row, key, int(work.block_ids[place]) * work.block_size + key % work.block_size] += 1
    return pairs


def check_merges(tiles: Tiles, partial_of: dict[int, tuple[int, int]], done: list[int]) -> None:
    """Check that each partial is merged once, in the order of keys, and each row finished once."""
    merged = tiles.merge_rows[HEADER:].tolist()
    assert tiles.merge_rows[0] == len(merged) == tiles.num_merges
    assert sorted(partial_of) == sorted(tiles.merge_ids.tolist()) == list(range(tiles.num_partials))
    assert sorted([*merged, *done]) == list(range(tiles.num_rows))
    for row, low, high in zip(merged, tiles.merge_offset[:-1], tiles.merge_offset[1:], strict=True):
        found = [partial_of[number] for number in tiles.merge_ids[low:high].tolist()]
        assert {owner for owner, _ in found} <= {row}
        starts = [start for _, start in found]
        assert starts == sorted(set(starts))


@st.composite
def lists(draw: st.DrawFn) -> WorkList:
    rng = random.Random(draw(st.integers(0, 10**9)))
    block_size = draw(st.sampled_from([1, 2, 3, 16]))
    tables, kv = tree_tables(rng, block_size, draw(st.integers(0, 6)), adjacent=False)
    queries = [min(length, rng.choice([0, 1, 1, 2, 9, 70])) for length in kv]
    window = draw(st.sampled_from([None, None, 1, 2, 7, 16, 40, 10_000]))
    most = draw(st.sampled_from([None, None, 5, 33]))
    min_saving = draw(st.sampled_from([1, 8, 256]))
    work = plan.build(tables, kv, queries, window, block_size=block_size, min_saving=min_saving, max_tokens=most)
    if draw(st.booleans()):
        return work
    order = np.array(rng.sample(range(len(work.tokens)), len(work.tokens)), dtype=np.int64)  # a list may have any
    items = ("block_offset", "kv_start", "tokens", "row_offset", "rows", "fully_visible")
    return dataclasses.replace(work, **{name: getattr(work, name)[order] for name in items})


@given(lists(), st.sampled_from([1, 2, 3, 8, 16]), st.sampled_from([None, 1, 9, 30]))
@SETTINGS
def test_every_visible_pair_stands_in_exactly_one_tile(work: WorkList, group: int, split: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "SHORTEST", 4)
        tiles = tiling.build(work, SHAPES, group, spread=20, split=split)
    check(tiles, work, SHAPES, group)


def single(length: int, queries: int = 1, window: int | None = None) -> WorkList:
    table = np.arange(-(-length // 16))
    return plan.build([table], [length], [queries], window, block_size=16)


def test_a_chunk_and_its_prefix_are_one_tile_that_masks_its_diagonal_only() -> None:
    (tile,) = records(tiling.build(single(96 + 8, 8), (Shape(16, 16),), 2), 0)
    assert tile[:9] == [0, 0, 0, 104, 0, 8, 0, 6, -1]


def test_a_window_is_masked_at_both_ends_and_clear_between() -> None:
    (tile,) = records(tiling.build(single(200, 4, 100), (Shape(16, 16),), 1), 0)
    _, position, first, stop, _, rows, clear_from, clear_to, _ = tile[:9]
    assert (position, first, stop, rows) == (96, 1, 104, 4)  # keys 97 to 199, from block 6 on
    assert (clear_from, clear_to) == (1, 6)  # all rows see 100 to 196


@pytest.mark.parametrize(
    ("start", "rows", "positions", "merges"),
    [
        (4, [0, 1, 3, 0, 2, 3], [7, 7, 7, 7], ([0, 2, 3, 4, 6], [0, 3, 1, 4, 2, 5])),
        (8, [0, 0], [11], ([0, 2], [0, 1])),
        (4, [0, 0], [11], ([0, 2], [0, 1])),
    ],
    ids=["other rows between the first and the last", "a gap between their keys", "a gap between their blocks"],
)
def test_items_that_do_not_join_are_not_one_tile(
    start: int, rows: list[int], positions: list[int], merges: tuple[list[int], list[int]]
) -> None:
    each = len(rows) // 2
    block = 1 if each > 1 else 2
    columns = [0, block], [0, start], [4, 4], [0, each], [each, each]
    ids = [np.array(column, np.int32) for column in columns]
    rest = [np.array(column, np.int32) for column in ([5, 6, 7], rows, positions, *merges)]
    work = WorkList(4, None, *ids, np.array([True, True]), *rest)
    check(tiling.build(work, SHAPES, 1), work, SHAPES, 1)


def test_each_row_tile_starts_where_the_first_of_its_rows_begins_to_see() -> None:
    found = records(tiling.build(single(400, 64, 100), (Shape(16, 16),), 1), 0)
    assert sorted(tile[1] + tile[2] for tile in found) == [336 - 99 + 16 * i for i in range(4)]


def test_keys_are_cut_to_spread_a_step_and_merged_in_order() -> None:
    tiles = tiling.build(single(4096), (Shape(16, 64),), 4, spread=8)
    assert [tile[3] - tile[2] for tile in records(tiles, 0)] == [512] * 8
    assert (tiles.num_partials, tiles.num_merges) == (8, 1)


def test_with_a_fixed_split_a_rows_tiles_do_not_depend_on_the_others() -> None:
    def tiles_of(lengths: list[int]) -> list[list[int]]:
        tables, at = [], 0
        for length in lengths:
            tables.append(np.arange(at, at - (-length // 16)))
            at += len(tables[-1])
        work = plan.build(tables, lengths, [1] * len(lengths), block_size=16, min_saving=plan.NEVER_SHARE)
        tiles = tiling.build(work, SHAPES, 4, spread=len(lengths), split=256)
        return sorted(tile[1:4] for tile in records(tiles, 0) if tile[4] == 0)

    assert tiles_of([1000]) == tiles_of([1000, 3, 5000, 70]) != []


def test_a_row_with_nothing_to_read_is_merged_from_nothing() -> None:
    work = single(20)
    padded = dataclasses.replace(work, positions=np.append(work.positions, 0).astype(np.int32))
    tiles = tiling.build(padded, SHAPES, 1)
    assert tiles.merge_rows[HEADER:].tolist() == [1]
    assert tiles.merge_offset.tolist() == [0, 0]


@st.composite
def decodes(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Draw tables and lengths of decodes: random trees, and combs, in which each sequence leaves the others in turn."""
    count = draw(st.integers(1, 40))
    if draw(st.booleans()):
        return comb(count, draw(st.integers(1, 3)))
    tables, kv = tree_tables(random.Random(draw(st.integers(0, 10**9))), 4, count, adjacent=False)
    return [table for table, length in zip(tables, kv, strict=True) if length], [length for length in kv if length]


def comb(leaves: int, blocks: int, size: int = 4) -> tuple[list[list[int]], list[int]]:
    """Return tables and lengths of sequences with 1, 2, 3 ... runs of `blocks` common blocks, and one token more."""
    spine = list(range(leaves * blocks))
    tables = [[*spine[: each * blocks], 10_000 + each] for each in range(1, leaves + 1)]
    return tables, [(len(table) - 1) * size + 1 for table in tables]


def binary(depth: int, size: int = 4) -> tuple[list[list[int]], list[int]]:
    """Return tables and lengths of the 2**depth leaves of a binary tree, with a block for each node."""
    tables = [[(leaf >> (depth - level)) + (1 << level) for level in range(depth + 1)] for leaf in range(1 << depth)]
    return tables, [len(tables[0]) * size] * len(tables)


def shared_rows(work: WorkList, queries: list[int]) -> int:
    """Return the rows of all shared runs together."""
    assert isinstance(work.origin, Grouping)
    return sum(queries[member] for member in work.origin.runs.members)


def fits(tiles: Tiles, room: GraphCapacity) -> bool:
    merges = tiles.merge_rows, tiles.merge_offset, tiles.merge_ids
    arrays = [*tiles.kinds, tiles.row_ids, tiles.positions, *merges]
    return room.holds(tiles) and all(len(a) <= size for a, size in zip(arrays, room.sizes, strict=True))


SPREADS = st.sampled_from([0.1, 1, 9, 60, (33, 0.5, 7.5)])


@given(decodes(), st.sampled_from([None, 3, 40]), st.integers(0, 3), st.sampled_from([1, 3, 8]), SPREADS, st.data())
@SETTINGS
def test_a_steps_tiles_fit_the_stated_bound(
    batch: tuple[list[list[int]], list[int]],
    window: int | None,
    padding: int,
    group: int,
    spread: float | tuple[float, ...],
    data: st.DataObject,
) -> None:
    """The bound is for balanced steps of any tree: decodes, and chunks of prompts; also in chunks of attention."""
    tables, kv = batch
    if not kv:
        return
    queries = [1] * len(kv)
    if data.draw(st.booleans()):
        queries = [data.draw(st.sampled_from([1, 2, 9, length])) if length > 9 else 1 for length in kv]
    bucket = Bucket(sum(queries) + padding, len(kv) + (padding if max(queries) == 1 else 0), max(queries) > 1)
    chunk = data.draw(st.sampled_from([None, None, 8]))
    sequences = (tables, kv, queries) if chunk is None else plan.cut_chunks(tables, kv, queries, chunk, 4)
    assert len(sequences[0]) <= bucket.pieces(chunk)
    work = plan.build(*sequences, window, block_size=4, min_saving=1, max_shared_rows=bucket.shared_rows)
    if chunk is None:
        assert covered(work) == expected(tables, kv, queries, window, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "SHORTEST", 4)
        tiles = tiling.build(work.padded(bucket.tokens), SHAPES, group, spread=spread)
        room = graph_capacity.step_capacity(
            bucket, len(work.block_ids), SHAPES, group, spread=spread, window=window, chunk=chunk
        )
    assert fits(tiles, room)


@given(decodes(), st.sampled_from([None, 3, 40]), st.sampled_from([8, 30]))
@settings(max_examples=40, deadline=None)
def test_decodes_with_a_fixed_split_fit_the_stated_bound(
    batch: tuple[list[list[int]], list[int]], window: int | None, split: int
) -> None:
    tables, kv = batch
    if kv:
        work = plan.build(tables, kv, [1] * len(kv), window, block_size=4, min_saving=plan.NEVER_SHARE)
        tiles = tiling.build(work, SHAPES, 3, split=split)
        assert fits(
            tiles, graph_capacity.split_capacity(len(kv), len(work.block_ids), SHAPES, 3, keys=max(kv), split=split)
        )


DEEP = {f"depth {depth}": binary(depth) for depth in (3, 5, 6)} | {f"comb {n}": comb(n, 16) for n in (5, 6, 8, 20, 64)}


@pytest.mark.parametrize("tree", DEEP)
def test_a_batch_that_fills_its_bucket_fits_however_deep_its_tree_is(tree: str) -> None:
    tables, kv = DEEP[tree]
    rows = len(kv)
    bucket, queries = Bucket(rows, rows), [1] * rows
    most = bucket.shared_rows
    free, work = (
        plan.build(tables, kv, [1] * rows, block_size=4, min_saving=1, max_shared_rows=limit) for limit in (None, most)
    )
    room = graph_capacity.step_capacity(bucket, len(work.block_ids), SHIPPED, 4, spread=AT_ONCE)
    assert room.holds(tiling.build(work, SHIPPED, 4, spread=AT_ONCE))
    if shared_rows(free, queries) <= most:
        assert len(work.tokens) == len(free.tokens) and (work.row_ids == free.row_ids).all()
        assert tree in ("depth 3", "comb 5", "comb 6", "comb 8")
        return
    assert not room.holds(tiling.build(free, SHIPPED, 4, spread=AT_ONCE))
    assert shared_rows(work, queries) <= most
    assert free.read_tokens < work.read_tokens < (1.2 if tree.startswith("depth") else 4) * free.read_tokens


SHIPPED = (Shape(16, 64), Shape(64, 64), Shape(128, 64))
"""As on an H200, for 32 query heads over 8 kv heads."""

AT_ONCE = (33.0, 33.0, 16.5)
"""132 processors with 2, 2 and 1 programs."""


def tree(*levels: tuple[int, int], own: int) -> WorkList:
    """Return decodes after shared tokens, with a number of branches and of tokens for each level."""
    paths, fresh = [np.empty(0, dtype=np.int64)], itertools.count()
    for branches, tokens in levels:
        runs = [(path, [next(fresh) for _ in range(tokens // 16)]) for path in paths for _ in range(branches)]
        paths = [np.concatenate([path, run]) for path, run in runs]
    tables = [np.concatenate([path, [next(fresh) for _ in range(-(-own // 16))]]).astype(np.int64) for path in paths]
    shared = sum(tokens for _, tokens in levels)
    return plan.build(tables, [shared + own] * len(tables), [1] * len(tables), block_size=16)


def sharing(readers: int, shared: int, own: int) -> WorkList:
    """Return decodes that all share one run."""
    tables = [[*range(shared // 16), *range(10_000 + 100 * i, 10_000 + 100 * i - (-own // 16))] for i in range(readers)]
    return plan.build(tables, [shared + own] * readers, [1] * readers, block_size=16)


def balance(tiles: Tiles, kind: int, kv_heads: int = 8) -> float:
    """Return the average program's keys as a share of the busiest one's, in the kernels' order of tiles."""
    programs = round(AT_ONCE[kind] * kv_heads)
    loads = [0] * programs
    units = [tile[3] - tile[2] for tile in records(tiles, kind) for _ in range(kv_heads)]
    for number, keys in enumerate(units):
        turn, place = divmod(number, programs)
        loads[place if turn % 2 == 0 else programs - 1 - place] += keys
    return sum(units) / programs / max(loads)


@pytest.mark.parametrize(
    ("work", "most"),
    [
        (sharing(64, 8192, 512), 64 * 9),
        (sharing(64, 32768, 512), 64 * 9),
        (tree((8, 10240), (8, 0), own=512), 64 * 5),
        (tree((64, 8192), own=0), 0),
        (tree((8, 8192), own=0), 8 * 4),
        (tree((1, 32768), own=0), 64),
        (tree((64, 1024), own=0), 0),
    ],
    ids=["tree", "long tree", "agents", "64 x 8k", "8 x 8k", "1 x 32k", "64 x 1k"],
)
def test_each_launch_keeps_a_gpu_busy_with_few_partials(work: WorkList, most: int) -> None:
    tiles = tiling.build(work, SHIPPED, 4, spread=AT_ONCE)
    kinds = [kind for kind in range(3) if tiles.num_tiles(kind)]
    assert min(balance(tiles, kind) for kind in kinds) > 0.95
    assert tiles.num_partials <= most


def test_keys_are_not_cut_where_partials_cost_more_than_a_gpu_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tiles of 128 stacked rows if seven run at once: three parts each would save 341 keys, and cost 439."""
    work = single(1024, 128)
    assert tiling.build(work, SHIPPED, 4, spread=7).num_partials == 0
    assert tiling.build(work, SHIPPED, 4, spread=AT_ONCE).num_partials == 13 * 32
    monkeypatch.setattr(tiling, "PARTIAL", 0)
    assert tiling.build(work, SHIPPED, 4, spread=7).num_partials == 13 * 32


def separate(*lengths: int) -> WorkList:
    tables = [np.arange(1000 * i, 1000 * i - (-length // 16)) for i, length in enumerate(lengths)]
    return plan.build(tables, list(lengths), [1] * len(lengths), block_size=16)


def test_the_longest_tile_is_cut_though_the_average_would_do() -> None:
    tiles = tiling.build(separate(1900, 700, 700, 700), (Shape(16, 16),), 1, spread=4)
    assert max(tile[3] - tile[2] for tile in records(tiles, 0)) <= 700


def test_keys_are_never_cut_into_more_than_so_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """If 1.9 tiles run at once, more parts always balance a little better."""
    monkeypatch.setattr(tiling, "PARTIAL", 0)
    tiles = tiling.build(single(8192), (Shape(16, 16),), 1, spread=1.9)
    assert [tiles.num_tiles(0)] == tiling.added_tiles(1.9, 1) == [7]


def test_after_the_edge_of_a_window_keys_are_cut_between_blocks() -> None:
    """A tile that starts inside a block needs a mask."""
    tiles = tiling.build(single(4099, window=2000), (Shape(16, 16),), 1, spread=4)
    assert sorted(tile[2] for tile in records(tiles, 0)) == [0, 0, 0, 3]


def test_what_does_not_fit_is_noticed_whatever_it_is() -> None:
    tiles = tiling.build(single(4096), SHIPPED, 4, spread=8)
    room = GraphCapacity(rows=1, tiles=(8, 0, 0), row_ids=1, partials=8, block_ids=len(tiles.block_ids))
    assert room.holds(tiles)
    for name, size in dataclasses.asdict(room).items():
        less = (7, 9, 9) if name == "tiles" else size - 1
        assert not dataclasses.replace(room, **{name: less}).holds(tiles)


def test_after_the_last_block_id_there_are_some_that_may_be_loaded() -> None:
    """Block ids are loaded one iteration ahead, beyond the last key."""
    work = single(4096)
    tiles = tiling.build(work, SHIPPED, 4)
    assert len(tiles.block_ids) == len(work.block_ids) + tiling.OVERREAD
    assert max(shape.keys for shape in SHIPPED) <= tiling.OVERREAD


def test_a_group_that_fits_no_tile_is_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        tiling.build(single(20), SHAPES, 17)
