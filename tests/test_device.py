"""A device answers the same calls on a CPU and by CUDA; CUDA's are checked against a fake `torch.cuda`."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import radixkv
import radixkv_kernels
from radixkv import Engine, nvidia_driver
from radixkv import device as devices
from radixkv.device import (
    RECOVERABLE,
    CudaDevice,
    PinnedDownload,
    default_place,
    device_of,
    refuse_fatal,
)
from radixkv.errors import DeviceLost, InvalidInput
from tests.fake_cuda import PLACE, FakeCuda

TENSORS = [
    torch.arange(5),
    torch.tensor([[True], [False], [True]]),
    torch.empty(0, 3),
    torch.linspace(0, 1, 6).reshape(2, 3).T,  # not contiguous
    torch.tensor(7, dtype=torch.int16),
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(CudaDevice, "_left_capturing", False)
    return FakeCuda(monkeypatch)


class Pageable(CudaDevice):
    """A GPU of a machine that cannot pin memory."""

    def pinned(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


# ---- which device


def test_each_place_has_one_device() -> None:
    assert device_of("cpu") is device_of(torch.device("cpu")) and not device_of("cpu").is_gpu
    assert device_of("cuda:1") is device_of(torch.device("cuda", 1)) and device_of("cuda:1").is_gpu
    with pytest.raises(RuntimeError):
        device_of("nonsense")


def test_the_gpu_is_the_default_where_there_is_one(cuda: FakeCuda) -> None:
    assert device_of("cpu").available() and device_of(PLACE).available()
    assert default_place() == torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, int, str | None], None]:
    """Install a driver by its version and its CUDA, "" and 0 for none, and a torch wheel for a CUDA."""

    def install(driver: str, cuda: int, wheel: str | None) -> None:
        def library(name: str) -> SimpleNamespace:
            if not cuda:
                raise OSError(f"{name}: cannot open shared object file")
            return SimpleNamespace(cuDriverGetVersion=lambda found: setattr(found._obj, "value", cuda))

        (tmp_path / "version").write_text(f"NVRM version: UNIX x86_64 Module  {driver}  May 8\n" if driver else "")
        monkeypatch.setattr(ctypes, "CDLL", library)
        monkeypatch.setattr(nvidia_driver, "DRIVER", tmp_path / "version")
        monkeypatch.setattr(torch.version, "cuda", wheel)
        monkeypatch.setattr(torch, "__version__", "2.13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


OLD = "the NVIDIA driver 550.54.15 (CUDA 12.4) is too old for torch 2.13.0 (CUDA 13.0): "
OLD += "install a driver of at least 580, or a torch wheel for CUDA 12"


@pytest.mark.parametrize(
    ("driver", "cuda", "wheel", "expected"),
    [
        ("550.54.15", 12040, "13.0", OLD),
        ("550.54.15", 0, "13.0", OLD.replace(" (CUDA 12.4)", "")),  # the library is missing
        ("", 12040, "13.0", OLD.replace(" 550.54.15", "")),  # Windows' Linux has the library alone
        ("580.65.06", 13000, None, "CUDA, but the NVIDIA driver 580.65.06 (CUDA 13.0) is here: install a torch wheel"),
        ("580.65.06", 0, "12.8", "but the NVIDIA driver 580.65.06 is here: start a container with its GPUs"),
        ("", 0, "13.0", ""),
    ],
)
def test_a_gpu_that_torch_cannot_use(machine: Any, driver: str, cuda: int, wheel: str | None, expected: str) -> None:
    machine(driver, cuda, wheel)
    found = devices.unusable_gpu()
    assert expected in found and bool(expected) == bool(found)


def test_loading_names_the_gpu_that_it_cannot_use(
    machine: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("550.54.15", 12040, "13.0")
    with pytest.raises(InvalidInput, match=re.escape(f"device 'cuda' was asked for, but {OLD}")):
        Engine.load(device="cuda")
    assert default_place() == torch.device("cpu")
    assert caplog.messages == [f"the CPU is used: {OLD}"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which is no mistake
    with pytest.raises(InvalidInput, match="but torch sees no CUDA device here"):
        Engine.load(device="cuda")


def test_no_other_module_calls_cuda() -> None:
    """Doctor may: it prints facts about cards."""
    used = re.compile(r"torch\.cuda|is_cuda|\"cuda[:\"]|pin_memory=")
    roots = [Path(package.__path__[0]) for package in (radixkv, radixkv_kernels)]
    found = {path.name for root in roots for path in root.rglob("*.py") if used.search(path.read_text())}
    assert found <= {"device.py", "doctor.py"}


# ---- on a CPU


def test_a_cpu_is_done_when_a_call_returns() -> None:
    cpu = device_of("cpu")
    numbers = np.arange(3)
    there = cpu.upload(numbers)
    numbers[:] = 0
    assert there.tolist() == [0, 1, 2]
    download = cpu.download(TENSORS)
    with cpu.current(), cpu.on(cpu.stream()), cpu.refuse_synchronisation(), cpu.peak() as peak:
        cpu.current_stream().wait_stream(cpu.stream())
        event = cpu.event()
        event.record()
        event.wait()
        event.synchronize()
        cpu.synchronize()
        cpu.release_cached()
        cpu.release_pinned()
    for found, tensor in zip(download.wait(), TENSORS, strict=True):
        np.testing.assert_array_equal(found, tensor.numpy(), strict=True)
    assert peak.bytes == 0


def test_a_cpu_has_no_graphs_or_memory_of_its_own() -> None:
    cpu = device_of("cpu")
    for call in (cpu.graph_pool, cpu.memory, cpu.properties, lambda: cpu.capture(list, stream=cpu.stream(), pool=None)):
        with pytest.raises(NotImplementedError, match="cpu is no GPU"):
            call()


# ---- by CUDA


def test_a_download_is_one_copy_and_waits_for_its_event_alone(cuda: FakeCuda) -> None:
    download = PinnedDownload(Pageable(PLACE), TENSORS)
    assert cuda.calls == [("event", "record")]
    found = download.wait()
    assert cuda.calls == [("event", "record"), ("event", "synchronize")]
    for array, tensor in zip(found, TENSORS, strict=True):
        np.testing.assert_array_equal(array, tensor.numpy(), strict=True)


def test_synchronisation_is_refused_for_a_while(cuda: FakeCuda) -> None:
    cuda.sync_mode = 1
    with CudaDevice(PLACE).refuse_synchronisation():
        assert cuda.sync_mode == 2
    assert cuda.sync_mode == 1
    with pytest.raises(KeyError), CudaDevice(PLACE).refuse_synchronisation():
        {}.popitem()
    assert cuda.sync_mode == 1


def test_the_peak_is_counted_from_the_memory_at_the_start(cuda: FakeCuda) -> None:
    cuda.allocated, cuda.peak = 100, 900
    with CudaDevice(PLACE).peak() as peak:
        cuda.peak = 170
    assert peak.bytes == 70


# ---- captures


def test_programs_of_larger_tiles_start_before_programs_of_small_ones(cuda: FakeCuda) -> None:
    pytest.importorskip("triton")
    from radixkv.attention.triton_backend import ForkedStreams

    used: list[str] = []
    kinds = [lambda: used.append(torch.cuda.current_stream(PLACE).name)] * 3  # type: ignore[attr-defined]
    ForkedStreams(CudaDevice(PLACE))(kinds)
    assert used == ["priority -1", "priority -1", "default"]


def capture(device: CudaDevice, step: object) -> object:
    stream = device.stream()
    return device.capture(step, stream=stream, pool=device.graph_pool())  # type: ignore[arg-type]


def test_a_capture_waits_then_records_on_its_stream_and_replays_the_same_result(cuda: FakeCuda) -> None:
    device = CudaDevice(PLACE)
    graph = device.capture(cuda.step(), stream=device.stream(), pool=device.graph_pool())
    assert cuda.calls == [
        "synchronize",
        "empty cache",
        ("capture", (0, 7), "own", "thread_local"),
        ("step on", "own"),
        ("captured", "own"),
    ]
    cuda.calls.clear()
    assert graph.replay() is graph.replay()
    assert cuda.calls == ["replay", "replay"]
    assert cuda.current.name == "default"


def test_memory_is_not_released_while_another_thread_captures(cuda: FakeCuda) -> None:
    """torch's allocator raises an internal error otherwise."""
    device = CudaDevice(PLACE)
    other = threading.Thread(target=CudaDevice(PLACE).release_cached)

    def step() -> None:
        cuda.calls.clear()
        other.start()
        other.join(0.05)

    capture(device, step)
    other.join()
    assert cuda.calls == [("captured", "own"), "empty cache"]


