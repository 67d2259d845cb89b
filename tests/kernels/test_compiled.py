"""The wrappers' launches compile for GPUs that this machine does not have, and their code has no faults.

`make kernels` compiles all cases for all GPUs, in about an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


ATTENTION = ("tails", "sharers", "chunks")

MOVED = {
    "merge": {"parts"},
    "write": {"keys", "values"},
    "copy": {"words"},
    "norm": {"numbers", "added", "factors"},
    "rotate": {"low", "high", "cosine", "sine"},
    "spread": {"numbers"},
    "silu": {"gate", "factor"},
    "draw": {"scaled"},
}
"""What the other kernels move, by the name that it has in their source."""

MOST_SHARED = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_120": 99}
"""KiB of shared memory that a program may have."""

RESTS = {
    "mha 80": {"query1": {128}, "key1": {32, 64}, "value1": {32, 64}},  # sixteen numbers a key, on 256 threads
    "mha 96, window": {"query1": {128}, "key1": {64, 128}, "value1": {64, 128}},
    "192/128": {"query1": {128}, "key1": {128}},
}
"""How many bits at a time the rests of heads are loaded, which are no power of two: 16 bytes, or a thread's share."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Compile all pinned kernels in processes of their own: this one may have another driver, or none."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(ROOT / "scripts" / "compile_kernels.py")
    command = [sys.executable, "-W", "ignore", script, "--json", "--pinned"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same if Triton names the source line of an inlined load (3.9 does, 3.6 does not)."""
    if any("unnamed" in row["code"]["loads"] for row in rows):
        pytest.skip("this Triton does not say what an inlined load is for")
    return rows


def widths(row: dict[str, Any], name: str) -> set[int]:
    """Return the widths in bits of a load from global memory; empty if nothing of that name is loaded."""
    return {int(bits) for bits in row["code"]["loads"].get(name, ())}


@pytest.mark.long
def test_every_pinned_kernel_compiles(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 36
    assert {row["target"] for row in rows} == {"sm_80", "sm_89", "sm_90", "sm_120"}
    assert all(row["code"] for row in rows)


@pytest.mark.long
def test_none_spills_or_takes_more_shared_memory_than_there_is(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert not row["code"]["spilled"], row
        assert row["code"]["shared"] <= MOST_SHARED[row["target"]] << 10, row


@pytest.mark.long
def test_queries_keys_and_values_are_loaded_in_128_bits(named: list[dict[str, Any]]) -> None:
    for row in named:
        if row["launch"] in ATTENTION:
            assert all(widths(row, name) == {128} for name in ("query0", "key0", "value0")), row
            for name in ("query1", "key1", "value1"):
                assert widths(row, name) <= RESTS.get(row["case"], {}).get(name, set()), row
            assert {name for name in ("query1", "key1", "value1") if widths(row, name)} == set(
                RESTS.get(row["case"], {})
            ), row


@pytest.mark.long
def test_whatever_else_is_moved_is_loaded_in_128_bits(rows: list[dict[str, Any]]) -> None:
    others = [row for row in rows if row["launch"] in MOVED]
    assert len(others) == 16
    for row in others:
        assert all(widths(row, name) == {128} for name in MOVED[row["launch"]]), row


@pytest.mark.long
def test_keys_and_values_are_copied_ahead(named: list[dict[str, Any]]) -> None:
    """With block ids loaded one iteration earlier, n stages hold at least n - 1 tiles of asynchronous copies."""
    for row in named:
        if row["launch"] in ATTENTION:
            for name in ("key0", "value0"):
                assert row["code"]["asynchronous"][name] > 0, row
                assert row["code"]["buffers"][name] >= row["kind"]["stages"] - 1, row


@pytest.mark.long
def test_every_loop_over_keys_copies_them_to_shared_memory_without_registers(rows: list[dict[str, Any]]) -> None:
    """Tiles of sixteen rows have one loop; taller tiles have one without masks and one with masks."""
    for row in rows:
        if row["launch"] in ATTENTION:
            loops = row["code"]["loops"]
            assert len(loops) == (1 if row["launch"] == "tails" else 2), row
            assert all(loop["copies"] >= 4 and not loop["wide"] for loop in loops), row


@pytest.mark.long
def test_row_numbers_are_not_loaded_from_volatile_memory(rows: list[dict[str, Any]]) -> None:
    assert not [row for row in rows if row["code"]["uncached"]]


@pytest.mark.long
def test_products_run_on_tensor_cores(rows: list[dict[str, Any]]) -> None:
    """Tiles of 64 rows and more use Hopper's products, which read shared memory."""
    attention = [row for row in rows if row["launch"] in ATTENTION]
    assert len(attention) == 20
    for row in attention:
        hopper = row["target"] == "sm_90" and row["launch"] != "tails"
        assert list(row["code"]["tensor_cores"]) == ["HGMMA" if hopper else "HMMA"], row


@pytest.mark.long
def test_nothing_else_is_at_fault(rows: list[dict[str, Any]]) -> None:
    assert not [row for row in rows if row["faults"]]
