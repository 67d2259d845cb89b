"""Order waiting requests, and delay a request while a running one prefills their shared prefix.

The order, first rule first:

1. A higher priority.
2. Preempted requests, as their callers have already seen a part of the answer. They take no turns.
3. Turns between the groups of namespaces: see `turns`.
4. Overdue requests, the oldest first: those that a later one of their group overtook `max_delay` seconds ago.
5. The oldest request ("fcfs"), or the one with the longest cached prefix ("longest-prefix", SGLang's "lpm").

Sixteen agents that start together with one system prompt would compute it sixteen times: at their start it is not
cached. So a request is delayed while a running request is about to compute a prefix of its prompt, and hits that prefix
then. The wait for each running request is bounded: twice the steps that the shared part takes, plus eight.

While requests of several groups wait or run, a group that runs half of all streams is passed over. Paused streams do
not count, because they are preempted when another request needs their place.

A request whose cached prefix is being read from a disk is held, and others overtake it.

The cached prefixes of the first `LOOKED_AT` requests by priority and arrival are announced to the cache, which evicts
them after all others.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from math import inf
from operator import attrgetter

from sortedcontainers import SortedKeyList

from radixkv.cache.announcements import Announcement
from radixkv.config import EngineConfig
from radixkv.engine.request import PrefixWait, Queued, Request, common_prefix
from radixkv.engine.reuse_policy import ReusePolicy
from radixkv.engine.stats import Counters
from radixkv.turns import Group, Turns, group_key

LOOKED_AT = 128  # requests by arrival: of one priority for "longest-prefix", and of all for announcements
_SLACK = 8  # steps: other requests may keep a leader from its chunk for a few
_RANK = attrgetter("scheduling.queued.rank")


class WaitQueue:
    """The waiting requests; delayed and held ones are not offered. O(log n) to add and remove."""

    def __init__(self, config: EngineConfig, block_size: int, reuse: ReusePolicy, counters: Counters) -> None:
        """Start empty. A prefix is worth a wait if the request saves two blocks."""
        self._all: SortedKeyList = SortedKeyList(key=_RANK)
        self._ready: defaultdict[Group, SortedKeyList] = defaultdict(partial(SortedKeyList, key=_RANK))  # none is empty
        self._delayed: SortedKeyList = SortedKeyList(key=_RANK)
        self._held: set[Request] = set()  # until another part of the engine releases them
        self._announced: dict[Request, Announcement] = {}
        self._is_changed = False  # since requests were announced
        self._reuse, self._counters = reuse, counters
        self.turns = Turns(config.max_sequences)
        self._min_saving = 2 * block_size
        self._prefill_chunk = config.prefill_chunk
        self._max_delay = config.max_delay or inf
        self._key = KEYS[config.order]
        self._cached: dict[Request, int] = {}  # tokens, as looked up in this step
        self._step, self._now = 0, 0.0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        """Yield all requests by priority, preempted ones first, then by arrival."""
        return iter(self._all)

    def __contains__(self, request: Request) -> bool:
        return request in self._all

    def add(self, request: Request) -> None:
        """Queue a request that arrived or was preempted, at the place of its arrival."""
        queued = request.scheduling.queued
        if not request.scheduling.admitted:
            queued.group = self.turns.enter(group_key(request.namespace), self._ready)
        queued.rank = (-request.priority, not request.scheduling.preemptions, request.scheduling.number)
        self._all.add(request)
        self._ready[queued.group].add(request)
        self._is_changed = True

    def remove(self, request: Request) -> None:
        """Take out a request that ended or was admitted."""
        self._all.remove(request)
        self._is_changed = True
        if request in self._announced:
            self._announced.pop(request).close()
        group = request.scheduling.queued.group
        ready = self._ready[group]
        next(each for each in (ready, self._delayed, self._held) if request in each).remove(request)
        if not ready:
            del self._ready[group]

    def unheld(self) -> Iterator[Request]:
        """Yield the requests that wait for blocks or for other requests, in no order."""
        return chain(*self._ready.values(), self._delayed)

    def announce(self) -> None:
        """Announce the cached prefixes of the first LOOKED_AT requests. O(requests that joined or left * tokens)."""
        if self._is_changed:
            self._is_changed = False
            first = dict.fromkeys(islice(self._all, LOOKED_AT))
            for request in [each for each in self._announced if each not in first]:
                self._announced.pop(request).close()
            for request in first:
                if request not in self._announced:
                    with suppress(Exception):  # it fails alone, when it is admitted
                        self._announced[request] = self._reuse.announce(request)

    def reason(self, request: Request) -> str | None:
        """Return why a waiting request is not offered; None if it is."""
        if request in self._held:
            return "disk"
        if request in self._delayed:
            return "shared prefix"
        return "slow reader" if request.channel.paused else None

    def _withdraw(self, request: Request) -> None:
        ready = self._ready[request.scheduling.queued.group]
        ready.remove(request)
        if not ready:
            del self._ready[request.scheduling.queued.group]

    # ---- order

    def first(self, running: Iterable[Request]) -> Request | None:
        """Return the request to admit next, while these are `running`.

        Returns None if all requests are paused, delayed or held, or of groups that run as many streams as they may.
        O(groups + running requests). For "longest-prefix" it looks up the cached prefixes of LOOKED_AT requests, once
        in a step.
        """
        heads = [ready[0] for ready in self._ready.values()]
        if any(each.channel.paused for each in heads):
            heads = self._unpaused()
        if not self.turns.several:
            return self._next(heads) if heads else None
        streams = Counter[Group]()
        for each in running:
            streams[each.scheduling.queued.group] += 0 if each.channel.paused else each.streams_left
        while heads:
            request = self._next(heads)
            group = request.scheduling.queued.group
            if self.turns.allows(group, request.streams_left, streams[group]):
                return request
            heads = [each for each in heads if each.scheduling.queued.group is not group]
        return None

    def _next(self, heads: list[Request]) -> Request:
        """Return the next request of the groups with these first requests."""
        head = min(heads, key=_RANK)
        if head.scheduling.preemptions:
            return head
        same = (each for each in heads if each.priority == head.priority)
        turn = min(same, key=lambda each: (each.scheduling.queued.group.tokens, each.scheduling.number))
        return turn if self._key is None or len(self) == 1 else self._best(turn)

    def _unpaused(self) -> list[Request]:
        """Return the first request of each group that is not paused. O(groups + paused requests)."""
        heads = (next((each for each in ready if not each.channel.paused), None) for ready in self._ready.values())
        return [each for each in heads if each is not None]

    def _best(self, head: Request) -> Request:
        """Return the next request of the group and the priority of `head`, which is the oldest one."""
        ready = self._ready[head.scheduling.queued.group].irange_key(_RANK(head), (*_RANK(head)[:2], inf))
        unpaused = (each for each in ready if not each.channel.paused)
        best: Request = min(islice(unpaused, LOOKED_AT), key=self._order)
        return best

    def _order(self, request: Request) -> tuple[bool, int, int]:
        assert self._key is not None
        overdue = self._is_overdue(request)
        return not overdue, 0 if overdue else self._key(self, request), request.scheduling.number

    def _is_overdue(self, request: Request) -> bool:
        return self._now - request.scheduling.queued.overtaken_at >= self._max_delay

    def admit(self, request: Request) -> None:
        """Take out a request that runs now, and count it for the earlier requests that could have run instead."""
        self.remove(request)
        queued, number = request.scheduling.queued, request.scheduling.number
        self.turns.last = queued.group
        if request.scheduling.preemptions:
            return
        others = (each for each in self._unpaused() if each.priority == request.priority)
        older = (each.scheduling.queued for each in others if each.scheduling.number < number)
        self._counters.turn_admissions += any(each.group is not queued.group for each in older)
        if self._key is None:
            return
        self._counters.overdue_admissions += self._is_overdue(request)
        ready = self._ready.get(queued.group)
        if ready is not None:
            for other in islice(ready, ready.bisect_key_left(_RANK(request))):
                if other.priority == request.priority and not other.channel.paused:
                    other.scheduling.queued.overtaken_at = min(other.scheduling.queued.overtaken_at, self._now)

    def cached_length(self, request: Request) -> int:
        """Return how many tokens a request would hit now, as looked up once in a step."""
        if request not in self._cached:
            try:
                self._cached[request] = self._reuse.match(request).length
            except Exception:  # it fails alone, when it is admitted
                self._cached[request] = 0
        return self._cached[request]

    # ---- waiting for a read

    def hold(self, request: Request) -> None:
        """Hold a request back until `release`."""
        if request in self._delayed:
            self._delayed.remove(request)
        else:
            self._withdraw(request)
        self._held.add(request)

    def release(self, request: Request) -> None:
        """Offer a request again that is held."""
        self._held.remove(request)
        self._ready[request.scheduling.queued.group].add(request)

    # ---- waiting for a shared prefix

    def begin_step(self) -> None:
        """Count a step, and offer delayed requests again whose wait is over."""
        self._step += 1
        self._now = time.perf_counter()
        self._cached.clear()
        if self._delayed:
            for request in self.ended_waits():
                self._delayed.remove(request)
                self._ready[request.scheduling.queued.group].add(request)

    def ended_waits(self) -> list[Request]:
        """Return the requests whose prefix is cached, whose leader is gone, or whose leader took too long.

        O(delayed requests + leaders).
        """
        positions: dict[Request, int | None] = {}
        ended = []
        for request in self._delayed:
            queued: Queued = request.scheduling.queued
            wait = queued.prefix_wait
            assert wait is not None
            if wait.leader not in positions:
                positions[wait.leader] = _prefill_position(wait.leader)
            position = positions[wait.leader]
            queued.waited_enough |= position is not None and position < wait.shared and self._step > wait.until
            if position is None or position >= wait.shared or queued.waited_enough:
                ended.append(request)
        return ended

    def delay(self, request: Request, running: Iterable[Request], cached: int) -> bool:
        """Delay a request with `cached` cached tokens if a running one is about to compute more of its prompt.

        Returns whether it does. Compares the prompt with each prompt that is being prefilled.
        """
        if request.scheduling.queued.waited_enough:
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
                queued = request.scheduling.queued
                before = cached if queued.prefix_wait is None else queued.prefix_wait.cached
                queued.prefix_wait = PrefixWait(leader, shared, self._step + 2 * steps + _SLACK, before)
                part = self._reuse.aligned(min(shared, len(request.prompt) - 1))
                next(each for each in leader.live if each.active).sequence.snapshot_at(part, shared=True)
                self._withdraw(request)
                self._delayed.add(request)
                return True
        return False


KEYS: dict[str, Callable[[WaitQueue, Request], int] | None] = {
    "fcfs": None,
    "longest-prefix": lambda queue, request: -queue.cached_length(request),
}
"""What decides within a turn, the least first, before arrival."""


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
