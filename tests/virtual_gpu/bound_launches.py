"""A fake of Triton's compiled kernels and of its launcher in C, which gets addresses in place of tensors.

The code of a kernel is valid for arguments like those of its first launch. An address stands for the rest of the tensor
that returned it, which must be alive when the launch is queued: nothing else keeps its memory.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from sortedcontainers import SortedDict
from torch import Tensor

from tests.virtual_gpu.memory import READ, Lease, Memory, span_of
from tests.virtual_gpu.tensor import VirtualTensor

if TYPE_CHECKING:
    from tests.virtual_gpu.gpu import VirtualGpu


ALIGNMENT = 16  # Triton's code depends on which addresses are multiples of it


class Addresses:
    """The addresses that tensors returned, and the tensors there."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._found: SortedDict[int, tuple[weakref.ref[Lease], int]] = SortedDict()

    def note(self, tensor: VirtualTensor) -> int:
        """Return the address of a tensor's first number."""
        start = tensor.backing.data_ptr()
        stop = start + max(
            (span.stop - span.start for span in span_of(tensor.lease.memory, tensor.backing, READ)), default=0
        )
        with self._gpu.lock:
            self._found[start] = weakref.ref(tensor.lease), stop
        return start

    def at(self, address: int, dtype: torch.dtype, name: str) -> VirtualTensor:
        """Return the rest of a tensor from an address on; that of an empty tensor is 0. `name` is the argument."""
        if not address:
            return VirtualTensor(self._gpu, torch.empty(0, dtype=dtype), self._gpu.lease(Memory(0, 0, name)))
        with self._gpu.lock:
            place = self._found.bisect_right(address)
            while place:
                place -= 1
                start, (found, stop) = self._found.peekitem(place)
                if (lease := found()) is None:
                    del self._found[start]
                elif address < stop:
                    return self._rest(lease, address, stop, dtype)
            self._gpu.violation("freed", f"no tensor is at the address of {name}")

    def _rest(self, lease: Lease, start: int, stop: int, dtype: torch.dtype) -> VirtualTensor:
        base = lease.memory.backing
        assert base is not None
        offset, count = (start - base.data_ptr()) // dtype.itemsize, (stop - start) // dtype.itemsize
        with torch.inference_mode():
            rest = torch.empty(0, dtype=dtype).set_(base.untyped_storage(), offset, (count,), (1,))
        return VirtualTensor(self._gpu, rest, lease)


class Driver:
    """Triton's driver of a simulated GPU."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu

    def get_current_device(self) -> int:
        """Return a number that no other simulated GPU has; another one outside of `current`."""
        return self._gpu.number if self._gpu.is_current else -1

    def get_current_stream(self, device: int) -> int:
        return self._gpu.current_stream().number


class Code:
    """A compiled kernel; `launch(arguments, grid)` queues it in the present stream, with tensors for addresses."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(
        self, gpu: VirtualGpu, kernel: Any, given: Mapping[str, Any], launch: Callable[[list[Any], Any], None]
    ) -> None:
        """Compile for arguments like those `given` by name."""
        self._gpu, self._launch, self._name = gpu, launch, kernel.__name__
        self._any = kernel.kwargs.get("do_not_specialize") or ()
        self._names = [*inspect.signature(kernel.fn).parameters]
        self._dtypes = {name: each.dtype for name, each in given.items() if isinstance(each, Tensor)}
        self._kinds = {name: self._kind(name, _address(given[name])) for name in self._names}

    def _kind(self, name: str, value: Any) -> Any:
        """Return the facts that the code assumes of an argument."""
        if name in self._dtypes:
            return value % ALIGNMENT == 0
        return type(value) if name in self._any else (type(value), value)

    def run(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *metadata_and_hooks_and_values: Any
    ) -> None:
        """Launch as Triton's launcher does, which checks nothing; raise where the code is wrong for the arguments."""
        gpu, values = self._gpu, metadata_and_hooks_and_values[3:]
        assert (function, packed, len(values)) == (self.function, self.packed_metadata, len(self._names))
        gpu.counts["bound launch"] += 1
        for name, value in zip(self._names, values, strict=True):
            if self._kind(name, value) != self._kinds[name]:
                gpu.violation("other code", f"{self._name} was not compiled for {name} = {value}")
        arguments = [
            gpu.addresses.at(value, self._dtypes[name], f"{name} of {self._name}") if name in self._dtypes else value
            for name, value in zip(self._names, values, strict=True)
        ]
        with gpu.on(gpu.scheduler.streams[stream]):
            self._launch(arguments, (x, y, z))


def _address(value: Any) -> Any:
    return value.backing.data_ptr() if isinstance(value, VirtualTensor) else value
