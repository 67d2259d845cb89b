"""What a model answers on its own, and whether an engine's steps say the same."""

from __future__ import annotations

from typing import Any

import torch

from radixkv.models.hook import own_attention
from radixkv.models.loaded import LoadedModel
from tests.models.mill import Mill, random_steps


@torch.inference_mode()
def own_logits(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """The model on its own: logits after the last of `tokens`."""
    with own_attention(loaded.model):
        found: torch.Tensor = loaded.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return found


def compare(loaded: LoadedModel, tolerance: float) -> None:
    """Random steps over random branches are the model's own forward, each of them."""
    mill = Mill(loaded, num_blocks=70)
    rows = random_steps(mill, seed=3, steps=9)
    assert len(rows) > 25
    assert mill.hits > 50
    assert mill.copied > 1
    for tokens, logits in rows:
        torch.testing.assert_close(logits, own_logits(loaded, tokens), rtol=0, atol=tolerance)


def forwarded(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    """The greedy reply by its own forward, which has to see everything anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def generated(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    """What transformers' own loop generates greedily."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    reply: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return tuple(reply)
