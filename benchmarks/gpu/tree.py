"""Part 3, decode along the tree, against the same kernel sequence by sequence: shared prefixes of one to five levels.

`floor_us` is the time of reading every key once at the read ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator

from .decode import fitting, timed
from .pools import Attention, copies_for
from .result import Bench, Row
from .shapes import Batch, HeadShape, comb, shared, two_level


def run(bench: Bench) -> Iterator[Row]:
    """Yield a row for every tree, and one without sharing, both over the same pools."""
    for batch in batches(bench):
        for shape in bench.sizes.shapes:
            yield from bench.case(batch.name, lambda s=shape, b=batch: _case(bench, s, b), shape=shape.name)


def batches(bench: Bench) -> list[Batch]:
    """The trees, that of the bars first."""
    sizes = bench.sizes
    made = ((shared, sizes.trees), (two_level, sizes.agents), (comb, sizes.combs))
    return [batch(*each) for batch, all_sizes in made for each in all_sizes]


def _case(bench: Bench, shape: HeadShape, batch: Batch) -> Iterator[Row]:
    copies = copies_for(shape, batch.unique_tokens, bench.sizes.rotate, bench.sizes.copies)
    pools = fitting(bench, shape, batch, copies)
    query = pools.query(batch.rows)
    flat = Attention(pools, batch, query, tree=False)
    without = timed(bench, flat, shape, batch, len(pools))
    along = Attention(pools, batch, query)
    with_tree = timed(bench, along, shape, batch, len(pools))
    read = {"unique_tokens": batch.unique_tokens, "flat_tokens": batch.flat_tokens}
    ceiling = bench.ceilings.read_tb_s
    floor = {"floor_us": round(with_tree["bytes"] / ceiling / 1e6, 2)} if ceiling else {}
    gain = {"speedup": round(without["us"] / with_tree["us"], 3)}
    yield {"mode": "tree", "read_tokens": along.read_tokens, **read, **with_tree, **floor, **gain}
    yield {"mode": "flat", "read_tokens": flat.read_tokens, **read, **without}
