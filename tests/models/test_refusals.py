"""Models that cannot run exactly are refused at load with the reason, and never answer wrongly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, selftest
from radixkv.models.rounding import TOLERANCE, relative_error
from radixkv.models.selftest_cases import SelfTestCases
from tests.models.conftest import GROUPED, SIZES

load = partial(adapter.load, model_code="transformers")  # layers of our own need none of this


def test_a_model_that_is_no_decoder_is_refused(build: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedModel, match="later tokens"):
        load(build(transformers.BertConfig(**SIZES, is_decoder=False)))


def test_two_attention_calls_in_a_layer_are_two_layers_of_the_pool(build: Callable[..., Any]) -> None:
    """DiffLlama subtracts one attention from another: numbering layers by their index would mix up the two."""
    loaded = load(build(transformers.DiffLlamaConfig(**GROUPED)))
    assert len(loaded.layers) == 4


class Leaky(nn.Module):
    """An MLP that adds the mean of all it sees in a forward: state across tokens that no attention call shows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(1, x.shape[1] + 1)[:, None]
        result: torch.Tensor = self.inner(x) + x.cumsum(dim=1) / seen
        return result


def test_state_outside_of_attention_fails_the_self_test(build: Callable[..., Any]) -> None:
    model = build("llama")
    model.model.layers[0].mlp = Leaky(model.model.layers[0].mlp)
    with pytest.raises(UnsupportedModel, match=r"own forward by .* of the logits' spread"):
        load(model)


def test_a_refused_model_keeps_its_own_attention(build: Callable[..., Any]) -> None:
    model = build("llama")
    tokens = torch.arange(3, 20)[None]
    before = model(input_ids=tokens).logits
    mlp = model.model.layers[0].mlp
    model.model.layers[0].mlp = Leaky(mlp)
    with pytest.raises(UnsupportedModel):
        load(model)
    model.model.layers[0].mlp = mlp
    torch.testing.assert_close(model(input_ids=tokens).logits, before)


def test_a_window_that_is_not_passed_to_attention_is_refused(build: Callable[..., Any]) -> None:
    model = build("gemma2")
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModel, match="layer 0 is sliding_attention, but its window is None"):
        load(model, attention="torch")


def test_a_softcap_that_is_not_passed_to_attention_is_refused(build: Callable[..., Any]) -> None:
    model = build("gemma2")
    model.model.layers[1].self_attn.attn_logit_softcapping = None
    with pytest.raises(UnsupportedModel, match="softcap"):
        load(model, attention="torch")


class Faint(Leaky):
    """An error that is smaller than the rounding of 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leaked = super().forward(x)
        plain: torch.Tensor = self.inner(x)
        return plain + (leaked - plain) * 0.01


def test_16_bits_do_not_hide_a_small_fault(build: Callable[..., Any]) -> None:
    assert load(build("llama", torch.bfloat16)).dtype == torch.bfloat16
    model = build("llama", torch.bfloat16)
    model.model.layers[0].mlp = Faint(model.model.layers[0].mlp)
    with pytest.raises(UnsupportedModel, match="float32"):
        load(model)
    assert model.dtype == torch.bfloat16


def test_a_model_whose_own_forward_fails_is_refused(build: Callable[..., Any]) -> None:
    model = build("llama")
    model.lm_head.register_forward_pre_hook(_refuse_many_rows)
    with pytest.raises(UnsupportedModel, match="failed in its self-test: ArithmeticError: too many"):
        load(model)


def _refuse_many_rows(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    if inputs[0].shape[1] > 2:
        raise ArithmeticError("too many")


def test_a_number_that_attention_does_not_know_is_refused(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might be a window that is longer than the test's prompt."""
    model = build("llama")
    forward = type(model.model).forward
    monkeypatch.setattr(type(model.model), "forward", lambda self, **given: forward(self, **given, lookback=200))
    with pytest.raises(UnsupportedModel, match="LlamaAttention passes lookback to attention"):
        load(model, attention="torch")


def test_bidirectional_attention_is_refused(build: Callable[..., Any]) -> None:
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(UnsupportedModel, match="later tokens"):
        load(model, attention="torch")


def test_a_model_that_is_causal_in_one_of_its_attentions_only_is_refused(build: Callable[..., Any]) -> None:
    """transformers runs this one with torch's attention, which then sees all tokens; its own would stay causal."""
    config = transformers.GemmaConfig(**GROUPED, head_dim=8, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="a token changes the logits of earlier tokens"):
        load(build(config))


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a GGUF file or a transformers model, got "):
        load({})


@pytest.mark.parametrize("large", [False, True])
def test_rounding_that_routes_tokens_is_no_fault(
    large: bool, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 a few of its tokens go to other experts than in one forward of all: some logits differ widely."""
    if large:  # too large to be tested in float32
        monkeypatch.setattr(selftest, "_WEIGHTS_TO_WIDEN", 0)
    config = transformers.MixtralConfig(**{**GROUPED, "num_hidden_layers": 4}, num_local_experts=8)
    loaded = load(build(config, torch.bfloat16))
    errors = [relative_error(ours, own) for _, ours, own in SelfTestCases(loaded, 48).results()]
    assert loaded.attention == "torch"
    assert max(errors) > TOLERANCE[torch.bfloat16]
    leaky, damaged = (build(config, torch.bfloat16) for _ in range(2))
    leaky.model.layers[0].input_layernorm = Leaky(leaky.model.layers[0].input_layernorm)
    with pytest.raises(UnsupportedModel, match="own forward by"):
        load(leaky)
    with torch.no_grad():
        damaged.lm_head.weight[5] = torch.nan
    with pytest.raises(InvalidInput, match="nan or infinity by its own forward"):
        load(damaged)


@pytest.mark.parametrize(("routed", "accepted"), [(False, False), (True, True)])
def test_one_row_that_is_wrong_in_16_bits_is_rounding_only_where_experts_are_chosen(
    routed: bool, accepted: bool, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=4) if routed else "llama"
    loaded = load(build(config, torch.bfloat16))
    results = SelfTestCases.results

    def one_wrong(scenario: SelfTestCases) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        [(name, ours, own), *rest] = results(scenario)
        if own.dtype == torch.bfloat16:
            ours = -ours
        return [(name, ours, own), *rest]

    monkeypatch.setattr(SelfTestCases, "results", one_wrong)
    if accepted:
        selftest.self_test(loaded)
    else:
        with pytest.raises(UnsupportedModel, match="does not compute the same"):
            selftest.self_test(loaded)
