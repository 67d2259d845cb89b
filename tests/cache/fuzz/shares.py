"""The model of shares: a naive count of each group's blocks, and both rules checked at each eviction.

A group is a namespace with a share; all others are the group "others".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tests.cache.fuzz import inside
from tests.cache.fuzz.options import Sizes

if TYPE_CHECKING:
    from tests.cache.fuzz.world import World

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


class ShareModel:
    """The limits of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.limits = world.rng.choice(LIMITS)
        self.failures: list[AssertionError] = []
        self.evictions = 0
        self.requester: Hashable = None
        self.last_victim = -1
        self.before = Recount(Counter(), Counter(), {}, {})

    def sized(self, sizes: Sizes) -> Sizes:
        return replace(sizes, limits=self.limits)

    def group(self, namespace: Hashable) -> Hashable:
        return namespace if namespace in self.limits else "others"

    def guaranteed(self, group: Hashable) -> int:
        return int(self.limits.get(group, 0) * self.world.num_blocks + 1e-9)

    def excess(self, group: Hashable, used: int) -> float:
        share = self.limits.get(group, 0) * self.world.num_blocks
        return used / share if share else float("inf")

    def recount(self) -> Recount:
        counted = inside.blocks_by_group(self.world.cache, self.group)
        return Recount(*counted, inside.first_victims(self.world.cache, ["others", *self.limits]))

    # At each verb that evicts

    def begin(self, requester: Hashable, *, held_first: bool = False) -> None:
        """Count before blocks are taken for a namespace; if others are held first, check from the second victim on."""
        self.world.cache.stats()
        self.requester, self.before, self.last_victim = requester, self.recount(), -1
        if held_first:
            self.before = self.before._replace(groups={})

    def evicted(self, node: int, blocks: int) -> None:
        """Check a victim of the device once, though one part of it may be evicted and another one offloaded."""
        try:
            if node in self.before.groups and (node != self.last_victim or not self.world.host):
                self.assert_rules(node, blocks)
        except AssertionError as error:  # an observer must not raise
            self.failures.append(error)
        self.last_victim, self.before = node, self.recount()

    def assert_rules(self, node: int, blocks: int) -> None:
        used, evictable, groups, first = self.before
        group, own = groups[node], self.group(self.requester)
        self.evictions += 1
        # With very many leaves, `predictive` looks at some of them only, so `next_victims` is an estimate. So it is
        # after a victim of the same verb: what `predictive` learns from an eviction follows the event.
        learned = self.last_victim >= 0
        estimated = self.world.options.eviction == "predictive" and (self.world.options.ample or learned)
        assert first[group] == node or estimated, "not the victim that the policy chooses within its namespace"
        spare = used[group] - self.guaranteed(group)
        assert group == own or spare > 0, f"{group} lost blocks to {own} within its share"
        assert group == own or blocks <= spare + 1, "more than its spare blocks"  # a copy replaces one more at times
        others = [each for each in evictable if each == own or used[each] > self.guaranteed(each)]
        most = max((self.excess(each, used[each]) for each in others if evictable[each]), default=0)
        assert not evictable[group] or self.excess(group, used[group]) >= most, (
            f"{group} does not exceed its share most"
        )

    def assert_kept(self) -> None:
        """Raise the first failure at an eviction."""
        for failure in self.failures:
            raise failure

    def refuses_pin(self, namespace: Hashable, blocks: Iterable[int]) -> bool:
        """Whether a pin of these blocks would exceed its namespace's share, or what shares leave free for others."""
        world, group = self.world, self.group(namespace)
        free = world.num_blocks - sum(map(self.guaranteed, self.limits))
        pinned = set(blocks)
        for each in world.pins:
            if self.group(each.namespace) == group:
                pinned |= set(inside.cached_kv(world.cache, each.tokens, each.namespace).blocks.tolist())
        return len(pinned) > (self.guaranteed(group) if group in self.limits else free)

    # Room on the host

    def assert_room_on_host(self, number: int, short: bool, before: Sequence[int], after: Sequence[int]) -> None:
        """Check what groups have lost when room was made for one of them, by number; it may be `short` of blocks."""
        assert self.world.host
        size, left = self.world.host.num_blocks, inside.host_leaves(self.world.cache)
        least = [int(self.limits.get(group, 0) * size + 1e-9) for group in ["others", *self.limits]]
        for other, lost in enumerate(was - now for was, now in zip(before, after, strict=True)):
            if other != number:
                assert lost <= max(0, before[other] - least[other]), "a group lost host blocks within its share"
                ready = left[other] and after[other] > least[other]
                assert not (short and ready and after[number] < least[number]), "others have more than their share"

    # Verbs

    def drain(self) -> None:
        """Take all blocks that a namespace without a share can take, and leave every guaranteed block; then clear."""
        world = self.world
        flood = world.open("flood", [])  # which may close another sequence, to have its row
        before = self.recount()
        world.extend(flood, [0] * (world.available("flood") * world.block_size))
        after = self.recount()
        for group in self.limits:
            kept = min(before.used[group], self.guaranteed(group))
            assert after.used[group] >= kept - len(world.live) - len(world.pins), (
                f"{group} has lost blocks of its share"
            )
        world.close(flood)
        world.clear()

    # Invariants

    def verify(self) -> None:
        counted = self.recount()
        for usage in self.world.cache.namespace_usage():
            assert usage.used_blocks == counted.used[usage.namespace]
            assert usage.cached_blocks == counted.evictable[usage.namespace]
            assert usage.guaranteed_blocks == self.guaranteed(usage.namespace)
