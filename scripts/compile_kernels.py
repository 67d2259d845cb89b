"""Compile the Triton kernels for GPUs that this machine need not have, and inspect the code: `make kernels`.

The wrappers run on CPU tensors, under a driver that compiles each launch instead of running it. Ends in a table of
registers, shared memory, spills, loads and tensor-core instructions. Fails if a kernel does not compile, spills, takes
more than its share of a processor, loads too few bits at once, does not pipeline its loads, or multiplies half-width
numbers without tensor cores, unless `known_faults.txt` lists the fault for this Triton. Also lists the kinds of tile
that fit on a processor together. `--pinned` compiles the tests' choice; `--json` ends in one line for a program. Takes
some hours on two cores: a run with `--keep FILE` goes on where an interrupted one stopped. Kernels in Triton's own
cache, keyed by their source, are not compiled again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from kernel_cases import CASES, PINNED, Case
from kernel_cases import launches as launches_of
from machine_code import UNNAMED, Code, Loop, read
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from radixkv_kernels import attention, blocks, launches, layers, sampling
from radixkv_kernels.attention import AMD, Kind, head_parts
from radixkv_kernels.triton_kernels import MASKED_ROWS


@dataclass(frozen=True)
class Gpu:
    """A target of compilation, and the resources of one of its processors."""

    target: GPUTarget
    generation: int  # as in `kinds`
    most_shared: int  # KiB that one program may have
    shared: int  # KiB for all programs
    reserved: int  # KiB that each program takes in addition
    registers: int  # 32-bit, for all programs
    threads: int  # of all programs


GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), 8, 163, 164, 1, 1 << 16, 2048),
    "sm_89": Gpu(GPUTarget("cuda", 89, 32), 8, 99, 100, 1, 1 << 16, 1536),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), 9, 227, 228, 1, 1 << 16, 2048),
    "sm_100": Gpu(GPUTarget("cuda", 100, 32), 10, 227, 228, 1, 1 << 16, 2048),
    "sm_120": Gpu(GPUTarget("cuda", 120, 32), 12, 99, 100, 1, 1 << 16, 1536),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), AMD, 64, 64, 0, 1 << 17, 2048),
}

KNOWN = Path(__file__).with_name("known_faults.txt")
"""Known faults, one a line: the start of Triton's version, target, case, launch and words of the fault, by tabs."""

Job = tuple[str, Case, str]
"""A launch to compile: target, case, launch."""


@dataclass(frozen=True)
class Row:
    """One compiled kernel; `code` is None if it does not compile."""

    target: str
    case: str
    launch: str
    kind: Kind | None
    seconds: float
    code: Code | None
    faults: list[str]
    warps_per_kib: float = 0.0  # warps of a program for each KiB of keys and values of an iteration


class CompileOnly:
    """A Triton driver for a GPU that does not exist."""

    def __init__(self, name: str) -> None:
        self.target, self.number = GPUS[name].target, list(GPUS).index(name)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number  # Triton keeps compiled kernels by device, so each target is another device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiled_for(name: str) -> Iterator[list[Any]]:
    """Let a launch compile for the target, run nothing, and add its kernel to the list while this is open."""
    seen: list[Any] = []
    run = jit.JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        seen.append(run(self, *args, grid=grid, warmup=True, **options))
        return seen[-1]

    driver.set_active(CompileOnly(name))
    with patch.object(jit.JITFunction, "run", compile_it), patch.object(launches, "device", return_value=None):
        yield seen


def compiled(job: Job) -> Row:
    """Compile one launch and inspect its code; a launch that Triton refuses is also a row."""
    target, case, name = job
    launch = launches_of(case, GPUS[target].generation, GPUS[target].shared << 10)[name]
    start = time.perf_counter()
    try:
        with compiled_for(target) as seen:
            launch.call()
    except Exception as error:  # compilers raise exceptions of any type: the table has the reason
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Row(target, case.name, name, launch.kind, 0.0, None, [f"does not compile: {reason[:200]}"])
    seconds = round(time.perf_counter() - start, 2)
    kernel = [each for each in seen if launch.kernel in (None, each.metadata.name)][-1]
    code = read(kernel)
    threads = kernel.metadata.num_warps * GPUS[target].target.warp_size
    found = faults(code, case, name, launch.kind, GPUS[target], threads)
    per_kib = 0.0
    if (kind := launch.kind) is not None:
        width = (case.stored or case.dtype).itemsize
        per_kib = kind.warps * 1024 / (kind.keys * (case.key_dim + case.value_dim) * width)
    return Row(target, case.name, name, launch.kind, seconds, code, found, per_kib)


