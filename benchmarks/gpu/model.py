"""A Llama of random weights, made on the device, and an engine over it.

The weights are never downloaded or saved, and its answers mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers

from radixkv import Engine
from radixkv.attention import plan
from radixkv_kernels.work_list import WorkList

from .device import Device
from .shapes import BLOCK


@dataclass(frozen=True)
class Llama:
    """Sizes of a model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    context: int

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that a token takes in all layers, in 16 bits.

        >>> LLAMA_3_8B.token_bytes
        131072
        """
        return self.layers * self.kv_heads * (self.hidden // self.heads) * 2 * 2

    def deep(self, layers: int) -> Llama:
        """The same with another number of layers."""
        return replace(self, layers=layers)

    def config(self) -> Any:
        """As transformers wants it."""
        return transformers.LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=self.context,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=False,
            # Layers that enlarge their input also enlarge rounding errors: after 32 of them, two ways to compute the
            # same would differ by more than an engine's checks allow in 16 bits.
            initializer_range=0.5 / self.hidden**0.5,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )


LLAMA_3_8B = Llama(32, 4096, 14336, 32, 8, 128_256, 131_072)
TINY = Llama(2, 64, 128, 4, 2, 128, 4096)


@dataclass(frozen=True)
class Weights:
    """The bytes of a model that a step reads, and the operations of a token."""

    step_bytes: int
    token_flops: int


def build(sizes: Llama, device: Device) -> tuple[Any, Weights]:
    """Build the model, in bfloat16 on a GPU and in float32 on a CPU, and return it with its costs.

    A step reads all weights but the embedding, of which it takes a row a token.
    """
    torch.manual_seed(0)
    dtype = torch.float32 if device.interpreted else torch.bfloat16
    with torch.device(device.torch):
        model = transformers.AutoModelForCausalLM.from_config(sizes.config(), dtype=dtype).eval()
    read = sum(weight.numel() for weight in model.parameters()) - model.get_input_embeddings().weight.numel()
    return model, Weights(read * dtype.itemsize, 2 * read)


@contextmanager
def serving(
    model: Any, device: Device, *, kv_tokens: int, sequences: int, batch_tokens: int, **options: Any
) -> Iterator[Engine]:
    """An engine over the model, closed at the end."""
    engine = Engine.load(
        model,
        device=device.torch.type,
        num_blocks=-(-kv_tokens // BLOCK),
        block_size=BLOCK,
        max_sequences=sequences,
        max_batch_tokens=batch_tokens,
        prefill_chunk=batch_tokens,
        **options,
    )
    try:
        yield engine
    finally:
        engine.close()


class Reads:
    """Counts the keys that work lists read; without `tree`, lists share nothing even if their sequences do."""

    def __init__(self, *, tree: bool) -> None:
        self.tree, self.lists, self.tokens = tree, 0, 0
        self._build = plan.build

    def __call__(self, *arguments: Any, **options: Any) -> WorkList:
        """As `plan.build`."""
        if not self.tree:
            options["min_saving"] = plan.NEVER_SHARE
        work = self._build(*arguments, **options)
        self.lists += 1
        self.tokens += work.read_tokens
        return work


@contextmanager
def counting(*, tree: bool) -> Iterator[Reads]:
    """Count an engine's work lists while this is open; they share prefixes only if `tree`."""
    reads = Reads(tree=tree)
    with patch.object(plan, "build", reads):
        yield reads


def token_ids(seed: int, count: int, vocab: int) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def with_prefix(prefix: list[int], count: int, own: int, vocab: int, seed: int) -> list[list[int]]:
    """Prompts that share `prefix`, each with tokens of its own."""
    return [[*prefix, *token_ids(seed + 1 + index, own, vocab)] for index in range(count)]
