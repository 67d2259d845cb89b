"""Fused norms equal a model's own, row by row with the same bits; norms that compute something else stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from radixkv.models.quantized import kernels
from radixkv.models.quantized.norms import fuse_norms
from tests.models.gguf_files import CONFIGS, made

pytestmark = pytest.mark.skipif(kernels.kernels() is None, reason="no compiler, or a CPU without AVX2")
IDS = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
@pytest.mark.parametrize(("family", "count"), [("llama", 5), ("gemma2", 9), ("qwen3", 9), ("phi3", 5), ("granite", 5)])
def test_every_norm_of_a_model_is_fused(family: str, count: int) -> None:
    model = made(CONFIGS[family]())
    expected = model(IDS).logits
    assert fuse_norms(model) == count
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)


class TestRMSNorm(nn.Module):
    """A norm as most models have it; `power` 2 is an RMS norm."""

    __test__ = False  # not a test case of pytest

    def __init__(self, width: int, power: float = 2.0, inner: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.eps, self.power, self.inner = 1e-5, power, inner

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        scale = given.abs().pow(self.power).mean(-1, keepdim=True) + self.eps + self.inner
        return self.weight * given * scale.pow(-1 / self.power)


@torch.no_grad()
@pytest.mark.parametrize("width", [1, 7, 32, 100, 576])
def test_rows_have_the_same_bits_alone_and_in_a_batch(width: int) -> None:
    model: Any = nn.Sequential(TestRMSNorm(width))
    own, rows = model[0], torch.randn(3, 11, width)
    assert fuse_norms(model) == 1
    found = model(rows)
    torch.testing.assert_close(found, own(rows), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(model(rows[i, j]), found[i, j]) for i in range(3) for j in range(11))
    across = torch.randn(width, 5).t()
    assert torch.equal(model(across), model(across.contiguous()))
    assert model[0].weight is own.weight


@pytest.mark.parametrize("other", ["power", "epsilon", "hook", "dtype", "forward"])
def test_norms_that_compute_something_else_stay(other: str) -> None:
    norm = TestRMSNorm(64, power=3.0 if other == "power" else 2.0, inner=1e-6 if other == "epsilon" else 0.0)
    if other == "hook":
        norm.register_forward_hook(lambda *_: None)
    elif other == "dtype":
        norm = norm.double()
    elif other == "forward":
        norm.forward = lambda given: given  # type: ignore[method-assign]
    model: Any = nn.Sequential(norm, nn.LayerNorm(64))
    assert fuse_norms(model) == 0 and model[0] is norm
