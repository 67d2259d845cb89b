"""How much room the tiles of a decode step take at most, so that they can have fixed places on a device.

Knows how work lists and tiles come about, and counts. Does not know tensors, launches or who records a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv_kernels.tiles import FIELDS, HEADER, OVERREAD, Shape, Tiles, most

DEPTH = 4
"""Shared runs on one path that there is room for: a system prompt, tools, an agent, its task. Deeper trees may fit."""


@dataclass(frozen=True)
class GraphCapacity:
    """Room for the tiles of one step, of which each kind may have all."""

    rows: int
    tiles: int
    row_ids: int
    partials: int
    block_ids: int

    def holds(self, tiles: Tiles) -> bool:
        """Whether a step's tiles fit."""
        counts = (tiles.num_tiles(kind) for kind in range(len(tiles.kinds)))
        return (
            tiles.num_rows <= self.rows
            and max(counts) <= self.tiles
            and len(tiles.row_ids) <= self.row_ids
            and tiles.num_partials <= self.partials
            and len(tiles.block_ids) <= self.block_ids
        )

    def sizes(self, kinds: int) -> list[int]:
        """Numbers that the arrays `Tiles` have: each kind, row_ids, positions, merge_rows, merge_offset, merge_ids."""
        merges = [HEADER + self.rows, self.rows + 1, self.partials]
        return [HEADER + self.tiles * FIELDS] * kinds + [self.row_ids, self.rows, *merges]


def decode_capacity(
    rows: int,
    blocks: int,
    shapes: tuple[Shape, ...],
    group: int,
    *,
    spread: float | Sequence[float],
    keys: int,
    split: int | None = None,
) -> GraphCapacity:
    """Room for `rows` decodes whose tables have `blocks` blocks together and whose paths share at most `DEPTH` runs.

    Arguments are those of `tiles.build`; with `split` nothing is shared, and no sequence has more than `keys` keys.

    A tree of n leaves has at most n - 1 inner nodes, so there are n tails and n - 1 shared runs at most, and at most
    n * DEPTH rows under the runs. With t rows to the tallest tile, runs make (n - 1) + n * DEPTH / t row tiles. Of l
    keys, `tiles` makes at most 1 + l / split parts, and one more if they do not start at a block; as a kind's split is
    at least an m-th of all its keys (`most`), R row tiles become 2 R + m tiles. A row tile of r rows leaves r partials
    a part: 2 n (DEPTH + 1) in all, and those of each kind's m, of at most so many rows as it takes.
    """
    tall = min(shapes[-1].rows // group, rows)
    row_ids = rows * (DEPTH + 1)
    if split is None:
        cuts = most(spread, len(shapes))
        row_tiles = 2 * rows + rows * DEPTH // tall
        tiles = 2 * row_tiles + max(cuts)
        partials = 2 * row_ids + sum(m * min(shape.rows // group, rows) for m, shape in zip(cuts, shapes, strict=True))
    else:
        row_ids, tiles = rows, rows * (2 + keys // split)
        partials = tiles
    return GraphCapacity(rows, tiles, row_ids, partials, blocks + OVERREAD)
