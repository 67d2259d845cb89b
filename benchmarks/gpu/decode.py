"""Part 2, plain decode attention: bandwidth at each batch and context, in paged and in contiguous block tables.

Sequences share nothing. `paged` has scattered blocks, `contiguous` adjacent ones. `resident` runs over one pool that
fits into the cache, for comparison with benchmarks that do not rotate pools.
"""

from __future__ import annotations

from collections.abc import Iterator

from .pools import Attention, Pools, copies_for
from .result import Bench, Row, Skipped
from .shapes import Batch, HeadShape, kv_bytes, private, row_bytes, tb_s
from .timing import measure

ROOM = 0.8
"""Share of the free memory that pools may take."""


def run(bench: Bench) -> Iterator[Row]:
    """Rows of every head shape, batch and context."""
    for shape, count, context in bench.sizes.decodes():
        batch = private(count, context)
        known = {"shape": shape.name, "batch": count, "context": context}
        yield from bench.case(batch.name, lambda s=shape, c=count, n=context: _case(bench, s, c, n), **known)


def _case(bench: Bench, shape: HeadShape, count: int, context: int) -> Iterator[Row]:
    paged, contiguous = private(count, context), private(count, context, scattered=False)
    copies = copies_for(shape, count * context, bench.sizes.rotate, bench.sizes.copies)
    pools = fitting(bench, shape, paged, copies)
    query = pools.query(count)
    cases = [("paged", paged, len(pools)), ("contiguous", contiguous, len(pools))]
    if kv_bytes(shape, count * context) <= bench.device.l2 // 2 and copies > 1:
        cases.append(("resident", paged, 1))
    for layout, batch, rotated in cases:
        ours = Attention(pools, batch, query)
        yield {"layout": layout} | timed(bench, ours, shape, batch, rotated) | {"pools": rotated}


def fitting(bench: Bench, shape: HeadShape, batch: Batch, copies: int) -> Pools:
    """Pools for a batch, fewer if the memory is short; Skipped if not even one fits."""
    each = kv_bytes(shape, batch.num_blocks * 16)
    most = int(bench.device.free() * ROOM) // each
    if not most:
        raise Skipped(f"a pool takes {each / 2**30:.1f} GiB, {bench.device.free() / 2**30:.1f} are free")
    return Pools(shape, batch.num_blocks, min(copies, most), bench.device)


def timed(bench: Bench, ours: Attention, shape: HeadShape, batch: Batch, copies: int) -> Row:
    """Check, then time; the bandwidth is that of the keys and values that have to be read at least once."""
    error = ours.error()
    timing = measure(ours.calls(copies), bench.device, bench.sizes.seconds)
    nbytes = kv_bytes(shape, batch.unique_tokens) + row_bytes(shape, batch.rows)
    rate = round(tb_s(nbytes, timing.us), 4)
    tiles = {
        "tiles": list(ours.step.counts),
        "partials": ours.step.num_partials,
        "merges": ours.step.num_merges,
    }
    share = bench.ceilings.share(rate)
    return {**timing.row(), "bytes": nbytes, "tb_s": rate, "share": share, "error": round(error, 5), **tiles}
