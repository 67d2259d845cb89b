"""radixkv's own cache with the verbs of `engines.py`: open / extend / commit / close, everything switched on.

Token ids are validated, each call names a namespace, ghosts and counters are on (they cannot be switched off), and
with `observed` an observer counts every event.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from engines import Ids, Slots

from radixkv.cache import Match, PrefixCache, Sequence, WritePlan

NAMESPACE = "tenant-a"


class Counting:
    """The cheapest observer that still observes."""

    def __init__(self) -> None:
        self.events = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def count(*args: Any) -> None:
            self.events += 1

        setattr(self, name, count)
        return count


class Ticket:
    __slots__ = ("hit", "plan", "sequence")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.hit = sequence.length
        self.plan: WritePlan


class RadixKV:
    """`as_lists` hands over plain lists of ints instead of int32 arrays."""

    def __init__(self, page: int, capacity: int, *, as_lists: bool = False, observed: bool = False) -> None:
        self.observer = Counting() if observed else None
        self.cache = PrefixCache(capacity // page, page, observer=self.observer)
        self.page = page
        self.as_lists = as_lists

    @property
    def freed_by_eviction(self) -> int:
        return self.cache.stats().evicted_blocks * self.page

    def key(self, ids: Ids) -> Any:
        return ids.tolist() if self.as_lists else ids

    def open(self, prompt: Any) -> Ticket:
        return Ticket(self.cache.open(prompt, NAMESPACE))

    def reserve(self, ticket: Ticket, full: Any) -> None:
        ticket.plan = ticket.sequence.extend(full[ticket.hit :])

    def prepare(self, ticket: Ticket) -> tuple[int, Slots, list[tuple[Slots, Slots]]]:
        copies = [(self._slots(np.array([a])), self._slots(np.array([b]))) for a, b in ticket.plan.copies]
        return ticket.hit, ticket.plan.slots, copies

    def publish(self, ticket: Ticket) -> None:
        ticket.sequence.commit()

    def release(self, ticket: Ticket) -> None:
        ticket.sequence.close()

    def match(self, key: Any) -> Match:
        return self.cache.match(key, NAMESPACE)

    def found(self, match: Match) -> tuple[int, Slots]:
        return match.length, self._slots(match.blocks)[: match.length]

    def held(self, ticket: Ticket) -> Slots:
        return self._slots(ticket.sequence.block_table)[: ticket.hit]

    def check(self) -> None:
        self.cache.check()
        stats = self.cache.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks and not stats.held_blocks, stats
        assert self.observer is None or self.observer.events, "the observer received no event"

    def _slots(self, blocks: Any) -> Slots:
        return (blocks.astype(np.int64)[:, None] * self.page + np.arange(self.page)).ravel()
