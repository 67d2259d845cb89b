"""Run a model by its own attention, one sequence at a time, with the pool in the place of its cache.

For architectures that go around transformers' attention interface, or bend attention in a way that it does not show:
they find what is cached through transformers' cache, and build masks and biases by themselves. Knows that cache, and
chunks. Does not know why a model needs this, nor whether its answers are right: the self-test does.

It costs more than attention over the pool: each chunk gets a forward of its own, so that decodes share no product, and
every layer of it copies the sequence's whole context out of the pool. Hits, shared prefixes and branches are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from radixkv.attention.kv_store import KVStore
from radixkv.errors import UnsupportedModel
from radixkv.models.architecture import ForwardSignature, short_error, window_limit
from radixkv.models.attention_interface import OWN, own_attention
from radixkv.models.loaded import LayerSpec, LoadedModel, SequenceInput
from radixkv.models.rounding import agree


class OwnAttention:
    """One model over one pool, by its own attention."""

    def __init__(self, loaded: LoadedModel, store: KVStore) -> None:
        """Read and write `store`."""
        self._model, self._store = loaded.model, store
        self._forward = ForwardSignature.of(loaded.model)

    def run(self, chunks: Sequence[SequenceInput]) -> Tensor:
        """Logits [len(chunks), vocab] of each chunk's last token, in the model's dtype; a forward for each chunk.

        Costs, beside that, a copy of each chunk's context a layer, and scores [heads, chunk, context] of one layer.
        """
        return torch.cat([self._run(chunk) for chunk in chunks])

    def _run(self, chunk: SequenceInput) -> Tensor:
        """Logits [1, vocab] of one chunk."""
        device, count = self._store.device, len(chunk.tokens)
        columns = np.stack([chunk.tokens, np.arange(chunk.start, chunk.start + count), chunk.slots]).astype(np.int64)
        tokens, positions, slots = torch.from_numpy(columns).to(device)
        layers = [PoolLayer(self._store, layer, chunk, slots) for layer in range(len(self._store.layers))]
        logits = _logits(self._forward, self._model, tokens, positions, _cache(layers))
        unwritten = [index for index, layer in enumerate(layers) if not layer.written]
        if unwritten:
            raise RuntimeError(f"layer {unwritten[0]} of the cache was not written in this forward, as it was before")
        return logits


class PoolLayer(DynamicLayer):  # type: ignore[misc]  # transformers shows no types
    """One layer's cache of one sequence during one forward: what is new goes to the pool, all is read from there.

    Sliding windows are the model's masks' business: nothing is dropped, so that whoever shares a prefix finds it whole.
    """

    def __init__(self, store: KVStore, layer: int, chunk: SequenceInput, slots: Tensor) -> None:
        """The layer `layer` of `store`, for `chunk`, whose KV goes to `slots`."""
        super().__init__()
        self._store, self._layer, self._chunk, self._slots = store, layer, chunk, slots
        self.is_initialized = chunk.start > 0
        self.written = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Store key [1, kv_heads, T, dk] and value [1, kv_heads, T, dv]; return those of the whole sequence."""
        if self.written:
            raise RuntimeError(f"layer {self._layer} of the cache is written twice in a forward")
        if key_states.shape[:1] + key_states.shape[2:3] != (1, len(self._slots)):
            raise RuntimeError(f"{len(self._slots)} tokens put keys of {tuple(key_states.shape)} into the cache")
        self.written = self.is_initialized = True
        self._store.write(self._layer, self._slots, key_states[0], value_states[0])
        found = self._store.gather(self._layer, self._chunk.block_table, self.get_seq_length())
        key, value = (part.to(new.dtype)[None] for part, new in zip(found, (key_states, value_states), strict=True))
        return key, value

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return self._chunk.start + (len(self._slots) if self.written else 0)


def probe(model: Any) -> tuple[tuple[LayerSpec, ...], int]:
    """Return what each layer of the model's cache holds, in order, and the width of its logits.

    Raises UnsupportedModel, with the reason, if one token leaves something else than its keys and values there, or sees
    those behind it. Costs five forwards of up to eight tokens.
    """
    cache = DynamicCache()
    token = torch.zeros(1, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            logits = _logits(ForwardSignature.of(model), model, token, token, cache)
            causal = _is_causal(model)
    except Exception as error:
        raise UnsupportedModel(f"it failed on its first tokens: {short_error(error)}") from error
    if not cache.layers:
        raise UnsupportedModel("it does not use the cache that it is given")
    if not causal:
        raise UnsupportedModel("a token changes what comes of those before it")
    return tuple(_specs(model.config.get_text_config(), cache)), int(logits.shape[-1])


def _is_causal(model: Any) -> bool:
    """Whether the last token of a short prompt leaves alone all rows before it, also by torch's attention.

    transformers prefers that one, and some attentions of its own are causal where that one is not.
    """
    tokens = torch.arange(2, 10, device=model.device) % model.get_input_embeddings().num_embeddings
    changed, rows, forward = tokens.clone(), torch.arange(7, device=model.device), ForwardSignature.of(model)
    changed[-1] = 1
    for implementation in (OWN, "sdpa") if getattr(model, "_supports_sdpa", False) else (OWN,):
        with own_attention(model, implementation):
            before, after = (forward.logits(model, prompt, rows, use_cache=False) for prompt in (tokens, changed))
        if not agree(after, before, before.dtype):
            return False
    return True


def _logits(forward: ForwardSignature, model: Any, tokens: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """Logits [1, vocab] of the last of tokens [T], which stand at `positions` [T], behind what is in `cache`."""
    last = torch.full((1,), len(tokens) - 1, dtype=torch.long, device=tokens.device)
    found: Tensor = forward.logits(
        model, tokens, last, positions=positions, past_key_values=cache, use_cache=True, return_dict=True
    )
    return found


def _cache(layers: Sequence[PoolLayer]) -> DynamicCache:
    """transformers' cache over these layers: no other is ever added."""
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = list(layers), None
    return cache


def _specs(config: Any, cache: DynamicCache) -> Iterator[LayerSpec]:
    """What each layer holds after one token."""
    kinds = getattr(config, "layer_types", None) or ()
    for index, layer in enumerate(cache.layers):
        key, value = layer.keys, layer.values
        if key is None or key.ndim != 4 or key.shape[0] != 1 or key.shape[2] != 1:
            raise UnsupportedModel(f"layer {index} of its cache does not hold one key of one token")
        kv_heads, heads = key.shape[1], getattr(config, "num_attention_heads", None) or key.shape[1]
        yield LayerSpec(
            heads=heads if heads % kv_heads == 0 else kv_heads,
            kv_heads=kv_heads,
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            window=window_limit(config, kinds[index] if len(kinds) == len(cache.layers) else None),
        )
