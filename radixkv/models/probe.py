"""Probe a model with one token: record attention calls and states, and refuse calls that radixkv cannot express.

The self-test checks the numbers afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from radixkv.errors import UnsupportedModel
from radixkv.models.architecture import attention_kinds, kind_of, short_error
from radixkv.models.attention_interface import AttentionCall, ForwardSignature, handled_by
from radixkv.models.loaded import LayerSpec, StateSpec
from radixkv.models.recurrent.mixers import mixed_by
from radixkv.models.recurrent.state_probe import StateProbe

# Tensors that many architectures pass although plain attention does not need them.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k", "logits_to_keep"}
)


class Probed(NamedTuple):
    """The layers of one forward pass, in order, the width of its logits, and the recurrent states that it leaves."""

    layers: tuple[LayerSpec, ...]
    width: int
    state: tuple[StateSpec, ...] = ()


def probe(model: Any) -> Probed:
    """Return the layers and states of one forward pass.

    Raises UnsupportedModel with the reason if the model cannot run over a paged pool. Costs one forward of one token.
    """
    forward = ForwardSignature.of(model)
    recorder, states = _Recorder(), StateProbe()
    first = torch.zeros(1, dtype=torch.long, device=model.device)  # the token, its position, and its row
    try:
        with torch.inference_mode(), handled_by(recorder), mixed_by(states):
            logits = forward.logits(model, first, first, positions=first, use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{kind_of(model)} failed on its first token: {short_error(error)}") from error
    layers = tuple(recorder.layers)
    _check_layers(model, layers)
    return Probed(_with_chunks(model, layers), int(logits.shape[-1]), states.specs)


class _Recorder:
    """Answers the calls of a one-token forward (attention over one key is its value) and records them."""

    def __init__(self) -> None:
        self.layers: list[LayerSpec] = []
        self._stored: list[tuple[int, Tensor, Tensor]] = []  # number of the call, its key and its value

    def attend(self, call: AttentionCall) -> Tensor:
        """Record the call; raises UnsupportedModel if it is not plain causal attention."""
        _check_call(call)
        heads, kv_heads = call.query.shape[1], call.key.shape[1]
        self.layers.append(
            LayerSpec(
                heads=heads,
                kv_heads=kv_heads,
                key_dim=call.key.shape[3],
                value_dim=call.value.shape[3],
                window=call.window,
                softcap=call.softcap,
                sinks=call.sinks is not None,
                source=self._source(call),
            )
        )
        return call.value[0].repeat_interleave(heads // kv_heads, dim=0).transpose(0, 1)

    def _source(self, call: AttentionCall) -> int | None:
        """Return the number of the earlier call that passed the same two tensors; None if this call is the first."""
        for number, key, value in self._stored:
            if call.key is key and call.value is value:
                return number
        self._stored.append((len(self.layers), call.key, call.value))
        return None


def _check_call(call: AttentionCall) -> None:
    """Refuse masks, biases, bidirectional and cross attention, and tensors and numbers of unknown meaning."""
    module = type(call.module).__name__
    if call.mask is not None:
        raise UnsupportedModel(f"{module} passes its own attention mask, which a shared pool cannot honour")
    if call.extra.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise UnsupportedModel(f"{module} attends to later tokens too; radixkv runs causal decoders")
    unknown = sorted(k for k, v in call.extra.items() if _may_change_scores(v) and k not in _HARMLESS)
    if unknown:
        raise UnsupportedModel(f"{module} passes {', '.join(unknown)} to attention, which radixkv does not know")
    queries, keys = call.query.shape, call.key.shape
    if queries[0] != 1 or queries[2] != 1 or keys[2] != 1 or queries[1] % keys[1]:
        raise UnsupportedModel(
            f"{module} asks for attention of {tuple(queries)} over {tuple(keys)}, not of one token over itself"
        )


def _may_change_scores(value: Any) -> bool:
    """Return whether an argument could be a window, a scale or a bias; flags concern outputs."""
    return isinstance(value, Tensor | int | float) and not isinstance(value, bool)


def _check_layers(model: Any, layers: tuple[LayerSpec, ...]) -> None:
    """Refuse a model that bypassed our attention, or whose calls contradict its configuration.

    The self-test may be too short for a long window and have too small scores for a softcap, so the calls must agree
    with the configuration.
    """
    config = model.config.get_text_config()
    named = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")  # the decoder's number comes first
    expected = next(count for name in named if (count := getattr(config, name, None)))
    if getattr(config, "layer_types", None):
        expected = min(expected, len(attention_kinds(config)))
    if len(layers) < expected:
        raise UnsupportedModel(
            f"{kind_of(model)} shows {len(layers)} attention calls for {expected} layers: it does not go through the "
            "attention interface of transformers everywhere"
        )
    if getattr(config, "attn_logit_softcapping", None) and not all(layer.softcap for layer in layers):
        raise UnsupportedModel(f"{kind_of(model)} is configured with a softcap that it does not pass to attention")
    _check_windows(model, layers)


def _check_windows(model: Any, layers: tuple[LayerSpec, ...]) -> None:
    """Refuse windows that differ from the configuration."""
    config = model.config.get_text_config()
    kinds = attention_kinds(config)
    if kinds and getattr(config, "sliding_window", None) and len(kinds) == len(layers):
        for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
            if (kind == "sliding_attention") != (layer.window is not None):
                raise UnsupportedModel(f"{kind_of(model)}: layer {index} is {kind}, but its window is {layer.window}")


def _with_chunks(model: Any, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the same layers with the chunks in which they attend, which only the configuration has."""
    config = model.config.get_text_config()
    kinds = attention_kinds(config)
    if "chunked_attention" not in kinds:
        return layers
    size = getattr(config, "attention_chunk_size", None)
    if not size or len(kinds) != len(layers):
        raise UnsupportedModel(f"{kind_of(model)} does not say which of {len(layers)} layers attend in which chunks")
    return tuple(
        replace(layer, chunk=size) if kind == "chunked_attention" else layer
        for kind, layer in zip(kinds, layers, strict=True)
    )
