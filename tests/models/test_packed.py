"""Packed layers equal plain ones, leave a caller's model as it is, and are dropped if they do not work."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from radixkv.models import adapter, packed
from radixkv.models.packed import PackedLinear, pack, unpack
from tests.models.step_runner import in_chunks

pytestmark = pytest.mark.skipif(not packed._is_possible(), reason="this torch has no oneDNN, or no packed weights")


@pytest.fixture(autouse=True)
def _all_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MIN_WEIGHTS", 1)


def layers(model: Any) -> tuple[int, int]:
    """(packed, plain) linear layers."""
    kinds = [type(module) for module in model.modules()]
    return kinds.count(PackedLinear), kinds.count(nn.Linear)


def linear(rows: int, columns: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(rows * columns)
    return nn.Linear(columns, rows, bias=bias).eval()


@torch.inference_mode()
def own_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return the last row of the model's own forward, and restore its attention."""
    model.set_attn_implementation("eager")
    found: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (33, 17), (96, 64), (300, 257)])
def test_any_number_of_rows_gives_the_plain_products(shape: tuple[int, int], bias: bool) -> None:
    plain = linear(*shape, bias)
    quick = PackedLinear(plain)
    with torch.inference_mode():
        for size in [(1,), (2,), (5,), (8,), (16,), (40,), (1, 1), (1, 7), (2, 3), (1, 0)]:
            given = torch.randn(*size, shape[1])
            torch.testing.assert_close(quick(given), plain(given), rtol=1e-5, atol=1e-5)
        across = torch.randn(shape[1], 6).t()
        torch.testing.assert_close(quick(across), plain(across), rtol=1e-5, atol=1e-5)
        assert quick(torch.randn(shape[1])).shape == (shape[0],)


def test_the_weight_comes_back_bit_for_bit() -> None:
    plain = linear(300, 257)
    model: Any = nn.Sequential(plain)
    weight, bias = plain.weight.detach().clone(), plain.bias
    pack(model, keep=False)
    assert layers(model) == (1, 0)
    assert torch.equal(model[0].weight, weight)
    assert unpack(model) == 1
    assert layers(model) == (0, 1)
    assert torch.equal(model[0].weight, weight)
    assert model[0].bias is bias
    assert not model[0].training


def test_a_model_of_a_caller_stays_as_it_was(build: Callable[..., Any], family: str) -> None:
    model, tokens = build(family), list(range(3, 40))
    before = {name: (id(module), id(getattr(module, "weight", None))) for name, module in model.named_modules()}
    expected = own_logits(model, tokens)
    loaded = adapter.load(model)
    assert layers(loaded.model)[0] > 8
    assert {name: (id(m), id(getattr(m, "weight", None))) for name, m in model.named_modules()} == before
    assert torch.equal(own_logits(model, tokens), expected)
    torch.testing.assert_close(in_chunks(loaded, tokens, [len(tokens)])[0], expected, rtol=1e-4, atol=1e-4)
    kept = {id(tensor) for tensor in model.parameters()}
    assert {id(tensor) for tensor in loaded.model.parameters()} <= kept


def test_weights_that_we_read_go_as_their_layers_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(linear(8, 8) for _ in range(5)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    one = packed._pack_one

    def counted(*arguments: Any) -> bool:
        done = one(*arguments)
        alive.append(sum(weight() is not None for weight in weights))
        return done

    monkeypatch.setattr(packed, "_pack_one", counted)
    pack(model, keep=False)
    assert alive == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_packed_in_place_and_its_embedding_stays(
    tmp_path: Path, build: Callable[..., Any], tied: bool
) -> None:
    config = transformers.Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied, max_position_embeddings=128,
    )  # fmt: skip
    model, tokens = build(config), list(range(3, 30))
    model.save_pretrained(tmp_path)
    loaded = adapter.load(str(tmp_path))
    assert layers(loaded.model) == (15, 0)
    assert [name for name, weight in loaded.model.named_parameters() if weight.ndim == 2] == [
        "model.embed_tokens.weight"
    ]
    torch.testing.assert_close(
        in_chunks(loaded, tokens, [len(tokens)])[0], own_logits(model, tokens), rtol=1e-4, atol=1e-4
    )


