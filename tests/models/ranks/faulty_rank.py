"""A rank other than 0 that fails, dies or hangs where a token of a step, or a file, demands it.

Each fault at each phase of a step, on each of two ranks, has a token, from FIRST on. Transfers fail while the file that
RADIXKV_TEST_FAULT names has a text such as "raise load"; with "slow" a reload takes SLOW seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from radixkv.models.ranks import group, rank_process
from radixkv.models.ranks.messages import decode

FIRST, FILE = 100, "RADIXKV_TEST_FAULT"
PHASES = ("before", "inside", "after")
SLOW = 5.0
INSIDE = 2  # the sum over all ranks at which a forward fails


def _raise() -> None:
    raise ValueError("as ordered")


FAULTS: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
}


def order(fault: str, phase: str, rank: int = 1) -> int:
    """Return the token that orders a fault."""
    return FIRST + 9 * rank + 3 * list(FAULTS).index(fault) + PHASES.index(phase)


def faulty(inputs: Sequence[Any], rank: int, step: Callable[[], Any]) -> Any:
    """Call `step`, with the faults that its tokens order for a rank."""
    tokens = {int(token) for each in inputs for token in each.tokens}
    faults = {phase: FAULTS[fault] for phase in PHASES for fault in FAULTS if order(fault, phase, rank) in tokens}
    real, calls = vars(group.RankGroup)["allreduce"], count()

    def sum_up(*args: Any, **options: Any) -> Any:
        if next(calls) == INSIDE:
            faults.get("inside", int)()
        return real(*args, **options)

    faults.get("before", int)()
    with mock.patch.object(group.RankGroup, "allreduce", sum_up):
        result = step()
    faults.get("after", int)()
    return result


class FaultyRank(rank_process.RankProcess):
    """A rank that obeys orders."""

    def step(self, buffer: bytes) -> None:
        step, file = decode(np.frombuffer(buffer, np.int64)), Path(os.environ[FILE])
        fault, _, transfer = file.read_text().partition(" ") if file.exists() else ("", "", "")
        if {"offload": step.moves, "load": step.loads}.get(transfer):
            FAULTS[fault]()
        faulty(step.inputs, 1, lambda: super(FaultyRank, self).step(buffer))

    def reload(self, file: str) -> float:
        time.sleep(SLOW * (Path(os.environ[FILE]).read_text() == "slow"))
        return super().reload(file)


if __name__ == "__main__":
    rank_process.RankProcess = FaultyRank  # type: ignore[misc]
    rank_process.main()
