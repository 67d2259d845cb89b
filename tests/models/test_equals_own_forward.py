"""For any mix of chunks, decodes, shared prefixes and copied blocks, the logits are those of the model alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixkv.models import adapter
from tests.models.step_runner import StepRunner, prompts, random_steps


def reference(build: Callable[..., Any], family: str, dtype: torch.dtype) -> Callable[[list[int]], torch.Tensor]:
    """Return the model's own logits [tokens, vocab] of one forward."""
    model = build(family, dtype)
    # sdpa leaves out Gemma2's softcap
    model.set_attn_implementation("eager" if family == "gemma2" else "sdpa")

    @torch.inference_mode()
    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return found

    return logits


@pytest.mark.usefixtures("exact_softmax")
def test_logits_equal_the_own_forward_in_float64(build: Callable[..., Any], family: str) -> None:
    step_runner = StepRunner(adapter.load(build(family, torch.float64)), num_blocks=70)
    rows = random_steps(step_runner, seed=3, steps=14)
    own = reference(build, family, torch.float64)
    assert len(rows) > 40
    assert step_runner.hits > 50
    assert step_runner.copied > 3
    for tokens, logits in rows:
        torch.testing.assert_close(logits, own(tokens)[-1], rtol=0, atol=1e-9)


@pytest.mark.usefixtures("exact_softmax")
def test_logits_are_right_while_blocks_are_evicted_and_used_again(build: Callable[..., Any]) -> None:
    step_runner = StepRunner(adapter.load(build("llama", torch.float64)), num_blocks=40)
    rows = random_steps(step_runner, seed=5, steps=25)
    own = reference(build, "llama", torch.float64)
    assert step_runner.cache.stats().evicted_blocks > 20
    for tokens, logits in rows:
        torch.testing.assert_close(logits, own(tokens)[-1], rtol=0, atol=1e-9)


def greedy(step_runner: StepRunner, prompt: list[int], count: int, chunk: int, beside: list[list[int]]) -> list[int]:
    """Return the greedy reply to `prompt`, while other prompts are computed in the same steps."""
    branch, others = step_runner.open(prompt), [step_runner.open(other) for other in beside]
    reply: list[int] = []
    while len(reply) < count:
        busy = [branch, *(other for other in others if other.waiting)]
        rows = step_runner.step([(each, chunk) for each in busy])
        if not branch.waiting:
            reply.append(int(rows[0][1].argmax()))
            branch.waiting.append(reply[-1])
    for each in (branch, *others):
        each.sequence.close()
    return reply


def test_greedy_tokens_equal_the_own_forward_in_float32(build: Callable[..., Any], family: str) -> None:
    texts = prompts(random.Random(8), 4)
    step_runner = StepRunner(adapter.load(build(family)), num_blocks=200)
    own = reference(build, family, torch.float32)
    expected = list(texts[1])
    for _ in range(12):
        expected.append(int(own(expected)[-1].argmax()))
    cold = greedy(step_runner, texts[1], 12, chunk=9, beside=[])
    warm = greedy(step_runner, texts[1], 12, chunk=64, beside=[texts[2], texts[3]])
    assert step_runner.hits >= len(texts[1]) - 1
    assert cold == warm == expected[len(texts[1]) :]
