"""Count the blocks that requests may take if namespaces have shares of the pool.

Evictable blocks of a namespace within its share are for its own requests only. All other evictable blocks,
and free ones, are common. So a request is admitted if every running request of every namespace still gets its promised
blocks, in whatever order they take them.

A preempted request is admitted again only if it can finish even when the other running namespaces grow to their shares.
Blocks that requests take beyond their shares are free again when these requests are preempted. So no request is
preempted twice, with the exceptions that `admission` names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from radixkv.cache import PrefixCache
from radixkv.engine.request import Request

Promise = tuple[Request, int]
"""A request, and blocks that it may still take."""


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


class Shares:
    """Namespaces have shares of the pool."""

    def __init__(self, cache: PrefixCache) -> None:
        quotas = cache.quotas
        assert quotas is not None
        self._cache, self._quotas, self._limits, self._num_blocks = cache, quotas, quotas.limits, cache.num_blocks
        self._most = [quotas.shares.most_blocks(group) for group in range(len(quotas.limits))]

    def close(self) -> None:
        """See Accounts."""
        del self._cache, self._quotas

    def most_blocks(self, namespace: Hashable) -> int:
        """See Accounts: the shares of others are kept free."""
        return self._most[self._limits.group(namespace)]

    def described(self, most: int) -> str:
        """See Accounts."""
        return f"its namespace can have {most}, as the pool has {self._num_blocks} with the shares of others"

    def most_beside_pins(self, namespace: Hashable, pinned: int) -> int:
        """See Accounts: pins of other groups with a share are in their shares, which are kept free anyway."""
        own = self._limits.group(namespace)
        pinned_in = self._quotas.pinned_blocks(self._cache.state)
        return self._most[own] - sum(pinned_in[group] for group in {0, own})

    def allows(self, request: Request, need: Callable[[Request], int]) -> bool:
        """See Accounts."""
        return need(request) <= self.most_beside_pins(request.namespace, 0)

    def available(self, namespace: Hashable) -> int:
        """See Accounts."""
        return self._cache.free_blocks + self._quotas.shares.evictable_for(self._limits.group(namespace))

    def cover(self, promises: Sequence[Promise], *, idle: int = 0, freed: int = 0) -> bool:
        """See Accounts."""
        shares = self._quotas.shares
        groups = [Group(*row) for row in zip(shares.used, shares.evictable_in, shares.guaranteed, strict=True)]
        for request, blocks in promises:
            group = groups[self._limits.group(request.namespace)]
            group.promised += blocks
            group.running = True
            group.has_guaranteed |= request.scheduling.guaranteed
        if idle:
            groups[self._limits.group(promises[-1][0].namespace)].evictable -= idle
        return are_covered(groups, self._cache.free_blocks + sum(each.spare for each in groups) + freed)

    def victims(self, request: Request, running: list[Request]) -> list[Request]:
        """Return the requests of the same group, or of one beyond its share.

        Other groups keep their blocks as cached prefixes, so that preempting their requests would free none.
        """
        shares, own = self._quotas.shares, self._limits.group(request.namespace)
        group_of = {each: self._limits.group(each.namespace) for each in running}
        return [each for each, group in group_of.items() if group == own or shares.exceeds(group)]

    def waits_for_own(self, promises: Sequence[Promise]) -> bool:
        """See Accounts."""
        shares, own = self._quotas.shares, self._limits.group(promises[-1][0].namespace)
        same = [blocks for each, blocks in promises if self._limits.group(each.namespace) == own]
        held = shares.used[own] - shares.evictable_in[own]
        return len(same) > 1 and held + sum(same) > shares.guaranteed[own]
