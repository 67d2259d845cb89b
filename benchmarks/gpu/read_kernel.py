"""A kernel that only reads: its bandwidth is the ceiling of attention over KV.

Each program sums its share of one run of memory in 16-byte loads and writes one number.
"""

# ruff: noqa: N803  (compile-time arguments are upper case, as in every Triton kernel)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 8192
"""Numbers of 16 bits that an iteration reads: four 16-byte loads a thread of 8 warps."""


@triton.jit
def _read(source, sums, iterations, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    total = tl.zeros([WIDTH], tl.float32)
    for turn in tl.range(iterations, num_stages=STAGES):
        place = (program + turn * programs) * WIDTH + tl.arange(0, WIDTH)
        total += tl.load(source + place).to(tl.float32)
    tl.store(sums + program, tl.sum(total, 0))


def read(source: Tensor, processors: int, *, resident: int = 4, stages: int = 3) -> Tensor:
    """Return each program's sum over its share of a contiguous tensor of 16-bit numbers; a remainder is not read."""
    programs = processors * resident
    iterations = max(1, source.numel() // (programs * WIDTH))
    assert source.numel() >= programs * WIDTH
    sums = torch.empty(programs, dtype=torch.float32, device=source.device)
    _read[(programs,)](source, sums, iterations, WIDTH=WIDTH, STAGES=stages, num_warps=8)
    return sums


def bytes_read(numbers: int, processors: int, *, resident: int = 4) -> int:
    """Return the bytes that `read` reads of a tensor of 16-bit numbers."""
    share = processors * resident * WIDTH
    return numbers // share * share * 2
