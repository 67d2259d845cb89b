"""Run an engine whose cache has a second tier in host memory: offload blocks that leave the pool, and load them back.

A step runs the cache's moves (device to host), then loads (host to device), then its forward. Each starts with the
copies of its plans. So a block is offloaded before it is written again, and one stream keeps the order.

A stream whose next tokens are host-resident plans a load in place of a chunk, if loading takes less time than
computing. Loads take no part of a step's token budget. In one step, all of them together take about as long as one
chunk of a prompt. Each loads at least two blocks.

Preemption by swap needs nothing more. A preempted request publishes its tokens and closes its sequences. Its blocks are
offloaded when others take them, and loaded when the request returns. The victims are
those of an engine without a host tier: loading a token costs a fixed fraction of computing it.

A failed offload loses cached KV only. A failed load preempts its request and drops the cached run, so that the request
computes those tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import PrefixCache
from radixkv.cache.host import HostPrefixCache, HostSequence
from radixkv.cache.host.tree import HostRun
from radixkv.cache.recurrent import StatefulPrefixCache
from radixkv.cache.types import CachedRun, Load
from radixkv.config import EngineConfig
from radixkv.device import refuse_fatal
from radixkv.engine.core import Core, Forward
from radixkv.engine.overlap import OverlappedCore
from radixkv.engine.request import Stream, TokenIds
from radixkv.engine.reuse_policy import NO_LOADS, LoadLimits, ReusePolicy, reuse_policy
from radixkv.engine.scheduler import Scheduler, Work
from radixkv.errors import OutOfBlocks, PrefixHeld

if TYPE_CHECKING:
    from torch import Tensor

    from radixkv.attention.host_store import HostCosts

_log = logging.getLogger(__name__)


class HostMemory(Protocol):
    """Images of blocks in host memory; `radixkv.attention.host_store.HostStore` has them."""

    def offload(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (block of the pool, host block)."""
        ...

    def load(self, loads: Sequence[Load]) -> None:
        """Run all copies of the plans, then copy the sources to the slots of the plans. May be repeated."""
        ...


class HostForward(Forward, Protocol):
    """Computes a step over a pool with host memory; `radixkv.models.runner.Runner` does."""

    @property
    def host(self) -> HostMemory | None:
        """The host memory."""
        ...

    def host_costs(self, chunk: int) -> HostCosts:
        """Measure the seconds of a token's load and of its prefill, before anything is cached."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWork(Work):
    """Tokens whose KV a stream loads from the host in this step, in place of computing it."""

    sources: NDArray[np.int64]


def new_core(cache: PrefixCache, runner: Forward, config: EngineConfig, *, overlap: bool = False) -> Core:
    """Return a core for a cache with or without a host tier.

    With `overlap`, steps overlap if the cache has neither a host tier nor recurrent state.
    """
    if isinstance(cache, HostPrefixCache):
        return HostCore(cache, runner, config)
    overlaps = overlap and not isinstance(cache, StatefulPrefixCache)
    return (OverlappedCore if overlaps else Core)(cache, runner, config)


def load_limits(costs: HostCosts, config: EngineConfig, block_size: int) -> LoadLimits:
    """Return the limits of loads; no loads if a load takes as long as a prefill.

    A whole chunk and the least load always fit a step: loads of deterministic engines end on the grid of chunks.
    """
    load, prefill = costs
    if load >= prefill:
        return NO_LOADS
    least, chunk = 2 * block_size, config.prefill_chunk
    return LoadLimits(least, max(int(chunk * prefill / max(load, 1e-9)), chunk + least))


class LoadingScheduler(Scheduler):
    """Plans loads in place of chunks for streams whose next tokens are host-resident."""

    _room = 0  # tokens that this step may still load

    def schedule(self) -> list[Work]:
        """Plan the next step: at most max_batch_tokens tokens to compute, and a chunk's time of loads."""
        self._room = self._reuse.loads.most
        return super().schedule()

    def _in_order(self) -> Iterator[Stream]:
        """Yield the streams to plan, then plan the loads of those for which no budget was left."""
        streams = list(super()._in_order())
        yield from streams
        if not self._budget:
            for stream in streams:
                if stream not in self._planned and stream.active:
                    self._loads(stream)

    def _prefill_count(self, stream: Stream, pending: int) -> int:
        """Return the length of a chunk of a prompt; 0 if it does not fit, or if the stream plans a load instead."""
        if self._loads(stream) or not stream.active:
            return 0
        begin = self._reuse.aligned(stream.common_length)
        if begin == stream.common_length:
            return super()._prefill_count(stream, pending)
        stream.cut_hit(begin)  # its hit ends inside a chunk, and the load that it counted on is not possible
        self._plan(stream)
        return 0

    def _loads(self, stream: Stream) -> bool:
        """Plan a load if that is better than a chunk; returns whether it is, even if it must wait."""
        while stream.active and stream.pending > self._reuse.loads.least:
            try:
                if not (available := self._loadable(stream)):
                    break
                self._plan_load(stream, available)
                return True
            except OutOfBlocks:
                self.preempt(self.admission.victim(stream.request))
            except Exception as error:
                self._fail(stream.request, error)
        return False

    def _loadable(self, stream: Stream) -> int:
        """Return how many of a stream's next tokens are host-resident; 0 if it is better to compute them."""
        request, sequence = stream.request, cast(HostSequence, stream.sequence)
        start, end = sequence.length, request.most_hit(len(stream.tokens))
        if request.suspended:  # the other streams begin at the end of the prompt
            end = min(end, len(request.prompt))
        end = min(end, start + self._reuse.loads.most)
        available = sequence.loadable(stream.tokens[start:end])
        return available if self._reuse.worth_loading(start, available) else 0

    def _plan_load(self, stream: Stream, available: int) -> None:
        """Plan a load of at most the room that is left; the stream waits for the next step if that is too little."""
        sequence = cast(HostSequence, stream.sequence)
        start = sequence.length
        count = self._reuse.aligned(start + min(available, self._room)) - start
        if count >= self._reuse.loads.least:
            tokens = stream.tokens[start : start + count]
            load = sequence.load(tokens)
            self._planned[stream] = LoadWork(stream, start, tokens, load.plan, sources=load.sources)
            self._room -= count

    def _unplan(self, stream: Stream) -> None:
        work = self._planned.get(stream)
        if isinstance(work, LoadWork):
            del self._planned[stream]
            self._room += len(work.tokens)
        else:
            super()._unplan(stream)


