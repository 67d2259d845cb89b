"""Copies between the host and a simulated GPU: which are asynchronous, and whether their source still holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.virtual_gpu.memory import READ, WRITE, poison, span_of

if TYPE_CHECKING:
    from tests.virtual_gpu.gpu import VirtualGpu
    from tests.virtual_gpu.tensor import VirtualTensor


class HostRead:
    """A copy from pinned memory, whose numbers must not change until it has run."""

    def __init__(self, gpu: VirtualGpu, source: Tensor, name: str) -> None:
        self._gpu, self._source, self._name = gpu, source, name

    def expect(self) -> Callable[[], None]:
        """Return a check, for when the copy runs: the numbers are those of now, or queued copies have written some."""
        with self._gpu.lock:
            done = self._gpu.leaving.add(self._source)
            expected = None if self._gpu.arriving.overlap(self._source) else _bytes(self._source).clone()

        def check() -> None:
            done()
            if expected is not None and not torch.equal(_bytes(self._source), expected):
                self._gpu.violation("overwritten", f"pinned memory changed before {self._name} had read it")

        return check


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def to_device(gpu: VirtualGpu, target: VirtualTensor, source: Tensor, *, non_blocking: bool) -> None:
    """Copy numbers of the host to the device."""
    name, values = "a copy to the device", target.backing
    spans = [*span_of(target.lease.memory, values, WRITE), *gpu.pinned_spans(source, READ)]
    if gpu.is_pinned(source) and non_blocking:
        read = HostRead(gpu, source, name)
        stream = gpu.current_stream()
        if stream.capture is not None:
            stream.capture.host_reads.append(read)
            gpu.enqueue(name, copying(values, source), spans, kind="copy")
            return
        check = read.expect()

        def run() -> None:
            check()
            values.copy_(source)

        gpu.enqueue(name, run, spans, kind="copy")
        return
    assert not source.is_meta, "a tensor was made where the simulated GPU was not installed"
    if not non_blocking:
        gpu.refuse_in_capture(f"waiting for {name}")
    else:
        gpu.refuse_in_capture("copying from pageable memory")
        gpu.forbid("pageable copy", name)
    kept = source.clone()
    gpu.enqueue(name, copying(values, kept), spans, kind="copy")
    if not non_blocking:
        gpu.host_waits(name)


def to_host(gpu: VirtualGpu, target: Tensor, source: VirtualTensor, *, non_blocking: bool, what: str) -> None:
    """Copy numbers of the device to the host, where they are poison until the copy has run.

    Bytes that an earlier copy is yet to read keep their numbers for it.
    """
    values = source.backing
    waits = not (non_blocking and gpu.is_pinned(target))
    if waits:
        gpu.refuse_in_capture(what)
    spans = [*span_of(source.lease.memory, values, READ), *gpu.pinned_spans(target, WRITE)]
    copy = copying(target, values)
    with gpu.lock:
        if not waits and not gpu.leaving.overlap(target):
            with torch.inference_mode():
                poison(target)
        done = gpu.arriving.add(target)

    def run() -> None:
        copy()
        done()

    gpu.enqueue("a copy to the host", run, spans, kind="copy")
    if waits:
        gpu.host_waits(what)


def copying(target: Tensor, source: Tensor) -> Callable[[], None]:
    """Return the work of a copy."""

    def run() -> None:
        target.copy_(source)

    return run
