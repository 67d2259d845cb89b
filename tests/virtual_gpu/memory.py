"""Memory of a simulated GPU: allocations, their lifetime, and accesses that no order separates."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.virtual_gpu.schedule import Clock, Node

if TYPE_CHECKING:
    from tests.virtual_gpu.graphs import Capture

READ, WRITE, STORE, FREE = "reads", "writes", "stores to", "frees"
"""Kinds of access; a Triton launch `stores to` parts of tensors, as any of its programs stores to others."""


class Access(NamedTuple):
    """An access of the bytes [start, stop) by a node."""

    start: int
    stop: int
    kind: str
    stream: int
    number: int
    name: str


class Span(NamedTuple):
    """An access that has no node yet."""

    memory: Memory
    start: int
    stop: int
    kind: str


@dataclass(eq=False)
class Memory:
    """One allocation; `nbytes` of it, made in the present stream or while `capture` recorded."""

    nbytes: int
    stream: int
    name: str
    capture: Capture | None = None
    alive: bool = True
    accesses: list[Access] = field(default_factory=list)
    backing: Tensor | None = None
    """The values, while the allocation is alive, and of a graph's memory for good."""


class Lease:
    """Keeps an allocation alive; all tensors that view it share one."""

    def __init__(self, memory: Memory, freed: Callable[[Memory], None]) -> None:
        self.memory = memory
        weakref.finalize(self, freed, memory).atexit = False


def span_of(memory: Memory, tensor: Tensor, kind: str) -> Iterator[Span]:
    """Yield the bytes of `memory` from a tensor's first number to its last; nothing for an empty one."""
    if tensor.numel():
        start = tensor.storage_offset()
        yield Span(memory, start * tensor.itemsize, (start + _reach(tensor)) * tensor.itemsize, kind)


def _reach(tensor: Tensor) -> int:
    """Return how many numbers lie from the first of a tensor that is not empty to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class QueuedBytes:
    """Addresses of pinned memory that queued copies of one direction use."""

    def __init__(self) -> None:
        self._ranges: Counter[range] = Counter()

    def add(self, tensor: Tensor) -> Callable[[], None]:
        """Note a copy from or to a tensor; return a call for the moment when it runs."""
        used = self._range(tensor)
        self._ranges[used] += 1

        def done() -> None:
            self._ranges[used] -= 1
            if not self._ranges[used]:
                del self._ranges[used]

        return done

    def overlap(self, tensor: Tensor) -> bool:
        """Return whether a queued copy uses bytes of a tensor."""
        wanted = self._range(tensor)
        return any(each.start < wanted.stop and wanted.start < each.stop for each in self._ranges)

    def _range(self, tensor: Tensor) -> range:
        start = tensor.data_ptr()
        return range(start, start + (_reach(tensor) * tensor.itemsize if tensor.numel() else 0))


def _conflict(one: str, other: str) -> bool:
    """Return whether the order of two accesses matters; two launches may store to different parts of a tensor."""
    kinds = {one, other}
    return FREE in kinds or WRITE in kinds or kinds == {READ, STORE}


def add_access(accesses: list[Access], span: Span, node: Node, host: Clock) -> Access | None:
    """Note an access by `node`; return an earlier one that nothing orders before it, and that conflicts with it."""
    found, kept = None, []
    for each in accesses:
        ordered = node.clock.get(each.stream, 0) >= each.number
        overlaps = each.start < span.stop and span.start < each.stop
        if not ordered and overlaps and _conflict(each.kind, span.kind):
            found = each
        covered = ordered and span.start <= each.start and each.stop <= span.stop
        if not (covered and span.kind in (WRITE, FREE, each.kind)) and host.get(each.stream, 0) < each.number:
            kept.append(each)
    accesses[:] = [*kept, Access(span.start, span.stop, span.kind, node.stream, node.number, node.name)]
    return found


_PATTERN = np.frombuffer(bytes([0xA5] * 8), np.int64)[0]


def poison(tensor: Tensor) -> None:
    """Fill with values that nobody computes: NaN, or the byte A5 repeated."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        bits = np.array([_PATTERN]).view(f"i{tensor.itemsize}")[0]
        tensor.fill_(int(bits) & 0xFF if tensor.dtype == torch.uint8 else int(bits))


def pinned_buffer(nbytes: int, freed: Callable[[int], None]) -> tuple[Tensor, int]:
    """Return bytes of host memory, poisoned, and their address; `freed(address)` is called when they are freed."""
    numbers = np.full(max(nbytes, 1), 0xA5, dtype=np.uint8)
    tensor = torch.from_numpy(numbers)
    address = tensor.data_ptr()
    weakref.finalize(numbers, freed, address).atexit = False
    return tensor[:nbytes], address
