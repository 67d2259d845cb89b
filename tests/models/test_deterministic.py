"""A deterministic runner: bits depend on tokens, starts and lengths; not on blocks or other inputs of the step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from radixkv import Engine, SamplingParams
from radixkv.models import adapter
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from tests.models.step_runner import chunk
from tests.selection import mostly_long

BLOCKS, SIZE = 160, 4
DTYPES = [torch.float32, torch.bfloat16]
_LOADED: dict[tuple[str, torch.dtype], LoadedModel] = {}  # loading includes a self-test: once for all tests


@pytest.fixture(params=DTYPES, ids=str)
def loaded(request: pytest.FixtureRequest, family: str, build: Callable[..., Any]) -> LoadedModel:
    key = family, request.param
    if key not in _LOADED:
        _LOADED[key] = adapter.load(build(*key))
    return _LOADED[key]


@dataclass
class Reader:
    """One sequence over a runner's pool, computed in chunks that end on a grid."""

    runner: Runner
    tokens: list[int]
    table: list[int]
    logits: list[torch.Tensor] = field(default_factory=list)

    def chunk(self, start: int, end: int, *, isolated: bool = False) -> SequenceInput:
        return chunk(self.tokens[start:end], start, self.table[: blocks_for(end)], isolated=isolated)

    def prefill(self, start: int, end: int, grid: int) -> None:
        for low in range(start, end, grid):
            self.logits.append(self.runner.run([self.chunk(low, min(low + grid, end))])[0])

    def decode(self, start: int) -> None:
        for position in range(start, len(self.tokens)):
            self.logits.append(self.runner.run([self.chunk(position, position + 1)])[0])

    def kv(self) -> list[torch.Tensor]:
        layers = range(len(self.runner.store.layers))
        return [part for layer in layers for part in self.runner.store.gather(layer, self.table, len(self.tokens))]


