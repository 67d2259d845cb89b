"""The stages of a step before its forward: they copy recurrent states, and KV between the pool and host memory.

A step runs the copies of states, then the cache's moves (device to host), then loads (host to device), then its
forward. Each starts with the copies of its plans. So a block is offloaded before it is written again. A stage counts as
done when it was launched: the memories keep this order on the device.

Preemption by swap needs nothing more. A preempted request publishes its tokens and closes its sequences. Its blocks are
offloaded when others take them, and loaded when the request returns. An engine without a host tier would preempt the
same victims: loading a token costs a fixed fraction of computing it.

A failed offload loses cached KV only. A failed load preempts its request and drops the cached run, so that the request
computes those tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Protocol

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.cache import Sequence as CacheSequence
from radixkv.cache.host import HostRun
from radixkv.cache.recurrent.slots import StateSlots
from radixkv.cache.types import Load
from radixkv.config import EngineConfig
from radixkv.device import refuse_fatal
from radixkv.disk import NO_DISK, DiskStats
from radixkv.engine.fault_isolation import Fail
from radixkv.engine.request import Request, TokenIds
from radixkv.engine.reuse_policy import NO_LOADS, LoadLimits, ReusePolicy
from radixkv.engine.scheduler import Work
from radixkv.engine.stats import Counters
from radixkv.errors import PrefixHeld

if TYPE_CHECKING:
    from radixkv.attention.host_store import HostCosts

_log = logging.getLogger(__name__)


class Transfer(Protocol):
    """A stage of a step before its forward."""

    def launch(self, work: list[Work]) -> list[Work]:
        """Run this stage for a step's work; returns the work that is left for the forward."""
        ...


