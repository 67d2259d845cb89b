"""The longest sequence and the windows, for configurations and models that disagree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import transformers

from radixkv.errors import UnsupportedModel
from radixkv.models import adapter, selftest
from tests.models.conftest import GROUPED, SIZES
from tests.models.step_runner import compare
from tests.models.test_fallback import HEADS

load = partial(adapter.load, model_code="transformers")  # layers of our own need none of this

CONTEXTS = [
    (transformers.MptConfig(**HEADS, d_model=32, n_layers=2, n_heads=4, max_seq_len=70), 70),
    (
        transformers.WhisperConfig(
            **{**HEADS, "pad_token_id": 0}, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
            max_target_positions=60, is_encoder_decoder=False, begin_suppress_tokens=None,
        ),
        60,
    ),
    # It drops equal tokens beyond a number, and the choice depends on the number of other tokens.
    (transformers.DogeConfig(**GROUPED, keep_window_size=64), 64),
    # Beyond (5 + 2) blocks the answer would depend on whether it has seen a shorter prompt before.
    (transformers.BigBirdConfig(**SIZES, is_decoder=True, block_size=4, num_random_blocks=1), 28),
]  # fmt: skip


@pytest.mark.parametrize(("config", "length"), CONTEXTS, ids=lambda value: type(value).__name__)
def test_a_context_ends_where_positions_do_or_keys_are_dropped(
    build: Callable[..., Any], config: Any, length: int
) -> None:
    assert load(build(config)).max_length == length


def phimoe() -> Any:
    return transformers.PhimoeConfig(**GROUPED, num_local_experts=2, sliding_window=53)


@pytest.mark.usefixtures("exact_softmax")
def test_a_window_that_attention_is_not_told(build: Callable[..., Any]) -> None:
    """The model's mask has the window, its attention call does not: only a longer prompt shows it."""
    loaded = load(build(phimoe()))
    assert loaded.attention == "fallback"
    compare(loaded, 1e-3)  # its experts do not run in float64


def test_a_window_that_attention_is_not_told_and_that_cannot_be_tested(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "_TOKEN_WEIGHTS", 0)  # as if the model were large
    with pytest.raises(UnsupportedModel, match="a window of 53 tokens that it does not pass to attention"):
        load(build(phimoe()), attention="torch")
    assert load(build(phimoe())).attention == "fallback"


@pytest.mark.parametrize("large", [False, True])
def test_a_window_that_only_attention_is_told(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *, large: bool
) -> None:
    """OLMoE's own forward uses its mask, which has no window even if its configuration has one."""
    config = transformers.OlmoeConfig(**GROUPED, num_experts=2, num_experts_per_tok=1)
    config.sliding_window = 53
    said = "does not compute the same"
    if large:
        monkeypatch.setattr(selftest, "_TOKEN_WEIGHTS", 0)
        said = "passes a window of 53 tokens to attention that its own mask does not seem to have"
    with pytest.raises(UnsupportedModel, match=said):
        load(build(config), attention="torch")
    assert load(build(config)).attention == "fallback"


@pytest.mark.usefixtures("forced")
def test_a_foreign_window_is_tested_or_not_believed(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own code may drop keys outside of its window, as transformers' cache for it does."""

    class Foreign(transformers.MistralForCausalLM):  # type: ignore[misc]  # transformers shows no types
        pass

    config = transformers.MistralConfig(**GROUPED, sliding_window=53)
    assert load(Foreign(config).eval()).attention == "fallback"
    monkeypatch.setattr(selftest, "_TOKEN_WEIGHTS", 0)  # as if the model were large
    assert load(build(config)).attention == "fallback"
    with pytest.raises(UnsupportedModel, match="a window of 53 tokens, which is too long to be tested"):
        load(Foreign(config).eval())
