"""The world of a cache with limits: a naive count of each group's blocks, and both rules checked at each eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from radixkv.cache import Observer, WritePlan
from radixkv.cache.quotas import QuotaIndex
from tests.cache.recurrent.world import StatefulWorld
from tests.cache.verbs import Ids
from tests.cache.world import Tracked, World

LIMITS: tuple[dict[Hashable, float], ...] = (
    {"a": 0.5, "b": 0.5},
    {"a": 0.3, "b": 0.2},
    {None: 0.6, "a": 0.1},
    {"b": 1.0},
    {"a": 0.0, None: 0.25},
)


class Recount(NamedTuple):
    """Blocks by group, counted from trees and sequences; node -> group; the policy's first victim of each group."""

    used: Counter[Hashable]
    evictable: Counter[Hashable]
    groups: dict[int, Hashable]
    first: dict[Hashable, int]


class QuotaWorld(World):
    """A world whose namespaces have limits. A group is a namespace with a share; all others are the group "others"."""

    evictions = 0

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]  # those of World
        self.failures: list[AssertionError] = []
        self.cache.state.observe(watch(self))
        self.requester: Hashable = None
        self.before_eviction = self.recount()

    def limits(self) -> dict[Hashable, float]:
        self.shares = self.rng.choice(LIMITS)
        return self.shares

    def group(self, namespace: Hashable) -> Hashable:
        return namespace if namespace in self.shares else "others"

    def guaranteed(self, group: Hashable) -> int:
        return int(self.shares.get(group, 0) * self.num_blocks + 1e-9)

    def excess(self, group: Hashable, used: int) -> float:
        share = self.shares.get(group, 0) * self.num_blocks
        return used / share if share else float("inf")

    def recount(self) -> Recount:
        state = self.cache.state
        owner: dict[int, Hashable] = {}
        held: set[int] = set()
        groups: dict[int, Hashable] = {}
        for namespace, root in state.tree.roots.items():
            for node in state.tree.walk(root):
                groups[node.id] = self.group(namespace.value)
                owner.update(dict.fromkeys(node.blocks, groups[node.id]))
                held.update(node.blocks if node.locks else ())
        for sequence in state.open.values():
            blocks = sequence.own_blocks()
            owner.update(dict.fromkeys(blocks, self.group(sequence.namespace)))  # type: ignore[attr-defined]
            held.update(blocks)
        first: dict[Hashable, int] = {}
        index = state.index
        assert isinstance(index, QuotaIndex)
        for number, name in enumerate(("others", *self.shares)):
            for node in index.of(number).next_victims(1):
                first[name] = node.id
        evictable = Counter(group for block, group in owner.items() if block not in held)
        return Recount(Counter(owner.values()), evictable, groups, first)

    def evicted(self, node: int, blocks: int) -> None:
        """Check a victim against both rules."""
        used, evictable, groups, first = self.before_eviction
        group, own = groups[node], self.group(self.requester)
        self.evictions += 1
        assert first[group] == node, "not the victim that the policy chooses within its namespace"
        spare = used[group] - self.guaranteed(group)
        assert group == own or spare > 0, f"{group} lost blocks to {own} within its share"
        assert group == own or blocks <= spare + 1, "more than its spare blocks"  # a copy replaces one more at times
        others = [each for each in evictable if each == own or used[each] > self.guaranteed(each)]
        most = max((self.excess(each, used[each]) for each in others if evictable[each]), default=0)
        assert not evictable[group] or self.excess(group, used[group]) >= most, (
            f"{group} does not exceed its share most"
        )
        self.before_eviction = self.recount()

    def plan(self, one: Tracked, tokens: Sequence[int], verb: Callable[[Ids], WritePlan]) -> bool:
        self.cache.stats()
        self.requester, self.before_eviction = one.namespace, self.recount()
        planned = super().plan(one, tokens, verb)
        for failure in self.failures:
            raise failure
        return planned

    def evict(self, count: int) -> None:
        """Evict for a namespace until `count` blocks are free; no more is left for it if they are not."""
        self.cache.stats()
        self.requester, self.before_eviction = self.rng.choice((None, "a", "b")), self.recount()
        free = self.cache.free_blocks
        enough = self.cache.evict(count, self.requester)
        assert enough == (self.cache.free_blocks >= max(count, 0))
        assert enough or not self.cache.evictable_for(self.requester), "stopped although there was a block to evict"
        assert enough or count > free

    def drain(self) -> None:
        """Take all blocks that a namespace without a share can take, and leave every guaranteed block; then clear."""
        before = self.recount()
        flood = self.open("flood", [])
        self.extend(flood, [0] * (self.available("flood") * self.block_size))
        after = self.recount()
        for group in self.shares:
            kept = min(before.used[group], self.guaranteed(group))
            assert after.used[group] >= kept - len(self.live) - len(self.pins), f"{group} has lost blocks of its share"
        self.close(flood)
        self.clear()

    def verify(self) -> None:
        super().verify()
        counted = self.recount()
        for usage in self.cache.namespace_usage():
            assert usage.used_blocks == counted.used[usage.namespace]
            assert usage.cached_blocks == counted.evictable[usage.namespace]
            assert usage.guaranteed_blocks == self.guaranteed(usage.namespace)


class StatefulQuotaWorld(QuotaWorld, StatefulWorld):
    """The same of a cache with recurrent state."""


class Watch(Observer):
    """Receives the evictions of a cache."""


def watch(world: QuotaWorld) -> Watch:
    """Return an observer that checks each eviction; it keeps no reference to the world that a frozen state shows."""

    def evicted(node, blocks):
        try:
            world.evicted(node, blocks)
        except AssertionError as error:
            world.failures.append(error)

    made = Watch()
    made.evicted = lambda number, node, start, tokens, blocks, *facts: evicted(node, blocks)
    made.offloaded = lambda node, host_node, start, tokens, blocks: evicted(node, blocks)
    return made
