"""Score the cached KV of a prefix by the attention that it gets, and copy the best of it into other slots.

A forward of a piece of text reads the keys and values of the prefix from the pool, and writes none: its own stay in
its attention calls. Each method of `METHODS` is a function of the attention weights of some queries. Every layer and
head chooses tokens of its own, always equally many, so that one block table serves all layers. Keys were rotated
before they were stored, so they keep their positions in any slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from radixkv.attention.kv_store import KVStore
from radixkv.device import device_of
from radixkv.models.attention_interface import AttentionCall, ForwardSignature, handled_by
from radixkv.models.loaded import LayerSpec, LoadedModel

FIRST, LAST = 4, 32
"""Tokens at the start and at the end of a prefix that are always kept."""

PIECE = 256
"""Tokens of a forward that computes weights."""

CELLS = 1 << 23
"""Attention weights that are computed at once, at most, or one row: 32 MB in float32, and as much for the scores."""

NEIGHBOURS = 7
"""Tokens over which SnapKV averages weights."""


def num_slots(tokens: int, keep: float) -> int:
    """Return the number of slots that keep a share `keep` of `tokens`.

    >>> num_slots(2048, 0.5), num_slots(50, 0.5), num_slots(20, 0.5)
    (1024, 36, 20)
    """
    return min(tokens, max(FIRST + LAST, round(tokens * keep)))


# ---- methods: each adds the weights [kv_heads, group, rows, n] of some queries to the scores [kv_heads, n]


def reconstruct(scores: Tensor, weights: Tensor) -> None:
    """Keep the largest weight that a token gets while the model repeats the text after the prefix, as KVzip does."""
    torch.maximum(scores, weights.amax((1, 2)), out=scores)


def snapkv(scores: Tensor, weights: Tensor) -> None:
    """Add the weights of the last queries of the prefix, averaged over neighbouring tokens."""
    earlier = weights[..., :-LAST].sum((1, 2))
    scores[:, :-LAST] += functional.avg_pool1d(earlier, NEIGHBOURS, 1, NEIGHBOURS // 2)


def h2o(scores: Tensor, weights: Tensor) -> None:
    """Add the weights of all queries of the prefix: the tokens with the largest sums are the heavy hitters."""
    scores += weights.sum((1, 2))


class Method(NamedTuple):
    """A way to score tokens: `add` takes the weights, whose queries are the last `queries` tokens of the prefix.

    If `repeats`, the queries repeat these tokens after the prefix.
    """

    add: Callable[[Tensor, Tensor], None]
    repeats: bool = False
    queries: int | None = None


METHODS = {
    "reconstruct": Method(reconstruct, repeats=True),
    "snapkv": Method(snapkv, queries=LAST),
    "h2o": Method(h2o),
}


class Compressible(Protocol):
    """The parts of a runner that a compression uses."""

    loaded: LoadedModel
    store: KVStore


def obstacle(loaded: LoadedModel) -> str | None:
    """Return the reason why prefixes of this model cannot be compressed; None if they can."""
    config, layers = loaded.config.get_text_config(), loaded.layers
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = getattr(config, "attn_temperature_tuning", False) or rope.get("llama_4_scaling_beta")
    reasons = {
        "it has recurrent state, from which no token can be left out": bool(loaded.state),
        "it runs by its own attention, which shows no weights": loaded.attention == "fallback",
        "some of its layers see a window of tokens, which are counted in slots": any(each.window for each in layers),
        "some of its layers see chunks of tokens, which are counted in slots": any(each.chunk for each in layers),
        "it scales attention by position": bool(scaled),
        "its attention is latent (MLA)": bool(getattr(config, "kv_lora_rank", None)),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class Compression:
    """The scores of one prefix in all layers: call `step` until it returns False, then `write`.

    Scores take 4 bytes for each token, layer and KV head.
    """

    def __init__(self, runner: Compressible, tokens: NDArray[np.int32], method: str) -> None:
        """Score the prefix `tokens` [n] by a method of `METHODS`; few tokens are all kept, without scores."""
        self._loaded, self._store, self._method = runner.loaded, runner.store, METHODS[method]
        self._device = device_of(runner.loaded.device)
        self._tokens, count = tokens, len(tokens)
        self._next = max(0, count - (self._method.queries or count)) if count > FIRST + LAST else count
        self._signature = ForwardSignature.of(runner.loaded.model)
        heads = [layer.kv_heads for layer in self._store.layers]
        options: dict[str, Any] = {"dtype": self._store.compute_dtype, "device": self._store.device}
        self.scores = [torch.zeros(each, count, **options) for each in heads]
        """The score of each token in each layer that stores KV: [kv_heads, n]."""

    @torch.inference_mode()
    def step(self, block_table: NDArray[np.int32]) -> bool:
        """Run one forward of a piece over the cached prefix, in `block_table`; return whether others remain."""
        first, self._next = self._next, min(self._next + PIECE, len(self._tokens))
        if first < self._next:
            start = len(self._tokens) if self._method.repeats else first
            weights = _Weights(self._loaded.layers, self._store, block_table, start, self.scores, self._method.add)
            with self._device.current(), handled_by(weights):
                self._forward(self._tokens[first : self._next], start)
        return self._next < len(self._tokens)

    def _forward(self, piece: NDArray[np.int32], start: int) -> None:
        tokens = self._device.upload(piece.astype(np.int64))
        positions = self._device.upload(np.arange(start, start + len(piece)))
        rows = positions[:1] - start  # of logits, which nothing reads
        self._signature.logits(self._loaded.model, tokens, rows, positions=positions, use_cache=False)

    @torch.inference_mode()
    def write(self, block_table: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        """Copy the stored KV of the best tokens of each layer and head to `slots` [m], by position.

        `block_table` holds the prefix, and no slot is in it. Bytes are copied as they are.
        """
        store, size = self._store, self._store.block_size
        targets = self._device.upload(slots)
        table = self._device.upload(block_table.astype(np.int64))
        with self._device.current():
            for scores, *parts in zip(self.scores, store.key_parts, store.value_parts, strict=True):
                chosen = chosen_tokens(scores, len(slots))
                heads = torch.arange(len(chosen), device=store.device)[:, None]
                for pool in (*parts[0].tensors, *parts[1].tensors):
                    kept = pool[heads, table[chosen // size], chosen % size]
                    pool[heads, targets // size, targets % size] = kept


def chosen_tokens(scores: Tensor, count: int) -> Tensor:
    """Return the tokens with the best scores [kv_heads, n], in order: int64 [kv_heads, count].

    The first and the last ones of the prefix are among them.
    """
    always = scores.clone()
    always[:, :FIRST] = always[:, -LAST:] = torch.inf
    return always.topk(count).indices.sort().values


class _Weights:
    """Answers the attention calls of one forward over cached tokens [0, start), and scores the attention weights."""

    attend_rows = None

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        store: KVStore,
        block_table: NDArray[np.int32],
        start: int,
        scores: list[Tensor],
        add: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._store, self._table, self._start, self._scores, self._add = store, block_table, start, scores, add
        stored = [number for number, layer in enumerate(layers) if layer.source is None]
        self._places = [
            stored.index(number if each.source is None else each.source) for number, each in enumerate(layers)
        ]
        self._softcaps = iter([layer.softcap for layer in layers])
        self._calls = iter(self._places)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend to the cached tokens and to the piece's own, a few rows at once."""
        place, dtype = next(self._calls), self._store.compute_dtype
        cached = self._store.gather(place, self._table, self._start)
        key, value = (
            torch.cat([old.to(dtype), new[0].to(dtype)], 1)[:, None]
            for old, new in zip(cached, (call.key, call.value), strict=True)
        )
        query = call.query[0].to(dtype).view(len(key), -1, *call.query.shape[2:]) * call.scale
        softcap, output = next(self._softcaps), []
        most = max(1, CELLS // (call.query.shape[1] * key.shape[2]))
        for first in range(0, query.shape[2], most):
            rows = query[:, :, first : first + most]
            weights = self._weights(rows, key, first, softcap)
            output.append(weights @ value)
            seen = weights[..., : self._scores[place].shape[1]]
            self._add(self._scores[place][:, : seen.shape[-1]], seen)
        return torch.cat(output, 2).flatten(0, 1).transpose(0, 1).to(call.query.dtype)

    def _weights(self, query: Tensor, key: Tensor, first: int, softcap: float | None) -> Tensor:
        """Return the weights [kv_heads, group, rows, keys] of the rows from `first` on of the piece."""
        scores = query @ key.transpose(-1, -2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows = torch.arange(self._start + first, self._start + first + query.shape[2], device=key.device)
        later = torch.arange(key.shape[2], device=key.device) > rows[:, None]
        return scores.masked_fill_(later, -torch.inf).softmax(-1)
