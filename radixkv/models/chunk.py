"""A piece of one sequence that a step computes. Knows tokens, slots and blocks; does not know who plans or runs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + n) of one sequence, which this step computes and stores; a decode is a chunk of one.

    `slots` says where the n tokens' KV goes, `block_table` covers everything from token 0 to the chunk's end. A chunk
    that is `alone` gets a forward of its own: a matrix product of other height may round its rows differently.
    """

    tokens: NDArray[np.int32]
    start: int
    slots: NDArray[np.int64]
    block_table: NDArray[np.int32]
    alone: bool = False