class StateMemory(Protocol):
    """Slots of recurrent states; `radixkv.models.recurrent.forward.StateArena` has them."""

    def run(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots (source, target) one after the other; a source EMPTY sets the target to the empty state."""
        ...


class StateTransfer:
    """Copies recurrent states between slots, in the order in which the cache has queued the copies."""

    def __init__(self, queue: StateSlots, memory: StateMemory) -> None:
        """Run the copies of `queue` in `memory`."""
        self._queue, self._memory = queue, memory

    def launch(self, work: list[Work]) -> list[Work]:
        """Drain the queue once in a step: from then on the plans of this step count as executed."""
        self._memory.run(self._queue.drain())
        return work


class Records:
    """The records of cached text that outlive an engine; without a disk there are none."""

    def clear(self) -> Future[None]:
        """Delete all records; the future ends when that is durable. It gets EngineError if that failed."""
        cleared: Future[None] = Future()
        cleared.set_result(None)
        return cleared

    def clear_namespace(self, namespace: Hashable) -> None:
        """Delete the records of a namespace."""

    def discard(self, tokens: TokenIds, namespace: Hashable, start: int) -> None:
        """Delete the records of a text from `start` on, which are wrong, and all after them."""

    def random_run(self, rng: Random) -> HostRun | None:
        """Return a text whose last tokens were read for an audit, or begin to read one."""

    @property
    def is_read(self) -> bool:
        """Whether a text is being read for an audit."""
        return False

    def reach(self, tokens: TokenIds, namespace: Hashable) -> int:
        """Return how far the records that one read can bring continue the cached text, in tokens; 0 if none do."""
        return 0

    def stats(self) -> DiskStats:
        """Return their numbers."""
        return NO_DISK

    def weights_changed(self) -> None:
        """Leave the records of the old weights alone, and use those of the present ones."""


class HostMemory(Protocol):
    """Images of blocks in host memory; `radixkv.attention.host_store.HostStore` has them."""

    def offload(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (block of the pool, host block)."""
        ...

    def load(self, loads: Sequence[Load]) -> None:
        """Run all copies of the plans, then copy the sources to the slots of the plans. May be repeated."""
        ...


def load_limits(costs: HostCosts, config: EngineConfig, block_size: int) -> LoadLimits:
    """Return the limits of loads; no loads, with a warning, if a load takes as long as a prefill.

    A whole chunk and the least load always fit a step: loads of deterministic engines end on the grid of chunks.
    """
    load, prefill = costs
    if load >= prefill:
        _log.warning("the host tier has no effect: loading a token takes %.3g s, and computing it %.3g s", *costs)
        return NO_LOADS
    least, chunk = 2 * block_size, config.prefill_chunk
    return LoadLimits(least, max(int(chunk * prefill / max(load, 1e-9)), chunk + least))


class HostTransfer:
    """Offloads the blocks that left the pool since the last step, then loads host-resident tokens of this step."""

    def __init__(
        self,
        cache: PrefixCache,
        memory: HostMemory,
        reuse: ReusePolicy,
        counters: Counters,
        preempt: Callable[[Request], None],
        fail: Fail,
    ) -> None:
        """Copy between the pool of `cache` and `memory`. `preempt` and `fail` are called for requests of loads."""
        self._cache, self._memory, self._reuse, self._counters = cache, memory, reuse, counters
        self._preempt, self._fail = preempt, fail

    def launch(self, work: list[Work]) -> list[Work]:
        """Offload, then load; returns the work that computes, except for requests whose load has failed."""
        self.offload()
        loads = [each for each in work if each.sources is not None]
        if not loads:
            return work
        for each in self._load(loads):
            if each.stream.active:  # the load of another stream of its request may have failed
                self._commit(each)
        return [each for each in work if each.sources is None and each.stream.active]

    # ---- offload

    def offload(self) -> None:
        """Copy the blocks that left the pool since the last call to the host; if that raises, they are lost."""
        moves = self._cache.moves()
        if not moves:
            return
        try:
            self._memory.offload(moves)
        except Exception as error:
            refuse_fatal(error)
            self._counters.failed_offloads += 1
            _log.exception("%d blocks could not be offloaded to host memory, and are lost", len(moves))
            return
        self._cache.moves_done()

    # ---- load

    def load_between_steps(self, sequence: CacheSequence, tokens: TokenIds) -> bool:
        """Load the next tokens of an audit's sequence between two steps; returns whether that succeeded."""
        try:
            load = sequence.load(tokens)
            self.offload()
            self._memory.load([load])
        except Exception:
            self._counters.failed_loads += 1
            _log.exception("a cached run could not be loaded from the host for an audit, and is dropped")
            return False
        return True

    def _load(self, work: list[Work]) -> list[Work]:
        """Run all loads together, or each alone if that raises; returns those that ran."""
        try:
            self._memory.load([Load(each.plan, each.sources) for each in work if each.sources is not None])
            return work
        except Exception as error:
            refuse_fatal(error)
            if len(work) == 1:
                self._load_failed(work[0], error)
                return []
            _log.warning("%d loads raised %r: trying each alone", len(work), error)
        return [each for single in work if single.stream.active for each in self._load([single])]

    def _load_failed(self, work: Work, error: Exception) -> None:
        """Preempt a request, and drop the cached run that could not be loaded, so that it is computed."""
        _log.error("a cached run could not be loaded from the host: its tokens are computed", exc_info=error)
        self._counters.failed_loads += 1
        request = work.stream.request
        tokens = np.array(work.stream.tokens, np.int32)[: work.end]
        first = work.end - len(work.plan.slots)
        self._preempt(request)
        if self._cache.match(tokens, request.namespace).matched <= first:  # or others have computed or loaded it
            with suppress(PrefixHeld):  # by another load of it, which drops it if it fails too
                self._cache.discard(tokens, request.namespace, first)

    def _commit(self, work: Work) -> None:
        """Count and publish loaded tokens."""
        stream, count = work.stream, len(work.tokens)
        try:
            copied = len(work.plan.slots)  # of a model with recurrent state, others of its tokens were on the device
            stream.counts.count_loaded(work.start, count, copied)
            self._counters.host_tokens += copied
            stream.sequence.commit(self._reuse.loaded(stream, count))
        except Exception as error:
            self._fail(stream.request, error)
