"""Scores of a prefix are its attention weights, and the stored KV of each head's best tokens is copied unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from radixkv.models import adapter, compression
from radixkv.models.compression import Compression, chosen_tokens, num_slots, obstacle
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from tests.models.conftest import GROUPED
from tests.models.recurrent.hybrids import hybrid
from tests.models.test_architectures import deepseek_v3, llama4

SIZE, TOKENS, BLOCKS = 4, 90, 60
TABLE = np.random.default_rng(1).permutation(BLOCKS).astype(np.int32)  # the prefix, then other blocks
PIECES = {"reconstruct": [(0, 40), (40, 80), (80, 90)], "h2o": [(0, 40), (40, 80), (80, 90)], "snapkv": [(58, 90)]}


def slots(first: int, count: int) -> np.ndarray:
    places = np.arange(first, first + count)
    return TABLE[places // SIZE].astype(np.int64) * SIZE + places % SIZE


def prefix(loaded: LoadedModel) -> tuple[Runner, np.ndarray]:
    """Compute a prefix in a pool."""
    runner = Runner(loaded, BLOCKS, SIZE)
    tokens = np.random.default_rng(2).integers(3, 97, TOKENS).astype(np.int32)
    runner.run([SequenceInput(tokens, 0, slots(0, TOKENS), TABLE[: -(-TOKENS // SIZE)])])
    return runner, tokens


def scored(runner: Runner, tokens: np.ndarray, method: str) -> Compression:
    found = runner.compression(tokens, method)
    while found.step(TABLE):
        pass
    return found


@torch.inference_mode()
def reference(model: Any, tokens: np.ndarray, method: str) -> Iterator[list[Tensor]]:
    """Yield the weights [kv_heads, group, rows, n] of each piece in all layers, by the model's own full softmax."""
    model.set_attn_implementation("eager")
    for first, end in PIECES[method]:
        text = np.append(tokens, tokens[first:end]) if method == "reconstruct" else tokens[:end]
        layers = model(torch.from_numpy(text)[None].long(), output_attentions=True, use_cache=False).attentions
        rows = [
            each[0, :, first - end :, :TOKENS].unflatten(0, (GROUPED["num_key_value_heads"], -1)) for each in layers
        ]
        yield [torch.nn.functional.pad(each, (0, TOKENS - each.shape[-1])) for each in rows]


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("method", sorted(PIECES))
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_scores_are_the_weights_of_a_full_softmax(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str, method: str
) -> None:
    monkeypatch.setattr(compression, "PIECE", 40)
    monkeypatch.setattr(compression, "CELLS", 4 * 130 * 7)  # seven rows at once, of four heads
    runner, tokens = prefix(adapter.load(build(kind, torch.float64)))
    before = [tensor.clone() for tensor in runner.store.tensors]
    mine = scored(runner, tokens, method).scores
    assert all(torch.equal(tensor, old) for tensor, old in zip(runner.store.tensors, before, strict=True))
    for layer, weights in enumerate(zip(*reference(build(kind, torch.float64), tokens, method), strict=True)):
        whole = torch.cat(weights, 2)
        true = whole.amax((1, 2)) if method == "reconstruct" else whole.sum((1, 2))
        if method == "snapkv":
            sums = torch.nn.functional.pad(true[:, :-32], (3, 3))
            true = torch.cat([sums.unfold(1, 7, 1).mean(-1), torch.zeros(2, 32)], 1)
        torch.testing.assert_close(mine[layer], true, rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [36, 55, TOKENS])
@pytest.mark.parametrize("kv_dtype", ["auto", "float16", "int8"])
def test_stored_bytes_are_copied_in_order(build: Callable[..., Any], kv_dtype: str, count: int) -> None:
    runner, tokens = prefix(adapter.load(build("qwen3"), kv_dtype=kv_dtype))
    found, target = scored(runner, tokens, "reconstruct"), slots(120, count)
    expected = [tensor.clone().flatten(1, 2) for tensor in runner.store.tensors]
    found.write(TABLE, target)
    kept = [chosen_tokens(scores, count) for scores in found.scores]
    widths = len(expected) // (2 * len(kept))
    for number, (tensor, before) in enumerate(zip(runner.store.tensors, expected, strict=True)):
        for head, chosen in enumerate(kept[number // widths % len(kept)].tolist()):
            assert chosen == sorted({*chosen, *range(4), *range(TOKENS - 32, TOKENS)})
            assert len(chosen) == count
            before[head, target] = before[head, slots(0, TOKENS)[chosen]]
        assert torch.equal(tensor.flatten(1, 2), before)
    best = found.scores[0][0, 4:-32].argmax() + 4
    assert count == 36 or best in kept[0][0]


def test_few_tokens_all_stay(build: Callable[..., Any]) -> None:
    runner, tokens = prefix(adapter.load(build("llama")))
    assert not runner.compression(tokens[:36], "h2o").step(TABLE)
    assert [num_slots(20, 0.1), num_slots(90, 0.1), num_slots(90, 0.5), num_slots(90, 1)] == [20, 36, 45, 90]


def test_models_are_refused_with_a_reason(build: Callable[..., Any]) -> None:
    llama = adapter.load(build("llama"))
    scaled = transformers.Llama4TextConfig(**vars(llama4(attention_chunk_size=512)) | {"layer_types": None})
    assert obstacle(llama) is obstacle(adapter.load(build("gpt_neox"))) is None
    reasons = {
        "windows": adapter.load(build("gemma2")),
        "chunks": adapter.load(build(llama4())),
        "by position": adapter.load(build(scaled)),
        "MLA": adapter.load(build(deepseek_v3())),
        "recurrent": adapter.load(hybrid("lfm2")),
        "its own": replace(llama, attention="fallback"),
    }
    for reason, loaded in reasons.items():
        assert reason in str(obstacle(loaded))
