"""The kernel that draws tokens equals the torch operators, and so the sampler of the host."""

from __future__ import annotations

import math
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixkv.models.sampling_backend import sampler_of
from radixkv.sampling.batch_draw import DrawRows
from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import sample
from radixkv_kernels.sampling import draw
from tests.virtual_gpu import VirtualGpu

CPU = torch.device("cpu")


def drawn(logits: torch.Tensor, rows: list[SampleRow], tile: int = 1024) -> list[int]:
    """Sample with the kernel."""

    def kernel(values: torch.Tensor, best: torch.Tensor, given: DrawRows) -> torch.Tensor:
        return draw(values, best, *given.tensors(values), tile=tile)

    return DeviceSampler(CPU, kernel).begin(logits, rows).result().tokens


def params(rng: Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7, 1e-30, 1e30]),
        top_k=rng.choice([0, 0, 1, 2, 5, 30, 400, 10**30]),
        top_p=rng.choice([1.0, 0.95, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.6, 1.0]),
    )


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("vocab", [1500])
def test_rows_are_drawn_as_on_the_host(vocab: int, seed: int) -> None:
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    rows = [SampleRow(params(rng), rng.randrange(2**70), rng.randrange(1000)) for _ in range(8)]
    spread = torch.tensor([0.0, 0.5, 3.0, 30.0]).repeat(2)[:, None]
    logits = (torch.randn(8, vocab, generator=generator) * spread * 32).round() / 32  # some are equal
    logits[::3, vocab // 2 :: 3] = -torch.inf
    logits[logits.isneginf().all(dim=1), 0] = 1.0
    assert drawn(logits, rows) == sample(logits, rows).tokens


def test_equal_logits_are_kept_or_dropped_together() -> None:
    logits = torch.zeros(1, 700)
    logits[0, [3, 600, 640]] = 1.0
    rows = [SampleRow(SamplingParams(top_k=2), 0, position) for position in range(8)]
    assert set(drawn(logits.expand(8, -1), rows)) == {3, 600, 640}
    flat = [SampleRow(SamplingParams(top_p=0.5), 0, position) for position in range(2)]
    zeros = torch.zeros(2, 700)
    assert drawn(zeros, flat) == sample(zeros, flat).tokens


@pytest.mark.parametrize(("share", "kept"), [(0.39, {0}), (0.41, {0, 1}), (0.69, {0, 1}), (0.71, {0, 1, 2})])
def test_top_p_ends_at_the_token_that_reaches_it(share: float, kept: set[int]) -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(100, -1)
    rows = [SampleRow(SamplingParams(top_p=share), 0, position) for position in range(100)]
    expected = sample(logits, rows).tokens
    assert set(expected) == kept
    chosen = sorted({token: at for at, token in enumerate(expected)}.values())  # one row for each token
    assert drawn(logits[chosen], [rows[at] for at in chosen]) == [expected[at] for at in chosen]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_finite_maximum_get_some_token(value: float) -> None:
    logits = torch.full((4, 600), value)
    logits[3] = 0.0
    logits[3, 7] = math.inf if value == -torch.inf else value
    kinds = [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5, min_p=0.1), SamplingParams()]
    rows = [SampleRow(each, 0, 0) for each in kinds]
    assert all(0 <= token < 600 for token in drawn(logits, rows))


def test_logits_in_double_precision() -> None:
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(0)).double()
    rows = [SampleRow(each, 0, 0) for each in (SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.8))]
    assert drawn(logits, rows) == sample(logits, rows).tokens


def test_a_gpu_draws_by_the_kernel_that_was_proven(
    virtual_gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = SimpleNamespace(device=virtual_gpu.place, vocab_size=97)
    sampler = sampler_of(model)
    logits = torch.randn(2, 97, generator=torch.Generator().manual_seed(0))
    rows = [SampleRow(SamplingParams(top_p=0.8), 0, position) for position in range(2)]
    with virtual_gpu.serving():
        launches = virtual_gpu.counts["launch"]
        assert sampler.begin(virtual_gpu.upload(logits), rows).result() == sample(logits, rows)
    assert virtual_gpu.counts["launch"] - launches < 10
    assert not caplog.records
    monkeypatch.setattr("radixkv_kernels.sampling.draw", lambda logits, best, *_: best.long() * 0)
    sampler_of(model)
    assert "the kernel draws other tokens" in caplog.text
