"""The records that connect loading and running: a tested model, its layers, and one sequence's input to a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from radixkv.attention.kv_store import LayerShape
from radixkv.models.file_tokenizer import of_transformers
from radixkv.sizing.kv_size import LayerKV
from radixkv.sizing.recurrent_state import StateStep

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class AttentionWindow(NamedTuple):
    """The earlier tokens that a token sees: the last `window`, or the tokens of its own `chunk`; None is no limit."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class LayerSpec:
    """One attention call of a forward pass: its heads and dims, and the options of its arithmetic.

    `window` is in tokens (None: all earlier tokens are seen), `softcap` bounds the scores, `sinks` says whether each
    head has a learned score that takes part in the softmax. With `chunk`, a token sees nothing before the last multiple
    of `chunk` tokens. `source` is the number of an earlier call whose keys and values this call reads; None if the call
    stores its own.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    chunk: int | None = None
    source: int | None = None

    @property
    def attention_window(self) -> AttentionWindow:
        """The tokens that a token of this layer sees."""
        return AttentionWindow(self.window, self.chunk)

    @property
    def shape(self) -> LayerShape:
        """The KV that the pool stores per token."""
        return LayerShape(self.kv_heads, self.key_dim, self.value_dim)


class StateKey(NamedTuple):
    """The name of one state: its layer, "conv" (columns of a convolution) or "recurrent", and its number there."""

    layer: int
    kind: str
    number: int = 0


@dataclass(frozen=True)
class StateSpec:
    """One recurrent state of a sequence: its shape, independent of the number of tokens, and its dtype."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of the state of one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LoadedModel:
    """A decoder whose attention goes through the paged pool; `layers` are in the order of a forward pass.

    `max_length` is the longest sequence in tokens, `vocab_size` the number of token ids that can go in and come out.
    The tokens `stop_token_ids` end a reply. `codec` is the tokenizer that radixkv runs, a FileTokenizer or one of
    transformers; None for a model that came without one. `attention` is the backend that it was tested with: "torch",
    "triton", "compiled", or "fallback", the model's own attention for each
    sequence. `state` are the recurrent states of a hybrid model, empty for others; `layers` then has its attention
    layers only. `kv_dtype` is the format of the pool, a name of `KV_DTYPES`.
    """

    model: nn.Module
    config: Any
    codec: Any | None
    layers: tuple[LayerSpec, ...]
    max_length: int
    vocab_size: int
    stop_token_ids: frozenset[int]
    name: str
    dtype: torch.dtype
    device: torch.device
    attention: str = "torch"
    state: tuple[StateSpec, ...] = ()
    kv_dtype: str = "auto"

    def without_weights(self) -> LoadedModel:
        """Return the same record with an empty model, which keeps no memory."""
        return replace(self, model=nn.Module())

    @property
    def tokenizer(self) -> Any | None:
        """The tokenizer of transformers, which a user may change. Takes seconds the first time, if it is not built."""
        return of_transformers(self.codec)

    @property
    def num_experts(self) -> int:
        """The number of experts to which a layer routes its tokens; 0 without routing."""
        config = self.config.get_text_config()
        parts = (config, getattr(config, "ffn_config", None))
        return max(getattr(part, name, None) or 0 for part in parts for name in _EXPERTS)

    @property
    def stored_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that store keys and values of their own, in the order of the pool's layers."""
        return tuple(layer for layer in self.layers if layer.source is None)

    @property
    def bytes_per_token(self) -> int:
        """The bytes that the pool stores per token, over all layers."""
        layers = [LayerKV(each.kv_heads, each.key_dim, each.value_dim) for each in self.stored_layers]
        return sum(layer.bytes_per_token(self.dtype.itemsize, self.kv_dtype) for layer in layers)

    @property
    def state_bytes(self) -> int:
        """The bytes of all recurrent states of one sequence; 0 for a model without."""
        return sum(spec.num_bytes for spec in self.state)


class SequenceInput(NamedTuple):
    """Tokens [start, start + n) of one sequence, which a step computes and stores; a decode has one token.

    The KV of the n tokens goes to `slots`; `block_table` covers tokens [0, start + n). An `isolated` input gets a
    forward of its own: a matrix product of another height may round its rows differently. `state` is for models with
    recurrent state. If the host has not read the last token yet, `sampled_row` is its row in the `sampled` tensor of
    `Runner.run`, and the value in `tokens` is ignored.

    The logits of its last `logit_rows` tokens are wanted: 1 to n. A product with the vocabulary's weights of another
    height may round its rows differently, so for equal bits equal tokens need equal `logit_rows`, too.

    After a compressed prefix, token `start` has position `start + offset`: the prefix has `offset` more tokens than KV.
    """

    tokens: NDArray[np.int32]
    start: int
    slots: NDArray[np.int64]
    block_table: NDArray[np.int32]
    isolated: bool = False
    state: StateStep | None = None
    sampled_row: int = -1
    logit_rows: int = 1
    offset: int = 0
