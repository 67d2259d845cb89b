"""The kernels equal the reference on cases drawn from the full product of shapes, each from a seed.

A case has a tree of up to six shared runs on a path, decodes, prefills or both, any heads, blocks, masks and tiles.
Unused blocks and slots hold NaN, and so does all memory before it is written. Every address is checked.

RADIXKV_SEED=N adds cases with other seeds. A failure names its seed N.
`pytest tests/kernels/interpreted/test_random.py --seed N` repeats it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from radixkv.attention import plan
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv_kernels.attention import AMD, Kind, kinds
from tests.attention.batches import Batch, BlocksFirst, fill
from tests.kernels.interpreted.attending import SMALL, attend, cast, close, expected_output
from tests.kernels.interpreted.bounds import checked

FRESH = int(os.environ.get("RADIXKV_SEED") or 0) * 1000  # the first seed of a run with fresh examples
EXAMPLES = (4, 8, 23, 40, 44, *(range(FRESH, FRESH + 20) if FRESH else ()))
"""Seeds of fast cases that differ; those of cases that failed once are added."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = 500
"""Query rows of all heads of a case, about: a case takes the interpreter some seconds."""

GPUS = ((8, 164), (8, 100), (9, 228), (10, 228), (12, 100), (AMD, 64))
"""Generations, and KiB of shared memory of a processor."""


@dataclass(frozen=True)
class Case:
    """A batch, and the arguments of `attend`."""

    batch: Batch
    window: int | None
    kinds: tuple[Kind, ...]
    options: dict[str, Any]
    depth: int

    def __str__(self) -> str:
        store = self.batch.store
        kept = {name: value for name, value in self.options.items() if name != "sinks"}
        return (
            f"depth {self.depth}, lengths {self.batch.kv_lengths} / {self.batch.query_lengths}, {store.layers[0]}, "
            f"{len(self.batch.query)} heads, blocks of {store.block_size}, {store.dtype}, window {self.window}, "
            f"{kept}, sinks {self.options['sinks'] is not None}, {self.kinds}"
        )


def tree(rng: random.Random, depth: int, most: int) -> list[int]:
    """Draw the parent of each node, and -1 for the root: a path of `depth` nodes, and branches off it."""
    nodes = list(range(-1, depth - 1))
    while len(nodes) < most and rng.random() < 0.5:
        nodes.append(rng.randrange(-1, len(nodes)))
    return nodes


def tables_of(rng: random.Random, depth: int, size: int) -> tuple[list[list[int]], list[int]]:
    """Draw tables whose deepest path has `depth` shared runs of whole blocks, and a private tail on each node."""
    longest = max(1, 36 // size)  # blocks of a run
    free = rng.sample(range(1, 1000), 999)  # block 0 is never used: masked loads go there
    paths: list[list[int]] = []
    for parent in tree(rng, depth, 8):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, *(free.pop() for _ in range(rng.randint(1, longest)))])
    ends = [*paths, paths[depth - 1]] if depth else [[] for _ in range(rng.randint(1, 4))]
    tables, lengths = [], []
    for path in ends:
        tail = rng.choice([1, size, size + 1, rng.randint(1, 70)])
        lengths.append(len(path) * size + tail)
        tables.append([*path, *(free.pop() for _ in range(-(-tail // size)))])
    return tables, lengths


def draw(seed: int) -> Case:
    """Draw the case of a seed."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3, 5, 8, 16, 16, 32, 64, 128])
    depth = rng.randint(0, min(6, 400 // size))
    tables, kv_lengths = tables_of(rng, depth, size)
    kv_heads, group, dtype = rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 4, 8, rng.randint(1, 16)]), rng.choice(DTYPES)
    lengths = rng.choice([[1], [7, 40, 100], [0, 1, 1, 2, 16, 33]])  # decodes, prefills, both
    most = -(-ROWS // (kv_heads * group * len(tables)))
    query_lengths = [min(length, most, rng.choice(lengths)) for length in kv_lengths]
    key_dim = rng.choice([64, 80, 96, 128, 192, 256, rng.randint(5, 256)])
    value_dim = key_dim if rng.random() < 0.5 else rng.choice([64, 128, 256, rng.randint(5, 256)])
    used = 1 + max(block for table in tables for block in table)
    store = rng.choice([KVStore, BlocksFirst])([LayerShape(kv_heads, key_dim, value_dim)], used + 1, size)
    fill(store, tables, kv_lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(kv_heads * group, sum(query_lengths), key_dim, generator=generator)
    sinks = torch.randn(kv_heads * group, generator=generator).to(dtype) if rng.random() < 0.3 else None
    generation, shared = rng.choice(GPUS)
    chosen = kinds(key_dim, value_dim, dtype, generation=generation, shared=shared << 10)
    options = {
        "scale": key_dim**-0.5,
        "softcap": rng.choice([None, None, 0.5, 30.0]),
        "sinks": sinks,
        "split": rng.choice([None, None, 1, 16, rng.randint(1, 100)]),
        "processors": rng.choice([1, 2, 3, 8, 40]),
        "min_saving": rng.choice([1, 1, 1, 64, plan.NEVER_SHARE]),
        "max_shared_rows": rng.choice([None, None, rng.randint(0, 20)]),
    }
    window = rng.choice([None, None, rng.randint(1, 100)])
    batch = cast(Batch(store, tables, kv_lengths, query_lengths, query), dtype)
    return Case(batch, window, chosen if rng.random() < 0.7 else SMALL, options, depth)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory from torch with NaN while this is open."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_equals_the_reference(seed: int) -> None:
    case = draw(seed)
    sinks = case.options["sinks"]
    with poisoned(), checked():
        output = attend(case.batch, case.window, kinds=case.kinds, **case.options)
    expected = expected_output(
        case.batch,
        scale=case.options["scale"],
        window=case.window,
        softcap=case.options["softcap"],
        sinks=None if sinks is None else sinks.double(),
    )
    try:
        close(output, expected, case.batch.query.dtype)
    except AssertionError as error:
        pytest.fail(f"seed {seed}: {case}\n{error}")


def test_trees_of_every_depth_are_drawn() -> None:
    """The deepest path of a batch has as many shared runs as its case says."""
    for depth in range(7):
        tables, kv_lengths = tables_of(random.Random(depth), depth, 16)
        work = plan.build(tables, kv_lengths, [1] * len(tables), block_size=16, min_saving=1)
        runs = [int((work.row_ids == row).sum()) for row in range(len(tables))]
        assert max(runs) == depth + 1
