"""Compare recomputed KV with the cached KV in the pool, bit for bit or within rounding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.kv_store import KVStore
from radixkv.models.loaded import LoadedModel

# The KV of a token depends on the length of its chunk and on the rest of the batch. It differs by up to 9e-6 (float32),
# 7e-3 (float16) or 6e-2 (bfloat16) of its head's root mean square (docs/results/determinism.md). Codes of 8 bits differ
# by up to 30 steps, in the measure of `Int8.deviation`, but by one in the first layer (docs/results/kv_formats.md).
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5, torch.int8: 64.0}
IN_FIRST_LAYER = 4.0  # at most: no deviation of other layers moves its numbers


@dataclass(frozen=True)
class Recheck:
    """The result of recomputing a cached run; `positions` is empty if nothing differs.

    `positions` are the differing tokens, counted from the start of the run; `layer` and `part` ("key" or "value")
    locate the first difference. `worst` is the largest deviation of all, in root mean squares of its head, or in steps
    of the scales of codes.
    """

    positions: tuple[int, ...]
    layer: int | None
    part: str | None
    worst: float


def recompute_obstacle(loaded: LoadedModel, *, exact: bool) -> str | None:
    """Return the reason why this model's KV cannot be compared within a tolerance; None if it can."""
    if row_dependent(loaded) and not exact:
        count = loaded.num_experts
        return (
            f"this model routes tokens to {count} experts, and rounding may change the route, so that KV computed "
            "again differs without being wrong: load the engine with deterministic=True to audit it"
        )
    return None


def row_dependent(loaded: LoadedModel) -> bool:
    """Return whether the bits of a token's KV depend on later tokens of its chunk.

    The height of an expert's matrix product is the number of tokens routed to it, and affects the rounding of each row.
    """
    return loaded.num_experts > 1


def compare(
    store: KVStore,
    cached: NDArray[np.int32],
    again: NDArray[np.int32],
    offset: int,
    count: int,
    *,
    exact: bool = False,
) -> Recheck:
    """Compare `count` tokens from `offset` on in the blocks `cached` with those in the blocks `again`, in all layers.

    `exact` allows no differing bit; else `TOLERANCE` is allowed, in the units of the format's `deviation`.
    """
    tolerance = 0.0 if exact or not store.keys else TOLERANCE.get(store.keys[0].dtype, 0.5)
    worst, differs, found = 0.0, np.zeros(count, dtype=np.bool_), []
    for layer in range(len(store.layers)):
        allowed = tolerance if layer else min(tolerance, IN_FIRST_LAYER)
        both = (store.stored(layer, blocks, offset + count) for blocks in (cached, again))
        for part, mine, true in zip(("key", "value"), *both, strict=True):
            deviation = store.format.deviation(*([each[:, offset:] for each in stored] for stored in (mine, true)))
            beyond = ~(deviation <= allowed).cpu().numpy()  # "not <=" also finds NaN
            worst = max(worst, float(deviation.nan_to_num(nan=torch.inf).max()))
            if beyond.any():
                differs |= beyond
                found.append((int(beyond.argmax()), layer, part))
    _, layer_found, part_found = min(found, default=(0, None, None))
    return Recheck(tuple(np.flatnonzero(differs).tolist()), layer_found, part_found, worst)
