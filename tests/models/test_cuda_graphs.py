"""The recorder's calls of a fake CUDA, their order, and its use of memory."""

from __future__ import annotations

import pytest

from radixkv.device import CudaDevice
from radixkv.models.cuda_graphs import SHARE, WARM_UPS, CudaRecorder
from tests.fake_cuda import MEMORY, PLACE, FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_step_is_warmed_up_on_a_stream_of_its_own_then_captured_and_not_run_by_a_replay(cuda: FakeCuda) -> None:
    replay = CudaRecorder(CudaDevice(PLACE)).record(cuda.step())
    warm_up = [("own", "waits for", "default"), *[("step on", "own")] * WARM_UPS, ("default", "waits for", "own")]
    assert cuda.calls[: len(warm_up)] == warm_up
    assert cuda.calls[-2:] == [("step on", "own"), ("captured", "own")]
    cuda.calls.clear()
    assert replay() is replay()
    assert cuda.calls == ["replay", "replay"]


def test_graphs_are_made_until_their_share_of_memory_is_taken(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(CudaDevice(PLACE))
    cuda.taken_by_a_graph = int(SHARE * MEMORY * 0.4)
    made = []
    while not recorder.full:
        made.append(recorder.record(cuda.step()))
    assert len(made) == 3


def test_graphs_are_not_made_where_a_card_has_no_room_for_them(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(CudaDevice(PLACE))
    assert not recorder.full
    cuda.free = int(SHARE * MEMORY) - 1
    assert recorder.full


def test_memory_that_comes_back_meanwhile_is_not_counted_against_it(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(CudaDevice(PLACE))
    cuda.taken_by_a_graph = -MEMORY
    recorder.record(cuda.step())
    cuda.free, cuda.taken_by_a_graph = MEMORY, int(SHARE * MEMORY)
    recorder.record(cuda.step())
    assert recorder.full
