"""Compute cached KV again, a piece at a time, and drop the blocks that differ.

An audit touches nothing in the cache: no hold, no hit, no recency, and its KV is computed outside the pool. A wrong
token shows in all that is computed after it. So a piece that differs only starts a walk along its path, from the
beginning; the first piece that differs there is reported and dropped. Requests that read a dropped block fail, and pins
on it are released.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import PrefixCache
from radixkv.engine.request import Request, Stream, TokenIds, common_prefix
from radixkv.engine.scheduler import Scheduler
from radixkv.engine.stats import AuditReport, Counters, Difference
from radixkv.errors import EngineError, InvalidInput, PrefixHeld, RequestFailed
from radixkv.models.kv_recompute import Recheck
from radixkv.sampling.params import is_int

_log = logging.getLogger(__name__)

PIECE = 128
"""Tokens that are computed again between two steps: about a step's worth, and running streams wait that much longer."""


class Rechecks(Protocol):
    """A runner that can compute cached KV again, `recheck_tokens` at a time; `radixkv.models.runner.Runner` can."""

    recheck_tokens: int
    recheck_obstacle: str | None
    row_dependent: bool
    """Whether only whole pieces can be computed again."""

    def recheck(self, tokens: NDArray[np.int32], start: int, block_table: NDArray[np.int32]) -> Recheck:
        """Compute [start, len(tokens)) again and compare; `start` is a multiple of `recheck_tokens`."""
        ...


@dataclass(eq=False)
class _Job:
    """An audit that somebody waits for."""

    blocks: int
    future: Future[AuditReport]
    audited: int = 0
    differ: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def report(self) -> AuditReport:
        return AuditReport(self.audited, self.differ, tuple(self.differences))


@dataclass
class _Walk:
    """A path in which something differs, on the way from its beginning to the piece that raised the alarm."""

    tokens: TokenIds
    namespace: Hashable
    start: int = 0


