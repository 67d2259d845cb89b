"""KV of 16 and 8 bits on the real model: what rounding costs over a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from radixkv.models import adapter
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from tests.real.conftest import Figure

ROOT = Path(__file__).parents[2]
POSITIONS, CHUNK = 1024, 512
LIMITS = {"float16": (5e-6, 5e-5, 0.99), "int8": (6e-4, 6e-3, 0.98)}  # mean and 99th percentile in nats, same token


@pytest.fixture(scope="module")
def loaded(model_file: Path) -> LoadedModel:
    return adapter.load(str(model_file), kv_dtype="int8")


def text_ids(loaded: LoadedModel) -> np.ndarray:
    assert loaded.codec is not None
    return np.array(loaded.codec.encode((ROOT / "docs" / "cache.md").read_text())[:POSITIONS], np.int32)


@torch.inference_mode()
def logits(loaded: LoadedModel, chunk: int = CHUNK) -> torch.Tensor:
    """The logits of each position of a text, in chunks over a pool."""
    ids, table = text_ids(loaded), np.arange(POSITIONS // 16, dtype=np.int32)
    runner, rows = Runner(loaded, len(table), 16), []
    for start in range(0, POSITIONS, chunk):
        end = start + chunk
        step = SequenceInput(ids[start:end], start, np.arange(start, end), table[: end // 16], logit_rows=chunk)
        rows.append(runner.run([step]).roll(-1, 0))
    return torch.cat(rows)


def compared(mine: torch.Tensor, true: torch.Tensor) -> tuple[float, float, float]:
    p, q = true.log_softmax(-1), mine.log_softmax(-1)
    every = (p.exp() * (p - q)).sum(-1).double()
    same = (mine.argmax(-1) == true.argmax(-1)).double().mean()
    return float(every.mean()), float(every.quantile(0.99)), float(same)


def test_rounding_costs_little(loaded: LoadedModel, figure: Figure) -> None:
    true = logits(replace(loaded, kv_dtype="auto"))
    for name, (mean, high, same) in LIMITS.items():
        found = compared(logits(replace(loaded, kv_dtype=name)), true)
        figure(f"KV in {name}: mean KL {found[0]:.1e}, 99th percentile {found[1]:.1e}, same token {found[2]:.4f}")
        assert (found[0] <= mean, found[1] <= high, found[2] >= same) == (True, True, True)


def test_chunks_of_other_lengths_cost_less_than_rounding(loaded: LoadedModel, figure: Figure) -> None:
    found = compared(logits(loaded, 64), logits(loaded))
    figure(f"KV in int8, chunks of 64 against {CHUNK}: mean KL {found[0]:.1e}, same token {found[2]:.4f}")
    assert found[0] <= LIMITS["int8"][0]
