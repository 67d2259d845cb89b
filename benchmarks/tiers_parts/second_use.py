"""A simulated disk that takes a block only after its second use: radixkv's takes each run that leaves the host."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable

from radixkv.cache import PrefixCache
from radixkv.disk.store import Run
from radixkv_traces.simulated_disk import SimulatedDisk


class SecondUse(SimulatedDisk):
    """Counts the requests with a block without a limit, whether they hit or not."""

    def __init__(self, cache: PrefixCache, num_slots: int) -> None:
        super().__init__(cache, num_slots)
        self._uses: Counter[int] = Counter()

    def read(self, chain: array[int], namespace: Hashable) -> int:
        """Count a use of each block."""
        self._uses.update(chain)
        return super().read(chain, namespace)

    def offer(self, run: Run) -> None:
        """Write the first blocks, which were used twice; a recorded block is one token."""
        blocks = [block for block in run.blocks if self._uses[int.from_bytes(block, "little")] >= 2]
        images = len(run.images) - len(run.blocks) + len(blocks)
        super().offer(Run(run.namespace, blocks, run.images[: max(images, 0)], run.used))
