"""Architectures whose attention cannot be replaced: the same hits, and the answers of the model alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from radixkv.errors import UnsupportedModel
from radixkv.models import adapter
from radixkv.models.fallback import PoolLayer
from radixkv.models.runner import Runner
from tests.models.conftest import GROUPED, SIZES
from tests.models.step_runner import chunk, compare

load = partial(adapter.load, model_code="transformers")  # layers of our own need none of this

HEADS: dict[str, Any] = {"vocab_size": 97, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
# The second number is how exactly the architecture computes in float64: some keep parts of it in float32.
ARCHITECTURES: dict[str, tuple[Callable[[], Any], float]] = {
    "bloom": (lambda: transformers.BloomConfig(**HEADS, hidden_size=32, n_layer=2, n_head=4), 1e-9),
    "mpt": (lambda: transformers.MptConfig(**HEADS, d_model=32, n_layers=2, n_heads=4), 1e-4),
    "falcon": (lambda: transformers.FalconConfig(**SIZES, alibi=True, new_decoder_architecture=False), 1e-9),
    "gpt_neo": (
        lambda: transformers.GPTNeoConfig(
            **HEADS,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=21,
            max_position_embeddings=128,
        ),
        1e-4,
    ),
    "doge": (lambda: transformers.DogeConfig(**GROUPED), 1e-9),
}


@pytest.fixture(params=sorted(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.usefixtures("exact_softmax")
def test_logits_equal_the_own_forward(build: Callable[..., Any], architecture: str) -> None:
    config, tolerance = ARCHITECTURES[architecture]
    loaded = load(build(config(), torch.float64))
    assert loaded.attention == "fallback"
    compare(loaded, tolerance)


@pytest.mark.usefixtures("exact_softmax", "forced")
@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_a_sliding_window_drops_nothing(build: Callable[..., Any], family: str) -> None:
    """transformers' own cache keeps a window of 21 tokens, in which a longer prefix could not be a hit."""
    loaded = load(build(family, torch.float64))
    assert (loaded.attention, loaded.layers[0].window) == ("fallback", 21)
    compare(loaded, 1e-9)


@pytest.mark.usefixtures("forced")
def test_a_token_that_the_host_has_not_read_matches_its_sampled_row(build: Callable[..., Any]) -> None:
    runner, known = Runner(load(build("llama")), 4, 4), chunk([7], 0, [0])
    unknown = known._replace(tokens=np.zeros(1, np.int32), sampled_row=1)
    assert torch.equal(runner.run([unknown], (), torch.tensor([3, 7])), runner.run([known]))


@pytest.mark.usefixtures("forced")
def test_bits_depend_on_the_sequence_alone(build: Callable[..., Any]) -> None:
    """The same bits with any other inputs in the step and any block ids, as `deterministic` needs."""
    runner = Runner(load(build("llama")), 12, 4)

    def run(*tables: list[int]) -> torch.Tensor:
        return runner.run([chunk(range(3, 12), 0, table) for table in tables])

    alone = run([0, 1, 2])
    assert torch.equal(run([9, 3, 7], [2, 1, 0]), alone.expand(2, -1))


def test_the_fallback_has_to_be_allowed(build: Callable[..., Any]) -> None:
    config, _ = ARCHITECTURES["bloom"]
    with pytest.raises(UnsupportedModel, match="0 attention calls for 2 layers"):
        load(build(config()), attention="torch")


class Keeping(nn.Module):
    """An MLP that keeps its last input in the module, outside of the pool."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = torch.cat([self.last.expand_as(x[:, :1]), x[:, :-1]], dim=1)
        if 9 <= x.shape[1] < 40:  # as a module that takes long prompts to be new ones
            self.last = x[:, -1:].detach()
        result: torch.Tensor = self.inner(x) + 0.1 * shifted
        return result


@pytest.mark.usefixtures("forced")
def test_state_in_a_module_is_refused(build: Callable[..., Any]) -> None:
    model = build("llama")
    model.model.layers[1].mlp = Keeping(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match=r"nor does its own attention over a cache do: .* own forward by"):
        load(model)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize(("times", "said"), [(0, "layer 1 of the cache was not written"), (2, "is written twice")])
def test_a_step_that_writes_otherwise_than_the_first_fails(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, times: int, said: str
) -> None:
    """It would leave slots as they were, and they would count as cached."""
    runner = Runner(load(build("llama")), 4, 4)
    update = PoolLayer.update

    def otherwise(
        self: PoolLayer, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any
    ) -> Any:
        found = key_states, value_states
        for _ in range(times if self._layer else 1):
            found = update(self, key_states, value_states)
        return found

    monkeypatch.setattr(PoolLayer, "update", otherwise)
    with pytest.raises(RuntimeError, match=said):
        runner.run([chunk([3, 4, 5], 0, [0])])


def test_a_model_that_leaves_out_what_pads_is_refused(build: Callable[..., Any]) -> None:
    """Its positions would depend on tokens that a hit does not compute."""
    config = transformers.TrOCRConfig(
        **{**HEADS, "pad_token_id": 0}, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
        is_decoder=True, use_learned_position_embeddings=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedModel, match="own forward by"):
        load(build(config))
