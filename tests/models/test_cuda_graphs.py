"""The recorder's calls of a fake CUDA, their order, and its use of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixkv.models.cuda_graphs import SHARE, WARM_UPS, CudaRecorder

MEMORY = 1000 << 20
DEVICE = torch.device("cuda", 0)


class Cuda:
    """Fake streams, graphs and memory that record all calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.free, self.taken_by_a_graph = MEMORY, 0
        self.current = self._stream("default")
        cuda = {
            "graph_pool_handle": lambda: "pool",
            "Stream": lambda device: self._stream("own"),
            "get_device_properties": lambda device: SimpleNamespace(total_memory=MEMORY),
            "mem_get_info": lambda device: (self.free, MEMORY),
            "current_stream": lambda device: self.current,
            "stream": self._on,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.calls.append("replay")),
            "graph": self._capture,
        }
        for name, made in cuda.items():
            monkeypatch.setattr(torch.cuda, name, made)

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: self.calls.append((name, "waits for", other.name)))

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def _capture(self, graph: Any, **options: Any) -> Iterator[None]:
        self.calls.append(("capture", options["pool"], options["stream"].name, options["capture_error_mode"]))
        try:
            yield
        finally:
            self.calls.append("captured")
            self.free -= self.taken_by_a_graph

    def step(self) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            self.calls.append(("step on", self.current.name))
            return torch.zeros(1)

        return run


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_a_step_is_warmed_up_on_a_stream_of_its_own_then_captured_and_not_run_by_a_replay(cuda: Cuda) -> None:
    replay = CudaRecorder(DEVICE).record(cuda.step())
    assert cuda.calls == [
        ("own", "waits for", "default"),
        *[("step on", "own")] * WARM_UPS,
        ("default", "waits for", "own"),
        ("capture", "pool", "own", "thread_local"),
        ("step on", "default"),
        "captured",
    ]
    cuda.calls.clear()
    assert replay() is replay()
    assert cuda.calls == ["replay", "replay"]


def test_graphs_are_made_until_their_share_of_memory_is_taken(cuda: Cuda) -> None:
    recorder = CudaRecorder(DEVICE)
    cuda.taken_by_a_graph = int(SHARE * MEMORY * 0.4)
    made = []
    while not recorder.full:
        made.append(recorder.record(cuda.step()))
    assert len(made) == 3


def test_graphs_are_not_made_where_a_card_has_no_room_for_them(cuda: Cuda) -> None:
    recorder = CudaRecorder(DEVICE)
    assert not recorder.full
    cuda.free = int(SHARE * MEMORY) - 1
    assert recorder.full


def test_memory_that_comes_back_meanwhile_is_not_counted_against_it(cuda: Cuda) -> None:
    recorder = CudaRecorder(DEVICE)
    cuda.taken_by_a_graph = -MEMORY
    recorder.record(cuda.step())
    cuda.free, cuda.taken_by_a_graph = MEMORY, int(SHARE * MEMORY)
    recorder.record(cuda.step())
    assert recorder.full


def test_a_step_that_fails_ends_its_capture_and_leaves_the_stream(cuda: Cuda) -> None:
    runs: list[None] = []

    def fails() -> torch.Tensor:
        runs.append(None)
        if len(runs) > WARM_UPS:
            raise RuntimeError("it reads a number back")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="reads a number back"):
        CudaRecorder(DEVICE).record(fails)
    assert cuda.calls[-1] == "captured"
    assert cuda.current.name == "default"
