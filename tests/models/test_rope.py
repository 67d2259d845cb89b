"""Rotary frequencies that depend on the batch are fixed at load: a long sequence does not change a short one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from radixkv.errors import UnsupportedModel
from radixkv.models import adapter, rope
from radixkv.models.runner import Runner
from tests.models.conftest import GROUPED
from tests.models.step_runner import chunk

load = partial(adapter.load, model_code="transformers")  # layers of our own need none of this


def longrope(max_length: int = 128) -> Any:
    return transformers.Phi3Config(
        **GROUPED | {"max_position_embeddings": max_length},
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 4.0, 6.0, 8.0],
            "original_max_position_embeddings": 32,
        },
    )


def dynamic() -> Any:
    return transformers.LlamaConfig(
        **GROUPED | {"max_position_embeddings": 64},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )


def run(runner: Runner, *lengths: int) -> torch.Tensor:
    """Return logits of prompts of these lengths in one step, each in blocks of its own."""
    chunks, first = [], 0
    for place, length in enumerate(lengths):
        tokens = np.random.default_rng(place).integers(3, 97, length)
        table = range(first, first - (-length // 4))
        first += len(table)
        chunks.append(chunk(tokens, 0, table))
    return runner.run(chunks)


@pytest.mark.parametrize("config", [longrope, dynamic])
def test_a_short_prompt_is_the_same_with_a_long_one(build: Callable[..., Any], config: Callable[[], Any]) -> None:
    runner = Runner(load(build(config(), torch.float64)), 40, 4)
    torch.testing.assert_close(run(runner, 20)[0], run(runner, 20, 60)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("config", [longrope, dynamic])
@pytest.mark.usefixtures("forced")
def test_the_fallback_is_fixed_too(build: Callable[..., Any], config: Callable[[], Any]) -> None:
    """Keys that a short chunk has cached are those that a long prompt reads."""
    runner = Runner(load(build(config(), torch.float64)), 40, 4)
    whole = run(runner, 60)[0]
    tokens = np.random.default_rng(0).integers(3, 97, 60)
    run(runner, 20)  # the first blocks again
    cut = runner.run([chunk(tokens[20:], 20, range(15))])[0]
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-4)  # its softmax is float32's


def test_without_freezing_the_self_test_would_refuse_it(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "freeze", lambda model, max_length: [])
    with pytest.raises(UnsupportedModel, match="own forward"):
        load(build(longrope(), torch.float64))


def test_a_frozen_longrope_is_the_own_forward_of_long_prompts(build: Callable[..., Any]) -> None:
    runner = Runner(load(build(longrope(), torch.float64)), 40, 4)
    own = build(longrope(), torch.float64)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 97, 60))[None]
    torch.testing.assert_close(run(runner, 60)[0], own(input_ids=tokens).logits[0, -1], rtol=0, atol=1e-9)


def test_a_moving_rope_of_unknown_make_is_refused(build: Callable[..., Any]) -> None:
    model = build(dynamic())
    del model.model.rotary_emb.original_inv_freq
    with pytest.raises(UnsupportedModel, match="cannot be frozen"):
        load(model)


def test_a_rope_that_chooses_by_itself_is_fixed_too(build: Callable[..., Any]) -> None:
    """Phimoe scales its rotations by one of two factors."""
    scales = {"short_mscale": 1.0, "long_mscale": 1.5}
    config = transformers.PhimoeConfig(
        **GROUPED | {"max_position_embeddings": 128}, num_local_experts=2, sliding_window=None,
        rope_parameters={**longrope().rope_parameters, **scales},
    )  # fmt: skip
    runner = Runner(load(build(config)), 40, 4)
    torch.testing.assert_close(run(runner, 20)[0], run(runner, 20, 60)[0], rtol=0, atol=1e-4)


def test_a_rope_that_still_moves_is_refused(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    rotary = type(model.model.rotary_emb)
    forward = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda self, x, position_ids: forward(self, x, position_ids + position_ids.max())
    )
    with pytest.raises(UnsupportedModel, match="still rotates a token by how long the longest sequence"):
        load(model)