class Auditor:
    """Audits that were asked for, one piece behind each step; and the scrubber, while nothing else is to be done."""

    def __init__(
        self,
        cache: PrefixCache,
        runner: Any,
        scheduler: Scheduler,
        counters: Counters,
        end: Callable[[Request, Exception], None],
        *,
        reuse: bool = True,
        scrub: float | None = None,
    ) -> None:
        """`scrub` is in blocks a second, None for never; `end` ends a request that reads what turned out wrong."""
        self._cache, self._counters = cache, counters
        self._quarantine = Quarantine(cache, scheduler, end)
        self._runner: Rechecks = runner
        self._obstacle = _obstacle(runner, reuse=reuse)
        self._scrub = scrub
        if scrub is not None and self._obstacle is not None:
            raise InvalidInput(f"scrub: {self._obstacle}")
        self._jobs: deque[_Job] = deque()
        self._walk: _Walk | None = None
        self._next = 0.0  # when the scrubber may go on
        self._rng = Random(0)

    # ---- whose turn it is

    def begin(self, blocks: int, future: Future[AuditReport]) -> None:
        """Queue an audit of at least `blocks` blocks; `future` gets the report."""
        if self._obstacle is not None:
            _fail(future, InvalidInput(self._obstacle))
        else:
            self._jobs.append(_Job(blocks, future))

    def rest(self, *, busy: bool) -> float | None:
        """Seconds until there is a piece to audit; None for never."""
        if self._jobs:
            return 0.0
        if busy or self._scrub is None or self._cache.free_blocks == self._cache.num_blocks:
            return None
        return max(self._next - time.perf_counter(), 0.0)

    def step(self, *, busy: bool) -> None:
        """Audit one piece, if it is time. Raises nothing: whoever waits for the audit is told."""
        if self.rest(busy=busy) != 0.0:
            return
        job = self._jobs[0] if self._jobs else None
        try:
            if job is None:
                self._scrub_piece()
            elif job.future.cancelled() or not self._audit_piece(job) or (not self._walk and job.audited >= job.blocks):
                self._finish(job)
        except Exception as error:
            _log.exception("an audit failed")
            self._give_up(job, error)

    def close(self, error: EngineError) -> None:
        """Tell whoever waits that the engine ends, and let go of cache and pool."""
        while self._jobs:
            _fail(self._jobs.popleft().future, error)
        del self._cache, self._runner, self._quarantine

    def _finish(self, job: _Job) -> None:
        self._jobs.popleft()
        if job.future.set_running_or_notify_cancel():
            job.future.set_result(job.report)

    def _give_up(self, job: _Job | None, error: Exception) -> None:
        self._walk = None
        if job is None:
            _log.error("the scrubber is switched off")
            self._scrub = None
        else:
            self._jobs.popleft()
            failed = EngineError(f"the audit raised {type(error).__name__}: {error}")
            failed.__cause__ = error
            _fail(job.future, failed)

    def _scrub_piece(self) -> None:
        assert self._scrub is not None
        begun, before = time.perf_counter(), self._counters.audited_blocks
        self._audit_piece(None)
        now = time.perf_counter()
        # It rests at least as long as it worked.
        self._next = now + max((self._counters.audited_blocks - before) / self._scrub, now - begun)

    # ---- one piece

    def _audit_piece(self, job: _Job | None) -> bool:
        """Audit the next piece of a walk, or a random one; False if nothing is cached."""
        if self._walk is not None:
            self._walk_on(self._walk, job)
            return True
        run = self._cache.random_run(self._rng)
        if run is None:
            return False
        start = self._on_grid(self._rng.randrange(run.start, len(run.tokens)))
        if not self._can_compare(len(run.tokens) - start):  # eviction has cut this piece: the one before it is whole
            start -= self._runner.recheck_tokens
        if start < 0:
            return False
        tokens = run.tokens[: start + self._runner.recheck_tokens]
        if self._recheck(tokens, start, run.blocks, job).positions:
            _log.warning("an audit: tokens from %d on are not what was cached; looking for the first", start)
            self._walk = _Walk(tokens, run.namespace)
        return True

    def _walk_on(self, walk: _Walk, job: _Job | None) -> None:
        tokens, start = walk.tokens[: walk.start + self._runner.recheck_tokens], walk.start
        walk.start += self._runner.recheck_tokens
        if walk.start >= len(walk.tokens):
            self._walk = None
        match = self._cache.match(tokens, walk.namespace)
        if match.length < len(tokens) or not self._can_compare(len(tokens) - start):  # evicted meanwhile, or discarded
            self._walk = None
            return
        found = self._recheck(tokens, start, match.blocks, job)
        if found.positions:
            self._walk = None
            self._drop(tokens, walk.namespace, start, found, job)

    def _recheck(self, tokens: TokenIds, start: int, table: NDArray[np.int32], job: _Job | None) -> Recheck:
        size = self._cache.block_size
        found = self._runner.recheck(tokens, start, table[: -(-len(tokens) // size)])
        blocks = -(-len(tokens) // size) - start // size
        self._counters.audited_blocks += blocks
        if job is not None:
            job.audited += blocks
        return found

    def _can_compare(self, count: int) -> bool:
        return count >= self._runner.recheck_tokens or not self._runner.row_dependent

    def _on_grid(self, position: int) -> int:
        return position // self._runner.recheck_tokens * self._runner.recheck_tokens

    def _drop(self, tokens: TokenIds, namespace: Hashable, start: int, found: Recheck, job: _Job | None) -> None:
        """Drop the first run that differs, and report it."""
        first, last = start + found.positions[0], start + found.positions[-1]
        layer, part = found.layer or 0, found.part or ""
        dropped = self._quarantine.drop(tokens, namespace, first)
        difference = Difference(namespace, first, last + 1, layer, part, found.worst, *dropped)
        differ = len({(start + position) // self._cache.block_size for position in found.positions})
        self._counters.differing_blocks += differ
        if job is not None:
            job.differ += differ
            job.differences.append(difference)
        _log.error("an audit found cached KV that its tokens do not give, and dropped it: %s", difference)


def _obstacle(runner: Any, *, reuse: bool) -> str | None:
    """Why there can be no audit."""
    if not reuse:
        return "with prefix_cache=False nothing is cached, so there is nothing to audit"
    if not getattr(runner, "recheck_tokens", 0):
        return "this engine's runner cannot compute cached KV again: load the engine with Engine.load"
    obstacle: str | None = runner.recheck_obstacle
    return obstacle


def _fail(future: Future[AuditReport], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def piece_tokens(block_size: int) -> int:
    """Tokens of a piece: whole blocks, one at least."""
    return max(PIECE // block_size, 1) * block_size


def check_blocks(blocks: object) -> None:
    """Raise InvalidInput unless `blocks` is how many blocks to audit."""
    if not is_int(blocks) or blocks < 1:
        raise InvalidInput(f"blocks is how many cached blocks to audit, an int of at least 1; got {blocks!r}")


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
            if any(not each.active and each.output_length and _begins(each, prefix, namespace) for each in request.live)
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
    tables = (stream.sequence.block_table for stream in request.live if stream.active)
    return any(len(table) > index and table[index] == block for table in tables)


def _unreliable(position: int) -> RequestFailed:
    return RequestFailed(
        f"an audit found that the cached KV from token {position} on, which this request reads, is wrong: its answer "
        "cannot be trusted. It was dropped from the cache: ask again"
    )
