"""Read the code of a compiled Triton kernel: registers, shared memory, spills, and the widths of its loads.

Loads are attributed to variables by the lines of source in the disassembly of NVIDIA's and AMD's instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton

UNNAMED = "unnamed"
"""The name of loads whose line of source is unknown."""

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

TENSOR_CORES = re.compile(r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA|v_mfma_\w+)")

PTX_LINE = re.compile(r"\.loc\s+(\d+) (\d+) \d+(?:.*inlined_at (\d+) (\d+) \d+)?.*")
PTX_FILE = re.compile(r"\.file\s+(\d+) \"(.*?)\"")
PTX_LOAD = re.compile(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bfus](\d+)|\bcp\.async\.c[ag]\.shared\.global.*\], (0x\w+)")
SASS_LOAD = re.compile(r"\b(?:LDG|LDGSTS)((?:\.\w+)*) ")
SASS_LABEL = re.compile(r"\s*(\.L_x_\d+):")
SASS_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
SASS_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
SASS_COPY = re.compile(r"\b(?:LDGSTS|UBLKCP|UTMALDG)\b")
SASS_WIDE = re.compile(r"\bLDG\.(?:\S*\.)?(?:64|128)\b")
AMD_LINE = re.compile(r"\.loc\s.*?; (.*)")
AMD_PLACE = re.compile(r"([\w./-]+\.py):(\d+):")
AMD_LOAD = re.compile(r"\b(?:global|buffer)_load_(dword|ushort|short|ubyte)\w*?(x[234])?\b")
AMD_BITS = {"x4": 128, "x3": 96, "x2": 64, None: 32}

Place = tuple[str, int]
Load = tuple[tuple[Place, ...], int, bool]
"""A load's lines of source, innermost first; its bits; whether it is asynchronous."""


@dataclass(frozen=True)
class Loop:
    """An innermost loop that computes weights of keys, in machine code."""

    instructions: int  # of one warp and iteration
    copies: int  # instructions that copy to shared memory without registers
    wide: int  # loads into registers of more than 32 bits at once: keys and values that are not copied


@dataclass(frozen=True)
class Code:
    """One kernel's machine code."""

    registers: int
    shared: int  # bytes
    spilled: int  # bytes, or registers on AMD
    widths: dict[int, int]  # bits: instructions that load this width from global memory
    loads: dict[str, dict[int, int]]  # the same by variable, as the compiler emitted them
    asynchronous: dict[str, int]  # name: instructions that copy to shared memory without registers
    buffers: dict[str, int]  # name: tiles in shared memory at once, in a pipelined loop
    tensor_cores: dict[str, int]  # instruction: number
    loops: list[Loop]  # over keys, in order; empty for AMD's GPUs
    uncached: int  # loads that bypass caches: of volatile memory


def read(kernel: Any) -> Code:
    """Read a compiled kernel; takes about 0.2 s for NVIDIA's GPUs, whose code is disassembled."""
    registers, spilled, text, bits, loads = _amd(kernel) if "amdgcn" in kernel.asm else _nvidia(kernel)
    named: dict[str, Counter[int]] = {}
    asynchronous: Counter[str] = Counter()
    for places, width, free in loads:
        name = _name(places)
        named.setdefault(name, Counter())[width] += 1
        asynchronous[name] += free
    return Code(
        registers=registers,
        shared=kernel.metadata.shared,
        spilled=spilled,
        widths=_widest_first(Counter(bits)),
        loads={name: _widest_first(found) for name, found in sorted(named.items())},
        asynchronous={name: number for name, number in sorted(asynchronous.items()) if number},
        buffers=_buffers(kernel.asm["ttgir"]),
        tensor_cores=dict(sorted(Counter(TENSOR_CORES.findall(text)).items())),
        loops=list(_loops(text)),
        uncached=text.count(".STRONG.SYS"),
    )


def _widest_first(widths: Counter[int]) -> dict[int, int]:
    return dict(sorted(widths.items(), reverse=True))


