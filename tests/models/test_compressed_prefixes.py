"""The logits after a compressed prefix are those of the model's own forward with a mask that hides the dropped KV.

The mask differs by layer and head. Its queries are the tokens after the prefix, at their positions in the whole text.
Which KV was kept is read from the pool: each key of a slot is the key of one token of the exact prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from radixkv import CompressedPrefix, Engine, SamplingParams
from radixkv.attention.kv_store import kv_format
from radixkv.errors import PrefixGone
from radixkv.models.compression import METHODS
from radixkv.sampling.params import SampleRow
from tests.models.conftest import SIZES, make
from tests.models.test_rounded_kv import wide
from tests.selection import mostly_long

MODELING: dict[str, Any] = {"llama": modeling_llama, "qwen3": modeling_qwen3}
LAYERS, HEADS, KV_HEADS = 2, 4, 2
TEXT = [3 + at * at % 89 for at in range(75)]
QUESTIONS = [[5, 6, 7], [5, 6, 80, 81, 82, 9], [11], [5, 6, 7, 40, *range(20, 36)]]


class Recorder:
    """Records each row of logits with the tokens after the prefix."""

    reads_history = True
    rows: list[tuple[tuple[int, ...], Tensor]]

    def applies(self, params: SamplingParams) -> bool:
        return True

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        self.rows += [(tuple(row.history), one.clone()) for row, one in zip(rows, logits, strict=True)]


class Oracle:
    """The model's own forward, in which queries after the prefix see only the KV that each head has kept."""

    hidden: Tensor  # [layers, heads, tokens]

    def __init__(self, model: Any, kv_dtype: str) -> None:
        self.model, self.stored = model, kv_format(kv_dtype, model.dtype)
        self.module = MODELING[model.config.model_type]
        self.own = self.module.eager_attention_forward
        model.set_attn_implementation("eager")

    def attend(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *rest: Any, **more: Any
    ) -> Any:
        stored, hidden = self.stored, self.hidden[layer.layer_idx]
        key, value = (stored.restored(stored.decode(stored.encode(each))).to(query.dtype) for each in (key, value))
        mask = mask.repeat(1, len(hidden), 1, 1)
        mask[0, :, hidden.shape[1] :, : hidden.shape[1]].masked_fill_(hidden[:, None], -torch.inf)
        return self.own(layer, query, key, value, mask, *rest, **more)

    @torch.inference_mode()
    def judge(self, prefix: CompressedPrefix, rows: list[tuple[tuple[int, ...], Tensor]], tolerance: float) -> None:
        """Compare rows of logits, by the texts before them, with those of one forward for each whole text."""
        for text in {text for text, _ in rows if not any(text == other[: len(text)] != other for other, _ in rows)}:
            with mock.patch.object(self.module, "eager_attention_forward", self.attend):
                own = self.model(input_ids=torch.tensor([[*prefix.text, *text]]), use_cache=False).logits[0]
            for said, logits in rows:
                if said == text[: len(said)]:
                    torch.testing.assert_close(logits, own[prefix.tokens + len(said) - 1], rtol=0, atol=tolerance)


def hidden(engine: Engine, prefix: CompressedPrefix) -> Tensor:
    """The tokens that each head must not see; the stored bytes of each slot are equal to a token's."""
    match, store = engine.core.cache.match, engine.core.runner.store  # type: ignore[attr-defined]
    number, layers = engine.client.inputs.namespaces.number(prefix.namespace), []
    for layer in range(LAYERS):
        parts = [store.stored(layer, match(ids, number).blocks, len(ids)) for ids in (prefix.text, prefix.ids)]
        whole, some = (torch.cat([each.double() for part in both for each in part], -1) for both in parts)
        same = (some[:, :, None] == whole[:, None]).all(-1)
        assert (same.sum(2) == 1).all(), "a slot has the KV of no token, or of several"
        layers.append(~same.any(1))
    return torch.stack(layers).repeat_interleave(HEADS // KV_HEADS, 1)


TOLERANCES = {"auto": 1e-9, "float16": 1e-2, "int8": 5e-2}  # a number between two codes may get the other one
CASES = [f"{family} {kv_dtype} {method}" for family in MODELING for kv_dtype in TOLERANCES for method in METHODS]


@pytest.mark.usefixtures("exact_softmax")
@pytest.mark.parametrize("case", mostly_long(CASES, "llama auto reconstruct", "qwen3 auto snapkv", "llama int8 h2o"))
def test_every_step_after_a_prefix_sees_the_kept_kv_only(case: str) -> None:
    family, kv_dtype, method = case.split()
    dtype, recorder = torch.float64 if kv_dtype == "auto" else torch.float32, Recorder()
    oracle = Oracle(make(wide(family), dtype), kv_dtype)
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "monitor": False, "logits_processors": [recorder]}
    model = make(wide(family), dtype)
    with Engine.load(model, num_blocks=70, block_size=4, host_memory="4MiB", **options) as engine:
        for namespace, keep, slots in ((None, 0.6, 45), ("ann", 0.5, 38), ("ann", 1, 75)):
            prefix = engine.compress(TEXT, keep, method=method, namespace=namespace)
            assert (prefix.tokens, prefix.slots) == (75, slots)
            oracle.hidden = engine.client.thread.ask(partial(hidden, engine, prefix))

            def ask(questions: list[list[int]], most: int, n: int = 1) -> None:
                params = SamplingParams(temperature=1, seed=3, max_tokens=most, n=n, ignore_eos=True)
                recorder.rows, chosen = [], {"prefix": prefix, "namespace": namespace}  # noqa: B023
                engine.generate(questions, params, **chosen)
                assert len(recorder.rows) >= most * n * len(questions)
                oracle.judge(prefix, recorder.rows, TOLERANCES[kv_dtype])  # noqa: B023

            ask(QUESTIONS[:1], 6)
            ask(QUESTIONS, 9, n=2)
            before = engine.stats()
            ask(QUESTIONS, 60)
            assert engine.stats().preemptions > before.preemptions
            for token in range(20, 28):  # evicts the branches
                engine.generate([[token] * 90], SamplingParams(max_tokens=1))
            before = engine.stats()
            ask(QUESTIONS[3:], 4)
            assert engine.stats().host_tokens > before.host_tokens
            engine.release_prefix(prefix)
            with pytest.raises(PrefixGone, match=f"keep={float(keep)}"):
                ask(QUESTIONS, 1)


def test_a_prefix_that_fills_the_context_is_repeated_inside_it() -> None:
    """GPT-2 has no embedding of later positions."""
    config = transformers.GPT2Config(**{**SIZES, "max_position_embeddings": 80})
    with Engine.load(make(config), num_blocks=70, block_size=4, monitor=False) as engine:
        assert engine.compress(TEXT, 0.6).slots == 45
