"""The pairwise benchmark runs each option of a cache in this checkout; it asserts itself that the option is in use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "pairwise.py"


@pytest.mark.long
def test_pairwise_times_the_options_of_a_cache() -> None:
    command = [sys.executable, str(BENCHMARK), "--host", "--slices", "101", "--only", "watched,host,states"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # status 1 means slower
    assert done.stdout, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert list(rows) == ["watched", "host", "states"] and all(row["ours_ms"] > 0 for row in rows.values())
