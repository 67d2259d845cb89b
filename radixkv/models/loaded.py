"""What the adapter hands to everybody else: a model that passed its tests, and what its layers need.

Knows shapes, limits and names. Does not know how they were found, nor how a batch is run.

A piece of one sequence that a step computes. Knows tokens, slots and blocks; does not know who plans or runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from radixkv.attention.kv_store import LayerShape


class AttentionWindow(NamedTuple):
    """Which of the tokens before it a token sees: the last `window`, or those of its own `chunk`; None is no limit."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class LayerSpec:
    """One attention call of a forward pass: its heads, dims, and what changes its arithmetic.

    `window` is in tokens (None: sees everything before it), `softcap` bounds the scores, `sinks` says whether each
    head has a learned score that takes part in the softmax. `chunk`: sees nothing before the multiple of so many tokens
    behind which it stands.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    chunk: int | None = None

    @property
    def attention_window(self) -> AttentionWindow:
        """Which tokens it sees."""
        return AttentionWindow(self.window, self.chunk)

    @property
    def shape(self) -> LayerShape:
        """What the pool has to store per token."""
        return LayerShape(self.kv_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True)
class LoadedModel:
    """A decoder whose attention goes through the paged pool; `layers` are in the order of a forward pass.

    `max_length` is the longest sequence in tokens, `vocab_size` the number of token ids that can go in and come out,
    `stop_token_ids` what ends a reply. `tokenizer` is None for a model that came without one. `attention` is the
    backend that it was tested with, "torch" or "triton", or "fallback": each sequence by itself, by the model's own.
    """

    model: nn.Module
    config: Any
    tokenizer: Any | None
    layers: tuple[LayerSpec, ...]
    max_length: int
    vocab_size: int
    stop_token_ids: frozenset[int]
    name: str
    dtype: torch.dtype
    device: torch.device
    attention: str = "torch"


@dataclass(frozen=True)
class SequenceInput:
    """Tokens [start, start + n) of one sequence, which this step computes and stores; a decode is a chunk of one.

    `slots` says where the n tokens' KV goes, `block_table` covers everything from token 0 to the chunk's end. A chunk
    that is `isolated` gets a forward of its own: a matrix product of other height may round its rows differently.
    """

    tokens: NDArray[np.int32]
    start: int
    slots: NDArray[np.int64]
    block_table: NDArray[np.int32]
    isolated: bool = False
