"""The work list of one attention step, in arrays that both a CPU loop and GPU kernels read.

`radixkv.attention.plan` builds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class WorkList:
    """The keys that each query row reads: every visible (row, key) pair is in exactly one item.

    Item `i` multiplies the `rows[i]` query rows `row_ids[row_offset[i]:][:rows[i]]` with the `tokens[i]` keys at the
    positions `kv_start[i] + [0, tokens[i])` of one path. The key at position `p` lies in block
    `block_ids[block_offset[i] + p // block_size - kv_start[i] // block_size]`, slot `p % block_size`.
    A key is visible to a row iff `position - window < p <= position`. If all keys of an item are visible to all of its
    rows, `fully_visible[i]` is set, and no mask is needed.

    Each (item, row) is a *partial*, numbered by its place in `row_ids`: an output and a log-sum-exp. Row `r` is the
    merge of the partials `merge_ids[merge_offset[r]:merge_offset[r + 1]]` in the order of their keys. The result thus
    does not depend on the order in which items are computed. A list belongs to one step, and equality is identity.
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
    origin: object = None  # the builder's data, from which it builds the next step's list

    @property
    def num_rows(self) -> int:
        """The number of query rows of the step."""
        return len(self.positions)

    def padded(self, rows: int) -> WorkList:
        """Return the same list for a step of `rows` query rows: the last ones read nothing, at position 0."""
        if rows == self.num_rows:
            return self
        positions: Int32 = np.zeros(rows, dtype=np.int32)
        positions[: self.num_rows] = self.positions
        offsets: Int32 = np.full(rows + 1, len(self.merge_ids), dtype=np.int32)
        offsets[: self.num_rows + 1] = self.merge_offset
        return replace(self, positions=positions, merge_offset=offsets)

    @property
    def read_tokens(self) -> int:
        """The number of keys that are read, each once per item: the cost of a decode step."""
        return int(self.tokens.sum())
