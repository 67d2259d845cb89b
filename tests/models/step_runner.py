"""Run steps over many branches at once, planned by a real cache, and compare their logits with the model's own."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import torch

from radixkv.cache import PrefixCache, Sequence
from radixkv.errors import OutOfBlocks
from radixkv.models.attention_interface import own_attention
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner

BLOCK_SIZE = 4


def chunk(
    tokens: Iterable[int], start: int, table: Iterable[int], size: int = BLOCK_SIZE, *, isolated: bool = False
) -> SequenceInput:
    """Return an input of tokens from `start` on of a sequence in these blocks."""
    ids, blocks = np.array([*tokens], np.int32), np.array([*table], np.int32)
    places = np.arange(start, start + len(ids))
    slots = blocks[places // size].astype(np.int64) * size + places % size
    return SequenceInput(ids, start, slots, blocks, isolated=isolated)


def in_chunks(loaded: LoadedModel, tokens: list[int], cuts: list[int]) -> list[torch.Tensor]:
    """Return the logits after each chunk of a prompt that is computed over a pool, cut at these positions."""
    table = range(-(-cuts[-1] // BLOCK_SIZE))
    runner = Runner(loaded, len(table), BLOCK_SIZE)
    return [runner.run([chunk(tokens[a:b], a, table)])[0] for a, b in pairwise([0, *cuts])]


class Branch:
    """One sequence of the cache with the prompt that it still has to compute."""

    def __init__(self, sequence: Sequence, waiting: list[int]) -> None:
        self.sequence, self.waiting = sequence, waiting


class StepRunner:
    """Runs steps over many branches at once, as an engine does: plan all, run once, commit all."""

    def __init__(self, loaded: LoadedModel, num_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE)
        self.runner = Runner(loaded, num_blocks, BLOCK_SIZE)
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
            chunks.append(SequenceInput(tokens, start, plan.slots, branch.sequence.block_table))
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
    """Draw prompts that branch off each other anywhere."""
    made = [[rng.randrange(3, 97) for _ in range(58)]]
    while len(made) < count:
        stem = rng.choice(made)
        made.append(stem[: rng.randrange(5, len(stem))] + [rng.randrange(3, 97) for _ in range(rng.randrange(1, 30))])
    return made


def random_steps(step_runner: StepRunner, seed: int, steps: int) -> list[tuple[list[int], torch.Tensor]]:
    """Open, fork, truncate, close and step random chunks; return every row of logits with its history."""
    rng = random.Random(seed)
    texts = prompts(rng, 8)
    branches: list[Branch] = []
    rows = []
    for _ in range(steps):
        if len(branches) < 5:
            branches.append(step_runner.open(rng.choice(texts)))
        idle = [branch for branch in branches if not branch.waiting]
        if idle and rng.random() < 0.5:
            branch = rng.choice(idle)
            branches.append(Branch(branch.sequence.fork(), [rng.randrange(3, 97)]))
        if idle and rng.random() < 0.3:
            branch = rng.choice(idle)
            branch.sequence.truncate(rng.randrange(1, branch.sequence.length))
        for branch in idle:
            branch.waiting.append(rng.randrange(3, 97))
        fitted = step_runner.step([(branch, rng.choice([1, 1, 7, 20])) for branch in branches])
        rows += fitted
        if len(branches) > 6 or len(fitted) < len(branches):
            branches.pop(rng.randrange(len(branches))).sequence.close()
    return rows


@torch.inference_mode()
def own_logits(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """Return the model's own logits after the last of `tokens`."""
    with own_attention(loaded.model):
        found: torch.Tensor = loaded.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return found


def compare(loaded: LoadedModel, tolerance: float) -> None:
    """Check that random steps over random branches equal the model's own forward."""
    step_runner = StepRunner(loaded, num_blocks=70)
    rows = random_steps(step_runner, seed=3, steps=9)
    assert len(rows) > 25
    assert step_runner.hits > 50
    assert step_runner.copied > 1
    for tokens, logits in rows:
        torch.testing.assert_close(logits, own_logits(loaded, tokens), rtol=0, atol=tolerance)
