"""Build one architecture, try it, and describe its attention: one line of the page."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from model_parts import recipes, trial

RESULTS = ("paged", "fallback", "refused", "cannot be built", "wrong", "failed")
AT_FAULT = ("wrong", "failed")


@dataclass(frozen=True)
class Verdict:
    """The result of a class: `result` is one of RESULTS, `error` the largest difference of a logit, if it loads."""

    name: str
    kinds: tuple[str, ...]
    result: str
    reason: str = ""
    attention: str = ""
    error: float | None = None
    note: str = ""
    seconds: float = 0.0


def judge(name: str, kinds: tuple[str, ...]) -> Verdict:
    """Build a model of this class and try it; every failure becomes part of the verdict."""
    start = time.perf_counter()

    def verdict(result: str, **more: Any) -> Verdict:
        return Verdict(name, kinds, result, seconds=round(time.perf_counter() - start, 2), **more)

    try:
        model = recipes.build(name, kinds)
        found = trial.attempt(model)
    except recipes.CannotBeBuilt as error:
        return verdict("cannot be built", reason=str(error))
    except trial.Wrong as error:
        return verdict("wrong", reason=str(error))
    except Exception as error:  # nothing else may come out of building, loading and asking
        return verdict("failed", reason=f"{type(error).__name__}: {error}")
    if found.result == "refused":
        return verdict("refused", reason=found.reason, note=found.note)
    about = attention(found.layers, model.config.get_text_config(), found.stateful)
    return verdict(found.result, reason=found.reason, attention=about, error=found.error, note=found.note)


def attention(layers: tuple[Any, ...], config: Any, stateful: int = 0) -> str:
    """Describe a model's attention from the engine's record; experts are taken from the configuration.

    `stateful` is the number of its layers with recurrent state.
    """
    depth = getattr(config, "decoder_layers", config.num_hidden_layers)  # of an encoder and a decoder, the latter
    parts = [_heads(layers, config)] if layers else []
    for feature, some in (
        ("window", [layer for layer in layers if layer.window]),
        ("chunks", [layer for layer in layers if getattr(layer, "chunk", None)]),
        ("softcap", [layer for layer in layers if layer.softcap]),
        ("sinks", [layer for layer in layers if layer.sinks]),
        ("shared KV", [layer for layer in layers if layer.source is not None]),
    ):
        if some:
            parts.append(feature if len(some) == len(layers) else f"{feature} in {len(some)} of {len(layers)}")
    if any(layer.key_dim != layer.value_dim for layer in layers):
        parts.append("K wider than V")
    if len({layer.shape for layer in layers}) > 1:
        parts.append("sizes differ by layer")
    if stateful:
        parts += [f"in {len(layers)} of {depth} layers"] * bool(layers)
        parts.append(f"recurrent state in {stateful} of {depth} layers")
    elif len(layers) != depth:
        parts.append(f"{len(layers)} calls in {depth} layers")
    return ", ".join(parts + ["experts"] * _has_experts(config))


def _heads(layers: tuple[Any, ...], config: Any) -> str:
    if getattr(config, "kv_lora_rank", None):
        return "MLA"
    if all(layer.heads == layer.kv_heads for layer in layers):
        return "MHA"
    return "MQA" if all(layer.kv_heads == 1 for layer in layers) else "GQA"


def _has_experts(config: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    parts = (config, getattr(config, "ffn_config", None))
    return any((getattr(part, name, None) or 0) > 1 for part in parts for name in names)
