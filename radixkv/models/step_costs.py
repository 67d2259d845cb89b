"""Measure what steps of a runner cost, before anything is cached."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from radixkv.attention.host_store import HostCosts
from radixkv.models.loaded import SequenceInput
from radixkv.sizing.recurrent_state import StateRow, StateStep

_FIRST_TOKENS = 16
_PREFILL_SECONDS = 0.2  # of the forward that measures a prefill, about
_MEASURING_SECONDS = 1.0  # after which no other forward measures a prefill
_CONTEXT, _MOST_ROWS, _TIMES = 528, 16, 5  # tokens, rows and repetitions of the forwards that measure rows


class Measured(Protocol):
    """A runner whose pool holds nothing yet: `room` tokens of one sequence fit into it, in blocks of `block_size`."""

    @property
    def room(self) -> int:
        """The longest sequence, in tokens."""

    @property
    def block_size(self) -> int:
        """The tokens of a block."""

    @property
    def host(self) -> Any | None:
        """The host memory."""

    @property
    def states(self) -> Any | None:
        """The slots of recurrent states."""

    def run(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """Compute a step."""


def host_costs(runner: Measured, chunk: int) -> HostCosts:
    """Measure the seconds per token of loading KV from the host, and of a prefill of up to `chunk` tokens.

    Nothing may be cached yet: blocks of the pool and of the host, and a row of state, are overwritten. Costs a few
    copies, and forwards of about half a second in all. On a busy machine they may take longer: after the first two,
    none begins more than a second after the start. Needs `host`.
    """
    assert runner.host is not None
    load = runner.host.bytes_per_block / runner.block_size / runner.host.measure()
    most = max(1, min(chunk, runner.room))
    count = first = min(_FIRST_TOKENS, most)
    until = time.perf_counter() + _MEASURING_SECONDS
    _prefill_seconds(runner, count)  # the first forward of a process takes longer
    seconds = _prefill_seconds(runner, count)
    while seconds < _PREFILL_SECONDS / 2 and count < most and time.perf_counter() < until:
        count = min(most, max(2 * count, int(count * _PREFILL_SECONDS / seconds)))  # a GPU is faster with more
        seconds = _prefill_seconds(runner, count)
    if count > first and time.perf_counter() < until:  # and so does the first forward of a size
        seconds = min(seconds, _prefill_seconds(runner, count))
    return HostCosts(load, seconds / count)


def row_costs(runner: Measured) -> tuple[tuple[int, float], ...]:
    """Measure the seconds of forwards of 1 to 16 rows after a context of up to 512 tokens.

    All rows have logits. Nothing may be cached yet: blocks of the pool are overwritten. Costs a prefill of the
    context, and up to five forwards of each; after a second, only those of numbers that have none.
    """
    room = min(_CONTEXT, runner.room)
    context, found = max(0, room - _MOST_ROWS), dict[int, float]()
    if context:
        _prefill_seconds(runner, context)
    until = time.perf_counter() + _MEASURING_SECONDS
    for _ in range(_TIMES):
        for rows in (1, 2, 4, 6, 8, 12, _MOST_ROWS):
            if rows <= room and (rows not in found or time.perf_counter() < until):
                found[rows] = min(_rows_seconds(runner, context, rows), found.get(rows, math.inf))
    return tuple(found.items())


def _rows_seconds(runner: Measured, context: int, rows: int) -> float:
    table = np.arange(-(-(context + rows) // runner.block_size), dtype=np.int32)
    places = context + np.arange(rows)
    return _seconds(runner, SequenceInput(np.zeros(rows, np.int32), context, places, table, logit_rows=rows))


def _prefill_seconds(runner: Measured, count: int) -> float:
    """Return the seconds of a forward of `count` tokens over the first blocks of the pool."""
    table = np.arange(-(-count // runner.block_size), dtype=np.int32)
    state = None if runner.states is None else StateStep(StateRow(0))
    return _seconds(runner, SequenceInput(np.zeros(count, np.int32), 0, np.arange(count), table, state=state))


def _seconds(runner: Measured, chunk: SequenceInput) -> float:
    began = time.perf_counter()
    runner.run([chunk]).cpu()  # waits for the device
    return time.perf_counter() - began
