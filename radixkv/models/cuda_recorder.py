"""Record what a step launches as a CUDA graph. Knows streams, graphs and their memory; does not know what a step is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHARE = 0.03
"""Of a GPU's memory, what all graphs may take together. The KV pool leaves a tenth of the card to everything else."""

WARM_UPS = 2
"""Runs before a recording, in which kernels are compiled and libraries allocate, neither of which can be recorded."""


class CudaRecorder:
    """Graphs that share their memory: only one replays at a time, and its result is read before the next."""

    def __init__(self, device: torch.device) -> None:
        """Record on `device`, and count the memory that it takes."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._limit = SHARE * torch.cuda.get_device_properties(device).total_memory
        self._taken = 0

    @property
    def full(self) -> bool:
        """Whether the memory for graphs is used up, or the card has less left than would be."""
        return self._taken >= self._limit or torch.cuda.mem_get_info(self._device)[0] < self._limit - self._taken

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """As `decode_graphs.Recorder`: some runs on a stream of its own, then one that is recorded."""
        before = torch.cuda.mem_get_info(self._device)[0]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on using the device meanwhile; what they do is none of this graph's business.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = step()
        self._taken += max(0, before - torch.cuda.mem_get_info(self._device)[0])

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
