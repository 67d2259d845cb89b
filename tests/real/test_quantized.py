"""Weights of 8 and 4 bits on the real model: the answers of its own float32 weights, and hits that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.models import adapter, loader
from radixkv.models.file_tokenizer import of_transformers
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.quantized import kernels
from radixkv.models.quantized.kernels import Format
from radixkv.models.quantized.layers import quantize, quantized_weights
from radixkv.models.rounding import relative_error
from radixkv.models.runner import Runner
from tests.real.conftest import Figure

pytestmark = pytest.mark.skipif(kernels.kernels() is None, reason="no compiler, or a CPU without AVX2")
ROOT = Path(__file__).parents[2]
WINDOW = 512  # tokens of text in one forward


def read(file: Path, weights: str) -> tuple[Any, Any]:
    options: dict[str, Any] = {"device": torch.device("cpu"), "revision": None, "trust_remote_code": False}
    return loader.read(str(file), dtype=torch.float32, weights=weights, **options)


@pytest.fixture(scope="module")
def plain(model_file: Path) -> tuple[Any, Any]:
    """The model with its weights in float32, and transformers' tokenizer."""
    model, tokenizer = read(model_file, "float32")
    return model, of_transformers(tokenizer)


def text_ids(tokenizer: Any, windows: int) -> list[torch.Tensor]:
    """English and technical text in windows of equal length."""
    text = "\n\n".join((ROOT / name).read_text() for name in ("LICENSE", "README.md", "docs/cache.md", "docs/chats.md"))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) >= windows * WINDOW
    return [torch.tensor([ids[start : start + WINDOW]]) for start in range(0, windows * WINDOW, WINDOW)]


@torch.inference_mode()
def divergences(model: Any, expected: Any, windows: list[torch.Tensor]) -> torch.Tensor:
    """The KL divergence of each position in nats, from the distribution of `expected` to that of `model`."""
    return torch.cat(list(_divergences(model, expected, windows)))


def _divergences(model: Any, expected: Any, windows: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    for ids in windows:
        ours, theirs = (each(ids, use_cache=False).logits[0].double().log_softmax(-1) for each in (model, expected))
        yield (theirs.exp() * (theirs - ours)).sum(-1)


def test_blocks_of_the_file_give_the_distributions_of_their_float32_weights(
    model_file: Path, plain: tuple[Any, Any], figure: Figure
) -> None:
    expected, tokenizer = plain
    model, _ = read(model_file, "auto")
    formats = [each.format for each in quantized_weights(model)]
    assert formats.count(Format.INT4_MIN) == 210 and formats.count(Format.INT8) == 1  # the head is the embedding
    found = divergences(model, expected, text_ids(tokenizer, 4))
    figure(f"Q4_1 as it is, {len(found):,} positions: mean KL {found.mean():.1e} to its own weights in float32")
    assert found.mean() <= 1e-4 and found.max() <= 1e-4


def test_int8_is_close_to_float32(model_file: Path, plain: tuple[Any, Any], figure: Figure) -> None:
    expected, tokenizer = plain
    model, _ = read(model_file, "float32")
    assert quantize(model, "int8") == 211
    found = divergences(model, expected, text_ids(tokenizer, 8))
    figure(f"int8 weights, {len(found):,} positions: mean KL {found.mean():.2e}, p99 {found.quantile(0.99):.1e}")
    assert len(found) >= 4_000 and found.mean() <= 2e-3


@pytest.fixture(scope="module", params=["auto", "transformers", "int8 of float32"])
def loaded(request: pytest.FixtureRequest, model_file: Path, plain: tuple[Any, Any]) -> LoadedModel:
    """The model over a pool, with 4 bits by both kinds of model code, and with 8."""
    if request.param in ("auto", "transformers"):
        return adapter.load(model_file, model_code=request.param)
    return adapter.load(plain[0], tokenizer=plain[1], weights="int8")


def last_row(loaded: LoadedModel, tokens: list[int], cuts: list[int], beside: int = 0) -> torch.Tensor:
    """The logits after a prompt that is computed in chunks; `beside` other sequences run in its last step."""
    blocks, count = -(-len(tokens) // 16), len(tokens)
    runner = Runner(loaded, blocks * (beside + 1), 16)
    ids, found = np.array(tokens, np.int32), torch.empty(0)
    for start, end in zip([0, *cuts], [*cuts, count], strict=True):
        inputs = []
        for each in range(1 + (beside if end == count else 0)):
            table = np.arange(each * blocks, (each + 1) * blocks, dtype=np.int32)
            first = start if each == 0 else 0
            slots = table[np.arange(first, end) // 16].astype(np.int64) * 16 + np.arange(first, end) % 16
            inputs.append(SequenceInput(ids[first:end], first, slots, table[: -(-end // 16)]))
        found = runner.run(inputs)[0]
    return found


def test_hits_chunks_and_batches_change_nothing(loaded: LoadedModel, plain: tuple[Any, Any], figure: Figure) -> None:
    tokens = text_ids(plain[1], 1)[0][0, :400].tolist()
    cold = last_row(loaded, tokens, [])
    cases = {"a hit": [[384]], "chunks": [[64, 128, 192, 256, 320, 384]], "a decode": [[399]], "a batch": [[384], 3]}
    errors = {name: relative_error(last_row(loaded, tokens, *case), cold) for name, case in cases.items()}  # type: ignore[arg-type]
    figure("  of the spread: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    assert max(errors.values()) <= 1e-5
