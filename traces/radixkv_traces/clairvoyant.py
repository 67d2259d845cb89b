"""The best possible eviction: the victim is the cached block whose next use is farthest in the future.

It reads the whole trace, the future included, and keeps the rules of PrefixCache. Only blocks without cached children
are evicted, one at a time. A request's own path is held while victims are chosen. Of a chain longer than the pool, the
head stays cached. Under these rules no choice of victims hits more blocks (Belady's argument: within a path, the last
block is never used earlier than those before it). The tests compare it with exhaustive search.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

import numpy as np

from radixkv_traces.workload import Workload


class ClairvoyantPool:
    """A pool of `capacity` blocks with perfect foresight; `serve` the requests of its workload in order.

    At most `longest` blocks of each prompt enter (default: `capacity`), as in a device that has a host tier.
    """

    tiers = ()  # one pool has no traffic

    def __init__(self, workload: Workload, capacity: int, longest: int | None = None) -> None:
        self._workload = workload
        self._capacity = capacity
        self._longest = capacity if longest is None else longest
        self._uses = next_uses(workload)
        self._first = 0  # index of the next request's blocks in `_uses`
        self._cached = bytearray(workload.unique_blocks)
        self._children = array("i", bytes(4 * workload.unique_blocks))  # numbers of cached children
        self._next = array("i", bytes(4 * workload.unique_blocks))
        self._leaves: list[tuple[int, int]] = []  # (-next use, block); outdated entries are skipped when popped
        self.cached_blocks = 0
        self.evicted_blocks = 0

    def serve(self, index: int) -> int:
        """Serve one request; returns its hit in blocks. O(its blocks), log leaves for each evicted block."""
        chain = self._workload.requests[index].blocks
        cached = self._cached
        hit = next((i for i, block in enumerate(chain) if not cached[block]), len(chain))
        fits = min(len(chain), self._longest)  # at least `hit`, which is cached
        for i in range(fits):
            self._next[chain[i]] = self._uses[self._first + i]
        self._first += len(chain)
        self._make_room(fits - hit, chain[hit - 1] if hit else -1)
        self._insert(chain, hit, fits)
        return hit

    def check(self) -> None:
        """Recount everything; AssertionError names the fault. O(unique blocks): for tests."""
        parents = self._workload.parents
        children = array("i", bytes(4 * len(parents)))
        for block, cached in enumerate(self._cached):
            if cached and parents[block] >= 0:
                assert self._cached[parents[block]], f"block {block} is cached, the one before it is not"
                children[parents[block]] += 1
        assert all(self._children[b] == children[b] for b, cached in enumerate(self._cached) if cached), "children"
        assert sum(self._cached) == self.cached_blocks <= self._capacity, "cached blocks"
        leaves = {block for block, cached in enumerate(self._cached) if cached and not children[block]}
        found = {block for use, block in self._leaves if self._next[block] == -use}
        assert leaves <= found, "a leaf that cannot be found"

    def _insert(self, chain: array[int], start: int, end: int) -> None:
        for block in chain[start:end]:
            self._cached[block] = 1
        for block in chain[max(start - 1, 0) : end - 1]:
            self._children[block] += 1
        self.cached_blocks += end - start
        if chain and not self._children[last := chain[end - 1]]:
            heappush(self._leaves, (-self._next[last], last))

    def _make_room(self, count: int, held: int) -> None:
        """Evict until `count` blocks fit; `held` is the end of the request's own path."""
        parents = self._workload.parents
        while self.cached_blocks + count > self._capacity:
            block = self._victim()
            self._cached[block] = 0
            self.cached_blocks -= 1
            self.evicted_blocks += 1
            parent = parents[block]
            if parent >= 0:
                self._children[parent] -= 1
                if not self._children[parent] and parent != held:
                    heappush(self._leaves, (-self._next[parent], parent))

    def _victim(self) -> int:
        while True:
            use, block = heappop(self._leaves)
            if self._cached[block] and not self._children[block] and self._next[block] == -use:
                return block


def next_uses(workload: Workload) -> array[int]:
    """Return, for each block of each request in order, the next request that has it; the number of requests if none
    has.

    O(blocks), from the end.
    """
    requests = workload.requests
    uses = np.empty(sum(len(request.blocks) for request in requests), np.int32)
    following = np.full(workload.unique_blocks, len(requests), np.int32)
    end = len(uses)
    for index in range(len(requests) - 1, -1, -1):
        chain = np.frombuffer(requests[index].blocks, np.int32)
        uses[end - len(chain) : end] = following[chain]
        following[chain] = index
        end -= len(chain)
    return array("i", uses.tobytes())
