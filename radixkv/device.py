"""Use a device through one object: its memory, streams, events and graphs, or their plain counterparts on a CPU.

`device_of` returns the object of a torch device. No other module of radixkv calls `torch.cuda`; doctor alone does, for
facts about cards that it prints. All methods act on the calling thread's present stream, as torch's operators do.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.errors import DeviceLost
from radixkv.nvidia_driver import OLDEST_DRIVERS, driver

_log = logging.getLogger("radixkv")
T = TypeVar("T")
Result_co = TypeVar("Result_co", covariant=True)
Numbers = NDArray[Any]


class Stream(Protocol):
    """A queue of copies and launches that a device runs in order."""

    def wait_stream(self, stream: Any) -> None:
        """Let all later work of this stream wait for the work that `stream` holds now; the host does not wait."""
        ...


class Event(Protocol):
    """A mark in a stream."""

    def record(self) -> None:
        """Place the mark at the end of the present stream's work."""
        ...

    def wait(self) -> None:
        """Let all later work of the present stream wait for the mark; the host does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the device has reached the mark; return at once if it was never placed."""
        ...


class Download(Protocol):
    """A copy of tensors to the host that is under way."""

    def wait(self) -> list[Numbers]:
        """Wait for this copy alone, and return the arrays in order, with the shapes of the tensors."""
        ...


class Graph(Protocol[Result_co]):
    """Recorded launches."""

    def replay(self) -> Result_co:
        """Launch them again, on the same memory; return the result of the recorded step, which they overwrite."""
        ...


@dataclass(frozen=True)
class Properties:
    """Facts about a GPU that kernels are chosen by; sizes are bytes."""

    name: str
    processors: int
    generation: int  # major number of the compute capability; 8 for a GPU of AMD
    shared_memory: int  # of a processor
    memory: int


@dataclass
class Peak:
    """The most bytes that tensors took beyond those at the start; 0 until the measurement ends."""

    bytes: int = 0


