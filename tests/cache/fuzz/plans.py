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
    for block in [target for _, target in changed] + table[whole:]:
        world.marks[block] = 0
        world.private.add(block)
    for slot in plan.slots.tolist():
        world.marks[slot // size] = max(world.marks[slot // size], slot % size + 1)
    one.plan, one.planned, one.executed, one.table = plan, tokens, False, table
