"""The invariants after each step: content of all tables, gauges, stranded blocks; and the end of a run."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache import CacheStats
from tests.cache.fuzz import inside, upkeep
from tests.cache.fuzz.tracked import Tracked, leaves
from tests.cache.naive import kv

if TYPE_CHECKING:
    from tests.cache.fuzz.world import World

COUNTERS = (
    "query_tokens",
    "hit_tokens",
    "evicted_blocks",
    "evicted_tokens",
    "copied_blocks",
    "regret_tokens",
    "evicted_states",
    "offloaded_blocks",
    "loaded_tokens",
    "host_evicted_blocks",
)


def verify(world: World) -> None:
    """Check everything."""
    world.cache.check()
    assert_gauges(world)
    upkeep.assert_announced(world)
    for one in world.live:
        world.assert_sequence(one)
    for part in (world.host, world.states, world.mirror):
        if part is not None:
            part.verify()


def assert_sequence(world: World, one: Tracked) -> None:
    seq = one.seq
    assert not seq.closed
    assert seq.length == len(one.tokens)
    assert seq.tokens.dtype == seq.block_table.dtype == np.int32
    assert seq.tokens.tolist() == one.shown
    assert seq.block_table.tolist() == one.table, "a block table changed under its owner's feet"
    assert seq.unshared_length == len(one.tokens) - world.shared_length(one)
    if one.readable:
        values = world.pool.read(seq.block_table, len(one.tokens))
        assert np.array_equal(values, kv(one.namespace, one.tokens))


def assert_gauges(world: World) -> None:
    stats = world.cache.stats()
    assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == stats.num_blocks == world.num_blocks
    assert stats.free_blocks == world.cache.free_blocks
    assert stats.cached_blocks == world.cache.evictable_blocks
    assert stats.block_size == world.block_size
    assert stats.sequences == len(world.live)
    assert min(getattr(stats, gauge.name) for gauge in fields(CacheStats) if "blocks" in gauge.name) >= 0
    assert all(getattr(world.before, name) <= getattr(stats, name) for name in COUNTERS)
    assert known_blocks(world) <= stats.held_blocks
    assert stats.pinned_blocks <= stats.held_blocks
    world.before = stats


def known_blocks(world: World) -> int:
    """Count the blocks that open sequences, their plans' copies and pins visibly hold."""
    seen = read_blocks(world)
    for pinned in world.pins:
        if world.now < pinned.expires:
            seen |= set(inside.cached_kv(world.cache, pinned.tokens, pinned.namespace).blocks.tolist())
    return len(seen)


def read_blocks(world: World) -> set[int]:
    """The blocks that open sequences and their plans' copies read."""
    seen = {block for one in world.live for block in one.table}
    return seen | {source for one in world.live if one.plan for source, _ in one.plan.copies}


def assert_little_is_stranded(world: World) -> None:
    """Check that cached texts take the fewest blocks, plus at most one per open sequence or pin.

    So nothing is stranded while nothing is held.
    """
    if world.host:
        world.host.finish_moves()
    cached = {namespace: upkeep.cached_texts(world, namespace, texts) for namespace, texts in world.texts.items()}
    own = {block for one in world.live for block in one.table[one.published // world.block_size :]}
    own |= {source for one in world.live if one.plan for source, _ in one.plan.copies}
    stats = world.cache.stats()
    needed = sum(texts.blocks(world.block_size) for texts in cached.values()) + len(own)
    assert stats.cached_blocks + stats.held_blocks <= needed + len(world.live) + len(world.pins)
    if not world.live and not world.pins:
        assert stats.held_blocks == stats.pinned_blocks == 0
        assert stats.cached_blocks == needed
        found = (any(world.reach(each, text) for text in leaves(texts)) for each, texts in world.texts.items())
        assert stats.namespaces == sum(found)
    if world.host:
        world.host.assert_little_is_stranded()


def wind_down(world: World) -> None:
    """Close and release everything, then check that nothing is stranded and all blocks can be taken."""
    world.step()
    world.verify()
    while world.live:
        world.close(world.rng.choice(world.live))
    while world.pins:
        world.release(world.pins[-1])
    world.verify()
    world.assert_little_is_stranded()
    world.drain()
    world.assert_little_is_stranded()
    assert world.cache.free_blocks == world.num_blocks
    world.cache.check()
    if world.host:
        world.host.finish_moves()
        world.verify()
        world.clear()
        assert world.cache.stats().host_free_blocks == world.host.num_blocks
