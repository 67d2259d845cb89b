"""With deterministic=True a hit changes no bit of an answer, and cached KV is the KV that any request would compute.

The fake model has rounding errors: the value that it stores for a token depends on the length and the start of the
token's chunk, and on the rows of its forward. So a chunk that is not aligned, a shared forward, or published decodes
give other tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv import Engine, SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.errors import InvalidInput
from radixkv.models.loaded import SequenceInput
from radixkv.models.runner import Runner
from tests.engine.fakes import VOCAB, chain, logits_of, sized
from tests.engine.worlds import GREEDY, World
from tests.models.conftest import FAMILIES, make
from tests.plain_runner import PlainRunner
from tests.selection import mostly_long


class RoundingRunner(PlainRunner):
    """Return the state of a slot: all tokens up to it, and the chunks that computed them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.state = np.zeros((num_blocks, block_size), dtype=np.uint64)
        self.beside = 0

    def run(
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: Any = None
    ) -> torch.Tensor:
        self.state[[target for _, target in copies]] = self.state[[source for source, _ in copies]]
        together = sum(len(chunk.tokens) for chunk in chunks if not chunk.isolated)
        self.beside += any(chunk.isolated for chunk in chunks) and len(chunks) > 1
        for chunk in chunks:
            self._write(chunk, len(chunk.tokens) if chunk.isolated else together)
        return torch.from_numpy(np.stack([logits_of(hash(self.states(chunk).tobytes()) % 2**32) for chunk in chunks]))

    def states(self, chunk: SequenceInput) -> np.ndarray:
        return self.state[chunk.block_table].reshape(-1)[: chunk.start + len(chunk.tokens)]

    def _write(self, chunk: SequenceInput, rows: int) -> None:
        flat = self.state.reshape(-1)
        last = chunk.start - 1
        state = int(flat[chunk.block_table[last // self.size] * self.size + last % self.size]) if chunk.start else 0
        for token, slot in zip(chunk.tokens.tolist(), chunk.slots.tolist(), strict=True):
            state = chain(chain(state, token), (chunk.start * 1000 + len(chunk.tokens)) * 1000 + rows)
            flat[slot] = state


def rounding(num_blocks: int, block_size: int, config: EngineConfig, *, reuse: bool = True) -> World:
    return World(num_blocks, block_size, config, runner=RoundingRunner, reuse=reuse)


def answers(world: World, prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return the answer of one request that runs alone."""
    request = world.submit(prompt, params)
    world.finish()
    done = request.channel.wait(0)
    return [list(each.token_ids) for each in (done, *done.alternatives)]


def deterministic(chunk: int, sequences: int = 4) -> EngineConfig:
    return sized(sequences, 3 * chunk + sequences, chunk, deterministic=True)


def family_of_prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    """Return prompts that branch off each other anywhere, repeat each other, and continue each other."""
    prompts = [rng.choices(range(VOCAB), k=longest * 2 // 3)]
    for _ in range(count - 1):
        head: list[int] = []
        if rng.random() < 0.8:
            parent = rng.choice(prompts)
            head = parent[: rng.choice([len(parent), rng.randint(0, len(parent))])]
        tail = rng.choices(range(VOCAB), k=rng.choice([0, 1, rng.randint(1, longest)]))
        prompts.append((head + tail)[:longest] or [rng.randrange(VOCAB)])
    return prompts


def reference(block_size: int, config: EngineConfig, prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:
    """Return the answer of an engine with an empty cache and no other requests."""
    return answers(rounding(200, block_size, config, reuse=False), prompt, params)


# ---- one at a time


@pytest.mark.parametrize("seed", mostly_long(range(5), 0, 1, 2))
def test_hits_change_no_answer_of_requests_that_run_one_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    block_size, config = rng.choice([1, 3, 4, 8]), deterministic(rng.choice([1, 4, 6, 8, 16]))
    world = rounding(
        -(-110 // block_size) + rng.choice([4, 40]), block_size, config
    )  # small: cached prefixes are trimmed
    for prompt in family_of_prompts(rng, 14, 80):
        params = GREEDY.but(max_tokens=rng.randint(1, 7), n=rng.choice([1, 1, 1, 3]), temperature=rng.choice([0, 1]))
        params = params.but(seed=rng.randrange(100))
        fits = world.cache.num_blocks * block_size >= (len(prompt) + 8) * params.n + block_size * 2
        params = params if fits else params.but(n=1)
        assert answers(world, prompt, params) == reference(block_size, config, prompt, params)
    assert world.core.counters.cached_tokens > 0


def test_the_same_requests_do_differ_without_it() -> None:
    """The fake has rounding errors that the tests above would find."""
    rng = random.Random(3)
    config, prompts = (
        sized(4, 100, 8),
        family_of_prompts(rng, 20, 60),
    )
    world = rounding(100, 4, config)
    pairs = [(answers(world, prompt), reference(4, config, prompt, GREEDY)) for prompt in prompts]
    assert sum(mine != cold for mine, cold in pairs) > 5


def test_a_conversation_hits_whole_chunks_and_nothing_that_was_decoded() -> None:
    config = deterministic(8)
    world = rounding(100, 4, config)
    history: list[int] = list(range(21))
    for turn in range(4):
        before = world.core.counters.cached_tokens
        [reply] = answers(world, history)
        assert [reply] == reference(4, config, history, GREEDY)
        known = 0 if turn == 0 else (len(history) - 9) // 8 * 8  # tokens that the previous turn computed in its prompt
        assert world.core.counters.cached_tokens - before == known
        history += [*reply, turn, turn + 1, turn + 2]


# ---- together


def test_chunks_are_never_cut_to_fit_a_step() -> None:
    config = sized(3, 12, 8, deterministic=True)
    world = rounding(100, 4, config)
    requests = [world.submit(list(range(i, i + 30)), GREEDY.but(max_tokens=3)) for i in range(5)]
    lengths = set()
    run = world.runner.run

    def recorded(
        chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: Any = None
    ) -> torch.Tensor:
        lengths.update((chunk.start % 8, len(chunk.tokens)) for chunk in chunks if chunk.isolated)
        assert sum(len(chunk.tokens) for chunk in chunks) <= 12
        return run(chunks, copies)

    world.runner.run = recorded  # type: ignore[method-assign]
    world.finish()
    assert lengths == {(0, 8), (0, 6)}
    assert all(len(request.channel.wait(0).token_ids) == 3 for request in requests)


def test_a_step_must_have_room_for_a_chunk_with_all_decodes() -> None:
    with pytest.raises(InvalidInput, match=r"prefill_chunk \(60\).*max_sequences \(5\).*max_batch_tokens \(64\)"):
        sized(5, 64, 60, deterministic=True)
    assert sized(4, 64, 60, deterministic=True).deterministic


# ---- real models


class Recorder(PlainRunner):
    """A runner that records its logits, each with the text before it: (tokens, row)."""

    def __init__(self, engine: Engine) -> None:
        self.rows: list[torch.Tensor] = []
        self._runner = engine.core.runner
        engine.core.runner = self  # type: ignore[assignment]

    def run(
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: Any = None
    ) -> torch.Tensor:
        logits = self._runner.run(chunks, copies)
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        self.rows += [row.clone() for row, end in zip(logits, ends, strict=True) if end >= self.prompt]
        return logits

    def of(self, engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[torch.Tensor]:
        """Return the logits of all tokens of a request that runs alone."""
        self.rows, self.prompt = [], len(prompt)
        engine.generate([list(prompt)], params)
        return self.rows


def words(rng: random.Random, prompts: Sequence[Sequence[int]], vocab: int) -> list[list[int]]:
    """Return the same tree of prompts over another vocabulary."""
    table = rng.sample(range(3, vocab), VOCAB)
    return [[table[token] for token in prompt] for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "dtype"),
    mostly_long(
        [("tiny", "float32"), ("llama", "bfloat16"), ("gemma2", "float32"), ("mistral", "bfloat16")],
        ("llama", "bfloat16"),
    ),
)
def test_bits_are_the_same_with_and_without_hits(family: str, dtype: str) -> None:
    """Compare all logits of requests that run one at a time, in a small pool with scattered and evicted blocks."""
    rng = random.Random(family + dtype)
    torch.set_num_threads(1)
    model: Any = family if family == "tiny" else make(FAMILIES[family](), getattr(torch, dtype))
    options = {"deterministic": True, "prefill_chunk": 24, "block_size": 8, "max_sequences": 4}
    cached = Engine.load(model, dtype=dtype if family == "tiny" else "auto", num_blocks=24, **options)
    cold = Engine(
        cached.model,
        Runner(cached.model, 60, 8, deterministic=True),
        PrefixCache(60, 8),
        replace(cached.config, prefix_cache=False),
    )
    with cached, cold:
        recorders = Recorder(cached), Recorder(cold)
        prompts = words(rng, family_of_prompts(rng, 10, 120), 97)
        prompts += [prompts[0], prompts[-1][:50] + prompts[0][:70]]
        for prompt in prompts:
            params = GREEDY.but(max_tokens=6, n=rng.choice([1, 1, 2]), temperature=rng.choice([0, 1]), seed=1)
            mine, other = (
                recorder.of(engine, prompt, params) for recorder, engine in zip(recorders, (cached, cold), strict=True)
            )
            assert len(mine) == len(other) >= 6
            assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
        assert cached.stats().cached_tokens > 100
        assert cached.stats().cache.evicted_blocks > 0


def test_with_others_a_first_token_has_the_same_bits_and_later_ones_come_close() -> None:
    rng = random.Random(9)
    torch.set_num_threads(1)
    options: dict[str, Any] = {"deterministic": True, "prefill_chunk": 32, "max_sequences": 8, "num_blocks": 200}
    params = GREEDY.but(max_tokens=8, logprobs=1)
    with Engine.load("tiny", **options) as loaded, Engine.load("tiny", **options, prefix_cache=False) as lone:
        prompts = words(rng, family_of_prompts(rng, 8, 120), 97)
        together = loaded.generate(prompts, params)
        for done, prompt in zip(together, prompts, strict=True):
            [isolated] = lone.generate([prompt], params)
            assert done.logprobs is not None
            assert isolated.logprobs is not None
            assert done.logprobs[0] == isolated.logprobs[0]
            for mine, other in zip(done.logprobs, isolated.logprobs, strict=True):
                if mine.top[0][0] != other.top[0][0]:
                    break  # a near tie: the texts differ from here on
                assert mine.chosen == pytest.approx(other.chosen, abs=1e-3)
        # And their cached KV changes no bit of a later request that runs alone.
        before = loaded.stats().cached_tokens
        assert [loaded.generate([p], params)[0].logprobs for p in prompts] == [
            lone.generate([p], params)[0].logprobs for p in prompts
        ]
        assert loaded.stats().cached_tokens - before > 300


def test_deterministic_is_true_or_false() -> None:
    with pytest.raises(InvalidInput, match="deterministic must be True or False"):
        Engine.load("tiny", deterministic=1)  # type: ignore[arg-type]


def test_chunks_are_of_whole_blocks() -> None:
    with pytest.raises(InvalidInput, match=r"prefill_chunk \(24\) of whole blocks of 16"):
        Engine.load("tiny", deterministic=True, prefill_chunk=24)
