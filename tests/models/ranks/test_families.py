"""Two ranks give the logits and answers of one process, for small random models of the families and all options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from radixkv import Engine, SamplingParams
from radixkv.errors import UnsupportedModel
from radixkv.models.loaded import SequenceInput
from radixkv.models.ranks import rank_zero
from tests.models.conftest import FAMILIES, GROUPED, make
from tests.models.ranks.worlds import GREEDY, LOAD, llama, ranked, tokens

pytestmark = pytest.mark.long
DIVIDED = {name: FAMILIES[name] for name in ("gemma2", "gpt_neox", "mistral", "qwen3")} | {
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4),
}
WHOLE = {  # transformers gathers the heads of these, or does not divide them
    "phi3": FAMILIES["phi3"],
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "gpt_oss": lambda: transformers.GptOssConfig(**GROUPED, head_dim=16, num_local_experts=4),
}
SMALL: dict[str, Any] = {"num_blocks": 24, "host_memory": "4MB"}
PROMPTS = [[seed, *range(20, 50)] for seed in range(3, 11)]
ROUNDING = 2e-6  # the sums of two ranks add in another order; either is 8e-7 from a forward in float64
SCHEMA = {"type": "object", "properties": {"n": {"enum": ["one", "two"]}, "ok": {"type": "boolean"}}}
JOBS = (
    GREEDY.but(max_tokens=40),
    GREEDY.but(n=3, temperature=0.8, seed=7),
    GREEDY.but(beam_width=3),
    GREEDY.but(prompt_logprobs=2),
)


def logits(engine: Engine) -> torch.Tensor:
    """Return logits of a prefill, and of decodes of two sequences that share blocks."""
    run = engine.core.runner.run
    tables = [np.array([1, 2, 3, 4, 5], np.int32), np.array([1, 2, 3, 9, 7], np.int32)]

    def chunk(table: Any, start: int, end: int, rows: int = 1) -> SequenceInput:
        at = np.arange(start, end)
        values, slots = (at * 7 % 90 + table[-1]).astype(np.int32), table[at // 8] * 8 + at % 8
        return SequenceInput(values, start, slots, table, logit_rows=rows)

    def both() -> torch.Tensor:
        rows = [run([chunk(tables[0], 0, 30, 4)])]
        rows += [run([chunk(table, at, at + 1) for table in tables], [(4, 9)][at - 30 :]) for at in (30, 31, 32)]
        return torch.cat(rows).float()

    return engine.client.thread.call(both).result(60)


def difference(values: torch.Tensor, others: torch.Tensor) -> float:
    return float((values - others).abs().max() / others.abs().max())


def compare(folder: str, *jobs: SamplingParams, **options: Any) -> None:
    """Check that two ranks and one process say the same, to requests that need more than the pool."""
    with Engine.load(folder, **{**LOAD, **SMALL, **options}) as engine:
        expected, values = [tokens(engine, PROMPTS, params) for params in jobs], logits(engine)
    with ranked(folder, **SMALL, **options) as engine:
        assert [tokens(engine, PROMPTS, params) for params in jobs] == expected
        stats = engine.stats()
        assert all((stats.cache.hit_tokens, stats.host_tokens, stats.preemptions))
        assert difference(logits(engine), values) < ROUNDING


@pytest.mark.parametrize("name", list(DIVIDED))
def test_two_ranks_say_what_one_process_says(name: str, tmp_path: Path) -> None:
    make(DIVIDED[name]()).save_pretrained(tmp_path)
    compare(str(tmp_path), *JOBS)


@pytest.mark.parametrize("options", [{}, {"speculate": "tree"}, {"deterministic": True, "prefill_chunk": 16}])
def test_they_do_so_with_schemas_and_options(options: dict[str, Any], tmp_path: Path) -> None:
    schema = SamplingParams(json_schema=SCHEMA, max_tokens=40, temperature=0.7, seed=3)
    compare(llama(tmp_path), *JOBS, schema, **options)


@pytest.mark.parametrize(("options", "tolerance"), [({"kv_dtype": "int8"}, 1e-2), ({"dtype": "bfloat16"}, 4e-2)])
def test_rounded_values_stay_close(options: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    folder = llama(tmp_path, head_dim=16)
    with Engine.load(folder, **LOAD, **options) as engine:
        values = logits(engine)
    with ranked(folder, **options) as engine:
        assert difference(logits(engine), values) < tolerance
        assert tokens(engine, PROMPTS) == tokens(engine, PROMPTS)


@pytest.mark.parametrize("name", list(WHOLE))
def test_a_family_whose_heads_stay_whole_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(WHOLE[name]()).save_pretrained(tmp_path)
    monkeypatch.delattr(rank_zero, "Processes")
    with pytest.raises(UnsupportedModel, match=r"transformers('| has no) plan"):
        Engine.load(str(tmp_path), **LOAD, tensor_parallel=2)
