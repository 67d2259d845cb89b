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

from radixkv.figures import counter, described, gauge

BATCH = 64
"""Blocks of a transaction."""

SCRATCH = 16
"""Host blocks beyond those of the cache, through which blocks of the device are copied to the disk."""

_ROW = 512  # bytes of a record in the index without its tokens


@described
@dataclass(frozen=True, slots=True)
class DiskStats:
    """A folder of records at one moment. Counters begin when the engine is loaded."""

    slots: int = gauge("blocks", "Blocks of the third tier", hidden="the sum of radixkv:disk_blocks")
    records: int = gauge("blocks", "Used blocks of the third tier", hidden="in radixkv:disk_blocks")
    written_blocks: int = counter("blocks", "Blocks that were written to the disk cache", "disk_written_blocks")
    read_blocks: int = counter("blocks", "Blocks that were read from the disk cache", "disk_read_blocks")
    evicted_records: int = counter(
        "blocks", "Blocks that were evicted on disk to make room there", "disk_evicted_records"
    )
    dropped_blocks: int = counter(
        "blocks", "Blocks that were not written: the disk was too slow, full, or failed", "disk_dropped_blocks"
    )
    damaged_records: int = counter(
        "blocks",
        "Blocks on disk that were dropped because they, or a block before them, were damaged",
        "disk_damaged_records",
    )
    failed_writes: int = counter("faults", "Faults of writing to the disk cache", "disk_failed_writes")
    failed_reads: int = counter("faults", "Faults of reading from the disk cache", "disk_failed_reads")
    abandoned_reads: int = counter(
        "requests", "Requests that gave up waiting for the disk cache", "disk_abandoned_reads"
    )
    read_bytes_per_s: int = gauge("bytes", "Measured bytes that a second reads", hidden="the speed of a device")


NO_DISK = DiskStats()


def slots_in(memory: int, image_bytes: int, block_size: int) -> int:
    """Return how many blocks fit into `memory` bytes of a disk, with their records.

    >>> slots_in(1 << 30, 737_280, 16)
    1455
    """
    return memory // (image_bytes + _ROW + 8 * block_size)
