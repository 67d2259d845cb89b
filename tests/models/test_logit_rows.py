"""The rows of every position give the log probabilities of the model's own forward, in float32 to five places.

The matrix of architectures compares the same rows in float64. Chunks, cached prefixes, branches, decodes and isolated
inputs are in the same steps, each with another number of rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from radixkv.models import adapter
from radixkv.models.attention_interface import own_attention
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from radixkv.models.step_batch import logit_places
from radixkv.sampling.row_scores import begin_scores
from tests.models.conftest import FAMILIES, GROUPED, make
from tests.models.recurrent.hybrids import HYBRIDS, Steps, hybrid
from tests.models.step_runner import StepRunner, chunk, random_steps
from tests.models.test_fallback import ARCHITECTURES
from tests.selection import mostly_long

BUILT: dict[str, Callable[[], Any]] = {
    **{name: lambda config=config: make(config()) for name, config in FAMILIES.items()},
    **{name: lambda config=config: make(config()) for name, (config, _) in ARCHITECTURES.items()},
    "gpt2": lambda: make(transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)),
    "mixtral": lambda: make(transformers.MixtralConfig(**GROUPED, num_local_experts=4)),
}


class AllRows:
    """Asks a runner for random numbers of rows, and for forwards of their own; keeps the rows of each input."""

    def __init__(self, runner: Any, seed: int) -> None:
        self.found: list[Tensor] = []
        self.additional = self.isolated = 0
        self._run, self._rng, runner.run = runner.run, random.Random(seed), self.run

    def run(self, inputs: Sequence[SequenceInput], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        counts = [self._rng.choice((1, 5, len(each.tokens))) for each in inputs]
        counts = [min(count, len(each.tokens)) for count, each in zip(counts, inputs, strict=True)]
        asked = [
            each._replace(logit_rows=count, isolated=self._rng.random() < 0.4)
            for count, each in zip(counts, inputs, strict=True)
        ]
        logits: Tensor = self._run(asked, copies)
        assert len(logits) == sum(counts)
        self.found += [logits[places] for places in logit_places(counts)]
        self.additional += sum(counts) - len(counts)
        self.isolated += sum(each.isolated and each.logit_rows > 1 for each in asked)
        return logits[: len(inputs)]


@torch.inference_mode()
def own_log_probabilities(loaded: LoadedModel, tokens: list[int]) -> np.ndarray:
    """Return transformers' log-softmax of the model's own logits [tokens, vocab]."""
    with own_attention(loaded.model):
        logits = loaded.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.nn.functional.log_softmax(logits, dim=-1).numpy()


def check_scores(loaded: LoadedModel, tokens: list[int], rows: Tensor) -> None:
    """Check the scores by the rows of the last tokens of a history: of each token that follows, and the best five."""
    own = own_log_probabilities(loaded, tokens)[-len(rows) :, : rows.shape[1]]
    targets = [*tokens[len(tokens) - len(rows) + 1 :], 5]
    found = begin_scores(rows, targets, 5).result()
    np.testing.assert_allclose(found.chosen, own[np.arange(len(rows)), targets], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.values, -np.sort(-own, axis=1)[:, :5], rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(own, found.ids, axis=1), found.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", mostly_long(BUILT, "llama", "gemma2", "bloom"))
def test_scores_equal_the_own_log_softmax(name: str) -> None:
    loaded = adapter.load(BUILT[name]())
    step_runner = StepRunner(loaded, num_blocks=70)
    rows = AllRows(step_runner.runner, seed=2)
    texts = [tokens for tokens, _ in random_steps(step_runner, seed=3, steps=9)]
    assert step_runner.hits > 50 and rows.additional > 30 and rows.isolated > 0
    for tokens, found in zip(texts, rows.found, strict=True):
        check_scores(loaded, tokens, found)


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, "qwen3_5"))
def test_scores_of_hybrid_models_equal_the_own_log_softmax(kind: str) -> None:
    loaded = adapter.load(quiet(hybrid(kind)))
    steps = Steps(loaded, seed=5)
    rows = AllRows(steps.runner, seed=2)
    texts = [tokens for _ in range(12) for tokens, _ in steps.step()]
    assert steps.restored > 1 and rows.additional > 20 and rows.isolated > 0
    for tokens, found in zip(texts, rows.found, strict=True):
        check_scores(loaded, tokens, found)


def quiet(model: Any) -> Any:
    """Return a model with smaller weights: larger ones enlarge each rounding error, also that of transformers."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(0.25)
    return model


def test_a_deterministic_runner_computes_the_same_bits_of_rows_in_any_step() -> None:
    """The bits depend on the tokens, start, length and rows of an input: not on its blocks, nor on other inputs."""
    runner = Runner(adapter.load(make(FAMILIES["llama"]())), 12, 4, deterministic=True)

    def piece(tokens: list[int], start: int, table: list[int], rows: int = 1) -> SequenceInput:
        return chunk(tokens, start, table, isolated=True)._replace(logit_rows=rows)

    text = list(range(10, 19))
    runner.run([piece(text[:4], 0, [7])])
    alone = runner.run([piece(text[4:], 4, [7, 1, 2], rows=3)])
    runner.run([piece(text[:4], 0, [3])])
    other = piece([5, 6, 8], 0, [9], rows=2)._replace(isolated=False)
    together = runner.run([other, piece(text[4:], 4, [3, 8, 0], rows=3), piece([30], 0, [10])])
    assert torch.equal(together[[1, 4, 5]], alone)
