"""Part 1, the ceilings of the device: copy bandwidth, read bandwidth, rate of a matrix product.

A copy counts bytes read and written. Numbers are random, as zeros are multiplied faster.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .read_kernel import WIDTH, bytes_read, read
from .result import Bench, Row
from .shapes import tb_s, tflop_s
from .timing import measure

RESIDENT = ((2, 3), (4, 3), (8, 2))
"""(programs a processor, loads in flight) that the read kernel is tried with: the best is the ceiling."""


def run(bench: Bench) -> Iterator[Row]:
    """Copy, read (several ways: the best one counts) and matmul."""
    yield from bench.case("copy", lambda: _copy(bench))
    yield from bench.case("read, torch.sum", lambda: _sum(bench))
    for resident, stages in RESIDENT[: 1 if bench.device.interpreted else None]:
        name = f"read, own kernel, {resident} programs, {stages} stages"
        yield from bench.case(name, lambda resident=resident, stages=stages: _read(bench, resident, stages))
    yield from bench.case(f"matmul {bench.sizes.matmul}, {str(bench.device.dtype)[6:]}", lambda: _matmul(bench))


def _numbers(bench: Bench) -> torch.Tensor:
    """Random numbers, as many bytes of them as the sizes say, and enough for each program of the read kernel."""
    least = bench.device.processors * max(resident for resident, _ in RESIDENT) * WIDTH
    return torch.empty(max(bench.sizes.copy // 2, least), dtype=bench.device.dtype, device=bench.device.torch).normal_()


def _copy(bench: Bench) -> Row:
    source = _numbers(bench)
    target = torch.full_like(source, torch.nan)
    timing = measure([lambda: target.copy_(source)], bench.device, bench.sizes.seconds)
    assert torch.equal(target[-1000:], source[-1000:])
    return {**timing.row(), "tb_s": round(tb_s(2 * source.nbytes, timing.us), 4)}


def _sum(bench: Bench) -> Row:
    source = _numbers(bench)
    timing = measure([source.sum], bench.device, bench.sizes.seconds)
    return {**timing.row(), "tb_s": round(tb_s(source.nbytes, timing.us), 4)}


def _read(bench: Bench, resident: int, stages: int) -> Row:
    source, processors = _numbers(bench), bench.device.processors
    nbytes = bytes_read(source.numel(), processors, resident=resident)
    found = read(source, processors, resident=resident, stages=stages).double().sum()
    expected = source[: nbytes // 2].double().sum()
    assert abs(float(found - expected)) < 1e-3 * (nbytes // 2) ** 0.5, "the read kernel does not read all"
    timing = measure(
        [lambda: read(source, processors, resident=resident, stages=stages)], bench.device, bench.sizes.seconds
    )
    return {**timing.row(), "tb_s": round(tb_s(nbytes, timing.us), 4)}


def _matmul(bench: Bench) -> Row:
    size = bench.sizes.matmul
    a, b = torch.randn(2, size, size, device=bench.device.torch).to(bench.device.dtype)
    timing = measure([lambda: a @ b], bench.device, bench.sizes.seconds)
    return {**timing.row(), "tflop_s": round(tflop_s(2 * size**3, timing.us), 2)}