def test_only_large_plain_layers_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    model: Any = nn.Sequential(linear(4, 4), Own(4, 4), linear(4, 4), linear(4, 4), linear(4, 4), linear(2, 4))
    model[2].register_forward_hook(lambda *_: None)
    model[3].register_forward_pre_hook(lambda *_: None)
    model[4].forward = lambda given: given
    monkeypatch.setattr(packed, "MIN_WEIGHTS", 16)
    pack(model, keep=False)
    assert [type(layer) for layer in model] == [PackedLinear, Own, *[nn.Linear] * 4]


class Wrong(PackedLinear):
    """A kernel that is wrong for a layer with a weight above 100, in its last column, by little."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        off = torch.zeros(self.out_features)
        off[-1] = 0.1 * float(self._packed.to_dense().max() > 100)
        return super().forward(input) + off


@pytest.mark.parametrize("keep", [True, False])
def test_a_wrong_kernel_is_refused_with_one_warning(
    keep: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed, "PackedLinear", Wrong)
    model: Any = nn.Sequential(*(linear(8, 8) for _ in range(4)))
    with torch.no_grad():
        model[1].weight[2, 2] = model[2].weight[0, 0] = 200
    with caplog.at_level(logging.WARNING):
        quick: Any = pack(model, keep=keep)
    assert [type(layer) for layer in quick] == [Wrong, nn.Linear, nn.Linear, Wrong]
    assert [record.getMessage() for record in caplog.records] == [
        "oneDNN computes 2 linear layers wrongly here (1); torch does them"
    ]


@pytest.mark.parametrize("rows", [1, 7])
def test_each_kernel_is_tested(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedLinear.forward
    monkeypatch.setattr(
        PackedLinear, "forward", lambda layer, given: right(layer, given) * (1.01 if len(given) == rows else 1)
    )
    model = nn.Sequential(linear(8, 8))
    pack(model, keep=False)
    assert layers(model) == (0, 1)


def raising(*_: object) -> torch.Tensor:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("keep", [True, False])
def test_an_operator_that_raises_leaves_a_model_that_runs(
    keep: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(linear(8, 8), linear(8, 8))
    given = torch.randn(3, 8)
    expected = model(given)
    monkeypatch.setattr(packed.PackedLinear, "forward", raising)
    with caplog.at_level(logging.DEBUG, logger=packed.__name__):
        assert pack(model, keep=keep) is model
    assert len(caplog.records) == 1
    assert torch.equal(model(given), expected)


def test_without_the_operators_models_run_unpacked(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("llama")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with caplog.at_level(logging.DEBUG, logger=packed.__name__):
        assert adapter.load(model, model_code="transformers").model is model
    assert ["unpacked" in record.getMessage() for record in caplog.records] == [True]


class Reader(nn.Module):
    """Casts to its layer's dtype first, as some architectures do."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(given.to(self.inner.weight.dtype))
        return found


def test_a_layer_whose_weight_is_read_in_a_forward_is_unpacked_again(build: Callable[..., Any]) -> None:
    model, tokens = build("llama"), list(range(3, 40))
    expected = own_logits(model, tokens)
    count = layers(model)[1]
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Reader(mlp.down_proj)
    loaded = adapter.load(model)
    taken: Any = loaded.model
    assert layers(taken) == (count - 1, 1)
    assert type(taken.model.layers[1].mlp.down_proj.inner) is nn.Linear
    torch.testing.assert_close(in_chunks(loaded, tokens, [len(tokens)])[0], expected, rtol=1e-4, atol=1e-4)


class Picky(nn.Module):
    """Works with a plain layer only."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.inner, nn.Linear)
        found: torch.Tensor = self.inner(given)
        return found


@pytest.mark.parametrize("keep", [True, False])
def test_a_model_that_fails_with_packed_layers_runs_without(build: Callable[..., Any], keep: bool) -> None:
    model, tokens = build("llama"), list(range(3, 40))
    expected = own_logits(model, tokens)
    mlp = model.model.layers[1].mlp
    mlp.down_proj = Picky(mlp.down_proj)
    loaded = adapter._take_over(model, None, "picky", keep=keep)
    assert layers(loaded.model)[0] == 0
    assert loaded.model is model
    torch.testing.assert_close(in_chunks(loaded, tokens, [len(tokens)])[0], expected, rtol=1e-4, atol=1e-4)
