"""Simulate the hit rate of a pool: a recorded trace, replayed against the real prefix cache.

Requests run one at a time in the given order, and only prompts enter the cache. A recorded block is one token in a
block of size 1, so that only eviction is measured. The cache receives the same facts as in a live engine: the time, and
for each closed request its output length and stop reason. In addition to the cache's policies there are "clairvoyant",
the upper bound of all policies, and "infinite".

With a host tier, blocks that leave the pool are offloaded, and hits on the host are loaded. A request's hit on the host
begins where its hit on the device ends. Loads and offloads take no time, and a load is always taken: the engine
computes a hit instead where loading it is slower. With a disk below, the real tier, a request first reads what the disk
has after its hit in memory. Reads and writes end at once.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from radixkv.cache import POLICIES, PrefixCache, Sequence
from radixkv.cache.tokens import check_int
from radixkv.errors import InvalidInput, UnknownPolicy
from radixkv_traces.clairvoyant import ClairvoyantPool
from radixkv_traces.records import TraceRequest
from radixkv_traces.simulate_hints import HINTS, Closing
from radixkv_traces.simulated_disk import SimulatedDisk
from radixkv_traces.workload import Workload, prepare

BOUNDS = ("clairvoyant", "infinite")
"""Upper bounds: policies that only a simulation can have."""

LOAD_TOKENS = 8192
"""The most tokens that a step loads. An engine has such a limit because long loads would delay other requests."""

_STRIDE = 64  # requests between two calls of `progress`


@dataclass(frozen=True, slots=True)
class Traffic:
    """The blocks that were copied to and from a tier during a replay."""

    hits_above: array[int]  # for each request, the blocks that hit in the tiers above
    read_blocks: int
    written_blocks: int


class HitRate:
    """The share of prompt tokens that hit."""

    __slots__ = ()
    input_tokens: int
    hit_tokens: int

    @property
    def token_hit_rate(self) -> float:
        """hit_tokens / input_tokens; 0.0 without prompts."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ReplayResult(HitRate):
    """The result of a replay. `regret_tokens` are misses that would hit in an infinite cache."""

    policy: str
    capacity_blocks: int
    block_tokens: int
    requests: int  # served
    input_tokens: int  # of the served requests
    hit_tokens: int
    hit_blocks: int
    evicted_blocks: int
    regret_tokens: int
    seconds: float  # of CPU time on one core
    finished: bool  # False: Ctrl-C ended the replay early
    hits: array[int]  # for each request, the blocks that hit
    cached: array[int]  # for each request, the blocks in the pool after it
    host_blocks: int = 0
    host: Traffic | None = None  # None for bounds, and without a host tier
    host_hit_tokens: int = 0  # part of hit_tokens: loaded from the host in place of a prefill
    disk_blocks: int = 0
    disk: Traffic | None = None
    disk_hit_tokens: int = 0  # part of hit_tokens: read from the disk first


class Pool(Protocol):
    """The pool that a replay serves requests from, in the order of a workload."""

    @property
    def cached_blocks(self) -> int:
        """Blocks in use now."""

    @property
    def evicted_blocks(self) -> int:
        """Blocks evicted from memory so far; with a host tier, from the host or directly from the device."""

    @property
    def tiers(self) -> tuple[Traffic, ...]:
        """The traffic of a host tier and of a disk so far."""

    def serve(self, index: int) -> int:
        """Serve one request; returns its hit in blocks."""


Progress = Callable[[int, int], None]
"""Called from time to time with the number of served requests and of all requests."""


def check_policy(policy: str) -> None:
    """Raise UnknownPolicy unless `policy` is one of BOUNDS, or one of the cache's with hints or without."""
    name, *hints = policy.split("+")
    if policy not in BOUNDS and (name not in POLICIES or not set(hints) <= set(HINTS)):
        allowed = ", ".join([*sorted(POLICIES), *BOUNDS])
        raise UnknownPolicy(f"policy {policy!r}: allowed are {allowed}, and hints after a +: {', '.join(HINTS)}")


def unique_blocks(requests: Iterable[TraceRequest]) -> int:
    """Return the number of distinct blocks of all prompts: the capacity at which nothing is ever evicted."""
    return prepare(requests, 1).unique_blocks


def replay(
    trace: Workload | Iterable[TraceRequest],
    capacity_blocks: int,
    policy: str = "lru",
    block_tokens: int = 512,
    progress: Progress | None = None,
    *,
    host_blocks: int = 0,
    disk_blocks: int = 0,
) -> ReplayResult:
    """Serve the requests in order from a pool of `capacity_blocks` blocks; a Workload has its own `block_tokens`.

    With `host_blocks`, blocks that leave the pool move to a host tier of that size, and hits on the host are loaded.
    With `disk_blocks`, blocks that leave the host have records on a disk, and hits on the disk are read to the host.
    "clairvoyant" is then one pool of all sizes, and a prompt takes at most `capacity_blocks` of it: the upper bound.

    A request's hit is its longest cached chain of blocks, at most its input length. The request holds these blocks
    while victims are evicted for the rest of its prompt. Of a chain longer than the pool, the head stays cached.
    O(blocks) in all, log leaves each. Ctrl-C ends it early, with `finished` False.

    >>> from radixkv_traces.formats import read, sample
    >>> trace = prepare(read(sample("cc_agent")), block_tokens=64)
    >>> [round(replay(trace, 2000, policy).token_hit_rate, 3) for policy in ("lru", "clairvoyant", "infinite")]
    [0.611, 0.686, 0.943]
    """
    workload = trace if isinstance(trace, Workload) else prepare(trace, block_tokens)
    pool = _pool(workload, capacity_blocks, policy, host_blocks, disk_blocks)
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
    seconds = time.process_time() - begin
    result = _result(workload, policy, capacity_blocks, pool, hits, cached, seconds)
    return replace(result, host_blocks=host_blocks, disk_blocks=disk_blocks)


