"""Score the cached KV of a prefix by the attention that it gets, and copy the best of it to other slots.

Every layer and KV head chooses its own tokens, always equally many, so that one block table serves all layers. Keys are
stored after their rotation, so they keep their positions in any slot. Scoring writes nothing to the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from radixkv.attention.kv_store import KVStore
from radixkv.device import device_of
from radixkv.models.attention_interface import AttentionCall, ForwardSignature, handled_by
from radixkv.models.loaded import LayerSpec, LoadedModel

FIRST, LAST = 4, 32  # tokens at both ends of a prefix that are always kept
PIECE, OVERLAP = 256, 8  # tokens of a forward, and earlier ones repeated first, to find the place
CELLS = 1 << 23  # attention weights of a layer that exist at once, unless one query has more
NEIGHBOURS = 7  # tokens over which SnapKV averages weights


def num_slots(tokens: int, keep: float) -> int:
    """Return the number of slots for a share `keep` of `tokens`."""
    return min(tokens, max(FIRST + LAST, round(tokens * keep)))


# Methods add the weights [kv_heads, group, queries, n] of some queries to the scores [kv_heads, n].


def reconstruct(scores: Tensor, weights: Tensor) -> None:
    """Keep the largest weight of each token, a mean over heads, while the model repeats the text, much as KVzip."""
    torch.maximum(scores, weights.mean(1).amax(1), out=scores)


def snapkv(scores: Tensor, weights: Tensor) -> None:
    """Add the weights of the last queries, averaged over neighbouring tokens."""
    earlier = weights[..., :-LAST].sum((1, 2))
    scores[:, :-LAST] += functional.avg_pool1d(earlier, NEIGHBOURS, 1, NEIGHBOURS // 2)


def h2o(scores: Tensor, weights: Tensor) -> None:
    """Add the weights of all queries."""
    scores += weights.sum((1, 2))


class Method(NamedTuple):
    """A way to score tokens; the queries are the last `queries` tokens of the prefix, in it or repeated after it."""

    add: Callable[[Tensor, Tensor], None]
    repeats: bool = False
    queries: int | None = None


METHODS = {"reconstruct": Method(reconstruct, repeats=True), "snapkv": Method(snapkv, queries=LAST), "h2o": Method(h2o)}


def obstacle(loaded: LoadedModel) -> str | None:
    """Return why prefixes of this model cannot be compressed; None if they can."""
    config, layers = loaded.config.get_text_config(), loaded.layers
    plain = [LayerSpec(each.heads, each.kv_heads, each.key_dim, each.value_dim) for each in layers]
    rope = getattr(config, "rope_parameters", None) or {}
    reasons = {
        "recurrent state": loaded.state,
        "its own attention, by the fallback": loaded.attention == "fallback",
        "layers with windows, chunks, softcaps, sinks or shared KV": list(layers) != plain,
        "attention scaled by position": getattr(config, "attn_temperature_tuning", 0) or "llama_4_scaling_beta" in rope,
        "latent attention (MLA)": getattr(config, "kv_lora_rank", None),
    }
    return next((f"the model has {reason}" for reason, applies in reasons.items() if applies), None)


class Compression:
    """The scores of a prefix, from one forward after another: call `step` until it returns False, then `write`."""

    attend_rows = None  # fused layers call `attend`

    def __init__(self, loaded: LoadedModel, store: KVStore, tokens: NDArray[np.int32], method: str) -> None:
        """Score `tokens` [n] by a method of `METHODS`; n numbers for each layer and KV head. Short ones stay whole."""
        self._loaded, self._store, self._method, self._tokens = loaded, store, METHODS[method], tokens
        self._device, self._signature, n = device_of(loaded.device), ForwardSignature.of(loaded.model), len(tokens)
        self._next = n if n <= FIRST + LAST else n - (self._method.queries or n)
        new = partial(torch.zeros, dtype=store.compute_dtype, device=store.device)
        self.scores = [new(layer.kv_heads, n) for layer in store.layers]

    @torch.inference_mode()
    def step(self, block_table: NDArray[np.int32]) -> bool:
        """Compute a piece over the prefix, whose KV is in `block_table`; return whether pieces remain."""
        end = min(self._next + PIECE, len(self._tokens))
        if self._next < end:
            first = max(0, self._next - OVERLAP) if self._method.repeats else self._next
            piece = self._tokens[first:end].astype(np.int64)
            self._table, self._start = block_table, len(self._tokens) if self._method.repeats else first
            self._layers = iter(range(len(self.scores)))
            with self._device.current(), handled_by(self):
                places = np.arange(len(piece))
                begin = min(self._start, self._loaded.max_length - len(piece))  # a repetition may leave the context
                tokens, rows, positions = map(self._device.upload, (piece, places[:1], places + begin))
                self._signature.logits(self._loaded.model, tokens, rows, positions=positions, use_cache=False)
        self._next = end
        return end < len(self._tokens)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend to the tokens before the piece, from the pool, and to its own, and score the weights."""
        layer, outputs = next(self._layers), list[Tensor]()
        cached, scores = self._store.gather(layer, self._table, self._start), self.scores[layer]
        new = (each[0].to(scores.dtype) for each in (call.key, call.value))
        key, value = (torch.cat(parts, 1)[:, None] for parts in zip(cached, new, strict=True))
        query = (call.query[0].to(scores.dtype) * call.scale).view(len(key), -1, *call.query.shape[2:])
        size = max(1, CELLS // (call.query.shape[1] * key.shape[2]))
        for first in range(0, query.shape[2], size):
            products = query[:, :, first : first + size] @ key.mT
            later = torch.ones_like(products[0, 0], dtype=torch.bool).triu(self._start + first + 1)
            weights = products.masked_fill_(later, -torch.inf).softmax(-1)
            seen = weights[..., : scores.shape[1]]
            self._method.add(scores[:, : seen.shape[3]], seen)
            outputs.append(weights @ value)
        return torch.cat(outputs, 2).flatten(0, 1).transpose(0, 1).to(call.query.dtype)

    @torch.inference_mode()
    def write(self, block_table: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        """Copy the stored bytes of each head's best tokens from `block_table` to other `slots` [m], in order."""
        size = self._store.block_size
        with self._device.current():
            table, targets = map(self._device.upload, (block_table.astype(np.int64), slots))
            for layer, scores in enumerate(self.scores):
                chosen = chosen_tokens(scores, len(slots))
                self._store.copy_slots(layer, table[chosen // size] * size + chosen % size, targets)


def chosen_tokens(scores: Tensor, count: int) -> Tensor:
    """Return int64 [kv_heads, count]: the first and last tokens and those with the best scores [kv_heads, n]."""
    scores = scores.clone()
    scores[:, :FIRST] = scores[:, -LAST:] = torch.inf
    return scores.topk(count).indices.sort().values
