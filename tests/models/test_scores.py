"""Scores of an engine are the log-softmax of the own forward of the model, in float32 to five places."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from radixkv import Engine, SamplingParams
from radixkv.models.attention_interface import own_attention
from tests.models.recurrent.hybrids import HYBRIDS, hybrid
from tests.models.test_logit_rows import BUILT
from tests.selection import mostly_long

SMALL: dict[str, Any] = {
    "num_blocks": 200, "block_size": 4, "prefill_chunk": 17, "max_batch_tokens": 60, "max_sequences": 6,
    "dtype": "float32", "monitor": False,
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)


def built(kind: str) -> Any:
    return hybrid(kind) if kind in HYBRIDS else BUILT[kind]()


@torch.inference_mode()
def table(model: Any, tokens: list[int]) -> np.ndarray:
    """Return the log-softmax [n, vocab] of the model's own logits."""
    with own_attention(model):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1).numpy()


@pytest.mark.parametrize("kind", mostly_long(["llama", "gemma2", "gpt2", "mixtral", "lfm2"], "llama"))
def test_scores_of_an_engine_match_the_model(kind: str) -> None:
    rng, own = random.Random(kind), built(kind)
    stem = rng.choices(range(3, 97), k=50)
    prompts = [[*stem[: rng.randint(20, 50)], *rng.choices(range(3, 97), k=rng.randint(0, 5))] for _ in range(5)]
    continuations = [rng.choices(range(3, 97), k=count) for count in (1, 3, 1, 6)]
    with Engine.load(built(kind), **SMALL) as engine:
        for _ in range(2):
            for prompt, done in zip(prompts, engine.generate(prompts, PARAMS), strict=True):
                expected = table(own, prompt)[np.arange(len(prompt) - 1), prompt[1:]]
                assert done.prompt_logprobs is not None
                found = [entry.chosen for entry in done.prompt_logprobs if entry is not None]
                np.testing.assert_allclose(found, expected, atol=1e-5)
        for prompt in prompts:
            for score, continuation in zip(engine.score(prompt, continuations), continuations, strict=True):
                rows = table(own, prompt + continuation)[len(prompt) - 1 : -1]
                np.testing.assert_allclose(score.token_logprobs, rows[range(len(rows)), continuation], atol=1e-5)
                assert score.greedy == (rows.argmax(axis=1).tolist() == continuation)
        stats = engine.stats()
        assert stats.reused_scores > 100 and stats.cached_tokens > 100
        engine.core.cache.check()