class HostCore(Core):
    """A core whose cache keeps blocks that leave the pool in host memory."""

    scheduler_class = LoadingScheduler
    cache: HostPrefixCache
    runner: HostForward

    def __init__(self, cache: PrefixCache, runner: Forward, config: EngineConfig) -> None:
        """Own `cache`, a HostPrefixCache, and `runner`, which has `host` memory, from now on. Measures the costs."""
        super().__init__(cache, runner, config)

    def _reuse_policy(self) -> ReusePolicy:
        self._costs = costs = self.runner.host_costs(self.config.prefill_chunk)
        limits = load_limits(costs, self.config, self.cache.block_size)
        if limits is NO_LOADS:
            _log.warning("the host tier has no effect: loading a token takes %.3g s, and computing it %.3g s", *costs)
        row_dependent = getattr(self.runner, "row_dependent", False)
        return reuse_policy(self.cache, self.config, row_dependent=row_dependent, loads=limits)

    def token_costs(self) -> dict[str, float]:
        """Return the measured seconds of a token's load and of its prefill, by name."""
        return self._costs._asdict()

    @property
    def _host(self) -> HostMemory:
        assert self.runner.host is not None
        return self.runner.host

    # ---- for audits

    def random_run(self, rng: Random) -> CachedRun | HostRun | None:
        """Return a random run of cached tokens of either tier; None if nothing is cached."""
        stats = self.cache.stats()
        on_host, on_device = stats.host_blocks - stats.host_free_blocks, stats.num_blocks - stats.free_blocks
        if rng.random() * (on_host + on_device) < on_host:
            run = self.cache.random_host_run(rng)
            if run is not None and self._fits(run.tokens, run.namespace):
                return run
        return super().random_run(rng)

    @contextmanager
    def cached_blocks(self, tokens: TokenIds, namespace: Hashable) -> Iterator[NDArray[np.int32] | None]:
        """Yield the block table of a cached text; its host-resident part is loaded into other blocks for that time.

        If the load raises, that part is dropped.
        """
        match = self.cache.match(tokens, namespace)
        if not match.host or match.length + match.host < len(tokens):
            with super().cached_blocks(tokens, namespace) as blocks:
                yield blocks
            return
        with closing(self.cache.open(tokens, namespace, purpose="audit")) as sequence:
            blocks = self._load_at_once(sequence, tokens)
            if blocks is not None:
                yield blocks
                return
        self.cache.discard(tokens, namespace, match.length)
        yield None

    def _fits(self, tokens: TokenIds, namespace: Hashable) -> bool:
        """Return whether the pool has room for the host-resident part of a text."""
        size, match = self.cache.block_size, self.cache.match(tokens, namespace)
        need = -(-len(tokens) // size) - match.length // size + match.idle_blocks
        return need <= self.cache.free_blocks + self.cache.evictable_for(namespace)

    def _load_at_once(self, sequence: HostSequence, tokens: TokenIds) -> NDArray[np.int32] | None:
        """Load the rest of `tokens` between two steps; returns the block table, None if that failed."""
        try:
            load = sequence.load(tokens[sequence.length :])
            self._offload()
            self._host.load([load])
        except Exception:
            self.counters.failed_loads += 1
            _log.exception("a cached run could not be loaded from the host for an audit, and is dropped")
            return None
        return sequence.block_table

    # ---- a step

    def _run(self, work: list[Work]) -> list[tuple[list[Work], Tensor]]:
        """Offload, load, then compute the rest of the work."""
        self._offload()
        loads = [each for each in work if isinstance(each, LoadWork)]
        if not loads:
            return super()._run(work)
        for each in self._load(loads):
            if each.stream.active:  # the load of another stream of its request may have failed
                self._commit_load(each)
        self.step_tokens -= sum(len(each.tokens) for each in loads)  # a step counts the tokens of all its work
        computed = [each for each in work if not isinstance(each, LoadWork) and each.stream.active]
        self.counters.steps += not computed
        return super()._run(computed)

    def _fail(self, work: list[Work], error: Exception) -> None:
        """End the requests of a step that raised, except those whose loads are done."""
        loaded = [each for each in work if isinstance(each, LoadWork) and not _is_pending(each)]
        super()._fail([each for each in work if each not in loaded] or work, error)

    # ---- offload

    def _offload(self) -> None:
        """Copy the blocks that left the pool since the last step to the host; if that raises, they are lost."""
        moves = self.cache.moves()
        if not moves:
            return
        try:
            self._host.offload(moves)
        except Exception as error:
            refuse_fatal(error)
            self.counters.failed_offloads += 1
            _log.exception("%d blocks could not be offloaded to host memory, and are lost", len(moves))
            return
        self.cache.moves_done()

    # ---- load

    def _load(self, work: list[LoadWork]) -> list[LoadWork]:
        """Run all loads together, or each alone if that raises; returns those that ran."""
        try:
            self._host.load([Load(each.plan, each.sources) for each in work])
            return work
        except Exception as error:
            refuse_fatal(error)
            if len(work) == 1:
                self._load_failed(work[0], error)
                return []
            _log.warning("%d loads raised %r: trying each alone", len(work), error)
        return [each for single in work if single.stream.active for each in self._load([single])]

    def _load_failed(self, work: LoadWork, error: Exception) -> None:
        """Preempt a request, and drop the cached run that could not be loaded, so that it is computed."""
        _log.error("a cached run could not be loaded from the host: its tokens are computed", exc_info=error)
        self.counters.failed_loads += 1
        request = work.stream.request
        tokens = np.array(work.stream.tokens, np.int32)[: work.start + len(work.tokens)]
        self.scheduler.preempt(request)
        if self.cache.match(tokens, request.namespace).length <= work.start:  # or others have computed or loaded it
            with suppress(PrefixHeld):  # by another load of it, which drops it if it fails too
                self.cache.discard(tokens, request.namespace, work.start)

    def _commit_load(self, work: LoadWork) -> None:
        """Count and publish loaded tokens."""
        stream, count = work.stream, len(work.tokens)
        try:
            stream.count_loaded(work.start, count)
            self.counters.host_tokens += count
            stream.sequence.commit(self._reuse.loaded(stream, count))
        except Exception as error:
            self._fail_alone(stream.request, error)


def _is_pending(work: Work) -> bool:
    return work.stream.active and work.stream.sequence.has_plan
