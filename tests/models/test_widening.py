"""Large models of 16 bits with experts are tested in float32 layer by layer, where the worst row counts."""

from __future__ import annotations

import importlib
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from radixkv.errors import UnsupportedModel
from radixkv.models import adapter, selftest
from radixkv.models.rounding import agree, widened_by_layers
from radixkv.models.selftest_cases import SelfTestCases
from tests.models.conftest import GROUPED, make
from tests.selection import mostly_long

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
recipes = importlib.import_module("model_parts.recipes")
EVERY = {**recipes.classes(), **recipes.variants()}
ROUTED = [
    "GptOssForCausalLM",
    "DbrxForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma4ForCausalLM with experts, K = V",
    "JetMoeForCausalLM",
    "Llama4ForCausalLM",
    "LongcatFlashForCausalLM",
    "Qwen3NextForCausalLM",
]


def experts(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    config = transformers.Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, **more
    )
    return make(config, dtype)


def places(model: nn.Module) -> list[tuple[int, torch.dtype]]:
    return [(each.data_ptr(), each.dtype) for each in model.parameters()]


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_layers_compute_in_float32_one_at_a_time_and_stay_where_they_were(tied: bool) -> None:
    model, before = experts(tie_word_embeddings=tied), []
    whole = experts(tie_word_embeddings=tied).float()
    wide: list[int] = []

    def count(*_: Any) -> None:
        wide.append(sum(each.numel() for each in model.parameters() if each.dtype == torch.float32))

    before, watched = places(model), [weakref.ref(each) for each in model.parameters()]
    with widened_by_layers(model, torch.bfloat16):
        for module in model.modules():
            module.register_forward_hook(count)
        found = logits(model)
    assert all(watch() is not None for watch in watched)  # as an optimizer or torch.compile watches
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits(whole), rtol=1e-5, atol=1e-5)
    assert places(model) == before
    largest = max(sum(each.numel() for each in layer.parameters()) for layer in model.model.layers)
    assert 0 < max(wide) <= max(largest, model.lm_head.weight.numel())


def test_a_forward_that_raises_leaves_the_weights_where_they_were() -> None:
    model = experts()
    before = places(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"), widened_by_layers(model, torch.bfloat16):
        logits(model)
    assert places(model) == before


@pytest.mark.usefixtures("each_load_tested")
def test_one_wrong_row_is_found_in_a_large_model_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits only the middle row counts, so this needs the comparison in float32."""
    monkeypatch.setattr(selftest, "_WEIGHTS_TO_WIDEN", 0)
    assert adapter.load(experts(), dtype=torch.bfloat16).dtype == torch.bfloat16
    tested, dtypes = SelfTestCases.results, []

    def results(cases: SelfTestCases) -> list[tuple[str, Tensor, Tensor]]:
        found = tested(cases)
        dtypes.append(found[0][2].dtype)
        name, ours, own = found[0]
        return [(name, -ours, own), *found[1:]]

    monkeypatch.setattr(SelfTestCases, "results", results)
    with pytest.raises(UnsupportedModel, match=r"does not compute the same.*float32"):
        adapter.load(experts(), dtype=torch.bfloat16, attention="torch")
    assert dtypes == [torch.float32]


@pytest.mark.parametrize("name", mostly_long(ROUTED, "GptOssForCausalLM"))
def test_every_kind_of_routing_is_judged_by_its_worst_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in modules and in stacked tensors, shared experts, latent attention, states, layers that share KV."""
    judged: list[tuple[torch.dtype, bool]] = []
    judge = selftest.judged

    def recorded(results: list[tuple[str, Tensor, Tensor]], *, middle: bool) -> tuple[float, str]:
        judged.append((results[0][2].dtype, middle))
        return judge(results, middle=middle)

    monkeypatch.setattr(selftest, "_WEIGHTS_TO_WIDEN", 0)
    monkeypatch.setattr(selftest, "judged", recorded)
    adapter.load(recipes.build(name, EVERY[name]).to(torch.bfloat16), dtype=torch.bfloat16)
    assert judged == [(torch.float32, False), (torch.bfloat16, True)]


def test_a_model_that_reads_weights_outside_of_their_layer_is_tested_in_16_bits_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = experts()
    gate = model.model.layers[0].input_layernorm.weight

    def read(module: Any, args: Any, output: Tensor) -> Tensor:
        return nn.functional.linear(output, torch.diag(gate))

    model.model.norm.register_forward_hook(read)
    monkeypatch.setattr(selftest, "_WEIGHTS_TO_WIDEN", 0)
    with caplog.at_level("INFO", "radixkv.models.selftest"):
        adapter.load(model, dtype=torch.bfloat16)
    assert "reads weights outside of their layers" in caplog.text


def test_products_in_tf32_are_compared_as_float16_and_the_self_test_rounds_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which some images set, begins with the precision "high"."""
    logits = torch.linspace(0, 1, 100)
    close = logits + 3e-3 * torch.tensor([1.0, -1.0] * 50)
    assert not agree(close, logits, torch.float32)
    torch.set_float32_matmul_precision("high")
    try:
        assert agree(close, logits, torch.float32)
        seen, results = list[str](), SelfTestCases.results

        def recorded(cases: SelfTestCases) -> Any:
            seen.append(torch.get_float32_matmul_precision())
            return results(cases)

        monkeypatch.setattr(SelfTestCases, "results", recorded)
        adapter.load(make(transformers.LlamaConfig(**GROUPED)), attention="torch")
        assert (seen, torch.get_float32_matmul_precision()) == (["highest"], "high")
    finally:
        torch.set_float32_matmul_precision("highest")
