"""Hybrid models over rows and snapshots equal their own forward; models that lose their state are refused."""

from __future__ import annotations

import copy
import importlib
import threading

import pytest
import torch
import transformers

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter
from radixkv.models.loaded import StateKey, StateSpec
from radixkv.models.quantized.kernels import kernels
from radixkv.models.quantized.layers import quantized_weights
from radixkv.models.recurrent.forward import StateArena
from radixkv.models.rounding import TOLERANCE, relative_error
from radixkv.models.runner import Runner
from radixkv.sizing.recurrent_state import EMPTY
from tests.models.recurrent.hybrids import HYBRIDS, Steps, hybrid, own_rows, worst
from tests.models.step_runner import own_logits
from tests.selection import mostly_long
from tests.virtual_gpu import VirtualGpu, installed

exact = importlib.import_module("model_parts.exact").exact


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, "qwen3_5", "lfm2", "nemotron_h"))
def test_chunks_decodes_and_restored_states_equal_the_own_forward(kind: str) -> None:
    with exact():
        loaded = adapter.load(hybrid(kind, torch.float64))
        steps = Steps(loaded, seed=5)
        rows = [row for _ in range(14) for row in steps.step()]
        assert len(rows) > 25
        assert (steps.joint > 2, steps.restored > 2) == (True, True)
        assert worst(loaded, rows) <= 1e-11
    assert loaded.state_bytes == sum(spec.num_bytes for spec in loaded.state) > 0
    assert steps.runner.states is not None
    assert steps.runner.states.copied_bytes == steps.runner.states.copied * loaded.state_bytes
    assert steps.runner.states.copied > steps.restored


@pytest.mark.parametrize("kind", mostly_long(HYBRIDS, "qwen3_5", "falcon_h1"))
def test_in_float32_only_rounding_is_left(kind: str) -> None:
    model = hybrid(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(0.25)  # larger weights enlarge each rounding error, also that of transformers
    loaded = adapter.load(model)
    steps = Steps(loaded, seed=6)
    rows = [row for _ in range(14) for row in steps.step()]
    expected = own_rows(loaded, [tokens for tokens, _ in rows])
    assert max(relative_error(logits, own) for (_, logits), own in zip(rows, expected, strict=True)) <= 3e-6


@pytest.mark.parametrize("kind", ["qwen3_5", "nemotron_h"])
def test_in_16_bits_states_keep_the_dtype_that_the_model_gives_them(kind: str) -> None:
    loaded = adapter.load(hybrid(kind, torch.bfloat16))
    assert {spec.dtype for spec in loaded.state if spec.key.kind == "conv"} == {torch.bfloat16}
    assert {spec.dtype for spec in loaded.state if spec.key.kind == "recurrent"} == {torch.float32}
    steps = Steps(loaded, seed=4)
    rows = [row for _ in range(8) for row in steps.step()]
    errors = [relative_error(logits, own_logits(loaded, tokens)) for tokens, logits in rows]
    assert sorted(errors)[len(errors) // 2] <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MambaForCausalLM", "second chunk from zero, as Mamba-1"),
        ("FalconMambaForCausalLM", "second chunk from zero, as Mamba-1"),
        ("JambaForCausalLM", "second chunk from zero, as Mamba-1"),
        ("MiniMaxForCausalLM", "does not go through transformers' cache of states"),
        ("RwkvForCausalLM", "does not go through transformers' cache of states"),
        ("RecurrentGemmaForCausalLM", "does not go through transformers' cache of states"),
        ("Inkling2ForCausalLM", "dynamic_input, which cannot be cut by sequence"),
        ("Qwen4ExpForCausalLM", "layers of type indexed_attention"),
    ],
)
def test_a_model_that_loses_its_state_is_refused(name: str, reason: str) -> None:
    model = hybrid(name)
    with pytest.raises(UnsupportedModel, match=reason):
        adapter.load(model)
    tokens = torch.tensor([[5, 6, 7]])
    expected = hybrid(name)(input_ids=tokens).logits
    torch.testing.assert_close(model(input_ids=tokens).logits, expected)


def test_layers_without_attention_take_no_blocks() -> None:
    loaded = adapter.load(hybrid("nemotron_h"))
    assert loaded.config.layer_types == ["linear_attention", "moe", "full_attention", "mlp"]
    assert len(loaded.layers) == 1
    assert [spec.key for spec in loaded.state] == [(0, "conv", 0), (0, "recurrent", 0)]
    assert Runner(adapter.load(hybrid("mamba2")), 8, 4, state_slots=1).store.bytes_per_block == 0


def test_a_slot_is_copied_by_one_launch_for_each_shape() -> None:
    keys = [StateKey(layer, kind, 0) for layer in range(5) for kind in ("conv", "recurrent")]
    specs = [StateSpec(key, (3, 4) if key.kind == "conv" else (2, 2, 3), torch.float32) for key in keys]
    with installed(VirtualGpu(0)) as gpu, torch.inference_mode():
        arena, rows = StateArena(specs, 3, gpu.place, host_slots=2), torch.arange(2, device=gpu.place)
        for number, spec in enumerate(specs):
            arena.write(spec.key, rows, torch.full((2, *spec.shape), number + 1.0, device=gpu.place))
        before = gpu.counts["launch"] + gpu.counts["copy"]
        with gpu.serving():
            arena.run([(1, 2), (1, 4), (EMPTY, 1), (4, 0)])
        assert gpu.counts["launch"] + gpu.counts["copy"] - before == 4 * 2
        for number, spec in enumerate(specs):
            states = arena.read(spec.key, slice(0, 3)).flatten(1).cpu()
            assert (states == (number + 1) * torch.tensor([[1.0], [0], [1]])).all()
        assert arena.copied == 3 and not gpu.findings


def test_states_need_slots() -> None:
    with pytest.raises(InvalidInput, match="at least one slot"):
        Runner(adapter.load(hybrid("lfm2")), 8, 4)


def test_two_threads_run_one_model_over_states_of_their_own() -> None:
    loaded = adapter.load(hybrid("lfm2"))
    found: dict[int, float] = {}

    def run(seed: int) -> None:
        steps = Steps(loaded, seed)
        found[seed] = len([row for _ in range(12) for row in steps.step()])
        rows = [row for _ in range(4) for row in steps.step()]
        results.append((seed, rows))

    results: list[tuple[int, list[tuple[list[int], torch.Tensor]]]] = []
    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [1, 2]
    assert max(worst(loaded, rows) for _, rows in results) <= 1e-4


@pytest.mark.skipif(kernels() is None, reason="no kernels for few bits on this machine")
def test_weights_in_few_bits_serve_mixers() -> None:
    torch.manual_seed(3)
    config = copy.deepcopy(hybrid("lfm2").config)
    config.hidden_size, config.intermediate_size = 128, 256
    loaded = adapter.load(transformers.AutoModelForCausalLM.from_config(config).float().eval(), weights="int8")
    assert quantized_weights(loaded.model)
    steps = Steps(loaded, seed=6)
    rows = [row for _ in range(8) for row in steps.step()]
    assert max(relative_error(logits, own_logits(loaded, tokens)) for tokens, logits in rows) <= 1e-4
