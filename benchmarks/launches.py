"""Measure the host time of attention outside of CUDA graphs: microseconds of thread CPU time for a layer of a step.

A layer of a Llama-3-8B (32 query heads over 8 kv heads of 128 numbers, bfloat16) stores its new KV and attends. The
time is from the attention function that transformers calls down to the driver's launch. Four steps of 32 layers:

  decode    64 sequences of 8,192 tokens that share nothing, one token each
  chunk     512 tokens of a prompt after 8,192 cached ones
  mixed     63 decodes over 8,192 shared and 512 own tokens, and such a chunk: several kinds of tile, and the merge
  fused     the same in a layer of `gpu_layers`, whose launch that writes KV also rotates queries and keys

Two variants take turns within one run:

  triton    Triton launches every kernel, and inspects all arguments each time
  bound     repeated launches are bound, as the engine does. Bar: 60 us in every step

No GPU is needed: kernels are compiled for sm_90, and Triton's own launcher calls a CUDA library whose functions do
nothing. So times are those of the host, without the driver's own for a launch, which are some 2 us each. Tensors are
on the CPU: torch's allocator for GPUs takes about as long. The first layer of a step, which also cuts the tiles, is
left out. The tenth percentile of the steps counts, because other work on the machine only adds time. Needs a C
compiler, as Triton does. Run it as

    python benchmarks/launches.py [--steps 100]

The last line is one JSON object; the exit code is 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from transformers import AttentionInterface
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from radixkv.attention import plan
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.device import Device, Properties, registered
from radixkv.models import attention_interface as interface
from radixkv.models.attention_interface import RotaryCall
from radixkv.models.loaded import LayerSpec
from radixkv.models.runner import ForwardContext
from radixkv_kernels import launches
from radixkv_kernels.work_list import WorkList

LAYERS, BLOCK, BAR_US = 32, 16, 60.0
HEADS, SHAPE = 32, LayerShape(8, 128, 128)
VARIANTS = ("triton", "bound")


# ---- a GPU that computes nothing


class IdleGpu(Device):
    """An H100 whose memory is the host's, and whose launches are nothing."""

    is_gpu: ClassVar[bool] = True

    def properties(self) -> Properties:
        """Return what the kernels are chosen by."""
        return Properties("idle", 132, 9, 228 << 10, 80 << 30)


class IdleDriver:
    """A Triton driver that compiles for sm_90 and launches through Triton's own code in C."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        """Build Triton's launcher over the library."""
        self.utils: Any = nvidia.CudaUtils()
        self.utils.load_binary = lambda *_: (1, 1, 0, 0, 1024)  # module, function, registers, spills, threads
        self.utils.get_device_properties = lambda _: {"max_shared_mem": 227 << 10}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def build_library(folder: Path) -> None:
    """Compile and load a CUDA library with all functions that Triton's launcher calls; each returns success."""
    source = (Path(nvidia.__file__).parent / "driver.c").read_text()
    names = {name for name in re.findall(r"\bcu[A-Z]\w*", source) if not name.endswith("_t")}
    code, library = folder / "idle.c", folder / "libcuda.so.1"
    code.write_text("\n".join(f"int {name}(void) {{ return 0; }}" for name in sorted(names)))
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", code, "-o", library], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    os.environ |= {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}


# ---- steps


@dataclass(frozen=True)
class Step:
    """A step's attention: block tables, and the lengths of contexts and of new tokens."""

    name: str
    tables: list[list[int]]
    kv_lengths: list[int]
    query_lengths: list[int]
    fused: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.query_lengths)

    def work(self) -> WorkList:
        """Return a new work list, as each step has."""
        return plan.build(self.tables, self.kv_lengths, self.query_lengths, block_size=BLOCK)


