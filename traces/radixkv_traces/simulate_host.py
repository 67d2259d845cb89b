"""Simulate a device pool with a host tier: the real cache offloads blocks, and hits on the host are loaded.

As in `simulate`, a recorded block is one token in a block of size 1, and requests run one at a time. A request's hit on
the host begins where its hit on the device ends. Loads and offloads take no time, and a load is always taken: the
engine computes a hit instead where loading it is slower.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from radixkv.cache import Hint, PrefixCache
from radixkv_traces.workload import Workload

LOAD_TOKENS = 8192
"""The most tokens that a step loads. An engine has such a limit because long loads would delay other requests."""


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """The blocks that moved between the device and the host tier during a replay."""

    device_hits: array[int]  # for each request, the blocks that hit on the device
    read_blocks: int  # copied from the host
    written_blocks: int  # copied to the host


class HostPool:
    """The real cache with a host tier of `host_blocks` blocks; `serve` the requests of its workload in order."""

    def __init__(self, workload: Workload, capacity: int, policy: str, host_blocks: int) -> None:
        self._workload = workload
        self._now = 0.0
        self._cache = PrefixCache(capacity, 1, policy, clock=lambda: self._now, host_blocks=host_blocks)
        self._loaded_at_once = max(1, LOAD_TOKENS // workload.block_tokens)
        self._device_hits = array("i")

    @property
    def cached_blocks(self) -> int:
        """Blocks in use on the device now."""
        return self._cache.num_blocks - self._cache.free_blocks

    @property
    def evicted_blocks(self) -> int:
        """Blocks that left the last tier so far."""
        return self._cache.stats().evicted_blocks

    @property
    def host(self) -> HostTraffic:
        """The traffic of the host tier so far."""
        stats = self._cache.stats()
        return HostTraffic(self._device_hits, stats.loaded_tokens, stats.offloaded_blocks)

    def serve(self, index: int) -> int:
        """Serve one request; returns its hit in blocks, on the device and on the host."""
        request, cache = self._workload.requests[index], self._cache
        self._now = self._workload.times[index]
        sequence = cache.open(request.blocks, request.namespace)
        chain = request.blocks[: cache.num_blocks]
        self._device_hits.append(sequence.length)
        while count := min(sequence.loadable(chain[sequence.length :]), self._loaded_at_once):
            sequence.load(chain[sequence.length : sequence.length + count])
            self._run_moves()
            sequence.commit()
        hit = sequence.length
        sequence.extend(chain[hit:])
        self._run_moves()
        sequence.commit()
        sequence.close(Hint(kind=request.stop or None, output_length=request.output_length))
        return hit

    def _run_moves(self) -> None:
        """Run the copies to the host that the step has planned; there are no bytes to copy."""
        self._cache.moves()
        self._cache.moves_done()
