"""Compare the owners of blocks with a recount from records and from the cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.telemetry.records import NodeRecord
from radixkv_monitor import block_map, block_modes, theme
from radixkv_monitor.block_map import (
    ACTIVE,
    CACHED,
    FREE,
    PINNED,
    PRIVATE,
    BlockMap,
    block_at,
    count_blocks,
    place_of,
    without_last,
)
from radixkv_monitor.block_modes import MODES, Blocks, reduce
from radixkv_monitor.state import SHARED, UNKNOWN
from tests.monitor.random_cache import STEPS, RandomCache
from tests.monitor.view_host import state

RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=5).map(lambda runs: sum(runs, ()))


def listed(blocks: tuple[int, ...]) -> list[int]:
    return [
        block for first, count in zip(blocks[::2], blocks[1::2], strict=True) for block in range(first, first + count)
    ]


def recounted(life: RandomCache) -> list[int]:
    """Return the state of each block, recounted from the cache."""
    nodes = list(life.cache.state.tree.walk())
    states = []
    for block in range(life.cache.num_blocks):
        owners = [node for node in nodes if block in node.blocks]
        sequences = [each for each in life.open if block in each.own_blocks()]
        if block in life.cache.state.pins.blocks():
            states.append(PINNED)
        elif owners:
            states.append(ACTIVE if any(node.locks for node in owners) else CACHED)
        else:
            states.append(PRIVATE if sequences else FREE)
    return states


@settings(max_examples=120, deadline=None)
@given(STEPS, st.integers(1, 4), st.sampled_from((1, 2, 4096)))
def test_a_life_told_in_changes_has_the_states_that_a_recount_of_the_cache_has(
    steps: list[tuple[str, int]], told_every: int, slice_: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_map, "SLICE", slice_)  # the records of one step
        compare_a_life(steps, told_every)


def compare_a_life(steps: list[tuple[str, int]], told_every: int) -> None:
    life, blocks = RandomCache(), Blocks()
    for index, step in enumerate(steps):
        life.step(*step)
        if index % told_every and index < len(steps) - 1:
            continue
        state = life.state()
        blocks.update(state)
        assert blocks.map.states().tolist() == recounted(life)
        counts = Counter(blocks.map.states().tolist())
        stats = life.cache.stats()
        assert counts[FREE] == stats.free_blocks
        assert counts[CACHED] == stats.cached_blocks
        assert counts[PINNED] == stats.pinned_blocks
        assert counts[ACTIVE] + counts[PRIVATE] + counts[PINNED] == stats.held_blocks
        fresh = Blocks()
        fresh.update(state)
        assert owners_of(fresh.map) == owners_of(blocks.map)


def owners_of(blocks: BlockMap) -> list[list[int]]:
    return [blocks.all_owners(block) for block in range(blocks.num_blocks)]


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(0, 5000))
def test_ages_count_from_the_last_use_of_the_tip(steps: list[tuple[str, int]], later: int) -> None:
    life, blocks = RandomCache(), Blocks()
    for step in steps:
        life.step(*step)
    state = replace(life.state(), now=life.now + later)
    blocks.update(state)
    for block, level in enumerate(MODES[1].levels(blocks).tolist()):
        owners, shown = blocks.map.all_owners(block), blocks.map.states()[block]
        if shown in (FREE, CACHED):
            age = 0 if shown == FREE else state.now - state.nodes[owners[0]].used
            assert level == (0 if shown == FREE else 2 + sum(age >= limit for limit in theme.AGE_LIMITS))
        else:
            assert level == 1


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_block_has_the_session_that_held_it_or_is_shared(steps: list[tuple[str, int]]) -> None:
    life, blocks = RandomCache(), Blocks()
    seen: dict[int, set[int]] = {}
    for step in steps:
        life.step(*step)
        blocks.update(life.state())
        for sequence in life.open:
            for node in life.cache.state.tree.path(sequence.node):
                seen.setdefault(node.id, set()).add(sequence.id % 3)
        for node in life.cache.state.tree.walk():
            sessions = seen.get(node.id, set())
            if node.parent is not None:
                wanted = SHARED if len(sessions) > 1 else next(iter(sessions), UNKNOWN)
                assert blocks.sessions.of(node.id) == wanted
        levels = MODES[2].levels(blocks).tolist()
        legend = MODES[2].legend(blocks)
        for block, level in enumerate(levels):
            owner = blocks.map.owner(block)
            session = None if owner is None else blocks.sessions.of(owner)
            named = {None: "free", UNKNOWN: "no session", SHARED: "several"}.get(session, f"session {session}")
            assert legend[level].name == named


def node(number: int, blocks: tuple[int, ...], start: int = 0, tokens: int = 4, locks: int = 0) -> NodeRecord:
    return NodeRecord(number, 0, start, tokens, blocks, locks, locks, 0, 0, 0, False, 0.0, 0.0)


def test_blocks_outside_of_the_pool_and_odd_runs_are_nobodys() -> None:
    blocks = BlockMap(8, 4)
    blocks.update({1: node(1, (6, 10**12), locks=1), 2: node(2, (-3, 5)), 3: node(3, (4,)), 4: node(4, (99, 2))}, {})
    assert blocks.states().tolist() == [CACHED, CACHED, FREE, FREE, FREE, FREE, ACTIVE, ACTIVE]
    blocks.update({}, {})
    assert not blocks.states().any() and not blocks.slots


@given(RUNS, st.integers(0, 40))
def test_runs_are_lists_of_blocks(runs: tuple[int, ...], block: int) -> None:
    plain = listed(runs)
    assert count_blocks(runs) == len(plain)
    assert listed(without_last(runs)) == plain[:-1]
    assert place_of(runs, block) == (plain.index(block) if block in plain else None)
    assert [block_at(runs, place) for place in range(len(plain) + 1)] == [*plain, None]


@given(st.lists(st.integers(0, 4), max_size=40), st.sampled_from((1, 2, 4, 8, 64)))
def test_a_cell_of_several_blocks_shows_the_commonest_level_of_equals_the_highest(levels: list[int], per: int) -> None:
    cells = reduce(np.array(levels, np.uint8), per, 5).tolist()
    groups = [levels[at : at + per] for at in range(0, len(levels), per)]
    assert cells == [max(group, key=lambda level: (group.count(level), level)) for group in groups]


def test_sessions_keep_their_shades_while_they_have_blocks() -> None:
    letters: list[int | None] = [None] * 2
    block_modes.assign_shades(letters, {7: 3, 8: 9, 9: 1, SHARED: 50, UNKNOWN: 4})
    assert letters == [8, 7]
    block_modes.assign_shades(letters, {7: 30, 8: 9, 9: 90})
    assert letters == [8, 7]
    block_modes.assign_shades(letters, {7: 30, 9: 90})
    assert letters == [9, 7]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_an_engine_with_nothing_cached_has_free_blocks_only(mode: block_modes.ColourMode) -> None:
    blocks = Blocks()
    blocks.update(RandomCache().state())
    assert mode.levels(blocks).tolist() == [0] * 24
    assert mode.legend(blocks)[0].name == "free"


def test_more_pins_than_there_can_be_have_levels_in_all_modes() -> None:
    flood = replace(node(2, (0, 4), tokens=64, locks=1), pins=2**63 - 1, holders=2**63 - 1)
    blocks = Blocks()
    blocks.update(state(nodes=[flood, replace(flood, id=3, parent=2, start=64, tokens=64, blocks=(4, 4))]))
    for mode in MODES:
        assert len(mode.levels(blocks)) == 64 and mode.legend(blocks)
