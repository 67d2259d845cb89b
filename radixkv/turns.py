"""Turns between groups of namespaces: the group that computed the fewest tokens for its share goes next.

A group is a namespace, or all tuples that begin with it. The count of a group is the number of tokens that its requests
computed, prompts and replies, divided by its share. A group that begins to wait starts at the lowest count of the
waiting groups at least. So it cannot save up turns while it is idle, or while it has fewer requests than its share
allows. The idea is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from radixkv.cache.quotas import NamespaceLimits

_KEPT = 1024  # idle groups whose counts are kept, and as many as there are active groups


@dataclass(slots=True, eq=False)
class Group:
    """A group of namespaces: how many requests wait or run, and the `tokens` that all its requests have computed.

    `tokens` is raised where the group begins to wait. The group last ran a request until `ran_until`, in seconds.
    """

    share: float = 1.0
    tokens: float = 0.0
    requests: int = 0
    ran_until: float = 0.0

    @property
    def count(self) -> float:
        """The tokens divided by the share."""
        return self.tokens / self.share


def group_key(namespace: Hashable, limits: NamespaceLimits | None = None) -> Hashable:
    """Return the namespace that names the group: one that has a share, or the first item of a tuple.

    >>> group_key(("ann", "mail")), group_key("ben"), group_key(None)
    (('ann',), 'ben', None)
    >>> group_key(("ann", "mail", 3), NamespaceLimits({("ann", "mail"): 0.5}))
    ('ann', 'mail')
    """
    number = 0 if limits is None else limits.group(namespace)
    if limits is not None and number:
        return limits.namespaces[number - 1]
    return namespace[:1] if isinstance(namespace, tuple) else namespace


class Turns:
    """The groups that have requests, and the counts of groups that had some.

    A group without a share counts as one with the smallest share.

    >>> turns = Turns()
    >>> ann, ben = turns.enter("ann"), turns.enter("ben")
    >>> ann.tokens += 100
    >>> turns.next([ann, ben]) == [ben]
    True
    >>> len(turns.next([ann, ben], ahead=100))
    2
    >>> turns.enter("ben", waiting=[ann]).count
    100.0
    """

    def __init__(self, limits: NamespaceLimits | None = None) -> None:
        """Start with the group of the default namespace."""
        self._limits = limits or NamespaceLimits({})
        self._least = min((share for share in self._limits.shares if share), default=1.0)
        self._floor = 0.0  # the lowest count of the waiting groups, when it was last looked at
        self.groups: dict[Hashable, Group] = {None: Group(self._share(None))}

    def enter(self, key: Hashable, waiting: Iterable[Group] = ()) -> Group:
        """Return the group of a key, which begins to wait as the groups in `waiting` do. O(groups).

        Where no group waits, it starts at the count of the group that ran last.
        """
        last = max(self.groups.values(), key=lambda each: each.ran_until).count
        self._floor = max(self._floor, min((each.count for each in waiting), default=last))
        active = sum(each.requests > 0 for each in self.groups.values())
        if len(self.groups) > 2 * active + _KEPT:
            self._forget()
        group = self.groups.setdefault(key, Group(self._share(key)))
        group.tokens = max(group.tokens, self._floor * group.share)
        return group

    def next(self, groups: Collection[Group], ahead: float = 0) -> list[Group]:
        """Return the groups that may go next: the first one with the lowest count, and others at most `ahead` ahead.

        `ahead` counts tokens that a group computed beyond its turn. O(groups).
        """
        first = min(groups, key=lambda each: each.count)
        lowest = first.count
        return [each for each in groups if each is first or (ahead and (each.count - lowest) * each.share <= ahead)]

    def _share(self, key: Hashable) -> float:
        return self._limits.shares[self._limits.group(key)] or self._least

    def _forget(self) -> None:
        """Drop half of the idle groups, those with the lowest counts: most would begin to wait at a higher one."""
        idle = [(each.count, at, key) for at, (key, each) in enumerate(self.groups.items()) if not each.requests]
        for _, _, key in sorted(idle)[: len(idle) // 2]:
            if key is not None:
                del self.groups[key]
