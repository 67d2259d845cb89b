"""The model of observers and change trackers: what they received adds up to the tree, step by step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from radixkv.cache import Observer
from radixkv.cache.reuse import total
from radixkv.cache.types import Node, Purpose
from tests.cache.fuzz import inside
from tests.cache.fuzz.block_index import BlockIndex, announced
from tests.cache.fuzz.tracked import Tracked

if TYPE_CHECKING:
    from tests.cache.fuzz.world import World

Facts = tuple[str, int | None, int, tuple[int, ...], tuple[int, ...]]


class Events(Observer):
    """Rebuilds the nodes of the device from the events of a cache alone."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}  # by node; None for a root
        self.lengths: dict[int, int] = {}
        self.names: dict[int, Hashable] = {}  # the namespaces of roots
        self.on_host: set[int] = set()  # host nodes that were named once
        self.open: dict[int, int] = {}  # sequences
        self.counted: Counter[str] = Counter()

    def opened(self, sequence: int, namespace: Hashable, asked: int, hit: int, purpose: Purpose) -> None:
        assert sequence not in self.open
        self.open[sequence] = hit
        self.counted["query_tokens"] += asked * (purpose == "request")
        self.counted["hit_tokens"] += hit * (purpose == "request")

    def forked(self, sequence: int, parent: int) -> None:
        assert sequence not in self.open
        self.open[sequence] = self.open[parent]

    def closed(self, sequence: int, length: int) -> None:
        del self.open[sequence]

    def rooted(self, node: int, namespace: Hashable) -> None:
        assert node not in self.parents
        self.parents[node], self.lengths[node], self.names[node] = None, 0, namespace

    def uprooted(self, node: int) -> None:
        del self.parents[node], self.lengths[node], self.names[node]

    def inserted(self, node: int, parent: int, start: int, tokens: int) -> None:
        assert node not in self.parents and parent in self.parents and tokens > 0
        self.parents[node], self.lengths[node] = parent, tokens

    def grown(self, node: int, tokens: int) -> None:
        self.lengths[node] += tokens

    def split(self, node: int, upper: int, tokens: int) -> None:
        if node in self.on_host:
            self.on_host.add(upper)
            return
        assert upper not in self.parents and 0 < tokens < self.lengths[node]
        self.parents[upper], self.parents[node] = self.parents[node], upper
        self.lengths[upper] = tokens
        self.lengths[node] -= tokens

    def merged(self, node: int, upper: int) -> None:
        self.lengths[node] += self.lengths.pop(upper)
        self.parents[node] = self.parents.pop(upper)

    def trimmed(self, node: int, tokens: int, blocks: int, gone: bool) -> None:
        if node in self.on_host:
            return
        self.lengths[node] -= tokens
        assert gone == (self.lengths[node] == 0)
        if gone:
            del self.parents[node], self.lengths[node]

    def evicted(self, number: int, node: int, start: int, tokens: int, blocks: int, *facts: Any) -> None:
        self.counted["evicted_tokens"] += tokens

    def offloaded(self, node: int, host_node: int, start: int, tokens: int, blocks: int) -> None:
        self.on_host.add(host_node)

    def arrived(self, host_node: int, start: int, tokens: int) -> None:
        assert host_node not in self.parents and host_node not in self.on_host and tokens > 0
        self.on_host.add(host_node)

    def loaded(self, sequence: int, tokens: int) -> None:
        assert sequence in self.open
        self.counted["loaded_tokens"] += tokens

    def regretted(self, number: int, tokens: int, ago: float) -> None:
        assert tokens > 0 and ago >= 0
        self.counted["regret_tokens"] += tokens

    def copied(self, sequence: int, source: int, target: int) -> None:
        assert source != target and sequence in self.open
        self.counted["copied_blocks"] += 1


