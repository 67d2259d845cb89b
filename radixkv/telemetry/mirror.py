"""The state of an engine as its telemetry describes it: the sum of all changes.

A publisher sends it as a snapshot, a monitor shows it, and a recording rebuilds it. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

from radixkv.telemetry.records import Changes, EvictionRecord, NodeRecord, RequestRecord, SequenceRecord, SessionRecord

ENDED_REQUESTS = 512
SESSIONS = 1024
EVICTIONS = 1024
"""How many of these are kept; the oldest are dropped first. Requests that have not ended are all kept."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Mirror:
    """The sum of all changes so far.

    `next_victims` are the ids of the nodes that the engine would evict next, the first one first, at most 32. It is
    None where the engine does not send them, as in old recordings: the order is unknown then, and must not be guessed.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.stats: dict[str, float] = {}
        self.nodes: dict[int, NodeRecord] = {}
        self.sequences: dict[int, SequenceRecord] = {}
        self.live: dict[int, RequestRecord] = {}
        self.ended: OrderedDict[int, RequestRecord] = OrderedDict()
        self.sessions: OrderedDict[int, SessionRecord] = OrderedDict()
        self.evictions: OrderedDict[int, EvictionRecord] = OrderedDict()
        self.next_victims: tuple[int, ...] | None = None
        self.what_if: dict[str, Any] | None = None

    def apply(self, changes: Changes) -> None:
        """Add changes. O(changes), except for a reset, which drops everything first."""
        if changes.reset:
            self.__init__()  # type: ignore[misc]
        self.time = changes.time
        self.stats.update(changes.stats)
        for number in changes.gone_nodes:
            self.nodes.pop(number, None)
        self.nodes.update({node.id: node for node in changes.nodes})
        for number in changes.gone_sequences:
            self.sequences.pop(number, None)
        self.sequences.update({sequence.id: sequence for sequence in changes.sequences})
        for request in changes.requests:
            self._request(request)
        for session in changes.sessions:
            keep_newest(self.sessions, session.number, session, SESSIONS)
        for eviction in changes.evictions:
            if not self._was_dropped(eviction):
                keep_newest(self.evictions, eviction.number, eviction, EVICTIONS, move=False)
        if changes.next_victims is not None:
            self.next_victims = changes.next_victims
        self.what_if = changes.what_if or self.what_if

    def everything(self) -> Changes:
        """Return the whole state as changes that begin with a reset. O(state)."""
        return Changes(
            time=self.time,
            reset=True,
            stats=dict(self.stats),
            nodes=tuple(self.nodes.values()),
            sequences=tuple(self.sequences.values()),
            requests=(*self.ended.values(), *self.live.values()),
            sessions=tuple(self.sessions.values()),
            evictions=tuple(self.evictions.values()),
            next_victims=self.next_victims,
            what_if=self.what_if,
        )

    def _was_dropped(self, eviction: EvictionRecord) -> bool:
        """Whether it was dropped as too old, so that a late regret must not add it again as the newest."""
        return len(self.evictions) == EVICTIONS and eviction.number < next(iter(self.evictions))

    def _request(self, request: RequestRecord) -> None:
        if request.live:
            self.live[request.number] = request
            return
        self.live.pop(request.number, None)
        keep_newest(self.ended, request.number, request, ENDED_REQUESTS)


def keep_newest(kept: OrderedDict[Key, Value], key: Key, value: Value, most: int, *, move: bool = True) -> None:
    """Keep the newest `most`."""
    kept[key] = value
    if move:
        kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
