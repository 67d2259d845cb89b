"""Cached KV that is wrong leaves the cache, and takes with it whoever reads it.

Knows which block of a path is wrong, and which requests and pins have it. Does not know how that was found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.engine.request import Request, Stream, TokenIds, common_prefix
from radixkv.engine.scheduler import Scheduler
from radixkv.errors import PrefixHeld, RequestFailed


class Dropped(NamedTuple):
    """What it took to forget a wrong run."""

    blocks: int  # freed, those included that were computed behind it
    requests: int  # failed
    pins: int  # released


class Quarantine:
    """Drops wrong runs from one cache."""

    def __init__(self, cache: PrefixCache, scheduler: Scheduler, end: Callable[[Request, Exception], None]) -> None:
        """`end` ends a request that reads what is wrong."""
        self._cache, self._scheduler, self._end = cache, scheduler, end

    def drop(self, tokens: TokenIds, namespace: Hashable, wrong: int) -> Dropped:
        """Forget a cached text from its wrong token on, with all that is behind it.

        Requests that read it now fail with RequestFailed, and so do preempted ones that have sampled behind it: they
        hold nothing any more, and nobody knows what they read. Pins on it are released. Between two steps only.
        """
        free = self._cache.free_blocks
        start, block = self._owned_from(tokens, namespace, wrong)
        pins = self._scheduler.unpin(tokens, namespace, start)
        readers = [*self._reading(block, wrong), *self._may_have_read(tokens, namespace, start)]
        failed = self._fail(list(dict.fromkeys(readers)), wrong)
        try:
            self._cache.discard(tokens, namespace, start)
        except PrefixHeld:  # somebody reads a copy of it: right or not, it stands in the way
            failed += self._fail(self._behind(tokens, namespace, start), wrong)
            self._cache.discard(tokens, namespace, start)
        return Dropped(self._cache.free_blocks - free, failed, pins)

    def _owned_from(self, tokens: TokenIds, namespace: Hashable, wrong: int) -> tuple[int, int]:
        """The block that is wrong at a token, and where in it the tokens begin that have no other.

        As a rule these are all of its tokens. But if two branches part inside a block, the lower one has a copy of it,
        and if that is wrong the other's is not.
        """
        size = self._cache.block_size
        index = wrong // size
        block = int(self._cache.match(tokens, namespace).blocks[index])
        for start in range(index * size, len(tokens)):
            if int(self._cache.match(tokens[: start + 1], namespace).blocks[index]) == block:
                return start, block
        raise AssertionError("the whole text has the block")

    def _fail(self, requests: list[Request], wrong: int) -> int:
        for request in requests:
            self._end(request, _unreliable(wrong))
        return len(requests)

    def _reading(self, block: int, position: int) -> list[Request]:
        """Running requests that read `block` at a position."""
        index = position // self._cache.block_size
        return [request for request in self._scheduler.running if _reads(request, block, index)]

    def _may_have_read(self, tokens: TokenIds, namespace: Hashable, start: int) -> list[Request]:
        """Preempted requests, or those coming back, that sampled behind these tokens beyond `start`."""
        prefix = tokens[: start + 1]
        return [
            request
            for request in (*self._scheduler.waiting, *self._scheduler.running)
            if any(not each.awake and each.output_length and _begins(each, prefix, namespace) for each in request.live)
        ]

    def _behind(self, tokens: TokenIds, namespace: Hashable, start: int) -> list[Request]:
        """Running requests whose text has these tokens beyond `start`."""
        prefix = tokens[: start + 1]
        running = self._scheduler.running
        return [request for request in running if any(_begins(each, prefix, namespace) for each in request.live)]


def _begins(stream: Stream, prefix: TokenIds, namespace: Hashable) -> bool:
    """Whether a stream's text begins with a prefix, in its namespace (compared as a dict compares its keys)."""
    known = np.array(stream.tokens[: len(prefix)], np.int32)
    return stream.request.namespace in {namespace} and common_prefix(known, prefix) == len(prefix)


def _reads(request: Request, block: int, index: int) -> bool:
    tables = (stream.sequence.block_table for stream in request.live if stream.awake)
    return any(len(table) > index and table[index] == block for table in tables)


def _unreliable(position: int) -> RequestFailed:
    return RequestFailed(
        f"an audit found that the cached KV from token {position} on, which this request reads, is wrong: its answer "
        "cannot be trusted. It was dropped from the cache: ask again"
    )
