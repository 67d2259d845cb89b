"""Whatever the mix of chunks, decodes, shared prefixes and copied blocks: the logits are those of the model alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.cache import PrefixCache, Sequence
from radixkv.errors import OutOfBlocks
from radixkv.models import adapter
from radixkv.models.runner import Chunk, Runner

BLOCK_SIZE = 4


def reference(build: Callable[..., Any], family: str, dtype: torch.dtype) -> Callable[[list[int]], torch.Tensor]:
    """The model on its own: all logits [tokens, vocab] of one forward."""
    model = build(family, dtype)
    # sdpa leaves out Gemma2's softcap
    model.set_attn_implementation("eager" if family == "gemma2" else "sdpa")

    @torch.inference_mode()
    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return found

    return logits


class Branch:
    """One sequence of the cache with the prompt that it still has to compute."""

    def __init__(self, sequence: Sequence, waiting: list[int]) -> None:
        self.sequence, self.waiting = sequence, waiting


class Mill:
    """Runs steps over many branches at once, as an engine does: plan all, run once, commit all."""

    def __init__(self, model: Any, num_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE)
        self.runner = Runner(adapter.load(model, dtype="auto"), num_blocks, BLOCK_SIZE)
        self.copied = self.hits = 0

    def open(self, prompt: list[int]) -> Branch:
        sequence = self.cache.open(prompt, limit=len(prompt) - 1)
        self.hits += sequence.cached_length
        return Branch(sequence, prompt[sequence.length :])

    def step(self, work: list[tuple[Branch, int]]) -> list[tuple[list[int], torch.Tensor]]:
        """Compute `count` waiting tokens of each branch; return (history, logits after it) of each that fits."""
        chunks, copies, done = [], [], []
        for branch, count in work:
            tokens = np.array(branch.waiting[:count], dtype=np.int32)
            start = branch.sequence.length
            try:
                plan = branch.sequence.extend(tokens)
            except OutOfBlocks:
                continue
            copies += plan.copies
            chunks.append(Chunk(tokens, start, plan.slots, branch.sequence.block_table))
            done.append((branch, count))
        if not chunks:
            return []
        random.Random(1).shuffle(copies)
        self.copied += len(copies)
        logits = self.runner.run(chunks, copies)
        for branch, count in done:
            branch.sequence.commit()
            del branch.waiting[:count]
        self.cache.check()
        return [(branch.sequence.tokens.tolist(), row) for (branch, _), row in zip(done, logits, strict=True)]


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that branch off each other anywhere."""
    made = [[rng.randrange(3, 97) for _ in range(58)]]
    while len(made) < count:
        stem = rng.choice(made)
        made.append(stem[: rng.randrange(5, len(stem))] + [rng.randrange(3, 97) for _ in range(rng.randrange(1, 30))])
    return made


def random_steps(mill: Mill, seed: int, steps: int) -> list[tuple[list[int], torch.Tensor]]:
    """Opens, forks, truncations, closes and steps of random chunks; every row of logits with its history."""
    rng = random.Random(seed)
    texts = prompts(rng, 8)
    branches: list[Branch] = []
    rows = []
    for _ in range(steps):
        if len(branches) < 5:
            branches.append(mill.open(rng.choice(texts)))
        idle = [branch for branch in branches if not branch.waiting]
        if idle and rng.random() < 0.5:
            branch = rng.choice(idle)
            branches.append(Branch(branch.sequence.fork(), [rng.randrange(3, 97)]))
        if idle and rng.random() < 0.3:
            branch = rng.choice(idle)
            branch.sequence.truncate(rng.randrange(1, branch.sequence.length))
        for branch in idle:
            branch.waiting.append(rng.randrange(3, 97))
        fitted = mill.step([(branch, rng.choice([1, 1, 7, 20])) for branch in branches])
        rows += fitted
        if len(branches) > 6 or len(fitted) < len(branches):
            branches.pop(rng.randrange(len(branches))).sequence.close()
    return rows


@pytest.mark.usefixtures("exact_softmax")
def test_logits_equal_the_own_forward_in_float64(build: Callable[..., Any], family: str) -> None:
    mill = Mill(build(family, torch.float64), num_blocks=70)
    rows = random_steps(mill, seed=3, steps=14)
    own = reference(build, family, torch.float64)
    assert len(rows) > 40
    assert mill.hits > 50
    assert mill.copied > 3
    for tokens, logits in rows:
        torch.testing.assert_close(logits, own(tokens)[-1], rtol=0, atol=1e-9)


@pytest.mark.usefixtures("exact_softmax")
def test_logits_are_right_while_blocks_are_evicted_and_used_again(build: Callable[..., Any]) -> None:
    mill = Mill(build("llama", torch.float64), num_blocks=40)
    rows = random_steps(mill, seed=5, steps=25)
    own = reference(build, "llama", torch.float64)
    assert mill.cache.stats().evicted_blocks > 20
    for tokens, logits in rows:
        torch.testing.assert_close(logits, own(tokens)[-1], rtol=0, atol=1e-9)


def greedy(mill: Mill, prompt: list[int], count: int, chunk: int, beside: list[list[int]]) -> list[int]:
    """Greedy reply to `prompt`, while other prompts are computed in the same steps."""
    branch, others = mill.open(prompt), [mill.open(other) for other in beside]
    reply: list[int] = []
    while len(reply) < count:
        busy = [branch, *(other for other in others if other.waiting)]
        rows = mill.step([(each, chunk) for each in busy])
        if not branch.waiting:
            reply.append(int(rows[0][1].argmax()))
            branch.waiting.append(reply[-1])
    for each in (branch, *others):
        each.sequence.close()
    return reply


def test_greedy_tokens_equal_the_own_forward_in_float32(build: Callable[..., Any], family: str) -> None:
    texts = prompts(random.Random(8), 4)
    mill = Mill(build(family), num_blocks=200)
    own = reference(build, family, torch.float32)
    expected = list(texts[1])
    for _ in range(12):
        expected.append(int(own(expected)[-1].argmax()))
    cold = greedy(mill, texts[1], 12, chunk=9, beside=[])
    warm = greedy(mill, texts[1], 12, chunk=64, beside=[texts[2], texts[3]])
    assert mill.hits >= len(texts[1]) - 1
    assert cold == warm == expected[len(texts[1]) :]
