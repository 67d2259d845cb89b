"""Threads of torch sleep while they wait, and leave the cores of a busy machine to others."""

import os
import subprocess
import sys

import pytest

_WAITS = """
import time
import radixkv
import torch

torch.set_num_threads(2)
numbers = torch.ones(40_000).add_(1)
before = time.process_time() - time.thread_time()
for _ in range(100):
    numbers.add_(1)  # in two threads
    time.sleep(0.01)
print(time.process_time() - time.thread_time() - before)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads never spin on one core")
@pytest.mark.parametrize(
    ("setting", "spins"), [({}, False), pytest.param({"OMP_WAIT_POLICY": "active"}, True, marks=pytest.mark.long)]
)
def test_a_waiting_thread_sleeps_unless_the_user_decides_otherwise(setting: dict[str, str], spins: bool) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", _WAITS]
    found = subprocess.run(command, env={**kept, **setting}, capture_output=True, text=True, check=True)
    assert (float(found.stdout) > 0.1) == spins  # seconds of CPU time of the other threads, of one second of waiting
