"""Fused layers of Llama-like models compute what the layers as written compute, in at most eleven launches each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from radixkv.attention import torch_backend, triton_backend
from radixkv.errors import UnsupportedModel
from radixkv.models import adapter, fusion
from radixkv.models.attention_interface import own_attention
from radixkv.models.cuda_graphs import record_graphs
from radixkv.models.loaded import LoadedModel
from radixkv.models.native.places import is_fused
from radixkv.models.runner import Runner
from radixkv.models.weights.reload import ModelWeights
from tests.models.conftest import GROUPED, make
from tests.models.step_runner import BLOCK_SIZE, chunk
from tests.virtual_gpu import VirtualGpu, installed

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy warns of SiLU at -1e4
SIZES: dict[str, Any] = {**GROUPED, "num_hidden_layers": 1, "max_position_embeddings": 128}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: transformers.LlamaConfig(**SIZES | more),
    "llama, biases": lambda **more: transformers.LlamaConfig(**SIZES | more, attention_bias=True, mlp_bias=True),
    "qwen2": lambda **more: transformers.Qwen2Config(**SIZES | more, tie_word_embeddings=True),
    "qwen3": lambda **more: transformers.Qwen3Config(**SIZES | more, head_dim=16),
    "mistral": lambda **more: transformers.MistralConfig(**SIZES | more, head_dim=16, sliding_window=5),
    "smollm3": lambda **more: transformers.SmolLM3Config(**SIZES | {"num_hidden_layers": 2}, no_rope_layers=[1, 0]),
    "granite": lambda **more: transformers.GraniteConfig(**SIZES | more, residual_multiplier=0.5, logits_scaling=2.0),
    "phi3": lambda **more: transformers.Phi3Config(**SIZES | more, sliding_window=5),
}
BLOCKS = 40


@pytest.fixture(autouse=True)
def _attention_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend in torch over the pool that fused layers write to: the interpreted kernel takes longer than all else."""

    def attend(*args: Any, split: int | None = None, **options: Any) -> torch.Tensor:
        return torch_backend.attend(*args, **options)

    monkeypatch.setattr(triton_backend, "attend", attend)