def test_a_step_that_raises_ends_its_capture(cuda: FakeCuda) -> None:
    with pytest.raises(KeyError):
        capture(CudaDevice(PLACE), {}.popitem)
    assert cuda.calls[-2:] == [("captured", "own"), ("end allocation", 0, (0, 7))]
    assert cuda.current.name == "default"


def test_an_invalid_capture_is_ended_in_the_allocator_too(cuda: FakeCuda) -> None:
    """torch 2.11 raises from the end of the stream's capture, and does not reach the allocator's."""
    invalid = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    cuda.left_capture, cuda.end_errors = False, [invalid, RuntimeError("not capturing")]
    device = CudaDevice(PLACE)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(device, cuda.step())
    assert cuda.left_capture and cuda.current.name == "default"
    cuda.calls.clear()
    device.release_cached()
    assert cuda.calls == ["empty cache"]
    capture(device, cuda.step())  # the next one succeeds


def test_an_allocator_that_cannot_leave_a_capture_is_not_used_for_others(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    with pytest.raises(KeyError):
        capture(CudaDevice(PLACE), {}.popitem)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    cuda.calls.clear()
    other = CudaDevice(PLACE)  # the allocator belongs to the process
    other.release_cached()
    with pytest.raises(RuntimeError, match="an earlier capture failed"):
        capture(other, cuda.step())
    assert cuda.calls == []


# ---- errors


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("the size of tensor a must match"), False),
        (KeyError("CUDA illegal memory"), False),
    ],
)
def test_errors_after_which_nothing_is_computed(error: Exception, fatal: bool) -> None:
    assert _is_fatal(error) == fatal


@pytest.mark.parametrize(("code", "fatal"), [(2, False), (700, True), (719, True), (901, False), (999, True)])
def test_the_number_of_an_error_is_decisive(code: int, fatal: bool) -> None:
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code  # type: ignore[attr-defined]  # torch sets it
    assert _is_fatal(error) == fatal == (code not in RECOVERABLE)


def _is_fatal(error: Exception) -> bool:
    with suppress(DeviceLost):
        refuse_fatal(error)
        return False
    with pytest.raises(DeviceLost) as raised:
        refuse_fatal(error)
    lost = raised.value
    assert lost.__cause__ is error
    with pytest.raises(DeviceLost) as again:
        refuse_fatal(lost)
    assert again.value is lost
    return True
