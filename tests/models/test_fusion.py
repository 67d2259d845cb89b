"""A model compiled around its attention computes the same, in one graph; else it runs as written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig

from radixkv.attention import triton_backend
from radixkv.errors import InvalidInput
from radixkv.models import adapter, fusion
from radixkv.models.quantized.kernels import kernels
from radixkv.models.runner import Runner
from tests.models.conftest import FAMILIES, GROUPED, make
from tests.models.step_runner import chunk
from tests.selection import mostly_long
from tests.virtual_gpu import VirtualGpu, installed

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


STEPS = [
    [chunk([3, 4, 5, 6, 7, 8, 9], 0, [5, 2])._replace(logit_rows=4)],
    [chunk([7], 7, [5, 2])],
    [chunk([8], 8, [5, 2, 9]), chunk([3, 4], 0, [1])],
    [chunk([9], 9, [5, 2, 9]), chunk([3, 4, 6], 2, [1, 0])._replace(logit_rows=2)],
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize(("family", "layers"), mostly_long([("llama", 5), ("gemma2", 4), ("gpt_neox", 2)]))
def test_layers_that_are_alike_are_compiled_once_and_compute_the_same(
    family: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FAMILIES[family]()
    config.num_hidden_layers = layers
    if family == "gemma2":
        config.layer_types = ["sliding_attention", "full_attention"] * (layers // 2)
    monkeypatch.setattr(adapter, "tested", lambda loaded: 0.0)
    loaded = adapter.load(make(config))
    plain, fused = Runner(loaded, 12, 4), Runner(loaded, 12, 4)
    fusion.fuse(fused, "eager")
    compiled = counters["stats"]["unique_graphs"]
    for step in STEPS:
        torch.testing.assert_close(fused.run(step), plain.run(step), rtol=0, atol=1e-5)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == compiled == 2  # several tokens, and one


def test_a_model_without_lists_of_layers_is_compiled_whole() -> None:
    class Model(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.sin() + 1

    model, rows = Model(), torch.randn(2, 3)
    assert torch.equal(fusion.Fused(model, "eager")(rows=rows), model(rows))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.long
def test_what_would_be_compiled_in_each_step_runs_as_it_is_with_one_warning(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A count of calls, which Dynamo takes for a constant: each call is another graph."""
    model = build("llama")
    mlp = model.model.layers[1].mlp
    forward, mlp.calls = mlp.forward, 0

    def counting(hidden: torch.Tensor) -> Any:
        mlp.calls += 1
        return forward(hidden) + 0 * mlp.calls

    mlp.forward = counting
    loaded = adapter.load(model)
    fused = Runner(loaded, 12, 4)
    fusion.fuse(fused, "eager")
    compiled = counters["stats"]["unique_graphs"]
    for step in STEPS:
        fused.run(step)
    assert counters["stats"]["unique_graphs"] == compiled
    assert caplog.messages == ["the model runs uncompiled: it would be compiled anew in each step"]


@pytest.mark.long
def test_what_does_not_compile_runs_as_it_is_with_one_warning(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = build("llama")
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda hidden: forward(hidden * (1.0 if hidden.sum().item() else 2.0))
    loaded = adapter.load(model)
    plain, fused = Runner(loaded, 12, 4), Runner(loaded, 12, 4)
    fusion.fuse(fused, "eager")
    for step in STEPS:
        assert torch.equal(fused.run(step), plain.run(step))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the model runs uncompiled from now on: ")


@pytest.mark.long
def test_what_computes_something_else_runs_as_it_is_with_one_warning(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = build("llama")
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda hidden: forward(hidden) * (2 if torch.compiler.is_compiling() else 1)
    loaded = adapter.load(model)
    plain, fused = Runner(loaded, 12, 4), Runner(loaded, 12, 4)
    fusion.fuse(fused, "eager")
    assert torch.equal(fused.run(STEPS[0]), plain.run(STEPS[0]))
    assert caplog.messages == ["the model runs uncompiled: compiled, it does not compute the same"]


def test_layers_for_the_cpu_are_not_tried_and_the_reason_is_said(
    build: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("tried"))
    model = build(LlamaConfig(**{**GROUPED, "hidden_size": 512}))
    fusion.fuse(Runner(adapter.load(model), 12, 4))
    [packed] = caplog.messages
    assert packed.startswith("the model runs uncompiled: on a CPU its linear layers are packed for oneDNN, and")
    if kernels() is not None:
        fusion.fuse(Runner(adapter.load(build(LlamaConfig(**GROUPED)), weights="int8"), 12, 4))
        assert "on a CPU its linear layers with weights of 8 or 4 bits are compiled already" in caplog.messages[1]


def test_a_model_is_compiled_on_cuda_unless_bits_matter_or_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "TRITON", True)
    assert fusion.wanted("auto", CUDA, deterministic=False)
    assert not fusion.wanted("auto", CPU, deterministic=False)
    assert not fusion.wanted("auto", CUDA, deterministic=True)
    assert fusion.wanted(True, CPU, deterministic=True)
    assert not fusion.wanted(False, CUDA, deterministic=False)
    with monkeypatch.context() as patch:
        patch.setattr(triton_backend, "TRITON", False)  # compiling for CUDA needs it
        assert not fusion.wanted("auto", CUDA, deterministic=False)
    with installed(VirtualGpu()) as gpu:
        assert fusion.wanted("auto", gpu.place, deterministic=False)
    with pytest.raises(InvalidInput, match="compile='max': allowed are 'auto', True and False"):
        fusion.wanted("max", CPU, deterministic=False)
