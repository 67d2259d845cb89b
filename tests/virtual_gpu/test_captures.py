"""Captures and graphs of a simulated GPU: what they allow, what they refuse, and what a replay computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv.device import Graph, refuse_fatal
from tests.virtual_gpu import VirtualGpu, VirtualGpuError, installed


@pytest.fixture(params=range(3))
def gpu(request: pytest.FixtureRequest) -> Iterator[VirtualGpu]:
    with installed(VirtualGpu(request.param)) as gpu, torch.inference_mode():
        yield gpu


def record(gpu: VirtualGpu, step: Callable[[], Any]) -> Graph[Any]:
    return gpu.capture(step, stream=gpu.stream(), pool=gpu.graph_pool())


def test_a_capture_computes_nothing_and_a_replay_reads_the_same_addresses(gpu: VirtualGpu) -> None:
    inputs = torch.zeros(3, device=gpu.place)
    made: list[Tensor] = []
    graph = record(gpu, lambda: made.append(inputs * 2 + 1) or made[0])
    assert made[0].isnan().all().item()
    assert graph.replay() is made[0]
    assert made[0].tolist() == [1] * 3
    inputs.fill_(4)
    with gpu.serving(allow=["synchronisation"]):
        assert graph.replay().tolist() == [9] * 3
    assert gpu.counts["replay"] == 2


def test_the_memory_of_a_graph_holds_nothing_of_an_earlier_replay(gpu: VirtualGpu) -> None:
    inputs = torch.ones(2, device=gpu.place)

    def step() -> Tensor:
        total = torch.empty(2, device=gpu.place)
        return total.add_(inputs)  # it counts on zeros

    graph = record(gpu, step)
    graph.replay()
    assert graph.replay().isnan().all().item()


def test_a_copy_in_a_graph_reads_pinned_memory_at_each_replay(gpu: VirtualGpu) -> None:
    gpu.scheduler.lag = 1.0
    pinned, there = gpu.pinned(2, torch.int64), torch.zeros(2, dtype=torch.int64, device=gpu.place)
    graph = record(gpu, lambda: there.copy_(pinned, non_blocking=True) + 0)
    for number in range(2):
        pinned.fill_(number)
        assert graph.replay().tolist() == [number] * 2
    graph.replay()
    pinned.fill_(9)
    with pytest.raises(VirtualGpuError, match="overwritten"):
        gpu.synchronize()


@pytest.mark.parametrize(
    "step",
    [
        lambda gpu, there: there.tolist(),
        lambda gpu, there: there[there > 3],
        lambda gpu, there: torch.tensor([1, 2], device=gpu.place),
        lambda gpu, there: torch.arange(2).to(gpu.place, non_blocking=True),
        lambda gpu, there: gpu.upload(torch.arange(2)),
        lambda gpu, there: gpu.download([there]).wait(),
        lambda gpu, there: gpu.synchronize(),
        lambda gpu, there: gpu.release_cached(),
        lambda gpu, there: record(gpu, there.clone),
    ],
)
def test_a_capture_refuses(step: Callable[[VirtualGpu, Tensor], Any]) -> None:
    with installed(VirtualGpu(1)) as gpu, torch.inference_mode():
        there = torch.arange(8, device=gpu.place)
        with pytest.raises(torch.AcceleratorError, match="not permitted when stream is capturing") as raised:
            record(gpu, lambda: step(gpu, there))
        refuse_fatal(raised.value)  # the device is not lost
        assert gpu.current_stream().number == 0 and there.tolist() == list(range(8))
        assert record(gpu, lambda: there + 1).replay().tolist() == list(range(1, 9))


def test_a_refused_operation_ends_the_capture_even_if_its_error_is_caught(gpu: VirtualGpu) -> None:
    there = torch.arange(8, device=gpu.place)

    def step() -> Tensor:
        with pytest.raises(torch.AcceleratorError):
            there.tolist()
        return there + 1

    with pytest.raises(torch.AcceleratorError, match="previous error during capture"):
        record(gpu, step)


def test_streams_that_take_part_are_joined_again(gpu: VirtualGpu) -> None:
    there, other = torch.arange(4, device=gpu.place), gpu.stream()

    def step(joined: bool) -> Tensor:
        own = gpu.current_stream()
        other.wait_stream(own)
        with gpu.on(other):
            right = there * 2
        left = there + 1
        if joined:
            own.wait_stream(other)
            return left + right
        return left

    with pytest.raises(torch.AcceleratorError, match="unjoined work"):
        record(gpu, lambda: step(joined=False))
    graph = record(gpu, lambda: step(joined=True))
    there.fill_(1)
    assert graph.replay().tolist() == [4] * 4


def test_streams_that_take_part_race_too(gpu: VirtualGpu) -> None:
    there, other = torch.arange(4, device=gpu.place), gpu.stream()

    def step() -> Tensor:
        own = gpu.current_stream()
        other.wait_stream(own)
        left = there + 1
        with gpu.on(other):
            right = left * 2
        own.wait_stream(other)
        return right

    with pytest.raises(VirtualGpuError, match=r"^race: "):
        record(gpu, step)


def test_work_from_before_a_capture_is_no_part_of_it(gpu: VirtualGpu) -> None:
    before = gpu.event()
    before.record()
    with pytest.raises(torch.AcceleratorError, match="of another capture, or of none"):
        record(gpu, before.wait)


def test_a_graph_that_uses_a_freed_tensor_is_found(gpu: VirtualGpu) -> None:
    inputs = [torch.ones(2, device=gpu.place)]
    graph = record(gpu, lambda: inputs[0] + 1)
    graph.replay()
    inputs.clear()
    with pytest.raises(VirtualGpuError, match=r"^freed: "):
        graph.replay()


def test_the_result_of_a_replay_is_ordered_as_other_work_is(gpu: VirtualGpu) -> None:
    inputs, other = torch.ones(2, device=gpu.place), gpu.stream()
    graph = record(gpu, lambda: inputs + 1)
    other.wait_stream(gpu.current_stream())
    found = graph.replay()
    with gpu.on(other), pytest.raises(VirtualGpuError, match=r"^race: "):
        found.sum()


def test_an_injected_failure_of_a_capture(gpu: VirtualGpu) -> None:
    there = torch.arange(2, device=gpu.place)
    gpu.inject("capture", 1)
    record(gpu, there.clone)
    taken = gpu.allocated
    with pytest.raises(torch.AcceleratorError, match="previous error during capture"):
        record(gpu, there.clone)
    assert gpu.allocated == taken
    assert record(gpu, there.clone).replay().tolist() == [0, 1]


def test_a_graph_keeps_its_memory_as_long_as_it_lives(gpu: VirtualGpu) -> None:
    there = torch.arange(2, device=gpu.place)
    gpu.release_cached()
    before = gpu.allocated
    graph = record(gpu, lambda: there + 1 + 1)
    assert gpu.allocated == before + 32
    del graph
    assert gpu.allocated == before
