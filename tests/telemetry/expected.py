"""An observed cache with its mirror, and the expected telemetry, counted by a full walk of the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from radixkv.cache import PrefixCache
from radixkv.cache.reuse import total
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.recorder import Recorder
from radixkv.telemetry.records import NEXT_VICTIMS, NodeRecord, namespace_label

OFFSET = 1000.0  # seconds between the cache's clock and the recorder's


def watched(
    num_blocks: int = 16, block_size: int = 4, *, host_blocks: int = 0, **options: Any
) -> tuple[PrefixCache, Recorder, Mirror, list[float]]:
    """A cache, its recorder, an empty mirror, and the time."""
    now = [0.0]
    make = partial(PrefixCache, host_blocks=host_blocks) if host_blocks else PrefixCache
    cache = make(num_blocks, block_size, clock=lambda: now[0])
    recorder = Recorder(clock=lambda: now[0] + OFFSET, **options)
    recorder.attach(cache)
    return cache, recorder, Mirror(), now


def collect_and_check(cache: PrefixCache, recorder: Recorder, mirror: Mirror) -> None:
    mirror.apply(recorder.collect())
    cache.check()
    assert_matches_cache(mirror, cache, OFFSET)


def expand(runs: Iterable[int]) -> list[int]:
    """The block ids of a record."""
    numbers = list(runs)
    return [
        each for first, count in zip(numbers[::2], numbers[1::2], strict=True) for each in range(first, first + count)
    ]


def assert_matches_cache(mirror: Mirror, cache: PrefixCache, offset: float) -> None:
    """Check that each record is that of a full walk, and that together they give the pool's gauges."""
    assert_nodes(mirror, cache, offset)
    assert_sequences(mirror, cache)
    assert_pool(mirror, cache)
    assert mirror.next_victims == tuple(cache.next_victims(NEXT_VICTIMS))
    assert_snapshot_is_complete(mirror)


def assert_nodes(mirror: Mirror, cache: PrefixCache, offset: float) -> None:
    pins = Counter(node.id for node in cache.state.pins.nodes())
    holders = Counter(sequence.node.id for sequence in cache.state.open.values()) + pins
    seen = set()
    roots = {root: namespace for namespace, root in cache.state.tree.roots.items()}
    for node in cache.state.tree.residents():
        seen.add(node.id)
        record = mirror.nodes[node.id]
        assert record.parent == (node.parent.id if node.parent else 0)
        assert record.residence == node.residence
        assert (record.start, record.tokens) == (node.start, node.end - node.start)
        assert expand(record.blocks) == list(node.blocks)
        assert all(count > 0 for count in record.blocks[1::2])
        assert record.holders == holders[node.id]
        assert record.locks == holders[node.id] + sum(child.locks > 0 for child in node.children.values())
        assert record.pins == pins[node.id]
        assert (record.hits, record.priority, record.demoted) == (node.hits, node.priority, node.demoted)
        assert record.reused == total(node.reuse)
        assert (record.used, record.born) == (node.used_at + offset, node.born_at + offset)
        assert record.namespace == (namespace_label(roots[node].value) if node in roots else None)
        head = [int.from_bytes(node.key[at : at + 4], "little") for at in range(0, min(32, len(node.key)), 4)]
        assert list(record.head) == head
    assert mirror.nodes.keys() == seen


def assert_sequences(mirror: Mirror, cache: PrefixCache) -> None:
    assert mirror.sequences.keys() == cache.state.open.keys()
    named = {block for node in cache.state.tree.walk() for block in node.blocks}
    for sequence in cache.state.open.values():
        record = mirror.sequences[sequence.id]
        facts = (sequence.node.id, sequence.length, sequence.cached_length)
        assert (record.node, record.length, record.cached) == facts
        own = set(sequence.own_blocks())
        assert own - named <= set(expand(record.blocks)) <= own


def assert_pool(mirror: Mirror, cache: PrefixCache) -> None:
    """Check the blocks: cached under unlocked nodes, held under locked ones and in sequences, pinned under pins, else
    free.
    """
    stats = cache.stats()
    device = [node for node in mirror.nodes.values() if node.residence == "device"]
    host = [node for node in mirror.nodes.values() if node.residence == "host"]
    images = [block for node in host for block in expand(node.blocks)]
    assert len(images) == len(set(images)) <= stats.host_blocks - stats.host_free_blocks
    assert len(host) == stats.host_nodes and not any(node.locks or node.pins for node in host)
    cached = {block for node in device if not node.locks for block in expand(node.blocks)}
    held = {block for node in device if node.locks for block in expand(node.blocks)}
    held |= {block for sequence in mirror.sequences.values() for block in expand(sequence.blocks)}
    cached -= held
    free = set(range(stats.num_blocks)) - cached - held
    assert free == set(cache.state.pool.free)
    assert (len(free), len(cached), len(held)) == (stats.free_blocks, stats.cached_blocks, stats.held_blocks)
    pinned = {block for node in mirror.nodes.values() if node.pins for block in table(mirror, node, stats.block_size)}
    assert len(pinned) == stats.pinned_blocks
    gauges = {name.removeprefix("cache."): value for name, value in mirror.stats.items() if name.startswith("cache.")}
    assert gauges == {each.name: getattr(stats, each.name) for each in fields(stats)}


def table(mirror: Mirror, node: NodeRecord, block_size: int) -> list[int]:
    """The block table of the path to the end of a node."""
    path = [node]
    while path[-1].parent:
        path.append(mirror.nodes[path[-1].parent])
    blocks: list[int] = []
    for each in reversed(path):
        if each.start % block_size and blocks:
            blocks.pop()
        blocks += expand(each.blocks)
    return blocks


def assert_snapshot_is_complete(mirror: Mirror) -> None:
    late = Mirror()
    late.apply(mirror.everything())
    assert vars(late) == vars(mirror)
    assert all(is_dataclass(record) for record in plain(late))


def plain(mirror: Mirror) -> list[Any]:
    return [*mirror.nodes.values(), *mirror.sequences.values(), *mirror.live.values(), *mirror.ended.values()]
