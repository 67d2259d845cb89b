"""The interfaces that a core needs: the forward of a model, and tasks that run between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.types import Load
from radixkv.engine.request import TokenIds
from radixkv.engine.transfers import HostMemory, StateMemory
from radixkv.models.loaded import SequenceInput

if TYPE_CHECKING:
    from torch import Tensor

    from radixkv.attention.host_store import HostCosts
    from radixkv.models.compression import Compression
    from radixkv.models.kv_recompute import Recheck


class Forward(Protocol):
    """Computes a step; `radixkv.models.runner.Runner` does."""

    @property
    def row_dependent(self) -> bool:
        """Whether a row's bits depend on the other rows of its forward, later ones included."""
        ...

    @property
    def host(self) -> HostMemory | None:
        """The host memory of a cache with host blocks."""
        ...

    @property
    def states(self) -> StateMemory | None:
        """The slots of a cache with rows of recurrent state."""
        ...

    def run(
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: Tensor | None = None
    ) -> Tensor:
        """Run all copies, then all chunks; returns logits [len(chunks) + additional rows, vocab].

        Row i is the last token of chunk i. The additional rows follow: of each chunk in turn, its last `logit_rows`
        tokens without the last one. `sampled` int64 [rows] on the device has the tokens of chunks with a `sampled_row`;
        it is passed at depth 1 only, where this may return before the device has computed.
        """
        ...

    @property
    def recheck_tokens(self) -> int:
        """The most tokens that `recheck` computes; 0 if it cannot. If `row_dependent`, it computes no fewer."""
        ...

    @property
    def recheck_obstacle(self) -> str | None:
        """Why cached KV cannot be recomputed and compared; None if it can."""
        ...

    def recheck(self, tokens: TokenIds, start: int, block_table: NDArray[np.int32]) -> Recheck:
        """Compute [start, len(tokens)) again and compare; `start` is a multiple of `recheck_tokens`."""
        ...

    @property
    def compression_obstacle(self) -> str | None:
        """Why no prefix can be compressed; None if it can."""
        ...

    def compression(self, tokens: TokenIds, method: str) -> Compression:
        """Begin to compress a cached prefix by a method; see `radixkv.models.compression`."""
        ...

    def row_costs(self) -> tuple[tuple[int, float], ...]:
        """Measure the seconds of forwards of 1 to 16 rows, some of these numbers, before anything is cached."""
        ...

    def host_costs(self, chunk: int) -> HostCosts:
        """Measure the seconds of a token's load and of its prefill, before anything is cached. Needs `host`."""
        ...

    @property
    def image_bytes(self) -> int:
        """Bytes of the image of a block, as `read_images` returns it."""
        ...

    def read_images(self, blocks: Sequence[int], tokens: int) -> NDArray[np.uint8]:
        """Copy up to STAGED blocks with `tokens` tokens: [blocks, image_bytes]; slots without a token are zero."""
        ...

    def load_images(self, load: Load, images: NDArray[np.uint8]) -> None:
        """Run the copies of a plan, then copy tokens of up to STAGED images to its slots.

        `load.sources` counts in slots of `images`: image * block_size + offset.
        """
        ...

    def stats(self) -> dict[str, int]:
        """Return counters of recurrent states and of steps without CUDA graphs, as in EngineStats."""
        ...


class BackgroundTask(Protocol):
    """Work that is done in pieces, one after each step; `audit.Auditor` is one."""

    def due_in(self, *, busy: bool) -> float | None:
        """Return the seconds until a piece is due; None for never. `busy` says whether there are requests."""
        ...

    def step(self, *, busy: bool) -> None:
        """Do one piece if it is due. Raises nothing but DeviceLost."""
        ...

    def close(self) -> None:
        """End, because the engine was closed."""
        ...