def steps() -> list[Step]:
    """Return the steps; blocks are named and never read."""
    shared, own, chunk = 8192 // BLOCK, 512 // BLOCK, 512
    flat = [list(range(i * shared, (i + 1) * shared)) for i in range(64)]
    tree = [[*range(shared), *range(shared + i * own, shared + (i + 1) * own)] for i in range(63)]
    prompt = [*range(100_000, 100_000 + shared + chunk // BLOCK)]
    mixed = [*tree, prompt], [8192 + 512] * 63 + [8192 + chunk], [1] * 63 + [chunk]
    return [
        Step("decode", flat, [8192] * 64, [1] * 64),
        Step("chunk", [prompt], [8192 + chunk], [chunk]),
        Step("mixed", *mixed),
        Step("fused", *mixed, fused=True),
    ]


def forward(store: KVStore, step: Step) -> float:
    """Run the attention of one step, layer by layer, as a model does; return seconds without the first layer."""
    specs = [LayerSpec(HEADS, SHAPE.kv_heads, SHAPE.key_dim, SHAPE.value_dim)] * LAYERS
    tokens, dim = step.tokens, SHAPE.key_dim
    rows = [torch.empty(1, tokens, heads * dim, dtype=torch.bfloat16) for heads in (HEADS, SHAPE.kv_heads)]
    query, key = (each.view(1, tokens, -1, dim).transpose(1, 2) for each in rows)
    loaded: Any = mock.Mock(attention="triton", layers=specs)
    backend = interface.backend_of(loaded, store)
    context = ForwardContext(backend, specs, torch.arange(tokens), [step.work()] * LAYERS)
    attention: Any = AttentionInterface()[interface.IMPLEMENTATION]
    module: Any = None
    product = torch.empty(tokens, (HEADS + 2 * SHAPE.kv_heads) * dim, dtype=torch.bfloat16)
    angles = torch.empty(2, tokens, dim, dtype=torch.bfloat16).unbind(0)
    rotate: Any = context.attend_rows

    def attend() -> None:
        if step.fused:
            rotate(RotaryCall(module, product, HEADS, 0.088, *angles))
        else:
            attention(module, query, key, key, None, scaling=0.088)

    with torch.inference_mode(), interface.handled_by(context):
        for layer in range(LAYERS):
            attend()
            if layer == 0:
                start = time.thread_time()
    return time.thread_time() - start


def measure(store: KVStore, step: Step, count: int) -> dict[str, float]:
    """Return microseconds for a layer in each variant."""
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(count + 3):
        for name in VARIANTS:
            device = launches.device if name == "bound" else no_device
            with mock.patch.object(launches, "device", device):
                seconds = forward(store, step)
            if turn >= 3:  # the first ones compile and bind
                found[name].append(seconds / (LAYERS - 1) * 1e6)
    return {name: round(statistics.quantiles(times, n=10)[0], 1) for name, times in found.items()}


def no_device() -> None:
    """Let Triton launch each kernel."""


def launches_of(store: KVStore, step: Step) -> float:
    """Return the launches of a layer."""
    with mock.patch.object(nvidia.CudaLauncher, "__call__") as call:
        forward(store, step)
    return call.call_count / LAYERS


def main() -> int:
    """Measure, print a table and one JSON line, and return 1 if the bar is missed."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=100)
    options = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    place = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder, registered(IdleGpu(place)):
        build_library(Path(folder))
        driver.set_active(IdleDriver())
        store = KVStore([SHAPE] * LAYERS, 2, BLOCK, dtype=torch.bfloat16, blocks_first=True)
        print("| step | launches | triton, us | bound, us |\n|---|---|---|---|")
        for step in steps():
            times = measure(store, step, options.steps)
            rows.append({"step": step.name, "launches": launches_of(store, step), **times})
            print("| {step} | {launches:g} | {triton} | {bound} |".format(**rows[-1]), flush=True)
    worst = max(row["bound"] for row in rows)
    print(json.dumps({"benchmark": "launches", "bar_us": BAR_US, "met": worst <= BAR_US, "rows": rows}))
    return int(worst > BAR_US)


if __name__ == "__main__":
    sys.exit(main())
