"""Each mistake that a simulated GPU is to find is found, and correct use of the same operations passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixkv.device import refuse_fatal
from radixkv.errors import DeviceLost
from tests.virtual_gpu import SERVING, VirtualGpu, VirtualGpuError, installed

SEEDS = range(4)


@pytest.fixture(params=SEEDS)
def gpu(request: pytest.FixtureRequest) -> Iterator[VirtualGpu]:
    with installed(VirtualGpu(request.param)) as gpu, torch.inference_mode():
        yield gpu


def numbers(gpu: VirtualGpu, count: int = 8) -> Tensor:
    return torch.arange(count, device=gpu.place)


def finds(gpu: VirtualGpu, kind: str, mistake: Callable[[], Any]) -> None:
    """Check that a mistake is found when it is made, or at the latest when the host waits."""
    with pytest.raises(VirtualGpuError, match=f"^{kind}: "):  # noqa: PT012
        mistake()
        gpu.synchronize()
    assert [each.kind for each in gpu.findings] == [kind]
    gpu.findings.clear()


# ---- order


def test_a_stream_that_reads_without_waiting_is_a_race(gpu: VirtualGpu) -> None:
    other, written = gpu.stream(), numbers(gpu)

    def read() -> None:
        with gpu.on(other):
            written.sum()

    finds(gpu, "race", read)
    other.wait_stream(gpu.current_stream())
    read()
    gpu.synchronize()


def test_an_event_orders_what_precedes_it_and_nothing_later(gpu: VirtualGpu) -> None:
    other, event, one = gpu.stream(), gpu.event(), numbers(gpu)
    event.record()
    two = one + 1
    with gpu.on(other):
        event.wait()
        one.sum()
        finds(gpu, "race", two.sum)


def test_a_stream_that_overwrites_before_a_reader_is_done_is_a_race(gpu: VirtualGpu) -> None:
    other, read = gpu.stream(), numbers(gpu)
    gpu.synchronize()
    with gpu.on(other):
        total = read.sum()
    finds(gpu, "race", lambda: read.fill_(0))
    gpu.current_stream().wait_stream(other)
    read.fill_(0)
    assert total.item() == 28


def test_streams_may_use_different_parts_of_one_allocation(gpu: VirtualGpu) -> None:
    other, whole = gpu.stream(), numbers(gpu)
    other.wait_stream(gpu.current_stream())
    whole[:4].add_(1)
    with gpu.on(other):
        whole[4:].add_(2)
        finds(gpu, "race", lambda: whole[3:5].add_(1))


def test_the_host_orders_streams_for_which_it_has_waited(gpu: VirtualGpu) -> None:
    other, event, written = gpu.stream(), gpu.event(), numbers(gpu)
    event.record()
    event.synchronize()
    with gpu.on(other):
        assert written.sum().item() == 28


def test_memory_that_is_freed_while_another_stream_reads_it_is_a_race(gpu: VirtualGpu) -> None:
    other, kept = gpu.stream(), numbers(gpu)
    other.wait_stream(gpu.current_stream())
    with gpu.on(other):
        total = kept.sum()
    assert kept is not None

    def free() -> None:
        nonlocal kept
        del kept
        numbers(gpu)  # the next call of the allocator

    finds(gpu, "race", free)
    again = numbers(gpu)
    other.wait_stream(gpu.current_stream())
    with gpu.on(other):
        total = again.sum()
    gpu.current_stream().wait_stream(other)
    del again
    assert total.item() == 28


# ---- the host


def test_work_is_late_and_memory_is_poison_until_then() -> None:
    with installed(VirtualGpu(0)) as gpu, torch.inference_mode():
        pinned = gpu.pinned(8, torch.int64)
        pinned.copy_(numbers(gpu), non_blocking=True)
        assert set(pinned.tolist()) == {-0x5A5A5A5A5A5A5A5B}
        gpu.synchronize()
        assert pinned.tolist() == list(range(8))
        assert gpu.pinned(2, torch.float32).view(torch.int32).tolist() == [-0x5A5A5A5B] * 2
        assert torch.empty(3, device=gpu.place).isnan().all().item()


def test_pinned_memory_that_changes_before_its_copy_is_found(gpu: VirtualGpu) -> None:
    gpu.scheduler.lag = 1.0
    pinned, there = gpu.pinned(4, torch.int32).zero_(), torch.empty(4, dtype=torch.int32, device=gpu.place)

    def send(number: int) -> None:
        pinned.numpy()[:] = number
        there.copy_(pinned, non_blocking=True)

    def mistake() -> None:
        send(1)
        send(2)

    finds(gpu, "overwritten", mistake)
    event = gpu.event()
    for number in range(3):
        event.synchronize()
        send(number)
        event.record()
    assert there.tolist() == [2] * 4


def test_an_upload_may_be_changed_at_once_and_a_download_waits_for_itself(gpu: VirtualGpu) -> None:
    host = np.arange(4)
    there = gpu.upload(host)
    host[:] = 0
    with gpu.serving():
        first = gpu.download([there, there > 1])
        there.fill_(9)
        assert [array.tolist() for array in first.wait()] == [[0, 1, 2, 3], [False, False, True, True]]
    assert gpu.counts["event wait"] == 1 and not gpu.counts["synchronisation"]


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("synchronisation", lambda gpu, there: there[0].item()),
        ("synchronisation", lambda gpu, there: there.tolist()),
        ("synchronisation", lambda gpu, there: there.cpu()),
        ("synchronisation", lambda gpu, there: bool((there > 3).any())),
        ("synchronisation", lambda gpu, there: there.nonzero()),
        ("synchronisation", lambda gpu, there: there[there > 3]),
        ("synchronisation", lambda gpu, there: there[[0, 1]]),
        ("synchronisation", lambda gpu, there: torch.tensor([1, 2], device=gpu.place)),
        ("synchronisation", lambda gpu, there: torch.from_numpy(np.arange(3)).to(gpu.place)),
        ("synchronisation", lambda gpu, there: torch.equal(there, there)),
        ("synchronisation", lambda gpu, there: gpu.synchronize()),
        ("pageable copy", lambda gpu, there: torch.arange(3).to(gpu.place, non_blocking=True)),
        ("memory query", lambda gpu, there: gpu.memory()),
        ("release", lambda gpu, there: gpu.release_cached()),
        ("capture", lambda gpu, there: gpu.capture(there.clone, stream=gpu.stream(), pool=gpu.graph_pool())),
    ],
)
def test_an_engine_that_serves_does_not(kind: str, mistake: Callable[[VirtualGpu, Tensor], Any]) -> None:
    with installed(VirtualGpu(1)) as gpu, torch.inference_mode():
        there = numbers(gpu)
        mistake(gpu, there)  # while loading it may
        with gpu.serving():
            finds(gpu, kind, lambda: mistake(gpu, there))
        with gpu.serving(allow=SERVING):
            mistake(gpu, there)


def test_synchronisation_is_refused_where_that_is_asked_for(gpu: VirtualGpu) -> None:
    with gpu.refuse_synchronisation(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        numbers(gpu).tolist()
    assert numbers(gpu, 2).tolist() == [0, 1] and not gpu.findings


def test_an_index_out_of_range_loses_the_device_later(gpu: VirtualGpu) -> None:
    gpu.scheduler.lag = 1.0
    there = numbers(gpu)
    there.index_select(0, there + 3)
    there + 1
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        gpu.synchronize()
    with pytest.raises(torch.AcceleratorError) as raised:
        there + 1
    with pytest.raises(DeviceLost):
        refuse_fatal(raised.value)
    assert [each.kind for each in gpu.findings] == ["device-side assert"]
    assert "test_mistakes.py" in gpu.findings[0].where


# ---- faults


@pytest.mark.parametrize("after", range(3))
def test_an_injected_lack_of_memory(gpu: VirtualGpu, after: int) -> None:
    gpu.inject("allocation", after)
    for _ in range(after):
        numbers(gpu)
    with pytest.raises(torch.OutOfMemoryError):
        numbers(gpu)
    assert numbers(gpu, 2).tolist() == [0, 1]


def test_an_injected_loss_of_the_device(gpu: VirtualGpu) -> None:
    gpu.scheduler.lag = 1.0
    there = numbers(gpu)
    gpu.inject("launch", 1)
    there + 1
    there + 1  # this one is lost, which shows later
    there + 1
    with pytest.raises(torch.AcceleratorError, match="illegal memory access") as raised:
        there.tolist()
    with pytest.raises(DeviceLost):
        refuse_fatal(raised.value)
    assert not gpu.findings
