"""Compare recomputed KV with the cached KV in the pool, bit for bit or within rounding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.kv_store import KVStore
from radixkv.models.architecture import num_experts
from radixkv.models.loaded import LoadedModel

# The KV of a token depends on the length of its chunk and on the rest of the batch. It differs by up to 9e-6 (float32),
# 7e-3 (float16) or 6e-2 (bfloat16) of its head's root mean square (docs/results/determinism.md).
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Recheck:
    """The result of recomputing a cached run; `positions` is empty if nothing differs.

    `positions` are the differing tokens, counted from the start of the run; `layer` and `part` ("key" or "value")
    locate the first difference. `worst` is the largest deviation of all, in root mean squares of its head.
    """

    positions: tuple[int, ...]
    layer: int | None
    part: str | None
    worst: float


def recompute_obstacle(loaded: LoadedModel, *, exact: bool) -> str | None:
    """Return the reason why this model's KV cannot be compared within a tolerance; None if it can."""
    if row_dependent(loaded) and not exact:
        count = num_experts(loaded.config.get_text_config())
        return (
            f"this model routes tokens to {count} experts, and rounding may change the route, so that KV computed "
            "again differs without being wrong: load the engine with deterministic=True to audit it"
        )
    return None


def row_dependent(loaded: LoadedModel) -> bool:
    """Return whether the bits of a token's KV depend on later tokens of its chunk.

    The height of an expert's matrix product is the number of tokens routed to it, and affects the rounding of each row.
    """
    return num_experts(loaded.config.get_text_config()) > 1


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

    `exact` allows no differing bit; else `TOLERANCE` is allowed, of the root mean square of a head over the run.
    """
    tolerance = 0.0 if exact else TOLERANCE.get(store.dtype, 0.5)
    worst, differs, found = 0.0, np.zeros(count, dtype=np.bool_), []
    for layer in range(len(store.layers)):
        both = (store.gather(layer, blocks, offset + count) for blocks in (cached, again))
        for part, mine, true in zip(("key", "value"), *both, strict=True):
            deviation = _deviation(mine[:, offset:], true[:, offset:])
            beyond = ~(deviation <= tolerance).cpu().numpy()  # "not <=" also finds NaN
            worst = max(worst, float(deviation.nan_to_num(nan=torch.inf).max()))
            if beyond.any():
                differs |= beyond
                found.append((int(beyond.argmax()), layer, part))
    _, layer_found, part_found = min(found, default=(0, None, None))
    return Recheck(tuple(np.flatnonzero(differs).tolist()), layer_found, part_found, worst)


def _deviation(mine: Tensor, true: Tensor) -> Tensor:
    """Return the largest difference at each token [tokens] of [kv_heads, tokens, dim], in root mean squares."""
    mine, true = mine.double(), true.double()
    scale = true.square().mean(dim=(1, 2), keepdim=True).sqrt()
    difference = (mine - true).abs()
    relative = torch.where(difference > 0, difference / scale, difference)  # where all is zero, both are
    return relative.amax(dim=(0, 2))
