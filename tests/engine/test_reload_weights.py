"""An engine takes new weights.

After a reload it must answer as an engine that loads the updated model afresh.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from radixkv import AsyncEngine, Engine, SamplingParams
from radixkv.errors import InvalidInput, UnsupportedModel, WeightsChanged
from radixkv.models import packed
from radixkv.models.native.layers import NativeModel
from radixkv.models.quantized.kernels import kernels
from tests.engine.fakes import check, make_engine
from tests.models import gguf_files
from tests.models.conftest import FAMILIES, make
from tests.selection import mostly_long

PROMPT = list(range(3, 60))
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
OPTIONS: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "monitor": False}
quantised = pytest.mark.skipif(kernels() is None, reason="no compiler, or a CPU without AVX2")


@pytest.fixture(autouse=True)
def _all_layers_are_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packed, "MIN_WEIGHTS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def answer(engine: Engine) -> list[int]:
    [completion] = engine.generate([PROMPT], GREEDY)
    return list(completion.token_ids)


def fresh(model: Any, **options: Any) -> list[int]:
    """The answer of an engine that loads a copy of the model now."""
    with Engine.load(copy.deepcopy(model), **OPTIONS, **options) as engine:
        return answer(engine)


def noise(model: Any, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """A state near the model's own, with the names of its state_dict."""
    found: dict[int, torch.Tensor] = {}  # by memory: a tied weight has one value
    draw = torch.Generator().manual_seed(5)
    for value in model.state_dict().values():
        if value.data_ptr() not in found:
            found[value.data_ptr()] = value + scale * torch.randn(value.shape, generator=draw).to(value.dtype)
    return {name: found[value.data_ptr()] for name, value in model.state_dict().items()}


# ---- ways to update a model


def optimizer_step(model: Any, **options: Any) -> None:
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    draw = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
    optimizer.step()


def fused_step(model: Any) -> None:
    optimizer_step(model, fused=True)


def load_state(model: Any) -> None:
    model.load_state_dict(noise(model))


def assign_state(model: Any) -> None:
    model.load_state_dict(noise(model), assign=True)


def copy_data(model: Any) -> None:
    state = noise(model)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


def replace_data(model: Any) -> None:
    state = noise(model)
    for name, parameter in model.named_parameters():
        parameter.data = state[name]


def merge_adapter(model: Any) -> None:
    """Add the product of two thin matrices to a projection in place, as a merged adapter does."""
    draw = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        weight = layer.self_attn.v_proj.weight
        outer, inner = (torch.randn(size, generator=draw) for size in ((len(weight), 2), (2, weight.shape[1])))
        with torch.no_grad():
            weight.add_((outer @ inner).to(weight.dtype))


def turn_faster(model: Any) -> None:
    """Change the rotary frequencies, which no state has."""
    model.model.rotary_emb.inv_freq.mul_(1.5)


UPDATES = [
    optimizer_step, fused_step, load_state, assign_state, copy_data, replace_data, merge_adapter, turn_faster,
]  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "packed": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
    "transformers": {"model_code": "transformers"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
}
PAIRS = [  # each update with packed weights, and two or three of them with each other form
    *(("packed", update) for update in UPDATES),
    ("bfloat16", fused_step), ("bfloat16", replace_data), ("float64", optimizer_step), ("float64", assign_state),
    ("int8", load_state), ("int8", assign_state), ("int8", replace_data), ("int4", fused_step), ("int4", copy_data),
    ("int8", merge_adapter), ("transformers", merge_adapter), ("int8", turn_faster), ("transformers", turn_faster),
]  # fmt: skip


def model_for(form: str, family: str = "llama") -> Any:
    return make(FAMILIES[family](), getattr(torch, FORMS[form].get("dtype", "float32")))


