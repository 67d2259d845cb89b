"""Which cached tokens a request uses, where its chunks end, and which of its tokens it leaves in the cache.

`ReusePolicy` lets hits and chunks end anywhere. `AlignedReuse` is the policy of a deterministic engine. `NoReuse` looks
nothing up and publishes nothing.

KV that was computed in a chunk of another length differs in its last bits, and so does all KV after it. A deterministic
engine therefore ties hits, chunks and publishing to absolute multiples of `prefill_chunk`. A hit ends on one. A chunk
goes from one to the next (except for the rest of a prompt) in a forward of its own. Only the KV of full chunks is
published, never the KV of a decode. Cached KV is then the KV that any request with the same tokens would compute.

A row's bits may depend on the rows after it as well: an expert multiplies as many rows at once as are routed to it. For
such a model a cached chunk is never joined from two chunks that began with the same tokens and then differed.

With a host tier, a cached prefix is the device-resident part and the host-resident part after it. A load ends where a
hit may end. A hit of a deterministic engine may end inside a chunk if a load of the rest of that chunk follows.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from radixkv.cache import Match, PrefixCache
from radixkv.cache.announcements import Announcement
from radixkv.config import EngineConfig
from radixkv.engine.request import Request, Stream, TokenIds
from radixkv.engine.scores import KeptScores

_log = logging.getLogger(__name__)
_NOTHING = Match(0, np.empty(0, np.int32), 0)


class LoadLimits(NamedTuple):
    """How many host-resident tokens to load in place of computing them: `least` at once, `most` in a step.

    A `whole` load is never cut: it ends at a recurrent state. It may exceed `most` if it is the only one of its step.
    """

    least: int
    most: int
    whole: bool = False


NO_LOADS = LoadLimits(least=sys.maxsize, most=0)


def reuse_policy(
    cache: PrefixCache, config: EngineConfig, *, row_dependent: bool = False, loads: LoadLimits = NO_LOADS
) -> ReusePolicy:
    """Return an engine's policy; `row_dependent` means that a row's bits depend on the other rows of its forward."""
    aligned = AlignedReuse(cache, config, loads, row_dependent) if config.deterministic else None
    policy = aligned or ReusePolicy(cache, config, loads)
    return policy if config.prefix_cache else NoReuse(cache, config, policy)


class ReusePolicy:
    """Hits, chunks and published prefixes may end at any token."""

    reopens_branches = True
    """Whether a preempted request's streams look for their own cached tokens again, instead of forking its prompt."""

    def __init__(self, cache: PrefixCache, config: EngineConfig, loads: LoadLimits = NO_LOADS) -> None:
        """Apply to the requests of one cache."""
        self.loads = loads
        self.kept_scores = KeptScores(self.shared_rows)
        self._cache = cache
        self._chunk = config.prefill_chunk

    def close(self) -> None:
        """Release the cache; no other method may be called afterwards."""
        del self._cache

    # ---- hits

    def match(self, request: Request) -> Match:
        """Return the cached prefix that a request would hit if it were admitted now; changes nothing."""
        tokens = request.known
        return self._cache.match(tokens[: self.limit(tokens, request)], request.namespace)

    def announce(self, request: Request) -> Announcement:
        """Announce to the cache the prefix that a waiting request would hit."""
        tokens = request.known
        return self._cache.announce(tokens, request.namespace, self.limit(tokens, request))

    def limit(self, tokens: TokenIds, request: Request) -> int:
        """Return how many of these tokens, the first ones of a request, may be a hit.

        A full repeat computes one token again: its logits are needed, and a step has no empty chunks. Scores need the
        logits of more tokens.
        """
        return min(len(tokens) - 1, request.scores.hit_limit)

    def aligned(self, length: int) -> int:
        """Return the largest length up to this one at which a hit may end."""
        return length

    def sure_hit(self, pinned: int) -> int:
        """Return how many of `pinned` tokens remain a hit after any one pin on them is released, in whole blocks.

        The last block does not count: a shorter pin may be left that ends inside it, and a request writes into a copy.
        """
        size = self._cache.block_size
        return max(-(-pinned // size) - 1, 0) * size

    # ---- scores

    def shared_rows(self, first: int, rows: int) -> int:
        """Return how many of a prompt's first rows of logits any request with the same tokens would get.

        `first` is the first position that a request scores.
        """
        return rows

    # ---- loads

    def worth_loading(self, start: int, available: int) -> bool:
        """Return whether to load `available` host-resident tokens from `start` on, as far as a hit may reach."""
        return self.aligned(start + available) - start >= self.loads.least

    def loaded(self, stream: Stream, count: int) -> bool:
        """Record that the next `count` tokens were loaded; returns whether they become matchable now."""
        return not stream.request.scheduling.publish_late

    # ---- chunks

    def chunk(self, pending: int, budget: int) -> int:
        """Return the length of the next chunk; 0 if it does not fit this step's budget."""
        return min(pending, self._chunk, budget)

    def isolated(self, stream: Stream) -> bool:
        """Return whether a stream's chunk must not share its forward with others."""
        return False

    # ---- publishing

    def publishes(self, stream: Stream, start: int, count: int, *, isolated: bool) -> bool:
        """Return whether [start, start + count), which were computed, become matchable by other requests now."""
        return not stream.request.scheduling.publish_late

    def publish_rest(self, stream: Stream, length: int | None = None) -> None:
        """Publish all tokens, or those up to `length`, when a stream ends or is preempted; it has no open plan.

        An error in here is logged and costs other requests a hit, nothing else.
        """
        if stream.sequence.closed:
            return
        try:
            if length is None:
                stream.sequence.commit()
            else:
                stream.sequence.publish(length)
        except Exception:
            _log.exception("what a request computed could not be published")


class AlignedReuse(ReusePolicy):
    """Hits, chunks and published prefixes end at multiples of the chunk length, so that a hit repeats a miss's bits."""

    reopens_branches = False

    def __init__(self, cache: PrefixCache, config: EngineConfig, loads: LoadLimits, row_dependent: bool) -> None:
        """Apply to the requests of one cache; see `reuse_policy` for `row_dependent`."""
        super().__init__(cache, config, loads)
        self._row_dependent = row_dependent

    def limit(self, tokens: TokenIds, request: Request) -> int:
        """Return the last multiple before the end, or before the point where eviction has cut the cached prefix.

        If the rest of that chunk will be loaded, the hit may end at the cut.
        """
        most = self.aligned(super().limit(tokens, request))
        if not most:
            return 0
        match = self._cache.match(tokens[:most], request.namespace)
        whole = self.aligned(match.matched)
        return most if match.matched == whole or self.worth_loading(match.matched, match.host) else whole

    def aligned(self, length: int) -> int:
        """Return the largest multiple of the chunk length up to `length`."""
        return length // self._chunk * self._chunk

    def shared_rows(self, first: int, rows: int) -> int:
        """Return the rows of whole chunks, which have the same bits if all rows of the chunk are computed."""
        return 0 if self._row_dependent or first > 1 else self.aligned(rows)

    def sure_hit(self, pinned: int) -> int:
        """Return whole blocks without the last chunk: a shorter pin may end just before the chunk does."""
        size = self._cache.block_size
        lost = -(-self._chunk // size) + (self._chunk % size > 0)
        return max(-(-pinned // size) - lost, 0) * size

    def chunk(self, pending: int, budget: int) -> int:
        """Return a whole chunk or the rest of a prompt, never a chunk that was cut to fit the budget."""
        count = min(pending, self._chunk)
        return count if count <= budget else 0

    def isolated(self, stream: Stream) -> bool:
        """Return whether this is a chunk of a prompt."""
        return stream.prefilling

    def publishes(self, stream: Stream, start: int, count: int, *, isolated: bool) -> bool:
        """Return whether any request with these tokens would have computed the same bits, and records how far.

        From the first chunk that the tree has by now, the stream uses its own KV and publishes none.
        """
        if not isolated or count != self._chunk or start != stream.common_length:
            return False
        stream.common_length += count
        tokens = np.array(stream.tokens[: start + count], np.int32)
        match = self._cache.match(tokens, stream.request.namespace)
        # A chunk that is cached as a whole without its recurrent state, or on the host, has the same bits.
        stream.diverged |= match.length > start or start < match.matched + match.host < len(tokens)
        return not stream.diverged and super().publishes(stream, start, count, isolated=isolated)

    def loaded(self, stream: Stream, count: int) -> bool:
        """Record that the next `count` tokens were loaded, which any request would have computed with the same bits."""
        stream.common_length += count
        return super().loaded(stream, count)

    def publish_rest(self, stream: Stream, length: int | None = None) -> None:
        """Drop the tokens that other requests would compute differently, and publish the others."""
        if stream.sequence.closed:
            return
        try:
            common = stream.common_length if length is None else min(length, stream.common_length)
            if self._row_dependent:
                common = self._uncut(np.array(stream.tokens[:common], np.int32), stream.request.namespace)
            stream.sequence.truncate(common)
        except Exception:
            _log.exception("what a request computed could not be published")
        else:
            super().publish_rest(stream)

    def _uncut(self, tokens: TokenIds, namespace: Hashable) -> int:
        """Return the length of `tokens`, or the last multiple up to their cached part if that ends inside a chunk."""
        match = self._cache.match(tokens, namespace)
        cached = match.matched + match.host
        return len(tokens) if cached == self.aligned(cached) else self.aligned(cached)


class NoReuse(ReusePolicy):
    """Every prompt is computed in full, and nothing is published; another policy cuts the chunks."""

    reopens_branches = False

    def __init__(self, cache: PrefixCache, config: EngineConfig, chunks: ReusePolicy) -> None:
        """Cut prompts into chunks as `chunks` does."""
        super().__init__(cache, config)
        self._chunks = chunks

    def close(self) -> None:
        """Release the cache of both policies."""
        super().close()
        self._chunks.close()

    def match(self, request: Request) -> Match:
        """Return an empty match."""
        return _NOTHING

    def limit(self, tokens: TokenIds, request: Request) -> int:
        """Return 0."""
        return 0

    def aligned(self, length: int) -> int:
        """Return 0: there are no hits."""
        return 0

    def shared_rows(self, first: int, rows: int) -> int:
        """Return 0: no scores are kept."""
        return 0

    def chunk(self, pending: int, budget: int) -> int:
        """Return the other policy's length."""
        return self._chunks.chunk(pending, budget)

    def isolated(self, stream: Stream) -> bool:
        """Return the other policy's answer."""
        return self._chunks.isolated(stream)

    def publishes(self, stream: Stream, start: int, count: int, *, isolated: bool) -> bool:
        """Return False."""
        return False

    def publish_rest(self, stream: Stream, length: int | None = None) -> None:
        """Publish nothing."""
