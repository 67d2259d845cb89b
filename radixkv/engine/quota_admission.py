"""Admission with limits of namespaces: which promises are covered, and which preemption gives blocks to a request.

Evictable blocks of a namespace within its share are for its own requests only. All other evictable blocks, and free
ones, are common. So a request is admitted if every running request of every namespace still gets its promised blocks,
in whatever order they take them.

A preempted request is admitted again only if it can finish even when the other running namespaces grow to their shares.
Blocks that requests take beyond their shares are free again when these requests are preempted. So no request is
preempted twice, with the exceptions that `admission` names.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from radixkv.cache import Match, PrefixCache, Sequence
from radixkv.cache.quotas import Quotas
from radixkv.config import EngineConfig
from radixkv.engine.admission import Admission, blocks_needed, most_blocks_freed
from radixkv.engine.request import Request
from radixkv.engine.reuse_policy import ReusePolicy
from radixkv.engine.wait_queue import WaitQueue


@dataclass(slots=True)
class Group:
    """The blocks of the namespaces with one share, now and promised."""

    used: int
    evictable: int
    guaranteed: int
    promised: int = 0  # to running requests
    running: bool = False
    has_guaranteed: bool = False  # a running request to which all its blocks are promised

    @property
    def spare(self) -> int:
        """Evictable blocks that other groups may evict."""
        return max(0, min(self.evictable, self.used - self.guaranteed))

    @property
    def kept(self) -> int:
        """Evictable blocks that only this group may evict."""
        return self.evictable - self.spare

    @property
    def below(self) -> int:
        """Blocks that the group can take before it reaches its share."""
        return max(0, self.guaranteed - self.used)

    @property
    def from_common(self) -> int:
        """The most common blocks that it takes for its promises: up to its share, then after its own evictable ones."""
        return min(self.promised, self.below) + max(0, self.promised - self.below - self.kept)

    @property
    def most_from_common(self) -> int:
        """The most common blocks that it takes if it also grows to its share beyond its promises."""
        return max(self.from_common, self.below) if self.running else 0


def are_covered(groups: list[Group], common: int) -> bool:
    """Return whether all promises can be kept with `common` blocks for all groups, in any order of taking.

    >>> ann, ben = Group(used=5, evictable=5, guaranteed=5, promised=4), Group(used=5, evictable=0, guaranteed=5)
    >>> are_covered([ann, ben], common=0)
    True
    >>> ben.promised = 1
    >>> are_covered([ann, ben], common=0)
    False
    """
    total, most = sum(each.from_common for each in groups), sum(each.most_from_common for each in groups)
    for each in groups:
        others = most - each.most_from_common if each.has_guaranteed else total - each.from_common
        need = each.promised - each.kept
        if need > 0 and need > common - others:
            return False
    return True


class QuotaAdmission(Admission):
    """Admission to a cache with limits of namespaces."""

    def __init__(
        self, cache: PrefixCache, config: EngineConfig, reuse: ReusePolicy, running: list[Request], waiting: WaitQueue
    ) -> None:
        """Read `running` and `waiting`, which are the scheduler's."""
        super().__init__(cache, config, reuse, running, waiting)
        quotas = cache.quotas
        assert quotas is not None
        self._limits = quotas.limits
        self._most = [quotas.pool.most_blocks(group) for group in range(len(quotas.limits))]

    def most_tokens(self, namespace: Hashable) -> int:
        """Return how many tokens a request of a namespace can have, given the shares of others."""
        return self._most[self._limits.group(namespace)] * self._block_size

    def victim(self, request: Request) -> Request:
        """Return the running request to preempt: of the same group, or of one beyond its share.

        Other groups keep their blocks as cached prefixes, so that preempting their requests would free none.
        """
        pool, own = self._quotas.pool, self._group(request)
        group_of = {each: self._group(each) for each in self._running}
        return self._first_to_go([each for each, group in group_of.items() if group == own or pool.exceeds(group)])

    def cut_to_fit(self, request: Request, sequence: Sequence) -> bool:
        """Cut the hit of a request that runs alone; returns False also if it counts on free blocks of other shares.

        Their namespaces may take these blocks later. If the request was preempted then, it could not return.
        """
        return self._fits_beside_shares(request) and super().cut_to_fit(request, sequence)

    # ---- room

    def _fits_beside_shares(self, request: Request) -> bool:
        need = blocks_needed(request, self._block_size, self._pinned_hit(request), worst_case=True)
        return need <= self._most_beside_pins(request)

    @property
    def _quotas(self) -> Quotas:
        quotas = self._cache.quotas
        assert quotas is not None
        return quotas

    def _group(self, request: Request) -> int:
        return self._limits.group(request.namespace)

    def _most_blocks(self, request: Request) -> int:
        return self._most[self._group(request)]

    def _holds(self, most: int) -> str:
        return f"its namespace can have {most}, as the pool has {self._num_blocks} with the shares of others"

    def _most_beside_pins(self, request: Request) -> int:
        """Return how many blocks that are not pinned a request can have: pins of other groups are in their shares."""
        own = self._group(request)
        pinned = self._quotas.pinned_blocks(self._cache.state)
        guaranteed = self._quotas.pool.guaranteed
        kept = sum(max(pair) for at, pair in enumerate(zip(guaranteed, pinned, strict=True)) if at != own)
        return self._num_blocks - kept - pinned[own]

    def _available(self, request: Request) -> int:
        return self._cache.free_blocks + self._quotas.pool.evictable_for(self._group(request))

    def _is_covered(self, request: Request, match: Match, without: Collection[Request] = ()) -> bool:
        groups = self._groups(without)
        own = groups[self._group(request)]
        own.evictable -= match.idle_blocks
        own.promised += self._takes(request, match) - match.idle_blocks
        own.running = True
        own.has_guaranteed |= request.guaranteed
        freed = sum(most_blocks_freed(each, self._block_size) for each in without)
        return are_covered(groups, self._common(groups) + freed)

    def _leaves_room(self, most: list[tuple[Request, int]]) -> bool:
        groups = self._groups()
        alone = all(self._available(each) >= blocks and self._fits_beside_shares(each) for each, blocks in most)
        return alone and are_covered(groups, self._common(groups))

    def _groups(self, without: Collection[Request] = ()) -> list[Group]:
        """Return the groups with the promises to all running requests except `without`."""
        pool = self._quotas.pool
        rows = zip(pool.used, pool.evictable_in, pool.guaranteed, strict=True)
        groups = [Group(*row) for row in rows]
        for each in self._running:
            if each not in without:
                group = groups[self._group(each)]
                group.promised += self._promise(each)
                group.running = True
                group.has_guaranteed |= each.guaranteed
        return groups

    def _common(self, groups: list[Group]) -> int:
        return self._cache.free_blocks + sum(each.spare for each in groups)
