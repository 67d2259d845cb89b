"""A fake of Triton's compiled kernels and of its launcher in C, which gets addresses in place of tensors.

The code of a kernel is valid for arguments like those of its first launch. An address stands for the rest of the tensor
that returned it, which must be alive when the launch is queued: nothing else keeps its memory.
"""

from __future__ import annotations

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


class Addresses:
    """The addresses that tensors returned, and the tensors there."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._found: SortedDict[int, tuple[weakref.ref[Lease], int]] = SortedDict()

    def note(self, tensor: VirtualTensor) -> int:
        """Return the address of a tensor's first number."""
        start = tensor.backing.data_ptr()
        with self._gpu.lock:
            for span in span_of(tensor.lease.memory, tensor.backing, READ):
                self._found[start] = weakref.ref(tensor.lease), start + span.stop - span.start
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
                    base, count = lease.memory.backing, (stop - address) // dtype.itemsize
                    offset = (address - base.data_ptr()) // dtype.itemsize
                    with torch.inference_mode():
                        rest = torch.empty(0, dtype=dtype).set_(base.untyped_storage(), offset, (count,), (1,))
                    return VirtualTensor(self._gpu, rest, lease)
            self._gpu.violation("freed", f"no tensor is at the address of {name}")


class Code:
    """A compiled kernel; `launch(arguments, grid)` queues it in the present stream, with tensors for addresses."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(
        self, gpu: VirtualGpu, kernel: Any, given: Mapping[str, Any], launch: Callable[[list[Any], Any], None]
    ) -> None:
        """Compile for arguments like those `given` by name."""
        self._gpu, self._launch, self._name = gpu, launch, kernel.__name__
        self._any = kernel.kwargs["do_not_specialize"] or ()
        self._given = {name: given[name] for name in kernel.arg_names}
        self._dtypes = {name: each.dtype for name, each in self._given.items() if isinstance(each, Tensor)}
        addresses = {name: self._given[name].backing.data_ptr() for name in self._dtypes}
        self._given = {name: self._assumed(name, value) for name, value in (self._given | addresses).items()}

    def _assumed(self, name: str, value: Any) -> Any:
        """Return the facts that the code assumes of an argument."""
        if name in self._dtypes:
            return value % 16 == 0
        return None if name in self._any else value

    def run(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
        """Launch as Triton's launcher does, which checks nothing; `rest` has metadata, two hooks, and the arguments."""
        gpu, arguments = self._gpu, []
        gpu.counts["bound launch"] += 1
        assert (function, packed, rest[:3]) == (self.function, self.packed_metadata, (None,) * 3)
        for (name, assumed), value in zip(self._given.items(), rest[3:], strict=True):
            if self._assumed(name, value) != assumed:
                gpu.violation("other code", f"{self._name} was not compiled for {name} = {value}")
            dtype = self._dtypes.get(name)
            arguments.append(value if dtype is None else gpu.addresses.at(value, dtype, f"{name} of {self._name}"))
        with gpu.on(gpu.scheduler.streams[stream]):
            self._launch(arguments, (x, y, z))