def _nvidia(kernel: Any) -> tuple[int, int, str, list[int], list[Load]]:
    """Return registers, spilled bytes, disassembly, the widths of its loads, and the loads of its PTX.

    PTX has the source of each instruction; ptxas moves and repeats loads, but each keeps its width.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        text = _tool("nvdisasm", "-c", file.name)
    names = [name.split(".") for name in SASS_LOAD.findall(text)]
    bits = [next((int(part) for part in parts if part in ("64", "128", "256")), 32) for parts in names]
    stack = _number(r"STACK:(\d+)", usage)
    return _number(r"REG:(\d+)", usage), stack, text, bits, list(_ptx_loads(kernel.asm["ptx"]))


def _loops(text: str) -> Iterator[Loop]:
    """Find the innermost loops that compute powers, which all loops over keys do."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if found := SASS_LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := SASS_INSTRUCTION.match(line):
            code.append(found[1])
    for end, instruction in enumerate(code):
        branch = SASS_BRANCH.search(instruction)
        if branch and labels.get(branch[1], end + 1) <= end:
            loops.append((labels[branch[1]], end + 1))
    for start, stop in sorted(loops):
        inner = [other for other in loops if start <= other[0] and other[1] <= stop and other != (start, stop)]
        body = code[start:stop]
        if not inner and any("MUFU.EX2" in each for each in body):
            copies, wide = (sum(bool(kind.search(each)) for each in body) for kind in (SASS_COPY, SASS_WIDE))
            yield Loop(len(body), copies, wide)


def _ptx_loads(text: str) -> Iterator[Load]:
    files = dict(PTX_FILE.findall(text))
    places: tuple[Place, ...] = ()
    fresh, inline = False, False
    for line in text.splitlines():
        if "inline asm" in line:
            inline, fresh = "begin" in line, True
        elif found := PTX_LINE.search(line):
            # Triton's loads are inline assembly, and each of its lines counts as one more line of source.
            if fresh or not inline:
                pairs = ((found[1], found[2]), (found[3], found[4]))
                places = tuple((files[file], int(number)) for file, number in pairs if file)
            fresh = False
        elif found := PTX_LOAD.search(line):
            vector, element, copied = found.groups()
            yield places, 8 * int(copied, 16) if copied else int(vector or 1) * int(element), bool(copied)


def _amd(kernel: Any) -> tuple[int, int, str, list[int], list[Load]]:
    """Return registers, spilled registers and scratch bytes, assembly, the widths of its loads, and the loads."""
    text = kernel.asm["amdgcn"]
    spilled = _number(r"\.vgpr_spill_count:\s+(\d+)", text) + _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    loads = list(_amd_loads(text))
    return _number(r"\.vgpr_count:\s+(\d+)", text), spilled, text, [bits for _, bits, _ in loads], loads


def _amd_loads(text: str) -> Iterator[Load]:
    places: tuple[Place, ...] = ()
    for line in text.splitlines():
        if found := AMD_LINE.search(line):
            places = tuple((name, int(number)) for name, number in AMD_PLACE.findall(found[1]))
        elif found := AMD_LOAD.search(line):
            yield places, AMD_BITS[found[2]] if found[1] == "dword" else 16, False


def _name(places: tuple[Place, ...]) -> str:
    """Return the variable of a load: the target of the innermost enclosing assignment."""
    for file, number in places:
        lines = _source(Path(file).name)
        found = re.match(r"\s*(\w+)(?:, \w+)* = ", lines[number - 1]) if 0 < number <= len(lines) else None
        if found:
            return found[1]
    return UNNAMED


@cache
def _source(name: str) -> list[str]:
    """Return a kernel file's lines; none for files of other packages."""
    import radixkv_kernels

    path = Path(radixkv_kernels.__path__[0]) / name
    return path.read_text().splitlines() if path.exists() else []


def _buffers(text: str) -> dict[str, int]:
    """Return the tiles that a pipelined loop keeps in shared memory, by the name of the tile."""
    found = re.findall(r"%([a-z]+\d?)(?:_\d+)? = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x\w+,", text)
    return {name: int(number) for name, number in found}


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, pattern
    return int(found[1])


def _tool(name: str, *arguments: str) -> str:
    """Return the output of one of the tools that come with Triton."""
    return subprocess.run([str(TOOLS / name), *arguments], capture_output=True, text=True, check=True).stdout