def blocks_for(tokens: int) -> int:
    return -(-tokens // SIZE)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 97) for _ in range(count)]


@pytest.mark.parametrize("grid", mostly_long([24, 30], 30))  # block boundaries, and not
def test_a_hit_on_the_grid_changes_no_bit(loaded: LoadedModel, grid: int) -> None:
    rng = random.Random(grid)
    for _ in range(2):
        prompt = rng.randrange(grid + 1, 100)
        tokens, hit = random_tokens(rng, prompt + 6), (prompt - 1) // grid * grid
        cold = Reader(Runner(loaded, BLOCKS, SIZE, deterministic=True), tokens, list(range(blocks_for(len(tokens)))))
        cold.prefill(0, prompt, grid)
        cold.decode(prompt)

        runner = Runner(loaded, BLOCKS, SIZE, deterministic=True)
        places = rng.sample(range(BLOCKS), 2 * len(cold.table))
        first = Reader(runner, tokens[:hit] + random_tokens(rng, 5), places[: len(cold.table)])
        first.prefill(0, len(first.tokens), grid)
        # The hit: whole blocks are shared, the part-filled one is copied.
        again = Reader(runner, tokens, first.table[: hit // SIZE] + places[len(cold.table) :])
        if hit % SIZE:
            runner.store.copy([(first.table[hit // SIZE], again.table[hit // SIZE])])
        again.prefill(hit, prompt, grid)
        again.decode(prompt)

        assert same(again.logits, cold.logits[hit // grid :])
        assert same(again.kv(), cold.kv())


def test_shared_blocks_are_read_by_each_alone(build: Callable[..., Any]) -> None:
    runner = Runner(adapter.load(build("llama")), BLOCKS, SIZE, deterministic=True)
    rng = random.Random(5)
    shared = random_tokens(rng, 96)
    readers = [
        Reader(runner, shared + random_tokens(rng, 9), rng.sample(range(40 * i, 40 * i + 40), 27)) for i in range(4)
    ]
    for reader in readers:
        reader.prefill(0, 104, 24)
    copied = runner.run([reader.chunk(104, 105) for reader in readers])
    for reader in readers[1:]:
        reader.table[:24] = readers[0].table[:24]
    assert torch.equal(runner.run([reader.chunk(104, 105) for reader in readers]), copied)


def test_copies_come_before_the_first_of_several_forwards(build: Callable[..., Any]) -> None:
    runner = Runner(adapter.load(build("llama", torch.float64)), 12, SIZE, deterministic=True)
    whole = Reader(runner, [3, 4, 5, 6, 7, 8], [0, 1])
    whole.prefill(0, 6, 6)
    branch = Reader(runner, [3, 4, 5, 6, 7, 9], [0, 4])
    over = Reader(runner, [3, 4, 5, 6, 9], [0, 1])  # overwrites the copied block
    logits = runner.run([over.chunk(4, 5, isolated=True), branch.chunk(5, 6)], copies=[(1, 4)])
    expected = Reader(Runner(runner.loaded, 12, SIZE), branch.tokens, [0, 1])
    expected.prefill(0, 6, 6)
    torch.testing.assert_close(logits[1], expected.logits[0], rtol=0, atol=1e-9)


def test_an_ordinary_runner_reads_runs_of_blocks_in_place_and_a_deterministic_one_never(
    build: Callable[..., Any],
) -> None:
    """The reason for the mode: a decode's bits depend on block ids, unless blocks are always gathered."""
    loaded = adapter.load(build("llama"))
    rng = random.Random(3)
    tokens = random_tokens(rng, 80)

    def logits(table: list[int], *, deterministic: bool) -> list[torch.Tensor]:
        reader = Reader(Runner(loaded, BLOCKS, SIZE, deterministic=deterministic), tokens, table)
        reader.prefill(0, 50, 50)
        reader.decode(50)
        return reader.logits

    adjacent, scattered = list(range(20)), rng.sample(range(BLOCKS), 20)
    assert same(logits(adjacent, deterministic=True), logits(scattered, deterministic=True))
    ordinary = zip(logits(adjacent, deterministic=False), logits(scattered, deterministic=False), strict=True)
    assert max(float((a - b).abs().max()) for a, b in ordinary) < 1e-3


def test_a_deterministic_runner_computes_the_model(loaded: LoadedModel) -> None:
    rng = random.Random(4)
    tokens = random_tokens(rng, 60)
    both = []
    for deterministic in (False, True):
        reader = Reader(
            Runner(loaded, BLOCKS, SIZE, deterministic=deterministic), tokens, rng.sample(range(BLOCKS), 15)
        )
        reader.prefill(0, 50, 20)
        reader.decode(50)
        both.append(torch.stack(reader.logits))
    tolerance = 1e-4 if loaded.dtype == torch.float32 else 0.5
    torch.testing.assert_close(both[1], both[0], rtol=0, atol=tolerance)


def test_with_experts_no_chunk_is_put_together_of_two() -> None:
    """If prompts differ inside a chunk, the first one's rows depend on it: the second must not read them."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    limits = {"max_position_embeddings": 512, "vocab_size": 97, "num_key_value_heads": 2, "initializer_range": 0.2}

    def engine(**options: Any) -> Engine:
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=8, **sizes, **limits))
        return Engine.load(
            model,
            deterministic=True,
            prefill_chunk=64,
            max_batch_tokens=200,
            num_blocks=200,
            monitor=False,
            **options,
        )

    rng = random.Random(1)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    with engine() as warm, engine(prefix_cache=False) as cold:
        hits = 0
        for _ in range(5):
            stem = random_tokens(rng, 48)
            for _ in range(2):
                prompt = stem + random_tokens(rng, 30)
                for _ in range(2):
                    [hit], [miss] = warm.generate([prompt], params), cold.generate([prompt], params)
                    assert hit.logprobs == miss.logprobs
                    hits += hit.usage.cached_tokens
        assert hits == 5 * 64, "only the second time that a stem's first prompt comes"
        report = warm.audit(blocks=20)
        assert report.blocks >= 20 and report.differ == 0
