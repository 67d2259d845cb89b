"""A simulated GPU: torch operators, copies, Triton launches and graphs run late, in any order that CUDA allows.

Its device is `torch.device("meta")`: the values of its tensors lie in memory of the host. Use the fixture:

    def test_a_step(virtual_gpu: VirtualGpu) -> None:
        loaded = adapter.load(model, device=virtual_gpu.place, attention="torch")   # or "triton" in the interpreter
        ...
        with virtual_gpu.serving():
            ...                                              # synchronisation and captures are mistakes from here on

or `with installed(VirtualGpu(seed)) as gpu:` for several seeds. A seed draws the order of work; even ones run
everything as late as possible. `device_of(gpu.place)` is the GPU; threads that start meanwhile use it too.

A mistake raises `VirtualGpuError` where it is found, and stays in `gpu.findings`, which the fixture checks at its end:

| kind | mistake |
|---|---|
| race | two streams use the same memory, one of them writes or frees it, and no event orders them |
| overwritten | pinned memory changed before a copy had read it |
| freed | a graph or a bound launch uses memory of a tensor that is gone |
| other device | a Triton kernel is launched outside of `Device.current` |
| other code | a bound launch has an argument for which Triton would compile other code |
| device-side assert | a queued operator raised: an index out of range, for example |
| synchronisation | while serving: the host waits for anything but an event (`Download.wait`) |
| pageable copy | while serving: a copy from memory that is not pinned |
| capture, memory query, release | while serving |

New memory and freed memory hold poison (NaN, or the byte A5), and so do pinned memory before its copy and a graph's
memory before each replay. An operation that a capture does not allow raises torch.AcceleratorError and ends it, as by
CUDA. `gpu.inject(kind, after)` lets the next "capture" or "allocation" fail, or a "launch" lose the device for good.
`gpu.counts` has the number of launches, copies, synchronisations and more. Loads and stores of Triton's kernels are
found in their source: two launches that store to one tensor are no race, as they may store to different parts.
"""

from tests.virtual_gpu.gpu import SERVING, Finding, VirtualGpu, VirtualGpuError
from tests.virtual_gpu.launches import installed

__all__ = ["SERVING", "Finding", "VirtualGpu", "VirtualGpuError", "installed"]