@pytest.mark.parametrize(
    ("form", "update"),
    mostly_long(
        PAIRS,
        ("packed", optimizer_step), ("packed", copy_data), ("bfloat16", fused_step), ("int8", assign_state),
        ("int8", merge_adapter), ("packed", turn_faster), ("transformers", turn_faster),
    ),
)  # fmt: skip
def test_an_update_counts_after_a_reload(form: str, update: Callable[[Any], None]) -> None:
    if form.startswith("int") and kernels() is None:
        pytest.skip("no compiler, or a CPU without AVX2")
    model = model_for(form)
    with Engine.load(model, **OPTIONS, **FORMS[form]) as engine:
        assert isinstance(engine.model.model, NativeModel) is (form != "transformers")
        before = answer(engine)
        update(model)
        engine.reload_weights()
        expected = fresh(model, **FORMS[form])
        assert expected != before  # else this test shows nothing
        assert engine.stats().cache.cached_blocks == 0
        assert answer(engine) == expected == answer(engine)  # computed, and from the cache
        assert engine.audit(10).differ == 0
        check(engine)


@pytest.mark.parametrize(
    ("family", "form"),
    mostly_long(
        [
            *((family, "packed") for family in sorted(FAMILIES)), ("llama", "int8"), ("gemma2", "bfloat16"),
            ("gpt_neox", "int8"), ("phi3", "bfloat16"),
        ],
        ("qwen3", "packed"),
    ),
)  # fmt: skip
def test_a_given_state_is_written_into_the_callers_model(family: str, form: str) -> None:
    if form == "int8" and kernels() is None:
        pytest.skip("no compiler, or a CPU without AVX2")
    model = model_for(form, family)
    state = noise(model, 2.0)
    with Engine.load(model, **OPTIONS, **FORMS[form]) as engine:
        before = answer(engine)
        engine.reload_weights(state)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert answer(engine) == fresh(model, **FORMS[form]) != before


