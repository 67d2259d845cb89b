"""Draw random batches whose block tables share prefixes, as in a prefix cache."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv_kernels import reference


@dataclass(frozen=True)
class Batch:
    """Sequences over one store; slots of a sequence hold numbers, all others NaN."""

    store: KVStore
    tables: list[list[int]]
    kv_lengths: list[int]
    query_lengths: list[int]
    query: Tensor

    def expected_output(self, **options: object) -> Tensor:
        pools = numbers(self.store)
        return reference.attend(
            self.query,
            *pools,
            self.tables,
            self.kv_lengths,
            self.query_lengths,
            **options,  # type: ignore[arg-type]
        )


def numbers(store: KVStore, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all blocks, as far as the store's format has kept those of the model."""
    parts = store.key_parts[layer], store.value_parts[layer]
    key, value = (store.format.restored(store.format.decode(part.tensors)) for part in parts)
    return key, value


class BlocksFirst(KVStore):
    """A store in a GPU's layout, on a CPU, so that it can be tested anywhere."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, blocks_first=True)


def fill(store: KVStore, tables: list[list[int]], kv_lengths: list[int], seed: int = 0) -> None:
    """Write NaN everywhere, then random numbers into each slot that a sequence may read."""
    generator = torch.Generator().manual_seed(seed)
    size = store.block_size
    slots = {table[i // size] * size + i % size for table, n in zip(tables, kv_lengths, strict=True) for i in range(n)}
    index = torch.tensor(sorted(slots), dtype=torch.long)
    for layer, shape in enumerate(store.layers):
        for pool in (*store.key_parts[layer].tensors, *store.value_parts[layer].tensors):
            if pool.is_floating_point():  # scales, too
                pool.fill_(torch.nan)
        key, value = (
            torch.randn(shape.kv_heads, len(index), dim, generator=generator, dtype=torch.float64)
            for dim in (shape.key_dim, shape.value_dim)
        )
        store.write(layer, index, key, value)


def tree_tables(
    rng: random.Random, block_size: int, sequences: int, *, adjacent: bool
) -> tuple[list[list[int]], list[int]]:
    """Draw tables and lengths that branch off each other at block boundaries; blocks adjacent or scattered."""
    tables: list[list[int]] = []
    lengths: list[int] = []
    free = list(range(2000))
    if adjacent:
        free.reverse()
    else:
        rng.shuffle(free)
    for _ in range(sequences):
        table: list[int] = []
        if tables and rng.random() < 0.8:
            parent = rng.randrange(len(tables))
            table = tables[parent][: rng.randint(0, lengths[parent] // block_size)]
        shared = len(table) * block_size
        length = shared + rng.choice(
            [0, 1, block_size - 1, block_size, block_size + 1, rng.randint(0, 12 * block_size)]
        )
        table += [free.pop() for _ in range(-(-length // block_size) - len(table))]
        tables.append(table)
        lengths.append(length)
    return tables, lengths


def random_batch(
    seed: int,
    *,
    block_size: int,
    shape: LayerShape,
    group: int,
    sequences: int,
    decode: bool,
    adjacent: bool,
    kind: type[KVStore] = KVStore,
    kv_dtype: str = "auto",
) -> Batch:
    """Draw a batch in float64: decodes only, or also chunks of any length and sequences without query rows."""
    rng = random.Random(seed)
    tables, kv_lengths = tree_tables(rng, block_size, sequences, adjacent=adjacent)
    choices = [1] if decode else [0, 1, 1, 2, 7, 40, 10**6]
    query_lengths = [min(length, rng.choice(choices)) for length in kv_lengths]
    blocks = 1 + max([-1, *(block for table in tables for block in table)])
    store = kind([shape], blocks + 1, block_size, dtype=torch.float64, kv_dtype=kv_dtype)
    fill(store, tables, kv_lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    heads = shape.kv_heads * group
    query = torch.randn(heads, sum(query_lengths), shape.key_dim, generator=generator, dtype=torch.float64)
    return Batch(store, tables, kv_lengths, query_lengths, query)
