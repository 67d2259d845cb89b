"""Compile the Triton kernels for GPUs that this machine need not have, and read what came out: `make kernels`.

What is compiled is what the wrappers launch: they run on CPU tensors, under a driver that takes each launch for a
request to compile. Prints a table: registers, shared memory, spills, how wide its loads are, tensor-core instructions.
Fails on spills, on more shared memory than the GPU has, on kernels without 128-bit loads, and on half-width products
without tensor cores. `--pinned` is the choice that the tests make; `--json` ends in one line for a program. A kernel
that Triton has in its own cache, keyed by all source that it was made from, is not compiled again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from radixkv_kernels import attention, blocks
from radixkv_kernels.work_list import WorkList

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

GENERATION = {"sm_80": 8, "sm_90": 9, "sm_100": 10, "gfx942": 8}
"""What `attention.kinds` is told."""

SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that one program may have."""

TENSOR_CORES = r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA|v_mfma_\w+)"


@dataclass(frozen=True)
class Case:
    """Heads of one model, and what its attention asks for."""

    name: str
    key_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    wide: bool = False


CASES = [
    Case("gqa 128", 128, 128, 32, 8),
    Case("gqa 128, 64-bit offsets", 128, 128, 32, 8, wide=True),
    Case("gqa 128, block 32", 128, 128, 28, 4, block_size=32),
    Case("gqa 128, block 64, fp16", 128, 128, 64, 8, torch.float16, 64),
    Case("mha 64", 64, 64, 12, 12),
    Case("gqa 64, window, sinks", 64, 64, 64, 8, window=128, sinks=True),
    Case("mha 80", 80, 80, 32, 32),
    Case("mha 96, window", 96, 96, 32, 32, torch.float16, window=2048),
    Case("mqa 128", 128, 128, 32, 1),
    Case("gqa 256, window, softcap", 256, 256, 8, 4, window=4096, softcap=50.0),
    Case("mqa 256", 256, 256, 8, 1),
    Case("192/128", 192, 128, 16, 16),
    Case("gqa 64, fp32", 64, 64, 32, 8, torch.float32),
    Case("gqa 128, fp32", 128, 128, 32, 8, torch.float32),
    Case("gqa 256, fp32", 256, 256, 8, 4, torch.float32),
]

PINNED = {
    "gqa 128": {"tails", "sharers", "chunks", "merge", "write", "copy"},
    "gqa 64, window, sinks": {"tails"},
    "mha 80": {"chunks"},
    "mha 96, window": {"sharers"},
    "gqa 256, window, softcap": {"tails"},
    "192/128": {"sharers"},
    "gqa 128, 64-bit offsets": {"tails"},
}
"""The launches that the tests compile, on sm_80 and sm_90."""

KINDS = ("tails", "sharers", "chunks")


@dataclass
class Row:
    """One compiled kernel; widths count the instructions that load so many bits from global memory."""

    target: str
    case: str
    launch: str
    seconds: float
    registers: int
    shared: int
    spilled: int
    widths: dict[int, int]
    tensor_cores: dict[str, int]
    faults: list[str] = field(default_factory=list)


class CompileOnly:
    """A Triton driver for a GPU that is not there."""

    def __init__(self, target: GPUTarget, number: int) -> None:
        self.target, self.number = target, number

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number  # Triton keeps what it has compiled by device, so each target is another one

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiled_for(name: str) -> Iterator[list[tuple[Any, float]]]:
    """While this is open, a launch compiles for the target, runs nothing, and adds (kernel, seconds) to the list."""
    seen: list[tuple[Any, float]] = []
    run = jit.JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        start = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        seen.append((kernel, time.perf_counter() - start))
        return kernel

    driver.set_active(CompileOnly(TARGETS[name], list(TARGETS).index(name)))
    jit.JITFunction.run = compile_it
    try:
        yield seen
    finally:
        jit.JITFunction.run = run


