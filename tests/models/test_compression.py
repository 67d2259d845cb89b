"""Scores of a prefix are its attention weights, and the stored KV of each head's best tokens is copied unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from radixkv.models import adapter, compression
from radixkv.models.compression import Compression, chosen_tokens, num_slots, obstacle
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from tests.models.recurrent.hybrids import hybrid
from tests.models.test_architectures import deepseek_v3, gemma3n, llama4

SIZE, N, BLOCKS = 4, 90, 60
TABLE = np.random.default_rng(1).permutation(BLOCKS).astype(np.int32)  # the prefix, then other blocks
TOKENS = np.random.default_rng(2).integers(3, 97, N).astype(np.int32)
PIECES = {"reconstruct": [(0, 40), (32, 80), (72, N)], "h2o": [(0, 40), (40, 80), (80, N)], "snapkv": [(N - 32, N)]}


def slots(first: int, count: int) -> np.ndarray:
    places = np.arange(first, first + count)
    return TABLE[places // SIZE].astype(np.int64) * SIZE + places % SIZE


def scored(loaded: LoadedModel, method: str) -> tuple[Runner, Compression]:
    """Compute a prefix in a pool, and its scores, which change nothing there."""
    runner = Runner(loaded, BLOCKS, SIZE)
    runner.run([SequenceInput(TOKENS, 0, slots(0, N), TABLE[: -(-N // SIZE)])])
    before, found = [tensor.clone() for tensor in runner.store.tensors], runner.compression(TOKENS, method)
    while found.step(TABLE):
        pass
    assert all(torch.equal(tensor, old) for tensor, old in zip(runner.store.tensors, before, strict=True))
    return runner, found


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("method", sorted(PIECES))
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
@torch.inference_mode()
def test_scores_are_the_weights_of_a_full_softmax(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str, method: str
) -> None:
    monkeypatch.setattr(compression, "PIECE", 40)
    monkeypatch.setattr(compression, "CELLS", 4 * 138 * 7)  # seven rows at once, of four heads
    found, model = scored(adapter.load(build(kind, torch.float64)), method)[1], build(kind, torch.float64)
    model.set_attn_implementation("eager")
    expected = [torch.zeros(len(each), 4 // len(each), 0, N) for each in found.scores]
    for first, end in PIECES[method]:
        text = np.append(TOKENS, TOKENS[first:end]) if method == "reconstruct" else TOKENS[:end]
        whole = model(torch.from_numpy(text)[None].long(), output_attentions=True, use_cache=False).attentions
        for layer, weights in enumerate(whole):
            rows = functional.pad(weights[0, :, first - end :, :N], (0, max(0, N - len(text))))
            expected[layer] = torch.cat([expected[layer], rows.view(*expected[layer].shape[:2], -1, N)], 2)
    for mine, weights in zip(found.scores, expected, strict=True):
        true = weights.mean(1).amax(1) if method == "reconstruct" else weights.sum((1, 2))
        if method == "snapkv":
            true = functional.pad(functional.pad(true[:, :-32], (3, 3)).unfold(1, 7, 1).mean(-1), (0, 32))
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [36, 55, N])
@pytest.mark.parametrize("kv_dtype", ["auto", "float16", "int8"])
def test_stored_bytes_are_copied_in_order(build: Callable[..., Any], kv_dtype: str, count: int) -> None:
    (runner, found), target = scored(adapter.load(build("qwen3"), kv_dtype=kv_dtype), "reconstruct"), slots(120, count)
    before = [tensor.flatten(1, 2).clone() for tensor in runner.store.tensors]
    found.write(TABLE, target)
    kept = [chosen_tokens(scores, count).tolist() for scores in found.scores]
    for number, (tensor, expected) in enumerate(zip(runner.store.tensors, before, strict=True)):
        for head, chosen in enumerate(kept[number // (len(before) // 4) % 2]):  # two layers of keys, then of values
            assert chosen == sorted({*chosen, *range(4), *range(N - 32, N)})
            expected[head, target] = expected[head, slots(0, N)[chosen]]
        assert torch.equal(tensor.flatten(1, 2), expected)
    best = [each + 4 for each in found.scores[1][:, 4:-32].argmax(1).tolist()]
    assert [each in heads for each, heads in zip(best, kept[1], strict=True)] == [count > 36] * 2


def test_few_tokens_all_stay(build: Callable[..., Any]) -> None:
    assert not Runner(adapter.load(build("llama")), BLOCKS, SIZE).compression(TOKENS[:36], "h2o").step(TABLE)
    assert [num_slots(20, 0.1), num_slots(90, 0.1), num_slots(90, 0.5), num_slots(90, 1)] == [20, 36, 45, 90]


def test_models_are_refused_with_a_reason(build: Callable[..., Any]) -> None:
    scaled = transformers.Llama4TextConfig(**vars(llama4()) | {"attention_chunk_size": 512, "layer_types": None})
    kinds = "llama", "gpt_neox", "gemma2", "mistral", llama4(), gemma3n(), scaled, deepseek_v3()
    loaded = [adapter.load(model) for model in (*map(build, kinds), hybrid("lfm2"))]
    loaded.append(replace(loaded[0], attention="fallback"))
    expected = ["None"] * 2 + ["windows, chunks"] * 4 + ["by position", "MLA", "state", "its own"]
    assert all(reason in str(obstacle(each)) for reason, each in zip(expected, loaded, strict=True))
