"""Turns between groups of namespaces: the group that computed the fewest tokens goes next.

A group is a namespace, or all tuples that begin with one item. Its count is the number of tokens that its requests
computed, prompts and replies. A group that begins to wait starts at the lowest count of the waiting groups at least, or
at the count of the group that was admitted last. So it cannot save up turns while it is idle. The idea is the virtual
token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

While several groups have requests, each one gets at most half of the streams. A group that comes later waits for a
stream to end.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from radixkv.telemetry.records import NamespaceId

_KEPT = 1024  # groups whose counts are kept, if they are more than twice the groups that have requests


@dataclass(slots=True, eq=False)
class Group:
    """A group of namespaces: how many requests wait or run, and the `tokens` that all its requests have computed.

    `tokens` is raised where the group begins to wait.
    """

    tokens: int = 0
    requests: int = 0


def group_key(namespace: Hashable) -> Hashable:
    """Return the namespace that names the group: the first item of a tuple, or the `turn` of a named namespace.

    >>> group_key(("ann", "mail")), group_key("ben"), group_key(None)
    (('ann',), 'ben', None)
    """
    if isinstance(namespace, NamespaceId):
        return namespace.turn or namespace
    return namespace[:1] if isinstance(namespace, tuple) else namespace


class Turns:
    """The groups that have requests, and the counts of groups that had some.

    >>> turns = Turns(max_sequences=8)
    >>> ann = turns.enter("ann", waiting=[])
    >>> ann.tokens += 100
    >>> turns.enter("ben", waiting=[ann]).tokens
    100
    >>> [turns.allows(ann, 1, running=streams) for streams in (3, 4)]
    [True, False]
    """

    def __init__(self, max_sequences: int) -> None:
        self.several = False  # whether more than one group has requests
        self._half = max(max_sequences // 2, 1)
        self._groups: dict[Hashable, Group] = {}
        self._active = 0  # groups that have requests
        self._most = _KEPT
        self._floor = 0  # the lowest count of the waiting groups, when it was last looked at
        self.last = Group()  # the group that was admitted last

    def __len__(self) -> int:
        """The number of groups that are kept."""
        return len(self._groups)

    def enter(self, key: Hashable, waiting: Collection[Group]) -> Group:
        """Return the group of a key, which has one more request, while the groups in `waiting` have some that wait.

        O(waiting groups), and once in many new groups O(groups).
        """
        if key not in self._groups and len(self._groups) >= self._most:
            self._forget()
        group = self._groups.setdefault(key, Group())
        if group not in waiting:
            self._floor = max(self._floor, min((each.tokens for each in waiting), default=self.last.tokens))
            group.tokens = max(group.tokens, self._floor)
        group.requests += 1
        self._active += group.requests == 1
        self.several = self._active > 1
        return group

    def leave(self, group: Group) -> None:
        """Count a request of the group that ended."""
        group.requests -= 1
        self._active -= not group.requests
        self.several = self._active > 1

    def allows(self, group: Group, streams: int, running: int) -> bool:
        """Return whether a group with `running` streams may run more: half of all, unless no other has requests.

        A request with many streams runs when no other one of its group does.
        """
        return not self.several or not running or running + streams <= self._half

    def _forget(self) -> None:
        """Drop half of the idle groups, those with the lowest counts: most would begin to wait at a higher one."""
        idle = [key for key, group in self._groups.items() if not group.requests]
        idle.sort(key=lambda key: self._groups[key].tokens)
        for key in idle[: (len(idle) + 1) // 2]:
            del self._groups[key]
        self._most = max(_KEPT, 2 * len(self._groups))