def one_tile(case: Case) -> WorkList:
    """A list of one item that one row reads."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    return WorkList(
        case.block_size, case.window, zero, zero, one, zero, one, one.astype(bool), zero, zero, zero,
        np.array([0, 1], np.int32), zero,
    )  # fmt: skip


def pool(case: Case, dim: int) -> torch.Tensor:
    """[kv_heads, blocks, block_size, dim] as a GPU lays it out; never touched, so it takes no memory."""
    count = 3 + (1 << 31) // (case.kv_heads * case.block_size * dim) if case.wide else 2
    return torch.empty(count, case.kv_heads, case.block_size, dim, dtype=case.dtype).transpose(0, 1)


def launches(case: Case, generation: int) -> dict[str, Callable[[], object]]:
    """The wrappers' calls, by name."""
    key_pool, value_pool = pool(case, case.key_dim), pool(case, case.value_dim)
    query = torch.zeros(2, case.heads, case.key_dim, dtype=case.dtype).transpose(0, 1)
    new = [
        torch.zeros(2, case.kv_heads, dim, dtype=case.dtype).transpose(0, 1) for dim in (case.key_dim, case.value_dim)
    ]
    sinks = torch.zeros(case.heads, dtype=case.dtype) if case.sinks else None

    def attend(chosen: tuple[attention.Kind, ...], rows: int = 1) -> object:
        work = one_tile(case)
        if rows > 1:  # a second row that reads nothing, for the merge
            work = WorkList(**{**vars(work), "positions": np.zeros(rows, np.int32)})
        step = attention.plan(
            work, heads=case.heads, kv_heads=case.kv_heads, chosen=chosen, device=torch.device("cpu"), processors=132
        )
        return attention.attend(
            query[:, :rows], key_pool, value_pool, step, scale=0.1, softcap=case.softcap, sinks=sinks
        )

    kinds = attention.kinds(case.key_dim, case.value_dim, case.dtype, generation=generation)
    group = case.heads // case.kv_heads
    found: dict[str, Callable[[], object]] = {
        name: lambda kind=kind: attend((kind,)) for name, kind in zip(KINDS, kinds, strict=False) if kind.rows >= group
    }
    found["merge"] = lambda: attend((kinds[-1],), rows=2)
    found["write"] = lambda: blocks.write(*new, key_pool, value_pool, torch.zeros(2, dtype=torch.int64))
    pairs = torch.zeros(2, 2, dtype=torch.int64)
    found["copy"] = lambda: blocks.copy(blocks.regions([key_pool, value_pool]), pairs)
    return found


def read(target: str, case: Case, launch: str, kernel: Any, seconds: float) -> Row:
    """What the machine code of a kernel says about it."""
    if target.startswith("gfx"):
        text = kernel.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count")
        )  # type: ignore[index]
        loads = [{"x4": 128, "x2": 64, "": 32}.get(width or "", 16) for width in
                 re.findall(r"(?:global|buffer)_load_(?:dword|ushort|short|ubyte)(x\d)?", text)]  # fmt: skip
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = tool("cuobjdump", "-res-usage", file.name)
            text = tool("nvdisasm", "-c", file.name)
        registers, spilled = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))  # type: ignore[index]
        names = re.findall(r"\b(?:LDG|LDGSTS)((?:\.\w+)+)", text)
        loads = [next((int(part) for part in name.split(".") if part in ("64", "128", "256")), 32) for name in names]
    widths = {width: loads.count(width) for width in sorted(set(loads), reverse=True)}
    shared, cores = kernel.metadata.shared, count(TENSOR_CORES, text)
    row = Row(target, case.name, launch, round(seconds, 2), registers, shared, spilled, widths, cores)
    row.faults = faults(row, case)
    return row


def tool(name: str, *arguments: str) -> str:
    """What one of the tools that come with Triton prints."""
    return subprocess.run([str(TOOLS / name), *arguments], capture_output=True, text=True, check=True).stdout


def count(pattern: str, text: str) -> dict[str, int]:
    """How often each match of the pattern's group stands in the text."""
    found = re.findall(pattern, text)
    return {name: found.count(name) for name in sorted(set(found))}


def faults(row: Row, case: Case) -> list[str]:
    """What a kernel may not be."""
    found = []
    if row.spilled:
        found.append(f"{row.spilled} bytes spilled")
    if row.shared > SHARED_LIMIT[row.target]:
        found.append(f"{row.shared} bytes of shared memory")
    small = row.launch == "write" and case.kv_heads * case.key_dim * case.dtype.itemsize < 32 * 16  # a warp's worth
    if not row.widths.get(128) and not small:
        found.append("no 128-bit load")
    if row.launch in KINDS and case.dtype.itemsize < 4 and not row.tensor_cores:
        found.append("no tensor cores")
    return found


def main() -> int:
    """Compile, print the table, and say whether anything is at fault."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    arguments.add_argument("--pinned", action="store_true", help="only what the tests compile")
    arguments.add_argument("--json", action="store_true", help="end in one line of JSON")
    arguments.add_argument("--target", action="append", choices=TARGETS, help="only for this GPU; may be repeated")
    arguments.add_argument("--case", help="only cases whose name contains this")
    options = arguments.parse_args()
    rows = []
    for target in options.target or (["sm_80", "sm_90"] if options.pinned else TARGETS):
        for case in CASES:
            if options.case and options.case not in case.name:
                continue
            for name, launch in launches(case, GENERATION[target]).items():
                if options.pinned and name not in PINNED.get(case.name, ()):
                    continue
                with compiled_for(target) as seen:
                    launch()
                row = read(target, case, name, *seen[-1])
                rows.append(row)
                print(line(row), flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    return int(any(row.faults for row in rows))


def line(row: Row) -> str:
    """A row of the table."""
    widths = " ".join(f"{number}x{width}" for width, number in row.widths.items())
    cores = " ".join(f"{number} {name}" for name, number in row.tensor_cores.items())
    return (
        f"{row.target:7} {row.case:26} {row.launch:8} {row.seconds:6.1f} s {row.registers:4} registers "
        f"{row.shared / 1024:6.1f} KiB  spilled {row.spilled:4}  loads {widths:26} {cores:12} {'; '.join(row.faults)}"
    )


if __name__ == "__main__":
    sys.exit(main())