@pytest.mark.parametrize("weights", ["float32", pytest.param("int8", marks=quantised)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_files_takes_a_state(tmp_path: Path, weights: str, tied: bool) -> None:
    config = FAMILIES["qwen3"]()
    config.tie_word_embeddings = tied
    model = make(config)
    model.save_pretrained(tmp_path)
    state = noise(model)
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    expected = fresh(model, weights=weights)
    with Engine.load(tmp_path, weights=weights, **OPTIONS) as engine:
        assert answer(engine) != expected
        if tied:
            del state["lm_head.weight"]  # as in its files
        engine.reload_weights(state)
        assert answer(engine) == expected
        with pytest.raises(InvalidInput, match="missing"):
            engine.reload_weights({"model.norm.weight": state["model.norm.weight"]})
        assert answer(engine) == expected


@quantised
def test_a_gguf_file_that_kept_its_blocks_takes_a_state(tmp_path: Path) -> None:
    model = gguf_files.made(gguf_files.CONFIGS["llama, tied"]())
    path = gguf_files.write(model, tmp_path / "model.gguf", "Q8_0")
    state = noise(model)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with Engine.load(path, **OPTIONS) as engine:
        before = answer(engine)
        engine.reload_weights(state)
        model.load_state_dict(state)
        assert answer(engine) == fresh(model, weights="int8") != before


# ---- requests during a reload


def test_a_reload_ends_requests_that_have_begun_and_runs_those_that_wait() -> None:
    model = model_for("packed")
    state = noise(model)
    with Engine.load(model, max_sequences=1, **{**OPTIONS, "num_blocks": 120}) as engine:
        pinned = engine.warm(PROMPT, pin=True)
        running = engine.submit(PROMPT[:9], GREEDY.but(max_tokens=200))
        next(iter(running))
        waiting = engine.submit(PROMPT, GREEDY)
        engine.reload_weights(state)
        with pytest.raises(WeightsChanged, match="send it again"):
            running.result()
        completion = waiting.result()
        assert list(completion.token_ids) == fresh(model)
        assert completion.usage.cached_tokens == 0
        assert engine.stats().cache.pinned_blocks == 0
        pinned.release()
        check(engine)


def test_reloads_can_be_awaited() -> None:
    model = model_for("packed")

    async def main() -> list[int]:
        async with await AsyncEngine.load(model, **OPTIONS) as engine:
            load_state(model)
            await engine.reload_weights()
            [completion] = await engine.generate([PROMPT], GREEDY)
            return list(completion.token_ids)

    assert asyncio.run(main()) == fresh(model)


# ---- weights that do not fit


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = model_for("packed")
    state = noise(model)
    first = next(iter(state))
    wrong: list[tuple[Any, str]] = [
        ({}, "missing"),
        ({**state, "extra.weight": torch.zeros(2)}, r"1 unknown \(extra.weight\)"),
        ({**state, first: state[first][:-1]}, rf"{first} of shape"),
        ({**state, first: "no tensor"}, "maps names to tensors"),
        ([state], "maps names to tensors"),
    ]
    with Engine.load(model, **OPTIONS) as engine:
        before = answer(engine)
        for each, message in wrong:
            with pytest.raises(InvalidInput, match=message):
                engine.reload_weights(each)
        assert engine.probe(PROMPT).length > 0
        assert answer(engine) == before


def test_broken_weights_are_refused_until_better_ones_come() -> None:
    model = model_for("packed")
    good = copy.deepcopy(model.state_dict())
    with Engine.load(model, max_sequences=1, **OPTIONS) as engine:
        before = answer(engine)
        broken = {name: torch.full_like(value, torch.nan) for name, value in good.items()}
        running = engine.submit(PROMPT[:9], GREEDY.but(max_tokens=100))
        next(iter(running))
        waiting = engine.submit(PROMPT, GREEDY)
        with pytest.raises(InvalidInput, match="nan or infinity"):
            engine.reload_weights(broken)
        with pytest.raises(WeightsChanged, match="send it again"):
            running.result()
        with pytest.raises(WeightsChanged, match="a reload failed"):
            waiting.result()
        with pytest.raises(WeightsChanged, match="a reload failed"):
            engine.generate([PROMPT], GREEDY)
        engine.reload_weights(good)
        assert answer(engine) == before


def test_another_dtype_or_other_modules_are_refused() -> None:
    model = model_for("packed")
    with Engine.load(model, **OPTIONS) as engine:
        model.to(torch.bfloat16)
        with pytest.raises(InvalidInput, match=r"bfloat16.*convert it back"):
            engine.reload_weights()
        model.to(torch.float32)
        engine.reload_weights()
        assert answer(engine) == fresh(model)
        layer = model.model.layers[0].self_attn
        layer.q_proj = nn.Sequential(layer.q_proj)  # as an adapter wraps it
        with pytest.raises(InvalidInput, match="other modules"):
            engine.reload_weights()


def test_a_model_that_is_not_of_load_cannot_be_reloaded() -> None:
    engine, _ = make_engine()
    with engine, pytest.raises(InvalidInput, match=r"Engine\.load"):
        engine.reload_weights()


# ---- the weights of a caller's model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_and_running_change_no_weight(dtype: torch.dtype) -> None:
    model = make(FAMILIES["llama"](), dtype)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with Engine.load(model, **OPTIONS) as first, Engine.load(model, **OPTIONS) as second:
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        assert answer(first) == answer(second) == answer(first)


def test_the_weights_of_a_dropped_model_are_freed() -> None:
    model = model_for("packed")
    weight = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    with Engine.load(model, **OPTIONS) as engine:
        state, expected = noise(model), answer(engine)
        del model
        gc.collect()
        assert weight() is None
        assert answer(engine) == expected
        engine.reload_weights(state)
        assert answer(engine) != expected


def test_a_change_during_the_reload_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from radixkv.models.weights import reload

    model = model_for("packed")
    with Engine.load(model, **OPTIONS) as engine:
        tested = reload.self_test

        def updated_meanwhile(loaded: Any) -> float:
            optimizer_step(model)
            return tested(loaded)

        monkeypatch.setattr(reload, "self_test", updated_meanwhile)
        with pytest.raises(WeightsChanged, match="meanwhile"):
            engine.reload_weights()
        monkeypatch.undo()
        engine.reload_weights()


def test_weights_that_a_failed_reload_has_moved_are_recorded_again_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded steps still read the memory of before."""
    from radixkv.models import adapter
    from radixkv.models.weights import reload

    recorded: list[None] = []
    loaded = adapter.load(make(FAMILIES["llama"]()))
    weights = reload.ModelWeights(loaded, None, lambda: recorded.append(None))
    model: Any = loaded.model
    norm = model.model.norm
    norm.weight = nn.Parameter(norm.weight.detach() * 2, requires_grad=False)
    with monkeypatch.context() as patch:
        patch.setattr(reload, "self_test", failing)
        with pytest.raises(UnsupportedModel):
            weights.reload()
    for _ in range(2):
        weights.reload()
        assert len(recorded) == 1


def failing(loaded: Any) -> float:
    raise UnsupportedModel("a decode differs")
