"""Bound the room that the tiles of a decode step take, so that recorded steps can have them at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv_kernels.tiles import FIELDS, HEADER, OVERREAD, Shape, Tiles, added_tiles

DEPTH = 4
"""Shared runs on one path that fit: a system prompt, tools, an agent, its task. Deeper trees may fit."""


def shared_rows(rows: int) -> int:
    """Return the most rows that all shared runs of a step of `rows` decodes may have together."""
    return rows * DEPTH


@dataclass(frozen=True)
class GraphCapacity:
    """Room for the tiles of one step; each kind has room for all tiles."""

    rows: int
    tiles: int
    row_ids: int
    partials: int
    block_ids: int

    def holds(self, tiles: Tiles) -> bool:
        """Return whether a step's tiles fit."""
        counts = (tiles.num_tiles(kind) for kind in range(len(tiles.kinds)))
        return (
            tiles.num_rows <= self.rows
            and max(counts) <= self.tiles
            and len(tiles.row_ids) <= self.row_ids
            and tiles.num_partials <= self.partials
            and len(tiles.block_ids) <= self.block_ids
        )

    def sizes(self, kinds: int) -> list[int]:
        """Return the sizes of the arrays of `Tiles`: kinds, row_ids, positions, merge_rows, merge_offset, merge_ids."""
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
    """Return room for `rows` decodes whose tables have `blocks` blocks together, and `shared_rows` in shared runs.

    Arguments are those of `tiles.build`; with `split` nothing is shared, and no sequence has more than `keys` keys.

    A tree of n leaves has at most n - 1 inner nodes, so there are n tails and n - 1 shared runs at most, and at most
    n * DEPTH rows under the runs. With t rows in the tallest tile, runs make (n - 1) + n * DEPTH / t row tiles. From l
    keys, `tiles` makes at most 1 + l / split parts, and one more if they do not start at a block. A kind's split is at
    least an m-th of all its keys (`added_tiles`), so R row tiles become 2 R + m tiles. A row tile of r rows leaves r
    partials per part: 2 n (DEPTH + 1) in all, and those of the m added tiles of each kind, of its rows at most.
    """
    tall = min(shapes[-1].rows // group, rows)
    row_ids = rows * (DEPTH + 1)
    if split is None:
        cuts = added_tiles(spread, len(shapes))
        row_tiles = 2 * rows + rows * DEPTH // tall
        tiles = 2 * row_tiles + max(cuts)
        partials = 2 * row_ids + sum(m * min(shape.rows // group, rows) for m, shape in zip(cuts, shapes, strict=True))
    else:
        row_ids, tiles = rows, rows * (2 + keys // split)
        partials = tiles
    return GraphCapacity(rows, tiles, row_ids, partials, blocks + OVERREAD)
