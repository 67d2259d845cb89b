"""Models of other engines' host tiers, block by block, with the rules of serving of `radixkv_traces.simulate`.

`WriteThrough` is the default of vLLM's OffloadingConnector and of SGLang's HiCache: each new full block is copied to
the host at once, and the host keeps its copy when the block is loaded or evicted from the device. Both tiers evict the
least recently used block. A request uses its whole path in both tiers, so a block is never older than those after it.
With `threshold` 2, a block is copied at its second use: `store_threshold` in vLLM, "write_through_selective" in SGLang.

The models favour the other engines in three points. Copies are on the host as soon as the request has ended, copies in
flight block nothing, and uses are counted without a limit. vLLM inserts a new chain on the host head first, so that
its head would be evicted before its tail.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class WriteThrough:
    """Two inclusive tiers; `serve` the chains of blocks in order."""

    def __init__(self, device_blocks: int, host_blocks: int, threshold: int = 1) -> None:
        self._device: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._host: OrderedDict[int, None] = OrderedDict()
        self._device_blocks, self._host_blocks = device_blocks, host_blocks
        self._threshold = threshold
        self._uses: dict[int, int] = {}
        self.written_blocks = 0  # from the device to the host
        self.read_blocks = 0  # from the host to the device

    def serve(self, chain: Sequence[int]) -> tuple[int, int]:
        """Serve one request; returns its hits in blocks: on the device, and after them on the host.

        A chain longer than the device keeps only its head there.
        """
        chain = chain[: self._device_blocks]
        on_device = next((i for i, block in enumerate(chain) if block not in self._device), len(chain))
        hit = next((i for i in range(on_device, len(chain)) if chain[i] not in self._host), len(chain))
        self.read_blocks += hit - on_device
        for block in reversed(chain):
            _use(self._device, block)
            self._uses[block] = self._uses.get(block, 0) + 1
            if block in self._host or self._uses[block] >= self._threshold:
                self.written_blocks += not _use(self._host, block)
        _shrink(self._device, self._device_blocks)
        _shrink(self._host, self._host_blocks)
        return on_device, hit - on_device


def _use(tier: OrderedDict[int, None], block: int) -> bool:
    """Make a block the most recently used one; returns whether it was there."""
    found = block in tier
    tier[block] = None
    tier.move_to_end(block)
    return found


def _shrink(tier: OrderedDict[int, None], most: int) -> None:
    while len(tier) > most:
        tier.popitem(last=False)
