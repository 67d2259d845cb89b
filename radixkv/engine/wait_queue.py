"""Order waiting requests, and delay a request while a running one prefills their shared prefix.

A higher priority always goes first. Within a priority, preempted requests go first, as their callers have already seen
a part of the answer; then comes the order: arrival, or the longest cached prefix. The latter (SGLang's "lpm") lets a
stream of hits starve a cold request for as long as it lasts; so a request that `max_overtakes` later ones have passed
goes before all others of its priority.

Sixteen agents that start together with one system prompt would compute it sixteen times: none finds it cached, as none
has written it. So a request waits while a running prompt is about to compute a prefix of its own, and hits it then. The
wait is bounded: twice the steps that the shared part takes, and a few.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice, takewhile

from sortedcontainers import SortedKeyList

from radixkv.config import EngineConfig
from radixkv.engine.request import PrefixWait, Request, common_prefix

LOOKED_AT = 128  # requests of one priority, by arrival, whose cached prefix is looked up for "longest-prefix"


class WaitQueue:
    """Requests by rank; O(log n) to add and remove. Who is parked (see `coalescing`) waits, too, but is not asked."""

    def __init__(self, config: EngineConfig, cached: Callable[[Request], int]) -> None:
        """Start empty; `cached` tells how many tokens of a request are cached now."""
        self._ready: SortedKeyList = SortedKeyList(key=_rank)
        self._delayed: SortedKeyList = SortedKeyList(key=_rank)
        self._by_prefix = config.order == "longest-prefix"
        self._max_overtakes = config.max_overtakes
        self._cached = cached
        self._lengths: dict[Request, int] = {}  # cached tokens, as looked up in this step

    def __len__(self) -> int:
        return len(self._ready) + len(self._delayed)

    def __iter__(self) -> Iterator[Request]:
        """By priority, then by arrival."""
        return merge(self._ready, self._delayed, key=_rank)

    def __contains__(self, request: Request) -> bool:
        return request in self._ready or request in self._delayed

    def add(self, request: Request) -> None:
        """Let a request wait, in the place of its arrival."""
        self._ready.add(request)

    def remove(self, request: Request) -> None:
        """Take it out: it ended, or comes in."""
        (self._ready if request in self._ready else self._delayed).remove(request)

    def delay(self, request: Request) -> None:
        """Ask a request no more until it is released."""
        self._ready.remove(request)
        self._delayed.add(request)

    def release(self, over: Callable[[Iterable[Request]], list[Request]]) -> None:
        """Before anybody comes in: those of the parked ones whose wait is `over` may come in again. O(parked)."""
        self._lengths.clear()
        for request in over(self._delayed):
            self._delayed.remove(request)
            self._ready.add(request)

    def ranked(self) -> Iterator[Request]:
        """Who may come in, best first. Good until something changes."""
        if not self._by_prefix or len(self._ready) < 2:
            return iter(self._ready)
        first = self._ready[0].priority
        highest = takewhile(lambda request: request.priority == first, islice(self._ready, LOOKED_AT))
        best = sorted(highest, key=self._by_length)
        return chain(best, islice(self._ready, len(best), None))

    def overtaken_by(self, request: Request) -> None:
        """`request` came in: of those that came before it, whoever could have run instead was overtaken."""
        if not self._by_prefix or request.preemptions:
            return
        for other in islice(self._ready, self._ready.bisect_key_left(request.rank)):
            if other.priority == request.priority and not other.channel.paused:
                other.overtaken += 1

    def _by_length(self, request: Request) -> tuple[bool, bool, int, int]:
        aged = request.overtaken >= self._max_overtakes
        return not request.preemptions, not aged, 0 if aged else -self._length(request), request.number

    def _length(self, request: Request) -> int:
        length = self._lengths.get(request)
        if length is None:
            length = self._lengths[request] = self._cached(request)
        return length


def _rank(request: Request) -> tuple[int, bool, int]:
    return request.rank


_SLACK = 8  # steps: others may keep a leader from its chunk for a few


class Coalescer:
    """Who waits for whom. One comparison of two prompts for each that begins to wait, then O(1) a step."""

    def __init__(self, prefill_chunk: int, worth: int, aligned: Callable[[int], int]) -> None:
        """Let nobody wait for less than `worth` tokens; a leader computes at most `prefill_chunk` a step.

        Of `n` tokens in common, `aligned(n)` can be hit.
        """
        self._chunk, self._worth, self._on_grid = prefill_chunk, worth, aligned
        self._step = 0

    def next_step(self) -> None:
        """Count the steps that bound every wait."""
        self._step += 1

    def over(self, prefix_wait: Iterable[Request]) -> list[Request]:
        """Those whose wait is over: the tokens are there, the leader is gone, or it took too long.

        O(parked + leaders).
        """
        positions: dict[Request, int | None] = {}
        done = []
        for request in prefix_wait:
            wait = request.prefix_wait
            assert wait is not None
            if wait.leader not in positions:
                positions[wait.leader] = _ahead(wait.leader)
            position = positions[wait.leader]
            if position is None or position >= wait.shared:
                done.append(request)
            elif self._step > wait.until:
                request.waited_enough = True
                done.append(request)
        return done

    def starts_wait(self, request: Request, running: Iterable[Request], cached: int) -> bool:
        """Park a request, of which `cached` tokens are cached, if a running prompt is about to compute more of it."""
        if request.waited_enough:
            return False
        for leader in running:
            position = _ahead(leader)
            if position is None or not _equal(leader.namespace, request.namespace):
                continue
            shared = self._on_grid(common_prefix(leader.prompt, request.prompt))
            if shared > position and shared - cached >= self._worth:
                steps = -(-(shared - position) // self._chunk)
                before = cached if request.prefix_wait is None else request.prefix_wait.cached
                request.prefix_wait = PrefixWait(leader, shared, self._step + 2 * steps + _SLACK, before)
                return True
        return False


def _equal(one: Hashable, other: Hashable) -> bool:
    """As a dict compares its keys: a caller's `__eq__` is asked only if the hashes are equal."""
    return one is other or (hash(one) == hash(other) and one == other)


def _ahead(leader: Request) -> int | None:
    """How many tokens of its prompt a request has computed; None if it computes, or publishes, none of it now."""
    stream = next((each for each in leader.live if each.active), None)
    if stream is None or leader.publish_late or leader.channel.paused or stream.sequence.length >= len(leader.prompt):
        return None
    return stream.sequence.length