def faults(code: Code, case: Case, name: str, kind: Kind | None, gpu: Gpu, threads: int) -> list[str]:
    """Return the faults of a kernel."""
    found = []
    if code.spilled:
        found.append(f"{code.spilled} bytes spilled")
    if code.uncached:
        found.append(f"{code.uncached} loads bypass caches")
    if code.shared > gpu.most_shared << 10:
        found.append(f"{code.shared} bytes of shared memory")
    for load, bits in needed(case, name, kind, threads).items():
        narrow = {width for width in widths(code, load) if width < bits}
        if narrow:
            found.append(f"{load} is loaded {min(narrow)} bits wide, not {bits}")
    if kind is not None:
        found += unlike(kind, code, gpu)
        sizes = case.key_dim, case.value_dim, case.dtype, gpu.generation, case.stored
        most = attention.shared_bytes(kind, *sizes)
        if code.shared > most and gpu.target.backend == "cuda":
            found.append(f"{code.shared} bytes of shared memory, not {most}")
        if case.dtype.itemsize < 4 and not code.tensor_cores:
            found.append("no tensor cores")
    return found


def widths(code: Code, load: str) -> set[int]:
    """Return the widths of a load in bits; Triton before 3.9 does not name inlined loads: then the widest load."""
    return set(code.loads.get(load, ())) or {max(code.loads.get(UNNAMED, (0,)))}


