"""Recomputed KV equals the cached KV unless it was changed, and then the first change is found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.models import adapter
from radixkv.models.kv_recompute import TOLERANCE, Recheck, compare
from radixkv.models.loaded import LoadedModel
from radixkv.models.runner import Runner
from tests.models.step_runner import chunk
from tests.selection import mostly_long

BLOCKS, SIZE = 40, 4
_LOADED: dict[tuple[str, torch.dtype], LoadedModel] = {}


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def load(build: Callable[..., Any]) -> Callable[[str, torch.dtype], LoadedModel]:
    def loaded(family: str, dtype: torch.dtype) -> LoadedModel:
        key = family, dtype
        if key not in _LOADED:
            _LOADED[key] = adapter.load(build(*key))
        return _LOADED[key]

    return loaded


class Path:
    """One prompt in a pool, computed in chunks of any length, or on the grid if the runner is deterministic."""

    def __init__(self, loaded: LoadedModel, grid: int, length: int, *, exact: bool, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.grid = grid
        self.runner = Runner(loaded, BLOCKS, SIZE, deterministic=exact, recheck_tokens=grid)
        self.tokens = np.array([self.rng.randrange(3, 97) for _ in range(length)], dtype=np.int32)
        self.table = np.array(self.rng.sample(range(BLOCKS), -(-length // SIZE)), dtype=np.int32)
        start = 0
        while start < length:
            count = grid if exact else self.rng.choice([1, 2, 3, 17, 40])
            end = min(start + count, length)
            table = self.table[: -(-end // SIZE)]
            self.runner.run([chunk(self.tokens[start:end], start, table, isolated=exact)])
            start = end

    def recheck(self, start: int, end: int | None = None) -> Recheck:
        end = min(start + self.grid, len(self.tokens)) if end is None else end
        return self.runner.recheck(self.tokens[:end], start, self.table[: -(-end // SIZE)])

    def all(self) -> list[Recheck]:
        return [self.recheck(start) for start in range(0, len(self.tokens), self.grid)]

    @contextmanager
    def changed(self, layer: int, part: str, position: int, by: float) -> Iterator[None]:
        """Move one number of the pool by a number of root mean squares of its head."""
        pool = (self.runner.store.keys if part == "key" else self.runner.store.values)[layer]
        key, value = self.runner.store.gather(layer, self.table, len(self.tokens))
        scale = float((key if part == "key" else value)[-1].double().square().mean().sqrt())
        place = (-1, int(self.table[position // SIZE]), position % SIZE, 3)
        before = pool[place].clone()
        pool[place] += by * scale
        yield
        pool[place] = before


@pytest.mark.parametrize("grid", mostly_long([24, 30], 30))
def test_healthy_kv_passes_however_it_was_computed(
    load: Callable[..., LoadedModel], family: str, dtype: torch.dtype, grid: int
) -> None:
    for seed in range(2):
        results = Path(load(family, dtype), grid, 101, exact=False, seed=seed).all()
        assert [result.positions for result in results] == [()] * len(results)
        assert max(result.worst for result in results) < TOLERANCE[dtype] / 4


@pytest.mark.parametrize("grid", mostly_long([24, 30], 30))
def test_a_deterministic_runner_computes_the_same_bits_again(
    load: Callable[..., LoadedModel], family: str, dtype: torch.dtype, grid: int
) -> None:
    path = Path(load(family, dtype), grid, 4 * grid, exact=True)
    assert [result.worst for result in path.all()] == [0.0] * 4
    assert path.recheck(grid, end=2 * grid - 7).worst == 0.0  # of a chunk whose end was evicted


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_change_is_found_where_it_is(
    load: Callable[..., LoadedModel], dtype: torch.dtype, layer: int, part: str
) -> None:
    path = Path(load("llama", dtype), 24, 101, exact=False)
    for position in (0, 23, 24, 50, 100):
        with path.changed(layer, part, position, 3 * TOLERANCE[dtype]):
            found = path.recheck(position // 24 * 24)
            assert found.positions == (position % 24,)
            assert (found.layer, found.part) == (layer, part)
            assert TOLERANCE[dtype] < found.worst < 10 * TOLERANCE[dtype]
        assert not path.recheck(position // 24 * 24).positions


def test_a_deterministic_runner_finds_the_smallest_change_there_is(
    load: Callable[..., LoadedModel], dtype: torch.dtype
) -> None:
    path = Path(load("qwen3", dtype), 24, 96, exact=True)
    pool = path.runner.store.values[1]
    place = (0, int(path.table[10]), 2, 5)
    before = pool[place].clone()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    pool.view(bits)[place] += 1  # the next number that the dtype has
    assert path.recheck(24).positions == (42 - 24,)
    pool[place] = before
    assert path.recheck(24).worst == 0.0


@pytest.mark.parametrize("exact", [False, True])
def test_nothing_that_is_cached_is_written(load: Callable[..., LoadedModel], exact: bool) -> None:
    path = Path(load("mistral", torch.float32), 30, 90, exact=exact)
    pools = [*path.runner.store.keys, *path.runner.store.values]
    before = [pool[:, :BLOCKS].clone() for pool in pools]
    path.all()
    assert all(torch.equal(pool[:, :BLOCKS], old) for pool, old in zip(pools, before, strict=True))


@pytest.mark.parametrize(("layer", "by", "found"), [(0, 3, 0), (0, 5, 1), (1, 30, 0), (1, 70, 1)])
def test_the_first_layer_of_codes_is_compared_more_strictly(layer: int, by: int, found: int) -> None:
    """Healthy codes of deep layers may be 25 steps apart."""
    store = KVStore([LayerShape(1, 64, 64)] * 2, 4, SIZE, kv_dtype="int8")
    for each in range(2):
        new = torch.randn(2, 1, 2 * SIZE, 64)
        for first in (0, 2):
            store.write(each, torch.arange(first * SIZE, (first + 2) * SIZE), *new)
            codes = store.key_parts[each].tensors[0]
            codes.clamp_(-50, 50)
    store.key_parts[layer].tensors[0][0, 1, 2, 9] += by
    mine, again = np.array([0, 1], np.int32), np.array([2, 3], np.int32)
    result = compare(store, mine, again, 0, 2 * SIZE)
    assert result.positions == (SIZE + 2,) * found
    assert result.worst == pytest.approx(by)
    assert compare(store, mine, again, 0, 2 * SIZE, exact=True).positions == (SIZE + 2,)
