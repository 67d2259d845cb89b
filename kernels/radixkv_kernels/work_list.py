"""The work list of one attention step, in arrays that a CPU loop and a GPU kernel read alike.

Knows positions, rows and block ids. Does not know how the list came about (`radixkv.attention.plan`), nor tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class WorkList:
    """Which query rows read which keys: every visible (row, key) pair stands in exactly one item.

    Item `i` multiplies the `rows[i]` query rows `row_ids[row_offset[i]:][:rows[i]]` with the `tokens[i]` keys at the
    positions `kv_start[i] + [0, tokens[i])` of one path. The key at position `p` lies in block
    `block_ids[block_offset[i] + p // block_size - kv_start[i] // block_size]`, slot `p % block_size`.
    A key is visible to a row iff `position - window < p <= position`; `fully_visible[i]` says that all of the item's
    keys are, to all of its rows, so that no mask is needed.

    Each (item, row) is a *partial*, numbered by its place in `row_ids`: an output and a log-sum-exp. Row `r` is done
    by merging the partials `merge_ids[merge_offset[r]:merge_offset[r + 1]]` in this order, which is that of their
    keys, so that the result does not depend on who computed which item when. Equality is identity: a list is of a step.
    """

    block_size: int
    window: int | None
    block_offset: Int32  # [items]
    kv_start: Int32  # [items]
    tokens: Int32  # [items]
    row_offset: Int32  # [items]
    rows: Int32  # [items]
    fully_visible: NDArray[np.bool_]  # [items]
    block_ids: Int32  # [blocks of all items]
    row_ids: Int32  # [partials]
    positions: Int32  # [query rows] absolute position of each query row
    merge_offset: Int32  # [query rows + 1]
    merge_ids: Int32  # [partials]
    origin: object = None  # what the builder remembers, to build the next step's list from this one

    @property
    def num_items(self) -> int:
        """How many items there are."""
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        """How many query rows the step has."""
        return len(self.positions)

    @property
    def read_tokens(self) -> int:
        """How many keys are read, each once per item: what a decode step costs."""
        return int(self.tokens.sum())
