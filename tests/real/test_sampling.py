"""The log probabilities of sampled tokens on a real distribution."""

from __future__ import annotations

import pytest
import torch

from radixkv import Engine, SamplingParams
from tests.real.reference import Reference

POEM = [{"role": "user", "content": "Write a short poem about the sea."}]
BASE = SamplingParams(max_tokens=24, seed=11)


def test_log_probabilities_match_transformers(engine: Engine, reference: Reference) -> None:
    [done] = engine.generate([POEM], BASE.but(temperature=1.0, logprobs=5))
    text = engine.model.tokenizer.apply_chat_template(POEM, add_generation_prompt=True, tokenize=False)
    prompt = engine.model.tokenizer.encode(text, add_special_tokens=False)
    assert len(prompt) == done.usage.prompt_tokens
    tokens = [*prompt, *done.token_ids]
    logprobs = reference.logits(tokens, range(len(prompt) - 1, len(tokens) - 1)).log_softmax(-1)
    assert done.logprobs is not None
    for row, token, each in zip(logprobs, done.token_ids, done.logprobs, strict=True):
        assert each.chosen == pytest.approx(float(row[token]), abs=1e-3)
        values = torch.tensor([value for _, value in each.top])
        torch.testing.assert_close(values, row.topk(5).values, atol=1e-3, rtol=0)
        torch.testing.assert_close(values, row[[token for token, _ in each.top]], atol=1e-3, rtol=0)