def _pool(workload: Workload, capacity: int, policy: str, host: int, disk: int) -> Pool:
    check_policy(policy)
    for name, blocks, least in (("capacity_blocks", capacity, 1), ("host_blocks", host, 0), ("disk_blocks", disk, 0)):
        check_int(name, blocks)
        if blocks < least:
            raise InvalidInput(f"{name}={blocks}: allowed is an int of at least {least}")
    if disk and not host:
        raise InvalidInput("disk_blocks: a disk needs a tier in host memory: host_blocks")
    if policy == "infinite":
        return _InfinitePool(workload)
    if policy == "clairvoyant":
        return ClairvoyantPool(workload, capacity + host + disk, longest=capacity)
    return _CachePool(workload, capacity, policy, host, disk)


def _result(
    workload: Workload,
    policy: str,
    capacity: int,
    pool: Pool,
    hits: array[int],
    cached: array[int],
    seconds: float,
) -> ReplayResult:
    hit_tokens = _tokens(workload, hits)
    above = [_tokens(workload, tier.hits_above[: len(hits)]) for tier in pool.tiers]
    on_device, in_memory = (*above, hit_tokens, hit_tokens)[:2]
    host, disk = (*pool.tiers, None, None)[:2]
    return ReplayResult(
        policy=policy,
        capacity_blocks=workload.unique_blocks if policy == "infinite" else capacity,
        block_tokens=workload.block_tokens,
        requests=len(hits),
        input_tokens=sum(request.input_length for request in workload.requests[: len(hits)]),
        hit_tokens=hit_tokens,
        hit_blocks=sum(hits),
        evicted_blocks=pool.evicted_blocks,
        regret_tokens=_tokens(workload, workload.known[: len(hits)]) - hit_tokens,
        seconds=seconds,
        finished=len(hits) == len(workload.requests),
        hits=hits,
        cached=cached,
        host=host,
        host_hit_tokens=in_memory - on_device,
        disk=disk,
        disk_hit_tokens=hit_tokens - in_memory,
    )


def _tokens(workload: Workload, hits: Iterable[int]) -> int:
    return sum(workload.hit_tokens(index, hit) for index, hit in enumerate(hits))


class _CachePool:
    """The real cache, with a host tier and a disk of these numbers of blocks if there are any."""

    def __init__(self, workload: Workload, capacity: int, policy: str, host_blocks: int, disk_blocks: int) -> None:
        self._workload = workload
        self._now = 0.0
        name, *hints = policy.split("+")
        self._closing = Closing(workload, hints)
        self._cache = PrefixCache(capacity, 1, name, clock=lambda: self._now, host_blocks=host_blocks)
        self._has_host = host_blocks > 0
        self._disk = SimulatedDisk(self._cache, disk_blocks) if disk_blocks else None
        self._loaded_at_once = max(1, LOAD_TOKENS // workload.block_tokens)
        self._device_hits, self._memory_hits = array("i"), array("i")

    @property
    def cached_blocks(self) -> int:
        return self._cache.num_blocks - self._cache.free_blocks

    @property
    def evicted_blocks(self) -> int:
        return self._cache.stats().evicted_blocks

    @property
    def tiers(self) -> tuple[Traffic, ...]:
        stats = self._cache.stats()
        host = Traffic(self._device_hits, stats.loaded_tokens, stats.offloaded_blocks)
        if self._disk is None:
            return (host,) if self._has_host else ()
        return host, Traffic(self._memory_hits, self._disk.read_blocks, self._disk.written_blocks)

    def serve(self, index: int) -> int:
        request, cache = self._workload.requests[index], self._cache
        self._now = self._workload.times[index]
        chain = request.blocks[: cache.num_blocks]
        in_memory = len(chain) if self._disk is None else self._disk.read(chain, request.namespace)
        sequence = cache.open(request.blocks, request.namespace)
        if self._has_host:
            self._load(sequence, chain)
        hit = sequence.length
        self._memory_hits.append(min(hit, in_memory))
        sequence.extend(chain[hit:])
        if self._has_host:
            self._run_moves()
        sequence.commit()
        self._closing.close(index, sequence, cache)
        return hit

    def _load(self, sequence: Sequence, chain: array[int]) -> None:
        """Load the hit on the host, in steps."""
        self._device_hits.append(sequence.length)
        while count := min(sequence.loadable(chain[sequence.length :]), self._loaded_at_once):
            sequence.load(chain[sequence.length : sequence.length + count])
            self._run_moves()
            sequence.commit()

    def _run_moves(self) -> None:
        """Run the copies to the host that the step has planned; there are no bytes to copy."""
        self._cache.moves()
        self._cache.moves_done()


class _InfinitePool:
    """A pool that never evicts."""

    evicted_blocks = 0
    tiers = ()

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.cached_blocks = 0

    def serve(self, index: int) -> int:
        hit = self._workload.known[index]
        self.cached_blocks += len(self._workload.requests[index].blocks) - hit
        return hit
