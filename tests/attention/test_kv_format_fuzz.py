"""The fuzz of the cache over real pools: the stored bytes of each token derive from its namespace and whole history.

Codes and scales of all layers are compared bit by bit with those of the token's text, on the device and after a way
through host memory: with forks inside blocks, truncations, evictions, and pools that are full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.attention.host_store import HostStore
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.cache import PrefixCache
from tests.attention.batches import BlocksFirst
from tests.cache.fuzz.machine import Machine
from tests.cache.fuzz.options import Options
from tests.cache.naive import Pool, Values, Work

SHAPES = [LayerShape(2, 16, 32), LayerShape(1, 48, 16)]  # heads of several sizes
PLACES = [(KVStore, False), (BlocksFirst, True)]


class StoredPool(Pool):
    """The naive pool, and a real one that does the same."""

    def __init__(self, machine: Machine, kind: type[KVStore], staged: bool, kv_dtype: str) -> None:
        world = machine.world
        super().__init__(world.num_blocks, world.block_size, world.rng)
        self.world, self.compared = world, 0
        size = world.block_size
        self.store = kind(SHAPES, world.num_blocks, size, dtype=torch.float64, kv_dtype=kv_dtype)
        self.host = HostStore(self.store, world.host.num_blocks, staged=staged) if world.host else None

    def numbers(self, values: Values, layer: int) -> list[torch.Tensor]:
        """Keys and values of tokens, each head in a scale of its own."""
        shape, found = SHAPES[layer], []
        for part, dim in enumerate((shape.key_dim, shape.value_dim)):
            steps = np.arange(1, shape.kv_heads * dim + 1, dtype=np.uint64) * np.uint64(2 * layer + part + 1)
            mixed = (values[:, None] + np.uint64(1)) * (steps * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1))
            whole = torch.from_numpy((mixed >> np.uint64(20)).astype(np.float64) / 2.0**40)
            scaled = whole * torch.from_numpy(1.0 + (values % np.uint64(29)).astype(np.float64))[:, None]
            found.append(scaled.view(len(values), shape.kv_heads, dim).transpose(0, 1).contiguous())
        return found

    def execute(self, batch: Sequence[Work]) -> None:
        super().execute(batch)
        pending = self.world.host.loads.values() if self.world.host else []
        loads = [load for load in pending if any(load.plan is work.plan for work in batch)]
        written = [work for work in batch if all(load.plan is not work.plan for load in loads)]
        self.store.copy([pair for work in written for pair in work.plan.copies])
        if self.host:
            self.host.load(loads)
        for work in written:
            for layer in range(len(SHAPES)):
                self.store.write(layer, torch.from_numpy(work.plan.slots), *self.numbers(work.values, layer))

    def read(self, table: Any, length: int) -> Values:
        values = super().read(table, length)
        for layer in range(len(SHAPES)):
            expected = [self.store.format.encode(each) for each in self.numbers(values, layer)]
            for stored, wanted in zip(self.store.stored(layer, table, length), expected, strict=True):
                for mine, true in zip(stored, wanted, strict=True):
                    assert torch.equal(mine, true), f"layer {layer} of a cached text has other bytes"
                    self.compared += mine.numel()
        return values


@pytest.mark.parametrize(("kind", "staged"), PLACES, ids=["direct", "staged"])
@pytest.mark.parametrize("name", ["float16", "int8"])
@pytest.mark.parametrize("seed", [11, pytest.param(13, marks=pytest.mark.long)])
@pytest.mark.parametrize("host", [pytest.param(False, marks=pytest.mark.long), True])
def test_stored_bytes_belong_to_the_text(
    kind: type[KVStore], staged: bool, name: str, seed: int, host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(Options(block_size=4, host=host), seed)
    machine.world.pool = pool = StoredPool(machine, kind, staged, name)
    moves, moved = PrefixCache.moves, []

    def moving(cache: PrefixCache) -> list[tuple[int, int]]:
        found = moves(cache)
        assert pool.host is not None
        pool.host.offload(found)
        moved.extend(found)
        return found

    monkeypatch.setattr(PrefixCache, "moves", moving)
    machine.run(range(150))
    assert pool.compared > 10_000
    assert machine.world.cache.stats().copied_blocks
    assert bool(moved) == host
    assert not host or machine.world.cache.stats().loaded_tokens
