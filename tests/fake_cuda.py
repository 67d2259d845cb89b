"""A fake `torch.cuda` without a GPU: its streams, events, graphs and memory record all calls in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

MEMORY = 1000 << 20
PLACE = torch.device("cuda", 0)


class FakeCuda:
    """Fake streams, graphs and memory that record all calls in `calls`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.free, self.taken_by_a_graph = MEMORY, 0
        self.allocated = self.peak = 0
        self.current = self._stream("default")
        self.end_errors: list[Exception] = []  # raised by the next ends of captures
        self.left_capture = True  # whether torch's allocator has left the capture that failed
        self.sync_mode = 0
        cuda: dict[str, Any] = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device": self._device,
            "graph_pool_handle": lambda: (0, 7),
            "Stream": lambda device, priority: self._stream("own" if priority == 0 else f"priority {priority}"),
            "get_device_properties": lambda device: self.properties,
            "mem_get_info": lambda device: (self.free, MEMORY),
            "current_stream": lambda device: self.current,
            "stream": self._on,
            "synchronize": lambda device: self.calls.append("synchronize"),
            "empty_cache": lambda: self.calls.append("empty cache"),
            "CUDAGraph": lambda: FakeGraph(self),
            "get_sync_debug_mode": lambda: self.sync_mode,
            "set_sync_debug_mode": self._set_mode,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
        }
        for name, made in cuda.items():
            monkeypatch.setattr(torch.cuda, name, made)
        monkeypatch.setattr(torch, "Event", lambda device: FakeEvent(self))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_allocation)

    properties = SimpleNamespace(
        name="Fake", multi_processor_count=132, major=9, shared_memory_per_multiprocessor=228 << 10, total_memory=MEMORY
    )

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.calls.append((name, "waits for", other.name)))

    def _set_mode(self, mode: int | str) -> None:
        self.sync_mode = {"default": 0, "warn": 1, "error": 2}.get(str(mode), mode)  # type: ignore[assignment]

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        self.calls.append(("on", str(device)))
        yield

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _end_allocation(self, index: int, pool: tuple[int, int]) -> None:
        self.calls.append(("end allocation", index, pool))
        if self.left_capture:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.left_capture = True

    def step(self) -> Callable[[], torch.Tensor]:
        """Return a step that records the stream on which it runs."""

        def run() -> torch.Tensor:
            self.calls.append(("step on", self.current.name))
            return torch.zeros(1)

        return run


class FakeEvent:
    """An event that records its calls."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self._cuda.calls.append(("event", name))


class FakeGraph:
    """A graph that records its calls; its end raises the next of `end_errors`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self._cuda.calls.append(("capture", pool, self._cuda.current.name, capture_error_mode))

    def capture_end(self) -> None:
        self._cuda.calls.append(("captured", self._cuda.current.name))
        self._cuda.free -= self._cuda.taken_by_a_graph
        if self._cuda.end_errors:
            raise self._cuda.end_errors.pop(0)

    def replay(self) -> None:
        self._cuda.calls.append("replay")
