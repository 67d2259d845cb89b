"""Run a model by its own attention, one sequence at a time, with the pool in place of its cache.

This serves architectures that bypass transformers' attention interface, or change attention in a way that it does not
show. They read cached KV through transformers' cache, and build masks and biases by themselves.

It costs more than attention over the pool. Each input gets a forward of its own, so decodes share no product, and each
layer copies the sequence's whole context out of the pool. Hits, shared prefixes and branches work the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from radixkv.attention.kv_store import KVStore
from radixkv.device import device_of
from radixkv.errors import UnsupportedModel
from radixkv.models.architecture import short_error, window_limit
from radixkv.models.attention_interface import OWN, ForwardSignature, own_attention
from radixkv.models.loaded import LayerSpec, LoadedModel, SequenceInput
from radixkv.models.probe import Probed
from radixkv.models.rounding import agree
from radixkv.models.step_batch import StepBatch


class OwnAttention:
    """Computes a step over one pool by the model's own attention."""

    def __init__(self, loaded: LoadedModel, store: KVStore) -> None:
        """Read and write `store`."""
        self._model, self._store = loaded.model, store
        self._forward = ForwardSignature.of(loaded.model)

    def run(self, inputs: Sequence[SequenceInput], sampled: Tensor | None = None) -> Tensor:
        """Return logits [len(inputs) + additional, vocab] as `Runner.run` does, in the model's dtype.

        Costs a forward for each input, a copy of its context per layer, and scores [heads, tokens, context] of one
        layer.
        """
        found = [self._run(sequence, sampled) for sequence in inputs]
        if all(each.logit_rows == 1 for each in inputs):
            return torch.cat(found)
        return torch.cat([*(logits[:1] for logits in found), *(logits[1:] for logits in found)])

    def _run(self, sequence: SequenceInput, sampled: Tensor | None) -> Tensor:
        """Return logits [logit_rows, vocab] of one input, its last token first."""
        batch = StepBatch([sequence], device_of(self._store.device), sampled)
        layers = [PoolLayer(self._store, layer, sequence, batch.slots) for layer in range(len(self._store.layers))]
        logits = _logits(self._forward, self._model, batch.tokens, batch.positions, batch.logit_rows, _cache(layers))
        unwritten = [index for index, layer in enumerate(layers) if not layer.written]
        if unwritten:
            raise RuntimeError(f"layer {unwritten[0]} of the cache was not written in this forward, as it was before")
        return logits


class PoolLayer(DynamicLayer):  # type: ignore[misc]  # transformers shows no types
    """One layer's cache of one sequence during one forward: new KV goes to the pool, all KV is read from there.

    The model's masks apply sliding windows. Nothing is dropped from the pool, so a shared prefix stays whole.
    """

    def __init__(self, store: KVStore, layer: int, sequence: SequenceInput, slots: Tensor) -> None:
        """Serve the layer `layer` of `store` for `sequence`, whose KV goes to `slots`."""
        super().__init__()
        self._store, self._layer, self._sequence, self._slots = store, layer, sequence, slots
        self.is_initialized = sequence.start > 0
        self.written = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Store key [1, kv_heads, T, dk] and value [1, kv_heads, T, dv]; return both for the whole sequence."""
        if self.written:
            raise RuntimeError(f"layer {self._layer} of the cache is written twice in a forward")
        if key_states.shape[:1] + key_states.shape[2:3] != (1, len(self._slots)):
            raise RuntimeError(f"{len(self._slots)} tokens put keys of {tuple(key_states.shape)} into the cache")
        self.written = self.is_initialized = True
        self._store.write(self._layer, self._slots, key_states[0], value_states[0])
        found = self._store.gather(self._layer, self._sequence.block_table, self.get_seq_length())
        key, value = (part.to(new.dtype)[None] for part, new in zip(found, (key_states, value_states), strict=True))
        return key, value

    def get_seq_length(self) -> int:
        """Return the number of tokens in the cache."""
        return self._sequence.start + (len(self._slots) if self.written else 0)


def probe(model: Any) -> Probed:
    """Return the contents of each layer of the model's cache, in order, and the width of its logits.

    Raises UnsupportedModel with the reason if one token leaves anything except its keys and values there, or sees later
    tokens. Costs five forwards of up to eight tokens.
    """
    cache = DynamicCache()
    token = torch.zeros(1, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            logits = _logits(ForwardSignature.of(model), model, token, token, token, cache)
            causal = _is_causal(model)
    except Exception as error:
        raise UnsupportedModel(f"it failed on its first tokens: {short_error(error)}") from error
    if not cache.layers:
        raise UnsupportedModel("it does not use the cache that it is given")
    if not causal:
        raise UnsupportedModel("a token changes the logits of earlier tokens")
    return Probed(tuple(_specs(model.config.get_text_config(), cache)), int(logits.shape[-1]))


def _is_causal(model: Any) -> bool:
    """Return whether the last token of a short prompt changes no earlier row, also by torch's attention.

    transformers prefers torch's attention, and some of its own implementations are causal while torch's is not.
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


def _logits(
    forward: ForwardSignature, model: Any, tokens: Tensor, positions: Tensor, rows: Tensor, cache: DynamicCache
) -> Tensor:
    """Return logits [len(rows), vocab] of rows of tokens [T] at `positions` [T], which follow the tokens in `cache`."""
    held = {forward.cache: cache}
    found: Tensor = forward.logits(model, tokens, rows, positions=positions, use_cache=True, return_dict=True, **held)
    return found


def _cache(layers: Sequence[PoolLayer]) -> DynamicCache:
    """Return transformers' cache over these layers; no other layer is ever added."""
    cache = DynamicCache()
    cache.layers, cache.layer_class_to_replicate = list(layers), None
    return cache


def _specs(config: Any, cache: DynamicCache) -> Iterator[LayerSpec]:
    """Yield the contents of each layer after one token; layers that read the KV of earlier ones follow, without any."""
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
            window=window_limit(config, kinds[index] if len(kinds) >= len(cache.layers) else None),
        )
