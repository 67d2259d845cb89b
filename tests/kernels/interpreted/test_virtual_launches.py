"""Launches on a simulated GPU: what a kernel loads and stores is known, and ordered with other work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv_kernels import launches, layers, sampling, triton_kernels
from tests.virtual_gpu import VirtualGpu, VirtualGpuError, installed
from tests.virtual_gpu.kernel_arguments import uses_of

STORED: dict[Any, tuple[int, tuple[str, ...]]] = {
    triton_kernels.attend_tiles: (13, ("output", "partial", "lse")),
    triton_kernels.merge_partials: (7, ("output",)),
    triton_kernels.spread_heads: (2, ("target",)),
    triton_kernels.write_slots: (7, ("key_pool", "value_pool", "key_scales", "value_scales")),
    triton_kernels.copy_regions: (3, ()),
    layers.add_norm_rows: (4, ("hidden", "output")),
    layers.rotate_and_write_rows: (10, ("rows", "key_pool", "value_pool", "key_scales", "value_scales")),
    layers.silu_multiply_rows: (2, ("output",)),
    sampling.draw_rows: (9, ("tokens",)),
}
"""How many of the first arguments of each kernel are tensors, and which of them it stores to."""

LOADED_TOO = {"hidden", "rows"}
"""Arguments that are both loaded and stored."""


@pytest.fixture(params=range(2))
def gpu(request: pytest.FixtureRequest) -> Iterator[VirtualGpu]:
    with torch.inference_mode(), installed(VirtualGpu(request.param)) as gpu, gpu.current():
        yield gpu


@pytest.mark.parametrize("kernel", STORED, ids=lambda kernel: kernel.__name__)
def test_the_source_of_a_kernel_says_what_it_loads_and_stores(kernel: Any) -> None:
    (count, stored), uses = STORED[kernel], uses_of(kernel.fn)
    tensors = set(kernel.arg_names[:count])
    assert uses.stores & tensors == set(stored)
    assert uses.loads & tensors == tensors - (set(stored) - LOADED_TOO)


def multiply(gpu: VirtualGpu) -> tuple[Tensor, Tensor, Any]:
    """Return the input and the output of a bound launch in a stream, which it returns too."""
    stream, pairs = gpu.stream(), torch.ones(2, 16, device=gpu.place)
    layers.silu_multiply(pairs)
    stream.wait_stream(gpu.current_stream())
    bound = gpu.counts["bound launch"]
    with gpu.on(stream):
        output = layers.silu_multiply(pairs)
    assert gpu.counts["bound launch"] == bound + 1
    return pairs, output, stream


@pytest.mark.parametrize(
    ("use", "races"),
    [
        (lambda pairs, output: output.sum(), True),
        (lambda pairs, output: output.zero_(), True),
        (lambda pairs, output: pairs.zero_(), True),
        (lambda pairs, output: layers.silu_multiply(output), True),
        (lambda pairs, output: pairs.sum(), False),
        (lambda pairs, output: layers.silu_multiply(pairs), False),
    ],
)
def test_other_work_is_ordered_with_the_loads_and_stores_of_a_launch(
    use: Callable[[Tensor, Tensor], Any], races: bool, gpu: VirtualGpu
) -> None:
    pairs, output, stream = multiply(gpu)
    if races:
        with pytest.raises(VirtualGpuError, match=r"^race: "):
            use(pairs, output)
        gpu.findings.clear()
    else:
        use(pairs, output)
    gpu.current_stream().wait_stream(stream)
    use(pairs, output)
    gpu.synchronize()
    assert not gpu.findings


def bound_to(tensor: Tensor) -> tuple[Callable[..., None], int]:
    """Return a bound launch that doubles numbers at two addresses, and the number of its GPU."""
    constants = {"HEADS": 1, "DIM": 16, "DIM_PADDED": 16, "AT_ONCE": 4, "FACTOR": 2.0}
    given = (tensor, tensor, 4), (16, 16, 16, 16), constants
    bound, present = launches.first(triton_kernels.spread_heads, (1,), *given), launches.device()
    assert bound is not None and present is not None
    return bound, present


def test_a_bound_launch_gets_the_present_addresses_and_counts(gpu: VirtualGpu) -> None:
    tensors = [torch.zeros(5, 16, device=gpu.place) for _ in range(3)]
    bound, present = bound_to(tensors[0])
    tensors[1].fill_(1)
    bound(present, 1, tensors[1].data_ptr(), tensors[2].data_ptr() + 64, 3)
    assert (tensors[2] != 0).any(1).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("kind", ["freed", "other code"])
def test_a_bound_launch_that_would_be_wrong_is_found(kind: str, gpu: VirtualGpu) -> None:
    bound, present = bound_to(there := torch.zeros(5, 16, device=gpu.place))
    given = [there.data_ptr(), there.data_ptr(), 4]
    bound(present, 1, *given)
    if kind == "freed":
        del there
    else:
        given[0] += 4  # Triton took it to be a multiple of 16
    with pytest.raises(VirtualGpuError, match=f"^{kind}: "):
        bound(present, 1, *given)


def test_launches_on_another_gpu_are_found() -> None:
    with installed(VirtualGpu()) as gpu, torch.inference_mode():
        pairs = torch.ones(2, 16, device=gpu.place)
        with gpu.current():
            layers.silu_multiply(pairs)
        with pytest.raises(VirtualGpuError, match=r"^other device: "):
            layers.silu_multiply(pairs)
        assert gpu.counts["bound launch"] == 0
