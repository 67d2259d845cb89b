"""The records by which cache and model share the recurrent state of hybrid models: rows, slots, copies.

A state arena has slots, each for the recurrent state of all layers after some tokens. Slots [0, rows) are rows: each
running sequence has one, and a forward updates it in place. The other slots hold snapshots. The cache decides which
slot holds which state, and the model copies and updates them. All copies between slots form one queue in order; the
engine drains it once before the forward of a step. A snapshot inside a chunk is written by the forward itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

EMPTY = -1  # the source of a copy that sets a row to the state before the first token


@dataclass(slots=True, eq=False)
class StateRow:
    """The row of one sequence; `number` may change until the copies before a forward are drained."""

    number: int


class StateSnapshot(NamedTuple):
    """A copy of a row that a forward makes after the first `tokens` tokens of a chunk, into `slot`."""

    tokens: int
    slot: int


class StateStep(NamedTuple):
    """The state of one chunk: the row to start from and to update, and snapshots in ascending order of tokens.

    The cache may add snapshots until the copies before the chunk's forward are drained.
    """

    row: StateRow
    snapshots: Sequence[StateSnapshot] = ()
