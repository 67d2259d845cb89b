"""What a request takes from the cache and leaves there, and where its chunks end: freely, or so that bits repeat.

Knows lengths, the grid and what is cached. Knows no queue and no tensor.

KV that was computed in a chunk of other length differs in its last bits, and so does what is computed behind it. If the
engine is to be deterministic, everything that could tell a hit from a miss is therefore tied to an absolute grid of
`prefill_chunk` tokens: a hit ends on it, a chunk goes from line to line (but for the rest of a prompt) in a forward of
its own, and only the KV of full chunks is published, never that of a decode. What is cached is then what anybody would
compute who has the same tokens.

A row's bits may depend on the rows behind it as well: an expert multiplies as many rows at once as are routed to it.
For such a model a chunk is never put together of two that began alike and parted.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

import numpy as np

from radixkv.cache import Match, PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.request import Request, Stream, TokenIds

_log = logging.getLogger(__name__)
_NOTHING = Match(0, np.empty(0, np.int32), 0)


class ReusePolicy:
    """The rules for one cache; `chunk_alignment` is None where chunks and hits may end anywhere."""

    def __init__(self, cache: PrefixCache, config: EngineConfig, *, row_dependent: bool = False) -> None:
        """Without `prefix_cache` no request looks for a cached prefix, and none leaves one.

        `row_dependent` says of the model that a row's bits depend on the other rows of its forward.
        """
        self.on = config.prefix_cache
        self._row_dependent = row_dependent
        self.chunk_alignment = config.prefill_chunk if config.deterministic else None
        self._cache = cache
        self._chunk = config.prefill_chunk

    def close(self) -> None:
        """Let go of the cache."""
        del self._cache

    # ---- taking

    def match(self, request: Request) -> Match:
        """What a request would hit if it came in now; changes nothing."""
        if not self.on:
            return _NOTHING
        tokens = request.known
        return self._cache.match(tokens[: self.limit(tokens, request.namespace)], request.namespace)

    def limit(self, tokens: TokenIds, namespace: Hashable) -> int:
        """How many of these tokens a sequence may open with, if they are cached."""
        # A full repeat computes one token again: its logits are needed, and a step has no empty chunks.
        most = self.aligned(len(tokens) - 1) if self.on else 0
        if self.chunk_alignment is None or not most:
            return most
        found = self._cache.match(tokens[:most], namespace).length
        return most if found == self.aligned(found) else self.aligned(found)  # eviction trims block by block

    def aligned(self, length: int) -> int:
        """The largest length up to this one at which a hit may end."""
        return length if self.chunk_alignment is None else length // self.chunk_alignment * self.chunk_alignment

    def sure(self, pinned: int) -> int:
        """Of so many pinned tokens, how many can be counted on whichever pin of them is released, in whole blocks.

        A shorter pin may be left. It may end inside a block, which it holds and whose tokens must be computed into a
        copy, or next to a line of the grid, so that what lies before that line is all that can be hit.
        """
        size = self._cache.block_size
        lost = (
            1 if self.chunk_alignment is None else -(-self.chunk_alignment // size) + (self.chunk_alignment % size > 0)
        )
        return max(-(-pinned // size) - lost, 0) * size

    # ---- computing

    def chunk(self, pending: int, budget: int) -> int:
        """Tokens of the next chunk, of those that are pending; 0 if it would have to be cut to fit the budget."""
        count = min(pending, self._chunk)
        return count if count <= budget else budget if self.chunk_alignment is None else 0

    def runs_alone(self, stream: Stream) -> bool:
        """Whether a stream's chunk must not share its forward with others."""
        return self.chunk_alignment is not None and stream.prefilling

    # ---- leaving

    def publishes(self, stream: Stream, count: int, *, isolated: bool) -> bool:
        """Whether the next `count` tokens, which were computed, can be matched by others from now on."""
        may = self.chunk_alignment is None or self._is_common(stream, count, isolated=isolated)
        return may and self.on and not stream.request.publish_late

    def leave(self, stream: Stream) -> None:
        """Publish what a stream kept to itself, if it may: it ends, or gives way. No plan may be under way.

        A fault here is logged: the stream loses nothing but what others could have hit.
        """
        sequence = stream.sequence
        if not self.on or sequence.closed:
            return
        try:
            if self.chunk_alignment is not None:
                sequence.truncate(self._unmixed(stream))
            sequence.commit()
        except Exception:
            _log.exception("what a request computed could not be published")

    def _unmixed(self, stream: Stream) -> int:
        """How much of a stream may be published: in the tree, its chunks must not begin as somebody else's."""
        length = stream.common_length
        if not self._row_dependent:
            return length
        tokens = np.array(stream.tokens[:length], np.int32)
        found = self._cache.match(tokens, stream.request.namespace).length
        return length if found == self.aligned(found) else self.aligned(found)

    def _is_common(self, stream: Stream, count: int, *, isolated: bool) -> bool:
        """Whether anybody would compute these tokens like this; notes how far that holds for the stream.

        If the tree has them by now, the stream keeps its own: it does not change horses in mid-stream.
        """
        assert self.chunk_alignment is not None
        start = stream.sequence.length  # what was computed now is not committed yet
        if not isolated or count != self.chunk_alignment or start != stream.common_length:
            return False
        stream.common_length += count
        tokens = np.array(stream.tokens[: start + count], np.int32)
        stream.diverged |= self._cache.match(tokens, stream.request.namespace).length > start
        return not stream.diverged
