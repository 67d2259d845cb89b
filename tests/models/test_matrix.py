"""18 of the architectures that `make models` tries, of every kind; faults that the trial finds; and its page."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.chat.calls.formats import FORMATS
from tests.selection import mostly_long

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
command = importlib.import_module("scripts.models")
exact, jobs, page, recipes, trial, verdict, witness = (
    importlib.import_module(f"model_parts.{name}")
    for name in ("exact", "jobs", "page", "recipes", "trial", "verdict", "witness")
)

PAGED = {
    "GPT2LMHeadModel": "MHA",
    "LlamaForCausalLM": "GQA",
    "Qwen3ForCausalLM": "GQA, window in 2 of 4",
    "Gemma2ForCausalLM": "GQA, window in 2 of 4, softcap",
    "Gemma4ForCausalLM": "GQA, window in 2 of 4, shared KV in 2 of 4, sizes differ by layer",
    "GptOssForCausalLM": "GQA, window in 2 of 4, sinks, experts",
    "MixtralForCausalLM": "GQA, window, experts",
    "DeepseekV3ForCausalLM": "MLA, K wider than V, experts",
    "DiffLlamaForCausalLM": "GQA",
    "Llama4ForCausalLM": "GQA, chunks in 2 of 4, experts",
    "RobertaForCausalLM": "MHA",
    "Qwen3NextForCausalLM": "GQA, in 2 of 4 layers, recurrent state in 2 of 4 layers, experts",
    "Lfm2ForCausalLM": "GQA, in 2 of 4 layers, recurrent state in 2 of 4 layers",
}
FALLBACK = {
    "BloomForCausalLM": "attention interface",
    "GPTNeoForCausalLM": "attention interface",
    "DogeForCausalLM": "mask",
}
REFUSED = {
    "MambaForCausalLM": "as Mamba-1 in torch does",
    "DeepseekV32ForCausalLM": "index",
}
SAMPLE = [*PAGED, *FALLBACK, *REFUSED]
QUICK = ("LlamaForCausalLM", "Gemma2ForCausalLM", "BloomForCausalLM", "DogeForCausalLM", "MambaForCausalLM")
CLASSES = recipes.classes()


@pytest.mark.parametrize("name", mostly_long(SAMPLE, *QUICK))
def test_an_architecture_says_what_it_says_alone_or_is_refused(name: str) -> None:
    if name not in CLASSES:
        pytest.skip(f"this transformers has no {name}")
    found = verdict.judge(name, CLASSES[name])
    assert found.result == ("paged" if name in PAGED else "fallback" if name in FALLBACK else "refused"), found
    if name in PAGED:
        assert found.attention.startswith(PAGED[name])
    else:
        assert {**FALLBACK, **REFUSED}[name] in found.reason
    assert name in REFUSED or found.error <= trial.EXACT


# ---- the trial finds faults


class WithoutCopies(witness.Witness):  # type: ignore[misc, name-defined]
    """An engine that forgets to copy blocks that streams part in."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        run = self._run
        self._run = lambda chunks, copies: run(chunks, ())


class OneSlotOff(witness.Witness):  # type: ignore[misc, name-defined]
    """An engine whose decodes read another sequence's last block."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        run = self._run

        def mixed_up(chunks: Sequence[Any], copies: Any) -> Any:
            if len(chunks) > 1 and all(len(chunk.tokens) == 1 for chunk in chunks):
                chunks[0].block_table[-1] = chunks[1].block_table[-1]
            return run(chunks, copies)

        self._run = mixed_up


class Rounded(witness.Witness):  # type: ignore[misc, name-defined]
    """An engine whose logits are right to six places."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        run = self._run
        self._run = lambda chunks, copies: run(chunks, copies) + 1e-6


@pytest.mark.parametrize("fault", [WithoutCopies, OneSlotOff, Rounded])
def test_the_trial_finds_a_fault_after_loading(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "Witness", fault)
    found = verdict.judge("LlamaForCausalLM", CLASSES["LlamaForCausalLM"])
    assert found.result == "wrong", found


def test_the_trial_refuses_to_judge_a_model_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    build = recipes.build

    def deaf(name: str, kinds: tuple[str, ...]) -> Any:
        model = build(name, kinds)
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        return model

    monkeypatch.setattr(recipes, "build", deaf)
    found = verdict.judge("LlamaForCausalLM", CLASSES["LlamaForCausalLM"])
    assert (found.result, "ArithmeticError" in found.reason) == ("failed", True)


def test_the_trial_finds_a_token_that_is_not_the_likeliest() -> None:
    own = recipes.build("GemmaForCausalLM", ("gemma",))
    best = int(trial._logits(own, [5, 6, 7])[-1, 1:].argmax()) + 1
    trial._check_greedy(own, [5, 6, 7], [best])
    with pytest.raises(trial.Wrong, match="greedy"):
        trial._check_greedy(own, [5, 6, 7], [best % 96 + 1])


def test_widening_to_float32_loses_nothing_while_exact(exact_is_over: Callable[[], bool]) -> None:
    third = torch.tensor([1.0, 2.0], dtype=torch.float64) / 3
    with exact.exact():
        for narrowed in (
            third.float(),
            third.to(torch.float32),
            third.type(torch.float32),
            third.to(dtype=torch.float32),
        ):
            assert torch.equal(narrowed, third)
        assert torch.nn.functional.softmax(third, -1, dtype=torch.float32).dtype == torch.float64
        assert third.to(torch.float16).dtype == torch.float16
        assert third.half().float().dtype == torch.float32
    assert exact_is_over()


@pytest.fixture
def exact_is_over() -> Callable[[], bool]:
    return lambda: torch.ones(1, dtype=torch.float64).float().dtype == torch.float32


# ---- processes, names and the page


def test_the_page_is_what_the_data_says() -> None:
    run = page.from_json((ROOT / "docs/results/models.json").read_text())
    assert (ROOT / "docs/models.md").read_text() == page.render(run)
    assert page.from_json(page.to_json(run)) == run
    assert {form for forms in page.CALLS.values() for form in forms.split(", ")} <= {form.name for form in FORMATS}


def test_nothing_on_the_page_is_at_fault_and_every_refusal_has_a_reason() -> None:
    run = page.from_json((ROOT / "docs/results/models.json").read_text())
    assert not [each.name for each in run.verdicts if each.result in verdict.AT_FAULT]
    assert all(each.reason for each in run.verdicts if each.result != "paged")
    assert [each.name for each in run.verdicts] == [each.name for each in page.sorted_by_name(run.verdicts)]
