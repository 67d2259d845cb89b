"""The promises about one plan: the blocks that it takes, the slots that it writes, the block that it copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache import WritePlan
from tests.cache.fuzz.tracked import Tracked

if TYPE_CHECKING:
    from tests.cache.fuzz.world import World


def need(world: World, one: Tracked, count: int) -> tuple[int, int]:
    """The fewest and the most blocks that `count` more tokens need; a possible copy takes one more."""
    length, size = len(one.tokens), world.block_size
    new = -(-(length + count) // size) - -(-length // size)
    offset = length % size
    if not count or not offset or world.marks[one.table[-1]] == offset or is_private(world, one, one.table[-1]):
        return new, new
    return new, new + 1


def is_private(world: World, one: Tracked, block: int) -> bool:
    """Whether only this sequence can own a block."""
    others = (other for other in world.live if other is not one)
    return block in world.private and not any(
        block in other.table or any(block in copy for copy in (other.plan.copies if other.plan else ()))
        for other in others
    )


def must_copy(world: World, one: Tracked, table: list[int]) -> bool:
    """Whether others have the part-filled last block too, and its next slot was reserved before."""
    offset = len(one.tokens) % world.block_size
    shared = any(table[-1] in other.table for other in world.live if other is not one) if offset else False
    return shared and world.marks[table[-1]] != offset


def lengthen(world: World, one: Tracked, plan: WritePlan, tokens: list[int], spare: int, free: int) -> None:
    """Check a plan that may have become longer, and replace it in the model; `free` blocks were free before."""
    assert one.plan is not None
    size, old, table = world.block_size, one.table, one.seq.block_table.tolist()
    start, added = len(one.tokens) + len(one.planned), len(plan.slots) - len(one.plan.slots)
    assert (plan.copies, plan.state, table[: len(old)]) == (one.plan.copies, one.plan.state, old)
    positions = range(len(one.tokens), start + added)
    assert plan.slots.tolist() == [table[i // size] * size + i % size for i in positions]
    took, left = len(table) - len(old), world.cache.free_blocks
    assert left == free - took == world.cache.stats().free_blocks and took == -(-(start + added) // size) - len(old)
    assert not took or left >= spare, "took a block that was to be spared"
    in_place = not start % size or world.marks[old[-1]] == start % size or is_private(world, one, old[-1])
    assert added == len(tokens) or left <= spare or one.forked or not in_place, "left tokens out without need"
    assert not (added and one.forked), "a fork reads this block, so that a cut would not free its slots"
    shared = any(old[-1] in other.table for other in world.live if other is not one)
    assert not added or not start % size or not shared or world.marks[old[-1]] == start % size, "wrote over slots"
    note_slots(world, table[len(old) :], plan)
    one.plan, one.planned, one.table = plan, one.planned + tokens[:added], table


def note_slots(world: World, blocks: list[int], plan: WritePlan) -> None:
    """Add the blocks that a plan took, and the slots that it reserved, to the model."""
    for block in blocks:
        world.marks[block] = 0
        world.private.add(block)
    for slot in plan.slots.tolist():
        world.marks[slot // world.block_size] = max(world.marks[slot // world.block_size], slot % world.block_size + 1)


def cut(world: World, one: Tracked, length: int) -> None:
    """Lower the mark of a block that is cut inside unpublished tokens, which no fork reads."""
    size, end = world.block_size, len(one.tokens)
    block = one.table[(length - 1) // size] if length % size else -1
    lowers = block >= 0 and one.published <= length < end and not one.forked
    if lowers and world.marks[block] == min(end - length + length % size, size):
        world.marks[block] = length % size


def taken(world: World, one: Tracked, plan: WritePlan) -> int:
    return len(one.table) - -(-len(one.tokens) // world.block_size) + len(plan.copies)


def note(world: World, one: Tracked, plan: WritePlan, tokens: list[int], must_stay_in_place: bool) -> None:
    """Check a plan, and add it to the model."""
    size, length, old = world.block_size, len(one.tokens), one.table
    table = one.seq.block_table.tolist()
    whole = -(-length // size)
    assert len(table) == -(-(length + len(tokens)) // size)
    assert plan.slots.dtype == np.int64
    positions = range(length, length + len(tokens))
    assert plan.slots.tolist() == [table[i // size] * size + i % size for i in positions]
    changed = [(old[i], table[i]) for i in range(whole) if old[i] != table[i]]
    assert [tuple(copy) for copy in plan.copies] == changed
    assert changed or not tokens or not must_copy(world, one, old), "wrote over slots that were reserved before"
    assert not (must_stay_in_place and changed), "copied a block that it could have written in place"
    assert all(length % size and source == old[-1] for source, _ in changed)
    note_slots(world, [target for _, target in changed] + table[whole:], plan)
    one.plan, one.planned, one.executed, one.table = plan, tokens, False, table
