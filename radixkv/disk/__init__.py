"""A tier of KV on disk: records of full blocks, which an engine that is started again finds.

records.py  the index: the record of each block, with the slot of its image
slabs.py    files with slots of one size, for the images
store.py    one folder of records: its writes, its reads, and their faults
folder.py   the folder of a user: its lock, and a folder for each fingerprint
tier.py     the runs that leave a prefix cache, and the records that continue a text

A record's parent is always on disk. An image is durable before its record is. Records and images have checksums, so
that a fault costs hits only.
"""

from __future__ import annotations

from dataclasses import dataclass

BATCH = 64
"""Blocks of a transaction."""

SCRATCH = 16
"""Host blocks beyond those of the cache, through which blocks of the device are copied to the disk."""

_ROW = 512  # bytes of a record in the index without its tokens


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A folder of records at one moment: gauges, and counters since the engine was loaded.

    `slots` have room for a block each, and `records` of them are used. `written_blocks` and `read_blocks` were copied.
    `evicted_records` made room. `dropped_blocks` were not written: the disk was slower than eviction, had no room, or
    failed. `damaged_records` were dropped with their subtrees. `failed_writes` and `failed_reads` count faults,
    `abandoned_reads` requests that waited for a disk in vain. `read_bytes_per_s` is measured.
    """

    slots: int = 0
    records: int = 0
    written_blocks: int = 0
    read_blocks: int = 0
    evicted_records: int = 0
    dropped_blocks: int = 0
    damaged_records: int = 0
    failed_writes: int = 0
    failed_reads: int = 0
    abandoned_reads: int = 0
    read_bytes_per_s: int = 0


NO_DISK = DiskStats()


def slots_in(memory: int, image_bytes: int, block_size: int) -> int:
    """Return how many blocks fit into `memory` bytes of a disk, with their records.

    >>> slots_in(1 << 30, 737_280, 16)
    1455
    """
    return memory // (image_bytes + _ROW + 8 * block_size)
