"""Sampling on a real distribution: a seed decides the reply, in any batch, with a cache or without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radixkv import Engine, SamplingParams
from tests.real.reference import Reference

POEM = [{"role": "user", "content": "Write a short poem about the sea."}]
BASE = SamplingParams(max_tokens=24, seed=11)
CASES = {
    "temperature": BASE.but(temperature=0.9),
    "top_p": BASE.but(temperature=1.0, top_p=0.8),
    "top_k": BASE.but(temperature=1.3, top_k=20),
    "min_p": BASE.but(temperature=1.5, min_p=0.1),
    "penalties": BASE.but(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.4),
    "four streams": BASE.but(temperature=1.0, n=4),
}


@pytest.fixture(scope="module")
def uncached(model_file: Path) -> Iterator[Engine]:
    with Engine.load(str(model_file), num_blocks=200, dtype="float32", monitor=False, prefix_cache=False) as engine:
        yield engine


def replies(engine: Engine, params: SamplingParams) -> list[tuple[int, ...]]:
    [first] = engine.generate([POEM], params)
    return [each.token_ids for each in (first, *first.alternatives)]


@pytest.mark.parametrize("name", CASES)
def test_a_seed_gives_the_same_replies_cached_and_uncached(engine: Engine, uncached: Engine, name: str) -> None:
    params = CASES[name]
    expected = replies(uncached, params)
    assert replies(engine, params) == expected  # the prompt may be cached by another case
    assert replies(engine, params) == expected  # now it is
    assert len(set(expected)) == params.n
    assert replies(engine, params.but(seed=12)) != expected


def test_all_cases_in_one_batch_give_the_same_replies(engine: Engine, uncached: Engine) -> None:
    batch = uncached.generate([POEM] * len(CASES), list(CASES.values()))
    for params, first in zip(CASES.values(), batch, strict=True):
        assert replies(engine, params) == [each.token_ids for each in (first, *first.alternatives)]


def test_greedy_streams_of_one_prompt_are_equal(engine: Engine) -> None:
    streams = replies(engine, SamplingParams(temperature=0, n=3, max_tokens=16))
    assert len(streams) == 3
    assert len(set(streams)) == 1


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