class Device:
    """A CPU, or another device without streams: every operation is done when its call returns.

    `CudaDevice` overrides all methods. A CPU has no graphs and no free memory of its own: these methods raise.
    """

    is_gpu: ClassVar[bool] = False

    def __init__(self, place: torch.device) -> None:
        """Stand for the torch device `place`."""
        self.place = place

    def available(self) -> bool:
        """Return whether torch can use it here."""
        return True

    def current(self) -> AbstractContextManager[Any]:
        """Launch kernels here while this is open, whichever device the thread uses otherwise."""
        return nullcontext()

    # ---- memory of the host

    def pinned(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate host memory from and to which the device copies without the host; its contents are undefined."""
        return torch.empty(shape, dtype=dtype)

    def upload(self, host: Tensor | Numbers) -> Tensor:
        """Start to copy numbers of the host to the device; their memory may change as soon as this returns.

        Costs one copy on the host, into pinned memory, and one to the device.
        """
        return torch.as_tensor(host).clone()

    def constant(self, host: Numbers) -> Tensor:
        """Return numbers of the host on the device; the caller must not change them later: a CPU uses their memory."""
        return torch.from_numpy(host)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start one copy of all tensors to the host, in the present stream. numpy must have their dtypes.

        Several tensors are joined on the device first. Later work of the stream may overwrite them.
        """
        return _Downloaded([each.detach().clone().numpy() for each in tensors])

    # ---- order

    def event(self) -> Event:
        """Return an event that is not recorded yet."""
        return _Done()

    def stream(self, priority: int = 0) -> Stream:
        """Return a new stream; a waiting program of the lowest `priority`, 0 or negative, is the first to start."""
        return _InOrder()

    def current_stream(self) -> Stream:
        """Return the stream in which the calling thread's work is queued."""
        return _InOrder()

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Queue the calling thread's work in `stream` while this is open."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait on the host for all work of all streams."""

    def refuse_synchronisation(self) -> AbstractContextManager[Any]:
        """Let torch raise RuntimeError for operators that make the host wait while this is open."""
        return nullcontext()

    # ---- graphs

    def graph_pool(self) -> Any:
        """Return a new pool of memory for graphs that are never replayed at the same time."""
        self._refuse("graphs")

    def capture(self, step: Callable[[], T], *, stream: Stream, pool: Any) -> Graph[T]:
        """Record the launches of `step` on `stream`, which computes nothing yet; waits for the device first.

        Raises the errors of `step`, and RuntimeError if something cannot be captured. After a failure the thread uses
        its stream of before, and the device allocates as before, or `release_cached` does nothing from then on.
        """
        self._refuse("graphs")

    # ---- the device's memory, and what it is

    def memory(self) -> tuple[int, int]:
        """Return the bytes that are free for any process, and all bytes. Costs up to milliseconds."""
        self._refuse("memory of its own")

    def reserved(self) -> int:
        """Return the bytes that torch's allocator took from the device; asks the device nothing. For any thread."""
        self._refuse("memory of its own")

    def peak(self) -> AbstractContextManager[Peak]:
        """Measure the most memory that tensors take while this is open."""
        return nullcontext(Peak())

    def release_cached(self) -> None:
        """Give memory that torch keeps of freed tensors back to the device; waits for it. Not while serving."""

    def release_pinned(self) -> None:
        """Give memory of the host that torch keeps of freed pinned tensors back to the system. Not while serving."""

    def properties(self) -> Properties:
        """Return facts about the device."""
        self._refuse("processors")

    def _refuse(self, asked: str) -> NoReturn:
        raise NotImplementedError(f"{self.place} is no GPU: it has no {asked}")


class _Done:
    """An event of a device without streams."""

    def record(self) -> None:
        """Do nothing: all work is done."""

    def wait(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


class _InOrder:
    """The stream of a device without streams."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: all work is done."""


class _Downloaded:
    """A download that is done."""

    def __init__(self, arrays: list[Numbers]) -> None:
        self._arrays = arrays

    def wait(self) -> list[Numbers]:
        """Return the arrays."""
        return self._arrays


ALIGNMENT = 16
"""Each tensor of a download starts at a multiple of these bytes."""


class PinnedDownload:
    """One copy of several tensors into pinned memory, and the event after it."""

    def __init__(self, device: Device, tensors: Sequence[Tensor]) -> None:
        """Start the copy in the present stream of `device`."""
        self._shown = [(each.shape, each.dtype) for each in tensors]
        parts = [_aligned(each) for each in tensors]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._bytes = device.pinned(len(joined), torch.uint8)
        self._bytes.copy_(joined, non_blocking=True)
        self._done = device.event()
        self._done.record()

    def wait(self) -> list[Numbers]:
        """Wait for the copy, and return views of its memory."""
        self._done.synchronize()
        found, start = [], 0
        for shape, dtype in self._shown:
            size = shape.numel() * dtype.itemsize
            found.append(self._bytes[start : start + size].view(dtype).view(shape).numpy())
            start += -(-size // ALIGNMENT) * ALIGNMENT
        return found


def _aligned(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, padded to a multiple of `ALIGNMENT`."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    missing = -len(flat) % ALIGNMENT
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


RECOVERABLE = frozenset((0, 1, 2, 9, 98, 209, 701, 720, 801, *range(900, 909)))
"""Numbers of CUDA errors after which a context works on: refused calls, too little memory, and failed captures."""

_STICKY_TEXTS = ("illegal memory", "misaligned", "unspecified launch failure", "device-side assert", "illegal instr")


class CudaDevice(Device):
    """A GPU that torch uses by its CUDA interface, which AMD's GPUs have, too."""

    is_gpu: ClassVar[bool] = True
    _process: ClassVar[threading.RLock] = threading.RLock()  # guards torch's allocator, and the fields below
    _left_capturing: ClassVar[bool] = False  # whether torch's allocator is in a capture that has ended
    _refusals: ClassVar[int] = 0  # of synchronisation, by all threads
    _mode_before: ClassVar[int] = 0  # torch's, to which the last of them returns

    def __init__(self, place: torch.device) -> None:
        """Stand for the torch device `place`; the first use of the GPU follows later."""
        super().__init__(place)
        self._properties: Properties | None = None

    def available(self) -> bool:
        """See `Device.available`."""
        return torch.cuda.is_available()

    def current(self) -> AbstractContextManager[Any]:
        """See `Device.current`."""
        return torch.cuda.device(self.place)

    def pinned(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Device.pinned`. torch rounds an allocation up to a power of two, and reuses it after the last copy."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def upload(self, host: Tensor | Numbers) -> Tensor:
        """See `Device.upload`."""
        source = torch.as_tensor(host)
        return self.pinned(source.shape, source.dtype).copy_(source).to(self.place, non_blocking=True)

    def constant(self, host: Numbers) -> Tensor:
        """See `Device.constant`; an upload."""
        return self.upload(host)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """See `Device.download`."""
        return PinnedDownload(self, tensors)

    def event(self) -> Event:
        """See `Device.event`."""
        return torch.Event(self.place)

    def stream(self, priority: int = 0) -> Stream:
        """See `Device.stream`."""
        made: Stream = torch.cuda.Stream(self.place, priority)  # type: ignore[no-untyped-call]  # torch's own
        return made

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return torch.cuda.current_stream(self.place)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """See `Device.on`."""
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        torch.cuda.synchronize(self.place)

    @contextmanager
    def refuse_synchronisation(self) -> Iterator[None]:
        """See `Device.refuse_synchronisation`; all threads of the process are affected."""
        with CudaDevice._process:
            if not CudaDevice._refusals:
                CudaDevice._mode_before = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("error")
            CudaDevice._refusals += 1
        try:
            yield
        finally:
            with CudaDevice._process:
                CudaDevice._refusals -= 1
                if not CudaDevice._refusals:
                    torch.cuda.set_sync_debug_mode(CudaDevice._mode_before)

    def graph_pool(self) -> Any:
        """See `Device.graph_pool`."""
        return torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], T], *, stream: Any, pool: Any) -> Graph[T]:
        """See `Device.capture`.

        `torch.cuda.graph` is not used: if ending a capture fails, it leaves the thread on the capture's stream. Other
        threads may use the device meanwhile, and their launches neither are recorded nor end the capture. Captures and
        releases of memory by several threads wait for each other, because torch's allocator cannot release meanwhile.
        """
        with CudaDevice._process:
            if CudaDevice._left_capturing:
                raise RuntimeError("an earlier capture failed, and torch's allocator did not leave it")
            self.synchronize()
            self.release_cached()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                try:
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    result = step()
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph, pool)
                    raise
            return CudaGraph(graph, result)

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a failed capture in the stream and in torch's allocator.

        `capture_end` of torch 2.11 and 2.12.0 raises before it ends the capture in the allocator. Then
        `torch.cuda.empty_cache` raises an internal error for the rest of the process. A second end of the allocator's
        capture raises RuntimeError and changes nothing, so it is safe with every version. The reference to the pool
        that the capture took cannot be returned safely: the memory of this pool may outlive its graphs.
        """
        try:
            graph.capture_end()
        except RuntimeError as error:
            _log.debug("a failed capture ended with: %s", error)
        index = torch.cuda.current_device() if self.place.index is None else self.place.index
        try:
            torch._C._cuda_endAllocateToPool(index, pool)
        except RuntimeError as error:
            _log.debug("torch's allocator had left the capture: %s", error)
        except (AttributeError, TypeError):  # another version of torch
            _log.warning("a CUDA graph could not be captured; unused memory stays allocated from now on")
            CudaDevice._left_capturing = True

    def memory(self) -> tuple[int, int]:
        """See `Device.memory`."""
        return torch.cuda.mem_get_info(self.place)

    def reserved(self) -> int:
        """See `Device.reserved`."""
        return torch.cuda.memory_reserved(self.place)

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """See `Device.peak`; resets torch's own statistics of the peak."""
        torch.cuda.reset_peak_memory_stats(self.place)
        before, found = torch.cuda.memory_allocated(self.place), Peak()
        yield found
        found.bytes = torch.cuda.max_memory_allocated(self.place) - before

    def release_cached(self) -> None:
        """See `Device.release_cached`; does nothing if torch's allocator did not leave a failed capture."""
        with CudaDevice._process:
            if not CudaDevice._left_capturing:
                torch.cuda.empty_cache()

    def release_pinned(self) -> None:
        """See `Device.release_pinned`; does nothing with a torch that cannot."""
        release = getattr(torch.accelerator, "empty_host_cache", None)  # absent in older versions
        if release is not None:
            release()

    def properties(self) -> Properties:
        """See `Device.properties`; read once."""
        if self._properties is None:
            found = torch.cuda.get_device_properties(self.place)
            self._properties = Properties(
                name=found.name,
                processors=found.multi_processor_count,
                generation=8 if torch.version.hip else found.major,
                shared_memory=getattr(found, "shared_memory_per_multiprocessor", 0),
                memory=found.total_memory,
            )
        return self._properties


class CudaGraph(Generic[T]):
    """A captured CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: T) -> None:
        """Replay `graph`, which overwrites the tensors of `result`."""
        self._graph, self._result = graph, result

    def replay(self) -> T:
        """See `Graph.replay`."""
        self._graph.replay()
        return self._result


_DEVICES: dict[torch.device, Device] = {}


def device_of(place: torch.device | str) -> Device:
    """Return the object of a torch device, always the same one; raises RuntimeError for a name of no device.

    >>> device_of("cpu").is_gpu, device_of(torch.device("cuda", 1)).is_gpu
    (False, True)
    """
    place = torch.device(place)
    if place not in _DEVICES:
        _DEVICES[place] = CudaDevice(place) if place.type == "cuda" else Device(place)
    return _DEVICES[place]


GPU = "cuda"  # torch's name of a kind of device


def gpu_count() -> int:
    """Return the number of GPUs that torch can use."""
    return torch.cuda.device_count()


def default_place() -> torch.device:
    """Return the present GPU if torch can use one, else the CPU; warns about an `unusable_gpu`."""
    if reason := unusable_gpu():
        logging.getLogger(__name__).warning("the CPU is used: %s", reason)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def unusable_gpu() -> str:
    """Return why torch cannot use the NVIDIA driver of this machine, and what to install, in one sentence.

    Returns "" if torch can use it, if there is none, and if CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    name, newest = driver()
    if not newest or torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    wheel, cuda = f"torch {torch.__version__}", torch.version.cuda
    if cuda is None:
        return f"{wheel} is built without CUDA, but {name} is here: install a torch wheel for CUDA {newest}"
    if newest < (needed := int(cuda.partition(".")[0])):
        advice = f"a driver of at least {OLDEST_DRIVERS.get(needed, 580)}, or a torch wheel for CUDA {newest}"
        return f"{name} is too old for {wheel} (CUDA {cuda}): install {advice}"
    return f"{wheel} (CUDA {cuda}) finds no GPU, but {name} is here: start a container with its GPUs (--gpus all)"


def refuse_fatal(error: BaseException) -> None:
    """Raise DeviceLost from an error after which the device computes nothing more in this process; else return.

    CUDA repeats such an error at each later call. Triton's launches and CUDA's libraries raise a RuntimeError with
    CUDA's text in place of torch's class.
    """
    if isinstance(error, DeviceLost):
        raise error
    if isinstance(error, torch.AcceleratorError):
        fatal = getattr(error, "error_code", None) not in RECOVERABLE
    else:
        text = str(error)
        fatal = isinstance(error, RuntimeError) and "CUDA" in text and any(each in text for each in _STICKY_TEXTS)
    if fatal:
        reason = str(error).strip().partition("\n")[0]
        raise DeviceLost(f"the device failed, and computes nothing more: restart the process ({reason})") from error
