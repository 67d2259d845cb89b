"""What the wrappers launch compiles for GPUs that are not here, and the machine code is what it should be."""

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


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The pinned kernels, compiled in a process of its own: this one may have another driver, or none."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "compile_kernels.py"), "--pinned", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_pinned_kernel_is_there(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 24
    assert {row["target"] for row in rows} == {"sm_80", "sm_90"}


def test_none_spills_or_takes_more_shared_memory_than_there_is(rows: list[dict[str, Any]]) -> None:
    assert not [
        row for row in rows if row["spilled"] or row["shared"] > (163 if row["target"] == "sm_80" else 227) << 10
    ]


def test_memory_is_read_in_128_bits(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        wide, narrow = int(row["widths"].get("128", 0)), sum(row["widths"].values())
        assert wide > 0, row
        assert row["launch"] == "merge" or wide >= 0.2 * narrow, row


def test_products_run_on_tensor_cores(rows: list[dict[str, Any]]) -> None:
    """Tiles of 64 rows and more use Hopper's products, which read shared memory."""
    attention = [row for row in rows if row["launch"] in ("tails", "sharers", "chunks")]
    assert len(attention) == 18
    for row in attention:
        hopper = row["target"] == "sm_90" and row["launch"] != "tails"
        assert list(row["tensor_cores"]) == ["HGMMA" if hopper else "HMMA"], row


def test_nothing_else_is_at_fault(rows: list[dict[str, Any]]) -> None:
    assert not [row for row in rows if row["faults"]]