def made(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random decoder; norms and biases are random, too."""
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.normal_(1.0, 0.2)
    return model.to(dtype)


def load(model: Any, monkeypatch: pytest.MonkeyPatch, *, gpu: bool = True) -> LoadedModel:
    """Load a model on the kernels as if on a GPU; without a self-test, which takes seconds here."""
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "should_fuse", lambda loaded: gpu)
        patch.setattr(adapter, "tested", lambda loaded: 0.0)
        return adapter.load(model, attention="triton")


STEPS = [
    [chunk([3, 4, 5, 6, 7], 0, [5, 2])._replace(logit_rows=3)],
    [chunk([8], 5, [5, 2]), chunk([3, 4], 0, [1])._replace(logit_rows=2)],
    [chunk([9], 6, [5, 2]), chunk([5], 2, [1])],
]


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Return the logits of a prefill, a mixed step and decodes."""
    runner = Runner(loaded, BLOCKS, BLOCK_SIZE)
    return torch.cat([runner.run(step) for step in STEPS])


def as_written(loaded: LoadedModel) -> torch.Tensor:
    """Return the same by the layers as written, which attention in torch uses also in a fused model."""
    return logits(replace(loaded, attention="torch"))


@pytest.mark.parametrize("name", ["llama, biases", "qwen3", "smollm3"])
def test_a_fused_model_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(made(CONFIGS[name]()), monkeypatch)
    assert is_fused(loaded.model)
    torch.testing.assert_close(logits(loaded), as_written(loaded), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_in_16_bits_it_computes_the_same_up_to_rounding(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(made(CONFIGS["qwen3"](), dtype), monkeypatch)
    assert is_fused(loaded.model)
    found, expected = logits(loaded), as_written(loaded)
    assert (found - expected).norm() / expected.norm() < (0.02 if dtype == torch.bfloat16 else 0.003)


def test_the_self_test_runs_on_the_fused_layers(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Layers that fail it run in torch, with one warning."""
    tested: list[bool] = []

    def failing(loaded: LoadedModel) -> float:
        tested.append(is_fused(loaded.model))
        if tested[-1]:
            raise UnsupportedModel("a decode differs")
        return 0.0

    monkeypatch.setattr(adapter, "tested", failing)
    monkeypatch.setattr(adapter, "should_fuse", lambda loaded: True)
    loaded = adapter.load(made(CONFIGS["llama"]()), attention="triton")
    assert tested == [True, False] and not is_fused(loaded.model)
    assert caplog.messages == ["LlamaForCausalLM: its layers run in torch: fused, a decode differs"]


def test_a_fused_model_is_not_compiled(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    fusion.fuse(Runner(load(made(CONFIGS["llama"]()), monkeypatch), BLOCKS, BLOCK_SIZE))
    assert not caplog.messages


# ---- other models

OTHERS: dict[str, Callable[[], Any]] = {
    "a norm of Gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=8),
    "a part of each head": lambda: transformers.Phi3Config(
        **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "an unlisted activation": lambda: transformers.LlamaConfig(**SIZES, hidden_act="relu"),
    "an unlisted type": lambda: transformers.CohereConfig(**SIZES),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_run_in_torch(name: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    assert not is_fused(load(made(OTHERS[name]()), monkeypatch).model)
    assert not caplog.messages


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda layer: layer.mlp.register_forward_hook(lambda *_: None),
    "a forward": lambda layer: setattr(layer.self_attn, "forward", layer.self_attn.forward),
    "a shared weight": lambda layer: setattr(layer.self_attn.k_proj, "weight", layer.self_attn.v_proj.weight),
    "one bias": lambda layer: setattr(layer.mlp.up_proj, "bias", torch.nn.Parameter(torch.ones(48))),
    "a scale": lambda layer: setattr(layer.self_attn, "scaling", 0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_with_one_changed_layer_lends_nothing(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(CONFIGS["llama"](num_hidden_layers=2))
    CHANGES[change](model.model.layers[1])
    assert not is_fused(load(model, monkeypatch).model)


# ---- weights


def test_weights_are_stored_once_under_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(CONFIGS["qwen2"]())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load(model, monkeypatch)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for stack in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        storages = {each.weight.untyped_storage().data_ptr(): each.weight.untyped_storage() for each in stack}
        assert [each.nbytes() for each in storages.values()] == [sum(each.weight.nbytes for each in stack)]
    after = model.state_dict()
    assert [*after] == [*before] and all(torch.equal(after[name], before[name]) for name in before)
    model.save_pretrained(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert [*saved] == [*before] and all(torch.equal(saved[name], before[name]) for name in before)


@pytest.mark.parametrize("way", ["replaced"])
def test_new_weights_count(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are written into the weights, a state, and other tensors in their place."""
    loaded = load(made(CONFIGS["llama, biases"]()), monkeypatch)
    weights, before = ModelWeights(loaded), logits(loaded)
    state = {name: 1.5 * tensor for name, tensor in loaded.model.state_dict().items()}
    monkeypatch.setattr("radixkv.models.weights.reload.self_test", lambda loaded: 0.0)
    if way == "given":
        weights.reload(state)
    else:
        loaded.model.load_state_dict(state, assign=way == "replaced")
        torch.testing.assert_close(logits(loaded), as_written(loaded), rtol=0, atol=1e-3)
        weights.reload()
    layer: Any = loaded.model.get_submodule("model.layers.0")
    parts = [getattr(owner, name).weight for owner in (layer.self_attn, layer.mlp) for name in owner.inputs]
    assert len({each.untyped_storage().data_ptr() for each in parts}) == 2
    torch.testing.assert_close(logits(loaded), as_written(loaded), rtol=0, atol=1e-3)
    assert not torch.allclose(logits(loaded), before, atol=0.1)


def test_a_copy_of_a_model_computes_with_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(made(CONFIGS["llama"]()), monkeypatch)
    before = logits(loaded)
    other = replace(loaded, model=copy.deepcopy(loaded.model))
    layer: Any = other.model.get_submodule("model.layers.0")
    with torch.no_grad():
        layer.self_attn.v_proj.weight.mul_(2.0)
        layer.post_attention_layernorm.weight.mul_(2.0)
    assert torch.equal(logits(loaded), before)
    torch.testing.assert_close(logits(other), as_written(other), rtol=0, atol=1e-4)
    assert not torch.allclose(logits(other), before, atol=0.1)


def test_a_model_that_is_loaded_again_keeps_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(CONFIGS["llama"]())
    load(model, monkeypatch)
    places = [each.data_ptr() for each in model.parameters()]
    assert is_fused(load(model, monkeypatch).model)
    assert [each.data_ptr() for each in model.parameters()] == places
    assert not is_fused(load(model, monkeypatch, gpu=False).model)


def test_outside_of_radixkv_the_model_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(CONFIGS["qwen3"]()), torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        expected = model(ids).logits
        load(model, monkeypatch)
        with own_attention(model):
            torch.testing.assert_close(model(ids, use_cache=True).logits, expected, rtol=0, atol=1e-5)


# ---- launches


def kernels(model: Any) -> list[list[str]]:
    """Return the operators and launches of recorded decodes, of one to five sequences, that cost a kernel each."""
    with installed(VirtualGpu()) as gpu:
        record_graphs(Runner(adapter.load(model, device=gpu.place), BLOCKS, BLOCK_SIZE), 5, 0)
        return [["launch" if "launch" in name else name for name in names] for names in gpu.recorded]


@pytest.mark.parametrize("name", ["llama"])
def test_a_layer_of_a_decode_takes_at_most_eleven_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its four products, four launches around them, and those of attention: the tiles, by kind, and the merge.

    Two sequences with 16 heads on one kv head may share tiles of the second kind, and five of the third in its place.
    """
    monkeypatch.setattr(adapter, "tested", lambda loaded: 0.0)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 1}
    configs = (CONFIGS[name](num_hidden_layers=layers, **heads) for layers in (1, 2))
    one, two = (kernels(made(config, torch.float16)) for config in configs)
    found = []
    for short, long in zip(one, two, strict=True):
        start = next(place for place, (a, b) in enumerate(zip([*short, ""], long, strict=False)) if a != b)
        found.append(long[start : start + len(long) - len(short)])
    assert all(len(each) <= 11 for each in found), found
    assert all(each.count("linear") == 4 and set(each) == {"linear", "launch"} for each in found)


# ---- a simulated GPU


@pytest.mark.parametrize("name", ["qwen3"])
def test_on_a_gpu_layers_are_fused_and_recorded(name: str, virtual_gpu: VirtualGpu, monkeypatch: Any) -> None:
    """Recorded decodes of a padded batch only launch: nothing is allocated, captured or awaited while serving."""
    monkeypatch.setattr(adapter, "tested", lambda loaded: 0.0)
    expected = as_written(adapter.load(made(CONFIGS[name]()), attention="torch"))
    loaded = adapter.load(made(CONFIGS[name]()), device=virtual_gpu.place)
    assert loaded.attention == "triton" and is_fused(loaded.model)
    runner = Runner(loaded, BLOCKS, BLOCK_SIZE)
    record_graphs(runner, 4, 8)
    padding = chunk([7], 2, [3])  # three sequences in a graph for four
    with virtual_gpu.serving():
        found = [runner.run(step) for step in STEPS[:2]]
        found.append(runner.run([*STEPS[2], padding])[:2])
    assert virtual_gpu.counts["replay"] >= 3
    torch.testing.assert_close(torch.cat(found).cpu(), expected, rtol=0, atol=1e-4)
