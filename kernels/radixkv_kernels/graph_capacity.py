"""Bound the room that the tiles of a step take, so that recorded steps can have them at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv_kernels.tiles import FIELDS, HEADER, OVERREAD, Shape, Tiles, added_tiles

DEPTH = 4
"""Shared runs on one path that fit: a system prompt, tools, an agent, its task. Deeper trees may fit."""

LOWEST_BAND = 64
"""Rows of the lowest band into which a work list cuts a chunk under a window, but for its last."""


@dataclass(frozen=True, order=True)
class Bucket:
    """The size of recorded steps: at most `tokens` rows of `sequences`; decodes only, unless there are `chunks`."""

    tokens: int
    sequences: int
    chunks: bool = False

    @property
    def shared_rows(self) -> int:
        """The most query rows that all shared runs of a step may have together."""
        return DEPTH * self.sequences + self.tokens * self.chunks

    def pieces(self, chunk: int | None) -> int:
        """Return the most sequences of a work list whose sequences are cut at multiples of `chunk` tokens."""
        if chunk is None or not self.chunks:
            return self.sequences
        return 2 * self.sequences + self.tokens // chunk


@dataclass(frozen=True)
class GraphCapacity:
    """Room for the tiles of one step; each kind that may occur has room for all tiles."""

    rows: int
    tiles: tuple[int, ...]  # for each kind
    row_ids: int
    partials: int
    block_ids: int

    def holds(self, tiles: Tiles) -> bool:
        """Return whether a step's tiles fit."""
        return (
            tiles.num_rows <= self.rows
            and all(tiles.num_tiles(kind) <= most for kind, most in enumerate(self.tiles))
            and len(tiles.row_ids) <= self.row_ids
            and tiles.num_partials <= self.partials
            and len(tiles.block_ids) <= self.block_ids
        )

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of the arrays of `Tiles`: kinds, row_ids, positions, merge_rows, merge_offset, merge_ids."""
        merges = [HEADER + self.rows, self.rows + 1, self.partials]
        return [HEADER + most * FIELDS for most in self.tiles] + [self.row_ids, self.rows, *merges]


def step_capacity(
    bucket: Bucket,
    blocks: int,
    shapes: tuple[Shape, ...],
    group: int,
    *,
    spread: float | Sequence[float],
    window: int | None = None,
    chunk: int | None = None,
) -> GraphCapacity:
    """Return room for the balanced steps of a bucket whose tables have `blocks` blocks together.

    The arguments are arguments of `tiles.build` and of the work list, whose shared runs have `bucket.shared_rows` rows
    at most.

    Items: n sequences have at most n - 1 shared runs, and n tails or chunks. A window cuts chunks into bands, and each
    into three items for the same rows, which become one tile; without a window there are two. With t rows in the
    tallest tile, R rows of i items make i + R / t row tiles. A kind's tiles are cut into as many parts as there are
    tiles, and `added_tiles` more; and each is cut once more if it does not start at a block, as under a window. Each
    part leaves a partial for each of its rows.
    """
    cuts, tall = added_tiles(spread, len(shapes)), min(shapes[-1].rows // group, bucket.tokens)
    parts = 1 if window is None else 2
    chunk_rows = bucket.tokens * bucket.chunks
    bands = chunk_rows // LOWEST_BAND * (parts - 1)
    row_tiles = 2 * bucket.pieces(chunk) + bands + (bucket.shared_rows + chunk_rows) // tall
    added = sum(m * min(shape.rows // group, bucket.tokens) for m, shape in zip(cuts, shapes, strict=True))
    return GraphCapacity(
        rows=bucket.tokens,
        tiles=_of_kinds(parts * row_tiles + max(cuts), shapes, group, bucket.tokens),
        row_ids=bucket.shared_rows + bucket.tokens + parts * chunk_rows,
        partials=parts * (bucket.shared_rows + bucket.tokens) + added,
        block_ids=blocks + OVERREAD,
    )


def split_capacity(
    rows: int, blocks: int, shapes: tuple[Shape, ...], group: int, *, keys: int, split: int
) -> GraphCapacity:
    """Return room for `rows` decodes of at most `keys` keys each, cut into parts of about `split`, that share nothing.

    From l keys, `tiles` makes at most 1 + l / split parts, and one more if they do not start at a block.
    """
    tiles = rows * (2 + keys // split)
    return GraphCapacity(rows, _of_kinds(tiles, shapes, group, 1), rows, tiles, blocks + OVERREAD)


def _of_kinds(tiles: int, shapes: tuple[Shape, ...], group: int, rows: int) -> tuple[int, ...]:
    """Return the most tiles of each kind: a tile of 1 to `rows` rows has the first shape that it fits into."""
    smaller = (0, *(shape.rows for shape in shapes))
    return tuple(
        tiles * (below < rows * group and group <= shape.rows) for below, shape in zip(smaller, shapes, strict=False)
    )