class Mirror:
    """The tree by events, the tree by changes, and the number of requests that found each token."""

    def __init__(self, world: World, events: Events) -> None:
        self.world, self.events = world, events
        self.tracker = world.cache.watch()
        self.router = BlockIndex(world.cache)
        self.seen: dict[int, Facts] = {}
        self.prefixes: dict[tuple[int, object], int] = {}  # (the prefix before a token, the token) -> this prefix
        self.requests: Counter[int] = Counter()  # that found the last token of a prefix
        self.hits_by_loads = 0

    def verify(self) -> None:
        self.assert_events()
        self.assert_changes()
        self.assert_blocks()
        self.forget_uncounted()
        for number, count in self.cached_prefixes().items():
            assert count == self.requests[number]

    def assert_events(self) -> None:
        """Check that the events give the nodes of the device, and the counters."""
        events, stats = self.events, self.world.cache.stats()
        nodes = [each for each in inside.nodes(self.world.cache) if each.residence == "device"]
        assert events.parents == {each.id: each.parent for each in nodes}
        assert events.lengths == {each.id: len(each.text) - each.start for each in nodes}
        assert events.names == {each.id: each.namespace for each in nodes if each.parent is None}
        assert events.open.keys() == {one.seq.id for one in self.world.live}
        for name, count in events.counted.items():
            loaded = self.hits_by_loads if name == "hit_tokens" else 0
            assert count + loaded == getattr(stats, name), f"{name} by events: {count}"

    def assert_changes(self) -> None:
        """Check that a mirror which reads the changes only has all nodes of both tiers."""
        changed, gone = self.tracker.look()
        for number in gone:
            del self.seen[number]
        self.seen |= {node.id: facts(node) for node in changed}
        expected = {
            each.id: (each.residence, each.parent, each.start, tuple(each.text[each.start :]), tuple(each.blocks))
            for each in inside.nodes(self.world.cache)
        }
        assert self.seen == expected

    def assert_blocks(self) -> None:
        """Check, in some steps, that a router's index is the tree, and sees what a prompt finds; or attach anew."""
        world, rng = self.world, random.Random(len(self.prefixes) + self.events.counted["query_tokens"])
        if rng.random() < 0.2:
            self.router.read()
            for one in world.live:
                blocks = announced(world.cache, one.tokens, one.namespace)
                assert self.router.overlap(one.tokens, one.namespace) == blocks
        if rng.random() < 0.02:
            self.router.read()
            self.router.events.disconnect()
            known, self.router = self.router.blocks, BlockIndex(world.cache)
            self.router.read()
            assert self.router.blocks == known

    # Reuse

    def found(self, one: Tracked, tokens: Sequence[int], start: int = 0) -> None:
        """Count a request that found the tokens of a text from `start` on."""
        if one.purpose == "request":
            self.requests.update(self.numbers(one.namespace, tokens)[start:])

    def loaded(self, one: Tracked, tokens: int) -> None:
        """Count the hits of a load that was committed."""
        self.hits_by_loads += tokens * (one.purpose == "request")

    def numbers(self, namespace: Hashable, tokens: Sequence[int]) -> list[int]:
        """Return a number for each prefix of a text."""
        numbers, number = [], self.number(0, ("namespace", namespace))
        for token in tokens:
            number = self.number(number, token)
            numbers.append(number)
        return numbers

    def number(self, before: int, token: object) -> int:
        return self.prefixes.setdefault((before, token), len(self.prefixes) + 1)

    def cached_prefixes(self) -> dict[int, int]:
        """The number of each cached prefix, with the count that the cache has for its last token."""
        counted: dict[int, int] = {}
        for node in inside.nodes(self.world.cache):
            numbers, start, end = self.numbers(node.namespace, node.text), node.start, len(node.text)
            assert all(start < at <= end for at in node.reuse), f"{node.reuse} of [{start}, {end})"
            for at in range(start, end):
                counted[numbers[at]] = sum(count for last, count in node.reuse.items() if last > at)
            if node.parent is not None:
                assert total(node.reuse) == counted[numbers[start]]
        return counted

    def forget_uncounted(self) -> None:
        """Forget the counts of text that is not cached any more."""
        cached = self.cached_prefixes()
        self.requests = Counter({number: count for number, count in self.requests.items() if number in cached})


def facts(node: Node) -> Facts:
    """The part of a node that a mirror shows."""
    above = None if node.parent is None else node.parent.id
    return node.residence, above, node.start, tuple(memoryview(bytes(node.key)).cast("i")), tuple(node.blocks)
