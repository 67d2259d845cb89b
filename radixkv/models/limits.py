"""How long sequences may be, how far back their tokens see, and where they may go, as a configuration has it.

Knows names that configurations use. Does not know whether a model keeps to them: the probe and the self-test do.
"""

from __future__ import annotations

from typing import Any

from radixkv.models.forward import Forward

_UNLIMITED = 1 << 30  # the context of a model that names no limit
_POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")  # of which a model has one, or none
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_REACHES = ("sliding_window", "attention_chunk_size", "window_size")


def max_length(model: Any) -> int:
    """The longest sequence in tokens that the model's positions allow, and in which it attends to all keys.

    Beyond `keep_window_size` keys Doge drops some by a score, which equal tokens share: which of them go depends on how
    the prompt was cut. BigBird leaves out most of longer sequences, but only if it has seen no shorter one before.
    """
    config = model.config.get_text_config()
    positions = min(int(found) for name in _POSITIONS if (found := getattr(config, name, None) or _UNLIMITED) > 0)
    limits = [positions - Forward.of(model).first_position, getattr(config, "keep_window_size", None)]
    if getattr(config, "attention_type", None) == "block_sparse" and hasattr(model.base_model, "set_attention_type"):
        limits.append((5 + 2 * config.num_random_blocks) * config.block_size)
    return min(int(limit) for limit in limits if limit)


def reach(config: Any, kind: str | None = None) -> int | None:
    """How many tokens a layer of this kind sees at most, itself included; None if all, or if nothing is said.

    Without a kind: the layers that see least.
    """
    if kind == "full_attention" or getattr(config, "use_sliding_window", None) is False:
        return None
    found = [getattr(config, name, None) for name in _REACHES]
    return max((limit for limit in found if isinstance(limit, int) and limit > 0), default=None)


def unsaid_reach(config: Any, told: set[int]) -> int | None:
    """A reach that the configuration names, but for which no layer has a kind, and which is none of those `told`."""
    kinds = set(getattr(config, "layer_types", None) or ())
    limit = None if kinds else reach(config)
    return None if limit in told else limit


def experts(config: Any) -> int:
    """To how many experts a layer routes its tokens; 0 if it does not."""
    parts = (config, getattr(config, "ffn_config", None))
    return max(getattr(part, name, None) or 0 for part in parts for name in _EXPERTS)