def needed(case: Case, name: str, kind: Kind | None, threads: int) -> dict[str, int]:
    """Return the width at which each tile must be loaded: 128 bits, or a thread's share of the tile if it is less."""
    element = 8 * (case.stored or case.dtype).itemsize
    if kind is not None:
        keys, wide = head_parts(case.key_dim), case.dtype.itemsize * 8 // element  # of a query's number
        values = head_parts(case.value_dim, attention.PAIRS if case.stored == torch.int8 else attention.LEAST)
        numbers = {f"key{i}": kind.keys * width for i, width in enumerate(keys) if width}
        numbers |= {f"value{i}": kind.keys * width for i, width in enumerate(values) if width}
        numbers |= {f"query{i}": kind.rows * width * wide for i, width in enumerate(keys) if width}
    elif name == "merge":
        numbers, element = {"parts": 16 * triton.next_power_of_2(case.value_dim)}, 32
    elif name == "spread":
        numbers, element = {"numbers": attention.NUMBERS}, 8 * case.dtype.itemsize
    elif name == "write":
        element = 8 * case.dtype.itemsize
        heads, *widths = map(triton.next_power_of_2, (case.kv_heads, case.key_dim, case.value_dim))
        tokens = max(1, blocks.ENOUGH // (heads * max(widths) * case.dtype.itemsize))
        numbers = {load: tokens * heads * width for load, width in zip(("keys", "values"), widths, strict=True)}
    elif name == "norm":
        numbers = dict.fromkeys(("numbers", "added", "factors"), triton.next_power_of_2(case.heads * case.key_dim))
    elif name == "rotate":
        numbers = dict.fromkeys(("low", "high", "cosine", "sine"), layers.HALVES)
        element = 8 * case.dtype.itemsize
    elif name == "silu":
        numbers = dict.fromkeys(("gate", "factor"), layers.COLUMNS)
    elif name == "draw":  # one number at a time where rows are not aligned
        numbers, element = {"scaled": 1 if (case.vocab or 0) % 16 else sampling.TILE}, 32
    else:
        numbers, element = {"words": case.kv_heads * case.block_size * case.value_dim * element // 32}, 32
    return {load: max(element, min(128, element * (number // threads))) for load, number in numbers.items()}


def unlike(kind: Kind, code: Code, gpu: Gpu) -> list[str]:
    """Return where a kernel differs from its kind of tile, in programs per processor and in tiles in flight."""
    found = [
        f"{number} of {name} do not fit {kind.resident} times"
        for name, (number, there) in shares(kind, code, gpu).items()
        if kind.resident * number > there
    ]
    if gpu.target.backend == "cuda":  # AMD's GPUs keep tiles in flight in registers
        found += [
            f"{load} has {code.buffers.get(load, 0)} buffers for {kind.stages} stages"
            for load in ("key0", "value0")
            if code.buffers.get(load, 0) < kind.stages - 1 or not {load, UNNAMED} & set(code.asynchronous)
        ]
        loops = 1 if kind.rows <= MASKED_ROWS else 2
        if len(code.loops) != loops:
            found.append(f"{len(code.loops)} loops over keys, not {loops}")
        found += [
            f"loop {number} copies {loop.copies} times and loads {loop.wide} times into registers"
            for number, loop in enumerate(code.loops)
            if not loop.copies or loop.wide
        ]
    return found


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the launches to compile: (target, case, launch)."""
    return [
        (target, case, name)
        for target in options.target or (PINNED if options.pinned else GPUS)
        for case in CASES
        if not options.case or options.case in case.name
        for name in launches_of(case, GPUS[target].generation, GPUS[target].shared << 10)
        if not options.pinned or name in PINNED.get(target, {}).get(case.name, ())
    ]


def main() -> int:
    """Compile, print the table, and return 1 if a kernel has a fault that is not known."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    arguments.add_argument("--pinned", action="store_true", help="only the kernels that the tests compile")
    arguments.add_argument("--json", action="store_true", help="end in one line of JSON")
    arguments.add_argument("--target", action="append", choices=GPUS, help="only for this GPU; may be repeated")
    arguments.add_argument("--case", help="only cases whose name contains this")
    arguments.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments.add_argument("--keep", type=Path, metavar="FILE", help="add rows to this file; take rows that it has")
    options = arguments.parse_args()
    todo, rows = jobs(options), []
    try:
        for row in results(todo, options.processes, options.keep):
            rows.append(row)
            message = f"{row.target} {row.case}, {row.launch}: {row.seconds} s {'; '.join(row.faults)}"
            print(f"[{len(rows)}/{len(todo)}] {message}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {len(rows)} of {len(todo)} launches", file=sys.stderr)
        return 130
    known = [tuple(line.split("\t")) for line in KNOWN.read_text().splitlines()]
    news, lines = compared(rows, [line[1:] for line in known if triton.__version__.startswith(line[0])])
    print("\n".join(table(rows)), "", *side_by_side(rows), "", *summary(rows), *lines, sep="\n")
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    return int(bool(news))


def results(todo: list[Job], processes: int, keep: Path | None) -> Iterator[Row]:
    """Yield the row of each launch, kept or compiled; keep the new ones, unless they did not compile."""
    scripts, kernels = Path(__file__).parent, Path(attention.__file__).parent
    sources = [*sorted(kernels.glob("*.py")), *sorted(scripts.glob("*kernel*.py")), scripts / "machine_code.py"]
    state = [triton.__version__, sha256(b"".join(map(Path.read_bytes, sources))).hexdigest()]
    had = kept(keep, state) if keep is not None and keep.exists() else {}
    missing = [job for job in todo if (job[0], job[1].name, job[2]) not in had]
    spawn, at_ctrl_c = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)  # a launch is finished
    with (
        open(keep or os.devnull, "a") as file,
        ProcessPoolExecutor(processes, spawn, initializer=signal.signal, initargs=at_ctrl_c) as pool,
    ):
        file.write("\n")  # the last line of a run that was killed may be cut off
        fresh = pool.map(compiled, missing)
        for target, case, name in todo:
            if (row := had.get((target, case.name, name))) is None:
                row = next(fresh)
                if row.code is not None:
                    print(json.dumps([*state, asdict(row)]), file=file, flush=True)
            yield row


def kept(path: Path, state: list[str]) -> dict[tuple[str, ...], Row]:
    """Return the rows of a file that this Triton and these sources gave, by target, case and launch."""
    found = {}
    for text in path.read_text().splitlines():
        with suppress(ValueError):  # it is empty or cut off
            *of, fields = json.loads(text, object_pairs_hook=_numbered)
            if of == state:
                code = Code(**fields["code"] | {"loops": [Loop(**loop) for loop in fields["code"]["loops"]]})
                row = Row(**fields | {"code": code, "kind": fields["kind"] and Kind(**fields["kind"])})
                found[row.target, row.case, row.launch] = row
    return found


def _numbered(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    """Return an object of JSON with the numbers that are keys in `Code`."""
    return {int(key) if key.isdecimal() else key: value for key, value in pairs}


def compared(rows: list[Row], known: list[tuple[str, ...]]) -> tuple[list[str], list[str]]:
    """Return the faults that are not known, and a line about the known ones and one for each that is gone."""
    found = [((row.target, row.case, row.launch), fault) for row in rows for fault in row.faults]
    listed = [line for line in known if line[:3] in {(row.target, row.case, row.launch) for row in rows}]
    news = [", ".join((*at, fault)) for at, fault in found if not any(at == k[:3] and k[3] in fault for k in listed)]
    gone = [", ".join(k) for k in listed if not any(at == k[:3] and k[3] in fault for at, fault in found)]
    lines = [f"known faults: {len(listed) - len(gone)}, others: {len(news)}"] if listed else []
    return news, lines + [f"known, but no longer found: {each}" for each in gone]


def shares(kind: Kind, code: Code, gpu: Gpu) -> dict[str, tuple[int, int]]:
    """Return the resources that a program takes of a processor, and how much of each there is."""
    threads = kind.warps * gpu.target.warp_size
    return {
        "shared memory": (code.shared + (gpu.reserved << 10), gpu.shared << 10),
        "registers": (threads * (-(-code.registers // 8) * 8), gpu.registers),
        "threads": (threads, gpu.threads),
    }


def fitting(*rows: Row) -> tuple[int, str]:
    """Return how often one program of each row fit on a processor together, and the resource that limits them."""
    each = [shares(row.kind, row.code, GPUS[row.target]) for row in rows if row.kind and row.code]
    return min((each[0][name][1] // sum(share[name][0] for share in each), name) for name in each[0])


def side_by_side(rows: list[Row]) -> list[str]:
    """Return a line for each GPU and case: which pairs of kinds fit on a processor, and what limits the others."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.kind and row.code:
            groups.setdefault((row.target, row.case), []).append(row)
    lines = []
    for (target, case), found in groups.items():
        pairs = [(f"{a.launch} + {b.launch}", *fitting(a, b)) for a, b in combinations(found, 2)]
        cells = [name if times else f"not {name} ({limit})" for name, times, limit in pairs]
        lines += [f"{target} {case}, side by side: {', '.join(cells)}"] if cells else []
    return lines


def table(rows: list[Row]) -> list[str]:
    """Return the rows in Markdown.

    `loads` are those of keys and values, or of moved numbers, by their bits. `instructions` are those of a warp in one
    iteration of each loop over keys (without masks, with masks), and `per KB` those of all warps for each KiB of KV.
    `programs` are those that fit on one processor, and the resource that limits them.
    """
    head = (
        "GPU", "heads", "launch", "rows x keys", "warps", "stages", "registers", "KiB shared", "spilled", "programs",
        "loads", "tensor cores", "instructions", "per KB", "at fault",
    )  # fmt: skip
    lines = [head, tuple("-" * len(title) for title in head), *map(line, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |" for cells in lines
    ]


def line(row: Row) -> tuple[str, ...]:
    """Return a row's cells."""
    kind = ("", "", "")
    if row.kind is not None:
        kind = (f"{row.kind.rows} x {row.kind.keys}", str(row.kind.warps), str(row.kind.stages))
    code, found = ("",) * 8, "; ".join(row.faults)
    if row.code is not None:
        others = ("parts", "keys", "values", "words", "numbers", "low", "gate", "scaled")
        moved = [name for name in row.code.loads if name[:-1] in ("key", "value") or name in others]
        wide = ", ".join(f"{name} {'/'.join(map(str, row.code.loads[name]))}" for name in moved)
        cores = ", ".join(f"{number} {name}" for name, number in row.code.tensor_cores.items())
        loops = ", ".join(str(loop.instructions) for loop in row.code.loops if row.kind)
        each = ", ".join(f"{loop.instructions * row.warps_per_kib:.0f}" for loop in row.code.loops if row.kind)
        resources = (str(row.code.registers), f"{row.code.shared / 1024:.1f}", str(row.code.spilled))
        programs = "{} ({})".format(*fitting(row)) if row.kind else ""
        code = (*resources, programs, wide, cores, loops, each)
    return (row.target, row.case, row.launch, *kind, *code, found)


def summary(rows: list[Row]) -> list[str]:
    """Return one line for each target."""
    lines = []
    for target in dict.fromkeys(row.target for row in rows):
        codes = [row.code for row in rows if row.target == target and row.code is not None]
        total, bad = (sum(row.target == target for row in some) for some in (rows, [row for row in rows if row.faults]))
        registers, shared = (max([0, *found]) for found in zip(*((c.registers, c.shared) for c in codes), strict=True))
        lines.append(
            f"{target}: {len(codes)} of {total} kernels compile, {bad} at fault; at most {registers} registers, "
            f"{shared / 1024:.1f} KiB of shared memory, {sum(c.spilled > 0 for c in codes)} spill"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
