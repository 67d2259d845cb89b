"""A simulated GPU as a `radixkv.device.Device`: its allocator, streams, captures, faults and findings."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from radixkv.device import CudaDevice, Graph, Peak, Properties
from tests.virtual_gpu.bound_launches import Addresses
from tests.virtual_gpu.graphs import Capture, VirtualGraph
from tests.virtual_gpu.memory import FREE, Lease, Memory, QueuedBytes, Span, add_access, pinned_buffer, poison, span_of
from tests.virtual_gpu.schedule import Clock, Node, Scheduler, VirtualEvent, VirtualStream, join

T = TypeVar("T")
PLACE = torch.device("meta")

SERVING = frozenset(("synchronisation", "pageable copy", "capture", "memory query", "release"))
"""Kinds of finding that are mistakes only while requests are served."""

NUMBERS = itertools.count(1 << 24)  # of simulated GPUs, which Triton's launches are bound to
REUSE = "the next use of memory"  # the beginning of the name of a node that stands for it
FATAL = 700  # CUDA's number of an illegal memory access


class VirtualGpuError(AssertionError):
    """The code under test made a mistake that would stay unseen on most runs of a GPU."""


@dataclass(frozen=True)
class Finding:
    """One mistake: its kind, a description, and the place in the code under test."""

    kind: str
    text: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}, at {self.where}"


@dataclass
class Pool:
    """Memory that graphs share; torch refuses a pool that was used and has no graph, unless it was freed meanwhile."""

    used: bool = False
    graphs: int = 0


def accelerator_error(text: str, code: int) -> torch.AcceleratorError:
    """Return an error as torch raises it."""
    error = torch.AcceleratorError(f"CUDA error: {text}")
    error.error_code = code  # type: ignore[attr-defined]  # torch sets it
    return error


class VirtualGpu(CudaDevice):
    """Runs copies and launches late; the package's docstring says how to use it.

    `counts` has each "launch", "copy", "allocation", "pinned allocation", "synchronisation", "event wait", "capture"
    and "replay".
    """

    is_gpu: ClassVar[bool] = True

    def __init__(
        self,
        seed: int = 0,
        *,
        lag: float | None = None,
        memory: int = 1 << 30,
        capability: tuple[int, int] = (9, 0),
        streams: int = 32,
    ) -> None:
        """Draw the order of work from `seed`; `lag` is the probability that the device does nothing for a call.

        By default an even seed runs everything as late as possible, and an odd one runs some work early. torch has
        `streams` streams besides the default one, and returns them in turn.
        """
        super().__init__(PLACE)
        self.capability = capability
        self.number, self.addresses = next(NUMBERS), Addresses(self)
        random = Random(seed)
        self.scheduler = Scheduler(
            random, lag if lag is not None else (1.0 if seed % 2 == 0 else random.uniform(0.2, 0.9))
        )
        self.lock = threading.RLock()
        self.counts: Counter[str] = Counter()
        self.arriving, self.leaving = QueuedBytes(), QueuedBytes()  # of queued copies to the host, and from it
        self.findings: list[Finding] = []
        self.recorded: list[list[str]] = []  # the operators and launches of each graph
        self.forbidden: frozenset[str] = frozenset()
        self.lost: BaseException | None = None  # the error after which nothing runs
        self.total, self.allocated, self._reserved = memory, 0, 0
        self.fragments = 0  # the most bytes between tensors that torch cannot give back
        self.host: Clock = {}  # all that the host has waited for
        self._most = 0
        self.sync_debug_mode: str | int = 0
        """torch's, which `refuse_synchronisation` sets; it sees no waits for events or for the whole device."""
        self.generator = torch.Generator().manual_seed(seed)
        self._faults: dict[str, set[int]] = {}
        self._freed: deque[Memory] = deque()
        self._late: list[VirtualGpuError] = []
        self._pinned: dict[int, Memory] = {}  # by address
        self._local = threading.local()
        self._default, *self._streams = (VirtualStream(self, number) for number in range(1 + streams))
        self.scheduler.streams += [self._default, *self._streams]
        self._next_stream = itertools.cycle(self._streams).__next__

    # ---- findings and faults

    def violation(self, kind: str, text: str) -> NoReturn:
        """Record a mistake, and raise it."""
        finding = Finding(kind, text, _where())
        self.findings.append(finding)
        raise VirtualGpuError(str(finding))

    def forbid(self, kind: str, text: str) -> None:
        """Treat something as a mistake if the engine serves."""
        if kind in self.forbidden:
            self.violation(kind, text)

    @contextmanager
    def serving(self, allow: Collection[str] = ()) -> Iterator[None]:
        """Make all kinds of `SERVING` mistakes, in all threads, but those of `allow`, while this is open."""
        before, self.forbidden = self.forbidden, SERVING.difference(allow)
        try:
            yield
        finally:
            self.forbidden = before

    def inject(self, kind: str, after: int = 0) -> None:
        """Let a "capture" or an "allocation" fail, or a "launch" lose the device: the next one, or one `after` it."""
        self._faults.setdefault(kind, set()).add(self.counts[kind] + after + 1)

    def _counted(self, kind: str) -> bool:
        """Count one; return whether it is to fail."""
        self.counts[kind] += 1
        return self.counts[kind] in self._faults.get(kind, ())

    def check_context(self) -> None:
        """Raise the error after which the device computes nothing more, if there is one."""
        if self.lost is not None:
            raise accelerator_error(str(self.lost), FATAL)

    def lose(self, error: BaseException) -> None:
        """Compute nothing more."""
        self.lost = self.lost or error

    def refuse_in_capture(self, what: str, code: int = 900) -> None:
        """Raise, and invalidate the capture, if the calling thread captures."""
        capture = getattr(self._local, "capture", None)
        if capture is not None:
            capture.invalid = what
            raise accelerator_error(f"operation not permitted when stream is capturing: {what}", code)

    def host_waits(self, what: str) -> None:
        """Wait for the present stream, which a capture and a serving engine must not do."""
        with self.lock:
            self.check_context()
            self.refuse_in_capture(what)
            if self.sync_debug_mode == "error":
                raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
            self.counts["synchronisation"] += 1
            self.forbid("synchronisation", what)
            stream = self.current_stream()
            self.finish([stream.last] if stream.last is not None else [], stream.clock)

    # ---- work

    def enqueue(self, name: str, run: Callable[[], None], spans: Sequence[Span] = (), kind: str = "launch") -> None:
        """Queue work in the present stream; it uses the memory of `spans`."""
        with self.lock:
            self.check_context()
            self.collect()
            if self._counted(kind):
                run = self._illegal_access
            self._add(self.current_stream(), name, run, spans)
            with self._running():
                self.scheduler.advance(self._execute)

    def _add(self, stream: VirtualStream, name: str, run: Callable[[], None], spans: Sequence[Span]) -> None:
        race = None
        if stream.capture is not None:
            race = stream.capture.add(stream.add(name, run, {}, _where()), list(spans))
        else:
            node = stream.add(name, run, self.host, _where())
            stream.pending.append(node)
            for span in spans:
                found = add_access(span.memory.accesses, span, node, self.host)
                race = race or (found and f"{found.name} {found.kind} memory that {name} {span.kind}, in no order")
        if race:
            self.violation("race", race)

    def _illegal_access(self) -> None:
        self.lose(RuntimeError("an illegal memory access was encountered"))

    def finish(self, nodes: Sequence[Node], clock: Clock) -> None:
        """Run these nodes and all before them; from now on the host counts on `clock`."""
        with self._running():
            self.scheduler.finish(nodes, self._execute)
        join(self.host, clock)
        if self._late:
            raise self._late.pop(0)
        self.check_context()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            yield

    def _execute(self, node: Node) -> None:
        """Run one node's work; an error of it is an assertion that fails on the device."""
        run, node.run = node.run, None
        if self.lost is not None or run is None:
            return
        try:
            run()
        except VirtualGpuError as error:
            self._late.append(error)
        except Exception as error:
            finding = Finding("device-side assert", f"{node.name}: {type(error).__name__}: {error}", node.where)
            self.findings.append(finding)
            self.lose(RuntimeError(str(finding)))

    # ---- memory

    def allocate(self, nbytes: int, name: str) -> Memory:
        """Return an allocation of the present stream, or of the capture under way."""
        with self.lock:
            self.check_context()
            self.collect()
            if self._counted("allocation") or self.allocated + nbytes > self.total:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes")
            self.allocated += nbytes
            self._reserved, self._most = max(self._reserved, self.allocated), max(self._most, self.allocated)
            stream = self.current_stream()
            self._reuse(stream)
            memory = Memory(nbytes, stream.number, name, stream.capture)
            if stream.capture is not None:
                stream.capture.own.append(memory)
            return memory

    def lease(self, memory: Memory) -> Lease:
        """Return the lease of an allocation; the allocation is freed with it."""
        return Lease(memory, self._freed.append)  # by the collector of garbage, at any moment

    def collect(self) -> None:
        """Let the streams of freed allocations use their memory again."""
        while self._freed:
            memory = self._freed.popleft()
            stream = self.scheduler.streams[memory.stream]
            if memory.capture is None:
                memory.alive = False
                self.allocated -= memory.nbytes
            if memory.capture in (None, stream.capture):  # else it stays in the pool of its graph
                stream.reusable.append(memory)

    def _reuse(self, stream: VirtualStream) -> None:
        """Write poison to freed memory, as the new allocation of its stream may use it.

        This is left out where no other stream has used the memory.
        """
        freed = [memory for memory in stream.reusable if memory.capture is stream.capture]
        stream.reusable = [memory for memory in stream.reusable if memory.capture not in (None, stream.capture)]
        for memory in freed:
            values, capture = memory.backing, memory.capture
            memory.backing = values if capture is not None else None
            used = memory.accesses if capture is None else capture.accesses_of(memory)
            if values is not None and any(each.stream != memory.stream for each in used):
                spans = [Span(memory, 0, memory.nbytes, FREE)]
                self._add(stream, f"{REUSE} that {memory.name} had made,", _poisoning(values), spans)

    def pinned(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate poisoned host memory that copies asynchronously."""
        with self.lock:
            self.refuse_in_capture("allocating pinned memory")
            self.counts["pinned allocation"] += 1
            size = torch.Size((shape,) if isinstance(shape, int) else shape)
            with torch.inference_mode(False), torch._C._DisableTorchDispatch():
                found, address = pinned_buffer(size.numel() * dtype.itemsize, self._pinned.pop)
                self._pinned[address] = Memory(found.nbytes, self.current_stream().number, "pinned memory")
                return found.view(dtype).view(size)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the host is in pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def pinned_spans(self, tensor: Tensor, kind: str) -> Iterator[Span]:
        """Yield the access of a copy to pinned memory; nothing for other memory of the host."""
        memory = self._pinned.get(tensor.untyped_storage().data_ptr())
        if memory is not None:
            yield from span_of(memory, tensor, kind)

    def memory(self) -> tuple[int, int]:
        """Return the bytes that are not reserved, and all."""
        with self.lock:
            self.check_context()
            self.forbid("memory query", "asking for free memory")
            return self.total - self._reserved, self.total

    def reserved(self) -> int:
        """See `Device.reserved`."""
        return self._reserved

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """See `Device.peak`."""
        self.collect()
        before = self._most = self.allocated
        found = Peak()
        yield found
        found.bytes = self._most - before

    def release_cached(self) -> None:
        """Give the memory of freed tensors back; waits for the device."""
        with self.lock:
            self.check_context()
            self.refuse_in_capture("releasing memory")
            self.forbid("release", "releasing cached memory")
            self._finish_all()
            self.collect()
            self._reserved = min(self._reserved, self.allocated + self.fragments)

    def release_pinned(self) -> None:
        """Do nothing: pinned memory is released when its tensors are gone."""

    # ---- order

    def event(self) -> VirtualEvent:
        """See `Device.event`."""
        return VirtualEvent(self)

    def stream(self, priority: int = 0) -> VirtualStream:
        """See `Device.stream`, without priorities; one of those of torch's pool, which others may use, too."""
        with self.lock:
            return self._next_stream()

    def current_stream(self) -> VirtualStream:
        """See `Device.current_stream`."""
        found: VirtualStream = getattr(self._local, "stream", self._default)
        return found

    @contextmanager
    def on(self, stream: VirtualStream) -> Iterator[None]:
        """See `Device.on`."""
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    @contextmanager
    def current(self) -> Iterator[None]:
        """See `Device.current`; another GPU is the present one of all threads outside of it."""
        before, self._local.current = self.is_current, True
        try:
            yield
        finally:
            self._local.current = before

    @property
    def is_current(self) -> bool:
        """Whether the calling thread's launches by Triton go to this GPU."""
        return getattr(self._local, "current", False)

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        with self.lock:
            self.check_context()
            self.refuse_in_capture("waiting for the device")
            self.counts["synchronisation"] += 1
            self.forbid("synchronisation", "waiting for the device")
            self._finish_all()

    def _finish_all(self) -> None:
        clock: Clock = {}
        for stream in self.scheduler.streams:
            if stream.capture is None:
                join(clock, stream.clock)
        self.finish([each.pending[-1] for each in self.scheduler.streams if each.pending], clock)

    # ---- graphs

    def graph_pool(self) -> Pool:
        """See `Device.graph_pool`."""
        return Pool()

    def capture(self, step: Callable[[], T], *, stream: VirtualStream, pool: Pool) -> Graph[T]:
        """See `Device.capture`."""
        with self.lock:
            self.check_context()
            self.refuse_in_capture("starting another capture")
            self.forbid("capture", "capturing a graph")
            if pool.used and not pool.graphs:
                raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
            pool.used = True
            self._finish_all()
            fails = self._counted("capture")
            capture = self._local.capture = Capture(self, stream)
        try:
            with self.on(stream):
                result = step()
        finally:
            with self.lock:
                self.collect()
                unjoined = capture.end()
                self._local.capture = None
                if sys.exc_info()[0] is not None or fails or capture.invalid or unjoined:
                    self.allocated -= capture.nbytes
        if fails or capture.invalid:
            raise accelerator_error("operation failed due to a previous error during capture", 901)
        if unjoined:
            raise accelerator_error("capturing stream has unjoined work", 904)
        self.recorded.append([node.name for node in capture.nodes if not node.name.startswith(REUSE)])
        graph = VirtualGraph(self, capture, result)
        pool.graphs += 1
        weakref.finalize(graph, self._drop, capture.nbytes, pool).atexit = False
        return graph

    def _drop(self, nbytes: int, pool: Pool) -> None:
        """Free a graph's part of its pool."""
        self.allocated -= nbytes
        pool.graphs -= 1

    # ---- facts

    def available(self) -> bool:
        """Return True."""
        return True

    def properties(self) -> Properties:
        """Return the facts of a small GPU."""
        return Properties("virtual", 2, self.capability[0], 228 << 10, self.total)


def _poisoning(values: Tensor) -> Callable[[], None]:
    return lambda: poison(values)


def _where() -> str:
    """Return the innermost lines of the code under test."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 4:
        module, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename.rpartition("/")[2]
        if module.startswith("radixkv") or file.startswith("test_"):
            found.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)
