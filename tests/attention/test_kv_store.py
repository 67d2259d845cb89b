"""Compare writes, copies and gathers with numpy, in both memory layouts."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.errors import InvalidInput
from tests.attention.batches import BlocksFirst

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # of 2 MB
SHAPES = [LayerShape(2, 3, 5), LayerShape(1, 4, 4)]


@pytest.mark.parametrize("kind", [KVStore, BlocksFirst])
def test_write_copy_and_gather_do_what_numpy_does(kind: type[KVStore]) -> None:
    rng, size, blocks = random.Random(0), 3, 40
    store = kind(SHAPES, blocks, size, dtype=torch.float64)
    model = [
        (np.zeros((s.kv_heads, blocks * size, s.key_dim)), np.zeros((s.kv_heads, blocks * size, s.value_dim)))
        for s in SHAPES
    ]
    for _ in range(50):
        for layer, shape in enumerate(SHAPES):
            slots = rng.sample(range(blocks * size), rng.randint(0, 20))
            new = [
                torch.randn(shape.kv_heads, len(slots), dim, dtype=torch.float64)
                for dim in (shape.key_dim, shape.value_dim)
            ]
            store.write(layer, torch.tensor(slots, dtype=torch.long), *new)
            for array, tensor in zip(model[layer], new, strict=True):
                array[:, slots] = tensor.numpy()
        count = rng.randint(0, 8)
        pairs = list(zip(rng.choices(range(blocks), k=count), rng.sample(range(blocks), count), strict=True))
        store.copy(pairs)
        for arrays in model:
            for array in arrays:
                by_block = array.reshape(len(array), blocks, size, -1)
                by_block[:, [b for _, b in pairs]] = by_block[:, [a for a, _ in pairs]]
        table, length = rng.sample(range(blocks), 9), rng.randint(0, 9 * size)
        index = [table[i // size] * size + i % size for i in range(length)]
        for layer in range(len(SHAPES)):
            for array, tensor in zip(model[layer], store.gather(layer, table, length), strict=True):
                np.testing.assert_array_equal(array[:, index], tensor.numpy())


def test_sizes() -> None:
    store = KVStore(SHAPES, 10, 16, dtype=torch.bfloat16)
    assert store.bytes_per_block == 16 * (2 * 8 + 8) * 2
    assert store.nbytes == 10 * store.bytes_per_block
    assert store.nbytes == sum(tensor.nbytes for tensor in (*store.keys, *store.values))


@pytest.mark.skipif(not PAGES.is_file() or "[never]" in PAGES.read_text(), reason="of a kernel that has none")
def test_a_token_takes_small_pages() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    store, before = KVStore([LayerShape(4, 64, 64)] * 8, num_blocks=1024), resident()
    for pool in (*store.keys, *store.values):
        pool[:, 5] = 1.0
    assert resident() - before < 8e6  # with pages of 2 MB more than 32


def test_write_casts_to_the_stores_dtype() -> None:
    store = KVStore([LayerShape(1, 2, 2)], 2, 4)
    store.write(
        0, torch.tensor([5]), torch.ones(1, 1, 2, dtype=torch.bfloat16), torch.ones(1, 1, 2, dtype=torch.float64)
    )
    assert store.gather(0, [1], 2)[1].tolist() == [[[0, 0], [1, 1]]]


def test_a_gather_is_not_overwritten_by_the_next() -> None:
    store = KVStore([LayerShape(1, 1, 1)], 2, 1)
    store.write(0, torch.tensor([0, 1]), torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [4.0]]]))
    key, value = store.gather(0, [0], 1)
    store.gather(0, [1], 1)
    assert (key.item(), value.item()) == (1.0, 3.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVStore([], 0),
        lambda: KVStore(SHAPES, 0),
        lambda: KVStore(SHAPES, 1, 0),
        lambda: KVStore(SHAPES, 1, dtype=torch.int8),
        lambda: LayerShape(0, 1, 1),
    ],
)
def test_what_makes_no_store_is_refused(make: object) -> None:
    with pytest.raises(InvalidInput):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("num_blocks", [2**40, 2**60])
def test_a_pool_that_does_not_fit_is_a_memory_error(num_blocks: int) -> None:
    with pytest.raises(MemoryError, match="bytes of KV do not fit into memory"):
        KVStore([LayerShape(8, 128, 128)], num_blocks)


def test_a_forked_process_writes_into_a_pool_of_its_own() -> None:
    store = KVStore([LayerShape(1, 2, 2)], 2, 4)
    if (child := os.fork()) == 0:
        store.keys[0].numpy()[:] = 1.0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not store.keys[0].any()
