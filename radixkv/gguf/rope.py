"""Describe rotary embeddings as transformers does, from the metadata and small tensors of a GGUF file.

llama.cpp stores the scaling of Llama 3.1 as one factor per rotary frequency. transformers computes the factors from
four parameters. These are recovered, and accepted only if the same factors follow from them.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from radixkv.errors import InvalidInput
from radixkv.gguf.header import GGUFTensor
from radixkv.gguf.model_keys import ModelKeys, shortest

FACTORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # parameters of every Llama 3.1, 3.2 and 3.3
_TOLERANCE = 1e-4  # of a factor; llama.cpp computes wavelengths in float32
_SCALING = "rope.scaling."


def rope_parameters(
    keys: ModelKeys, head_dim: int, *, partial: bool = False, scaling: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return `rope_parameters` of a transformers configuration: base, scaling, and with `partial` the rotary share.

    `scaling` replaces the scaling that the metadata state. Raises UnsupportedModel for a scaling that transformers does
    not have in this form, and without `partial` if only a part of each head is rotated.
    """
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": rope_base(keys)}
    rotary = keys.size("rope.dimension_count", head_dim)
    if rotary > head_dim:
        raise InvalidInput(
            f"{keys.header.path}: rope.dimension_count is {rotary:,}, of {head_dim:,} numbers of a head: fetch it again"
        )
    if partial and int(head_dim * (rotary / head_dim)) == rotary:  # as transformers rounds it
        found["partial_rotary_factor"] = rotary / head_dim
    elif rotary != head_dim:
        raise keys.unsupported(f"rotary embeddings rotate {rotary} of the {head_dim} numbers of a head")
    return {**found, **(stated_scaling(keys) if scaling is None else scaling)}


def rope_base(keys: ModelKeys, key: str = "rope.freq_base") -> float:
    """Return the base of the rotary frequencies. Raises InvalidInput if it is below 1."""
    if (base := keys.value(key, float, 10_000.0)) < 1.0:
        raise InvalidInput(f"{keys.header.path}: {key} is {base}: fetch or copy it again")
    return base


def llama3_parameters(keys: ModelKeys, head_dim: int, base: float) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 that the factors in `rope_freqs.weight` follow from; empty if they are all 1.

    Raises UnsupportedModel if they follow from other parameters than the Llama 3 models have.
    """
    factors = _values(keys, FACTORS, head_dim // 2)
    if all(each == 1.0 for each in factors):
        return {}
    turns = [_ORIGINAL * base ** -(2 * at / head_dim) / (2 * math.pi) for at in range(len(factors))]  # in 8192 tokens
    shares = [min(max((each - _LOW) / (_HIGH - _LOW), 0.0), 1.0) for each in turns]
    scaled = 1 / factors[-1] - shares[-1]
    factor = float(f"{(1 - shares[-1]) / scaled:.6g}") if scaled > 0 else 1.0
    expected = [1 / ((1 - share) / factor + share) if factor else 0.0 for share in shares]
    if not all(math.isclose(*pair, rel_tol=_TOLERANCE) for pair in zip(factors, expected, strict=True)):
        raise keys.unsupported(f"{FACTORS} has factors of rotary frequencies that Llama 3 does not have")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def longrope_parameters(keys: ModelKeys, rotary: int, context: int) -> dict[str, Any]:
    """Return the LongRoPE scaling of the factors for short and for long contexts, one factor per rotary frequency."""
    original = keys.size(f"{_SCALING}original_context_length")
    if original == 1:  # its logarithm is a divisor
        raise InvalidInput(f"{keys.header.path}: {_SCALING}original_context_length is 1: fetch or copy it again")
    stretch = context / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    attention = keys.value(f"{_SCALING}attn_factor", float, usual)
    found = {
        "rope_type": "longrope",
        "short_factor": [shortest(each) for each in _values(keys, SHORT, rotary // 2)],
        "long_factor": [shortest(each) for each in _values(keys, LONG, rotary // 2)],
        "original_max_position_embeddings": original,
    }
    return found if math.isclose(attention, usual, rel_tol=1e-6) else {**found, "attention_factor": attention}


def stated_scaling(keys: ModelKeys) -> dict[str, Any]:
    """Return the scaling that the metadata state: none, linear (in llama.cpp also a factor without a type), or YaRN."""
    keys.require(f"{_SCALING}attn_factor", 1.0)
    factor = keys.value(f"{_SCALING}factor", float, 0.0) or keys.value("rope.scale_linear", float, 1.0) or 1.0
    kind = keys.value(f"{_SCALING}type", str, "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.unsupported(f"rotary embeddings are scaled by {kind!r}")
    keys.require(f"{_SCALING}yarn_ext_factor", 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.size(f"{_SCALING}original_context_length"),
        "beta_fast": keys.value(f"{_SCALING}yarn_beta_fast", float, 32.0),
        "beta_slow": keys.value(f"{_SCALING}yarn_beta_slow", float, 1.0),
    }


def _values(keys: ModelKeys, name: str, count: int) -> list[float]:
    """Return the numbers of a small tensor, all finite and positive."""
    tensor = keys.header.tensors.get(name)
    if tensor is None:
        raise InvalidInput(f"{keys.header.path}: tensor {name} is missing: fetch or copy it again")
    if tensor.shape != (count,) or tensor.type_name != "F32":
        raise keys.unsupported(f"{name} has the shape {list(tensor.shape)} in {tensor.type_name}, not [{count}] in F32")
    found = _read(tensor)
    if not all(0.0 < each < math.inf for each in found):
        raise InvalidInput(f"{tensor.file}: {name} has numbers that are no factors: fetch or copy it again")
    return found


def _read(tensor: GGUFTensor) -> list[float]:
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            stored = file.read(4 * tensor.numbers)
    except OSError as error:
        raise InvalidInput(f"{tensor.file} cannot be read: {error.strerror}: check its permissions") from error
    if len(stored) < 4 * tensor.numbers:
        raise InvalidInput(f"{tensor.file} ended within {tensor.name}: fetch or copy it again")
    return list(struct.unpack(f"<{tensor.numbers}f", stored))
