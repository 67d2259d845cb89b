"""A base class for runners of tests: it has the facts of a runner without host memory and recurrent state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.attention.host_store import HostCosts
from radixkv.cache.types import Load
from radixkv.engine.transfers import HostMemory, StateMemory
from radixkv.models.kv_recompute import Recheck


class PlainRunner:
    """A runner without options; subclasses compute."""

    row_dependent = False
    host: HostMemory | None = None
    states: StateMemory | None = None
    recheck_tokens = 0
    recheck_obstacle: str | None = None
    image_bytes = 0
    compression_obstacle: str | None = "this runner compresses nothing"

    def host_costs(self, chunk: int) -> HostCosts:
        """Refuse to measure what is not there."""
        raise AssertionError("there is no host memory")

    def row_costs(self) -> tuple[tuple[int, float], ...]:
        """Return rows that cost next to nothing, so that drafts are long."""
        return (1, 1.0), (2, 1.0001)

    def recheck(self, tokens: NDArray[np.int32], start: int, block_table: NDArray[np.int32]) -> Recheck:
        """Refuse to compute KV again."""
        raise AssertionError("recheck_tokens is 0")

    def compression(self, tokens: NDArray[np.int32], method: str) -> Any:
        """Refuse to compress a prefix."""
        raise AssertionError("there is an obstacle")

    def read_images(self, blocks: Sequence[int], tokens: int) -> NDArray[np.uint8]:
        """Refuse to export KV."""
        raise AssertionError("there are no images")

    def load_images(self, load: Load, images: NDArray[np.uint8]) -> None:
        """Refuse to import KV."""
        raise AssertionError("there are no images")

    def stats(self) -> dict[str, int]:
        """Return no counters."""
        return {}
