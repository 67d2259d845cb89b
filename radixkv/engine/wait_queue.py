"""Order waiting requests, and delay a request while a running one prefills their shared prefix.

A higher priority always goes first. Within a priority, preempted requests go first, as their callers have already seen
a part of the answer. Then `WaitQueue` goes by arrival, and `LongestPrefixQueue` by the length of the cached prefix.

Sixteen agents that start together with one system prompt would compute it sixteen times: at their start it is not
cached. So a request is delayed while a running request is about to compute a prefix of its prompt, and hits that prefix
then. The wait for each running request is bounded: twice the steps that the shared part takes, plus eight.

A request whose cached prefix is being read from a disk is held, and others overtake it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, islice, takewhile
from operator import attrgetter

from sortedcontainers import SortedKeyList

from radixkv.config import EngineConfig
from radixkv.engine.request import PrefixWait, Request, Scheduling, common_prefix
from radixkv.engine.reuse_policy import ReusePolicy

LOOKED_AT = 128  # requests of one priority, by arrival, whose cached prefix is looked up for "longest-prefix"
_SLACK = 8  # steps: other requests may keep a leader from its chunk for a few
_RANK = attrgetter("rank")


class WaitQueue:
    """Waiting requests, first come, first served; delayed ones are not offered. O(log n) to add and remove."""

    def __init__(self, config: EngineConfig, block_size: int, reuse: ReusePolicy) -> None:
        """Start empty. A prefix is worth a wait if the request saves two blocks."""
        self._ready: SortedKeyList = SortedKeyList(key=_RANK)
        self._delayed: SortedKeyList = SortedKeyList(key=_RANK)
        self._held: SortedKeyList = SortedKeyList(key=_RANK)  # until another part of the engine releases them
        self._reuse = reuse
        self._min_saving = 2 * block_size
        self._prefill_chunk = config.prefill_chunk
        self._max_overtakes = config.max_overtakes
        self._step = 0

    def __len__(self) -> int:
        return len(self._ready) + len(self._delayed) + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        """Yield all requests by priority, then by arrival."""
        return merge(self._ready, self._delayed, self._held, key=_RANK)

    def __contains__(self, request: Request) -> bool:
        return request in self._ready or request in self._delayed or request in self._held

    def add(self, request: Request) -> None:
        """Queue a request at the place of its arrival."""
        self._ready.add(request)

    def remove(self, request: Request) -> None:
        """Take out a request that ended or was admitted."""
        next(each for each in (self._ready, self._delayed, self._held) if request in each).remove(request)

    def unheld(self) -> Iterator[Request]:
        """Yield the requests that wait for blocks or for other requests, in no order."""
        return chain(self._ready, self._delayed)

    # ---- waiting for a read

    def hold(self, request: Request) -> None:
        """Hold a request back until `release`."""
        self.remove(request)
        self._held.add(request)

    def release(self, request: Request) -> None:
        """Offer a request again that is held."""
        self._held.remove(request)
        self._ready.add(request)

    def admitted(self, request: Request) -> None:
        """Take out a request that was admitted."""
        self._ready.remove(request)

    def in_order(self) -> Iterator[Request]:
        """Yield the requests that may be admitted, best first. Valid until the queue changes."""
        return iter(self._ready)

    # ---- waiting for a shared prefix

    def begin_step(self) -> None:
        """Count a step, and offer delayed requests again whose wait is over."""
        self._step += 1
        if self._delayed:
            for request in self.ended_waits():
                self._delayed.remove(request)
                self._ready.add(request)

    def ended_waits(self) -> list[Request]:
        """Return the requests whose prefix is cached, whose leader is gone, or whose leader took too long.

        O(delayed requests + leaders).
        """
        positions: dict[Request, int | None] = {}
        ended = []
        for request in self._delayed:
            scheduling: Scheduling = request.scheduling
            wait = scheduling.prefix_wait
            assert wait is not None
            if wait.leader not in positions:
                positions[wait.leader] = _prefill_position(wait.leader)
            position = positions[wait.leader]
            scheduling.waited_enough |= position is not None and position < wait.shared and self._step > wait.until
            if position is None or position >= wait.shared or scheduling.waited_enough:
                ended.append(request)
        return ended

    def delay(self, request: Request, running: Iterable[Request], cached: int) -> bool:
        """Delay a request with `cached` cached tokens if a running one is about to compute more of its prompt.

        Returns whether it does. Compares the prompt with each prompt that is being prefilled.
        """
        if request.scheduling.waited_enough:
            return False
        for leader in running:
            position = _prefill_position(leader)
            if position is None or self._reuse.aligned(len(leader.prompt)) - cached < self._min_saving:
                continue  # too short, whatever it shares; without reuse always
            if leader.namespace != request.namespace:
                continue
            shared = common_prefix(leader.prompt, request.prompt)
            shared = self._reuse.aligned(self._reuse.kept_scores.reach(request.scores, leader.scores, shared))
            if shared > position and shared - cached >= self._min_saving:
                steps = -(-(shared - position) // self._prefill_chunk)
                before = cached if request.scheduling.prefix_wait is None else request.scheduling.prefix_wait.cached
                request.scheduling.prefix_wait = PrefixWait(leader, shared, self._step + 2 * steps + _SLACK, before)
                part = self._reuse.aligned(min(shared, len(request.prompt) - 1))
                next(each for each in leader.live if each.active).sequence.snapshot_at(part, shared=True)
                self._ready.remove(request)
                self._delayed.add(request)
                return True
        return False


class LongestPrefixQueue(WaitQueue):
    """Within a priority, offer the request with the longest cached prefix first (SGLang's "lpm").

    A stream of hits could starve a cold request for as long as it lasts. So a request that `max_overtakes` later ones
    have passed goes before all others of its priority.
    """

    def __init__(self, config: EngineConfig, block_size: int, reuse: ReusePolicy) -> None:
        """Start empty."""
        super().__init__(config, block_size, reuse)
        self._cached: dict[Request, int] = {}  # tokens, as looked up in this step

    def begin_step(self) -> None:
        """Look up cached prefixes again, too."""
        self._cached.clear()
        super().begin_step()

    def in_order(self) -> Iterator[Request]:
        """Yield the requests that may be admitted, best first. Valid until the queue changes."""
        if len(self._ready) < 2:
            return iter(self._ready)
        first = self._ready[0].priority
        highest = takewhile(lambda request: request.priority == first, islice(self._ready, LOOKED_AT))
        best = sorted(highest, key=self._key)
        return chain(best, islice(self._ready, len(best), None))

    def admitted(self, request: Request) -> None:
        """Take out a request that was admitted, and count it for the earlier requests that could have run instead."""
        super().admitted(request)
        if request.scheduling.preemptions:
            return
        for other in islice(self._ready, self._ready.bisect_key_left(request.rank)):
            if other.priority == request.priority and not other.channel.paused:
                other.scheduling.overtaken += 1

    def _key(self, request: Request) -> tuple[bool, bool, int, int]:
        aged = request.scheduling.overtaken >= self._max_overtakes
        return (
            not request.scheduling.preemptions,
            not aged,
            0 if aged else -self._cached_length(request),
            request.scheduling.number,
        )

    def _cached_length(self, request: Request) -> int:
        if request not in self._cached:
            try:
                self._cached[request] = self._reuse.match(request).length
            except Exception:  # it fails alone, when it is admitted
                self._cached[request] = 0
        return self._cached[request]


QUEUES: dict[str, type[WaitQueue]] = {"fcfs": WaitQueue, "longest-prefix": LongestPrefixQueue}


def _prefill_position(leader: Request) -> int | None:
    """Return how many tokens of its prompt a request has computed; None if it computes or publishes none of it now."""
    stream = next((each for each in leader.live if each.active), None)
    if (
        stream is None
        or leader.scheduling.publish_late
        or leader.channel.paused
        or stream.computed_length >= len(leader.prompt)
    ):
        return None
    return stream.computed_length
