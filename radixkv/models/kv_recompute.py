"""How far KV that was computed again may lie from what the pool holds, and where it lies farther.

Knows rounding. Does not know who asks, nor what becomes of KV that differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.kv_store import KVStore
from radixkv.models.architecture import num_experts
from radixkv.models.loaded import LoadedModel

# The same token computed in chunks of other lengths, or beside others, comes out up to 9e-6 (float32), 7e-3 (float16)
# or 6e-2 (bfloat16) of its head's root mean square away (docs/results/determinism.md).
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Recheck:
    """What came of computing a cached run again; without a difference, `positions` is empty.

    `positions` are those that differ, counted from the start of the run; `layer` and `part` ("key" or "value") tell
    where the first of them does. `worst` is the largest deviation of all, in root mean squares of its head.
    """

    positions: tuple[int, ...]
    layer: int | None
    part: str | None
    worst: float


def obstacle(loaded: LoadedModel, *, exact: bool) -> str | None:
    """Why this model's KV cannot be compared within a tolerance; None if it can."""
    if row_dependent(loaded) and not exact:
        count = num_experts(loaded.config.get_text_config())
        return (
            f"this model routes tokens to {count} experts, and rounding may change the route, so that KV computed "
            "again differs without being wrong: load the engine with deterministic=True to audit it"
        )
    return None


def row_dependent(loaded: LoadedModel) -> bool:
    """Whether the bits of a token's KV depend on the tokens behind it in its chunk.

    An expert's matrix product is as high as many tokens of the chunk are routed to it, and its height rounds its rows.
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
    """Largest difference at each token [tokens] between [kv_heads, tokens, dim], in root mean squares of its head."""
    mine, true = mine.double(), true.double()
    scale = true.square().mean(dim=(1, 2), keepdim=True).sqrt()
    difference = (mine - true).abs()
    relative = torch.where(difference > 0, difference / scale, difference)  # where all is zero, both are
    return relative.amax(dim=(0, 2))
