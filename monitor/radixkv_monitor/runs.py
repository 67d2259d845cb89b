"""The blocks of a record: runs (first, count, first, count, ...) of block ids, in logical order. Knows numbers only."""

from __future__ import annotations

from collections.abc import Iterable

Runs = tuple[int, ...]


def runs(blocks: Runs) -> Iterable[tuple[int, int]]:
    """The runs (first, count) of a record's blocks."""
    return zip(blocks[0::2], blocks[1::2], strict=False)


def count_blocks(blocks: Runs) -> int:
    """How many blocks these runs have."""
    return sum(blocks[1::2])


def without_last(blocks: Runs) -> Runs:
    """The runs but for their last block."""
    if not blocks:
        return ()
    return (*blocks[:-1], blocks[-1] - 1) if blocks[-1] > 1 else blocks[:-2]


def block_at(blocks: Runs, place: int) -> int | None:
    """The block that stands at this place in logical order; None behind the end."""
    for first, count in runs(blocks):
        if place < count:
            return first + place
        place -= count
    return None


def place_of(blocks: Runs, block: int) -> int | None:
    """The place of a block in logical order; None if it is not there."""
    before = 0
    for first, count in runs(blocks):
        if first <= block < first + count:
            return before + block - first
        before += count
    return None
