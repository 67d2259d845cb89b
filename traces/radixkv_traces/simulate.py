"""What hit rate would a pool of this size have had? A recorded trace, replayed against the real prefix cache.

Knows block numbers, the cache and one model of serving: requests run one at a time in the order given, and only prompts
enter. A recorded block is one token in a block of size 1, so that what is measured is the eviction and nothing else.
The cache hears what a live engine would tell it: the time, and when a request closes its output length and why it
stopped. Beside the cache's own policies there are "clairvoyant", the best that any could do, and "infinite".
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from radixkv.cache import POLICIES, Hint, PrefixCache
from radixkv.cache.tokens import check_int
from radixkv.errors import InvalidInput, UnknownPolicy
from radixkv_traces.clairvoyant import ClairvoyantPool
from radixkv_traces.records import TraceRequest
from radixkv_traces.workload import Workload, prepare

BOUNDS = ("clairvoyant", "infinite")
"""What no cache can be: the policies that only a replay has."""

_STRIDE = 64  # requests between two looks at the clock for `progress`


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay found. `regret_tokens` are those that missed but would hit in an infinite cache."""

    policy: str
    capacity_blocks: int
    block_tokens: int
    requests: int  # served
    input_tokens: int  # of these
    hit_tokens: int
    hit_blocks: int
    evicted_blocks: int
    regret_tokens: int
    seconds: float  # of CPU time: nothing waits, so it is what one idle core takes
    finished: bool  # False: Ctrl-C ended it before the trace did
    hits: array[int]  # request -> blocks that hit
    cached: array[int]  # request -> blocks in the pool after it

    @property
    def token_hit_rate(self) -> float:
        """hit_tokens / input_tokens; 0.0 for an empty trace."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


class Pool(Protocol):
    """What is replayed against; the requests of a workload come in order."""

    @property
    def cached_blocks(self) -> int:
        """Blocks in use now."""

    @property
    def evicted_blocks(self) -> int:
        """Blocks that made room so far."""

    def serve(self, index: int) -> int:
        """One request from arrival to end; returns its hit in blocks."""


Progress = Callable[[int, int], None]
"""Told now and then how many requests of how many were served."""


def check_policy(policy: str) -> None:
    """Raise UnknownPolicy unless `policy` is one of the cache's or one of BOUNDS."""
    if policy not in POLICIES and policy not in BOUNDS:
        raise UnknownPolicy(f"policy {policy!r}: allowed are {', '.join([*sorted(POLICIES), *BOUNDS])}")


def unique_blocks(requests: Iterable[TraceRequest]) -> int:
    """How many different blocks the prompts have: the capacity at which nothing is ever evicted."""
    return prepare(requests, 1).unique_blocks


def replay(
    trace: Workload | Iterable[TraceRequest],
    capacity_blocks: int,
    policy: str = "lru",
    block_tokens: int = 512,
    progress: Progress | None = None,
) -> ReplayResult:
    """Serve the requests in order from a pool of `capacity_blocks` blocks; a Workload brings its own `block_tokens`.

    A request's hit is its longest cached chain of blocks, at most its input length; it holds that while the rest of
    its prompt takes the place of victims. Of a chain longer than the pool the head stays. O(blocks) in all, log
    leaves each. Ctrl-C ends it early, and the result says so.

    >>> from radixkv_traces.formats import read, sample
    >>> trace = prepare(read(sample("cc_agent")), block_tokens=64)
    >>> [round(replay(trace, 2000, policy).token_hit_rate, 3) for policy in ("lru", "clairvoyant", "infinite")]
    [0.611, 0.686, 0.943]
    """
    workload = trace if isinstance(trace, Workload) else prepare(trace, block_tokens)
    pool = _pool(workload, capacity_blocks, policy)
    hits, cached = array("i"), array("i")
    begin = time.process_time()
    try:
        for index in range(len(workload.requests)):
            hits.append(pool.serve(index))
            cached.append(pool.cached_blocks)
            if progress is not None and index % _STRIDE == 0:
                progress(index, len(workload.requests))
    except KeyboardInterrupt:
        del hits[len(cached) :]
    return _result(workload, policy, capacity_blocks, pool, hits, cached, time.process_time() - begin)


def _pool(workload: Workload, capacity: int, policy: str) -> Pool:
    check_policy(policy)
    check_int("capacity_blocks", capacity)
    if capacity < 1:
        raise InvalidInput(f"capacity_blocks={capacity}: allowed is an int of at least 1")
    if policy == "infinite":
        return _InfinitePool(workload)
    return ClairvoyantPool(workload, capacity) if policy == "clairvoyant" else _CachePool(workload, capacity, policy)


def _result(
    workload: Workload, policy: str, capacity: int, pool: Pool, hits: array[int], cached: array[int], seconds: float
) -> ReplayResult:
    hit_tokens = sum(workload.hit_tokens(index, hit) for index, hit in enumerate(hits))
    return ReplayResult(
        policy=policy,
        capacity_blocks=workload.unique_blocks if policy == "infinite" else capacity,
        block_tokens=workload.block_tokens,
        requests=len(hits),
        input_tokens=sum(request.input_length for request in workload.requests[: len(hits)]),
        hit_tokens=hit_tokens,
        hit_blocks=sum(hits),
        evicted_blocks=pool.evicted_blocks,
        regret_tokens=sum(workload.hit_tokens(i, workload.known[i]) for i in range(len(hits))) - hit_tokens,
        seconds=seconds,
        finished=len(hits) == len(workload.requests),
        hits=hits,
        cached=cached,
    )


class _CachePool:
    """The real cache."""

    def __init__(self, workload: Workload, capacity: int, policy: str) -> None:
        self._workload = workload
        self._now = 0.0
        self._cache = PrefixCache(capacity, 1, policy, clock=lambda: self._now)

    @property
    def cached_blocks(self) -> int:
        return self._cache.num_blocks - self._cache.free_blocks

    @property
    def evicted_blocks(self) -> int:
        return self._cache.stats().evicted_blocks

    def serve(self, index: int) -> int:
        request, cache = self._workload.requests[index], self._cache
        self._now = self._workload.times[index]
        sequence = cache.open(request.blocks, request.namespace)
        sequence.extend(request.blocks[sequence.length : cache.num_blocks])
        sequence.commit()
        sequence.close(Hint(kind=request.stop or None, output_length=request.output_length))
        return sequence.cached_length


class _InfinitePool:
    """Never evicts."""

    evicted_blocks = 0

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.cached_blocks = 0

    def serve(self, index: int) -> int:
        hit = self._workload.known[index]
        self.cached_blocks += len(self._workload.requests[index].blocks) - hit
        return hit
