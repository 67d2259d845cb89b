"""Compute cached KV again, a piece at a time, and drop the blocks that differ.

An audit touches nothing in the cache: no hold, no hit, no recency, and its KV is computed outside the pool. A wrong
token shows in all that is computed after it. So a piece that differs only starts a walk along its path, from the
beginning; the first piece that differs there is reported and dropped. Requests that read a dropped block fail, and pins
on it are released.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import PrefixCache
from radixkv.device import refuse_fatal
from radixkv.engine.audit_reads import CachedRuns
from radixkv.engine.core import Core
from radixkv.engine.forward import Forward
from radixkv.engine.request import Request, Stream, TokenIds, common_prefix
from radixkv.engine.stats import AuditReport, Difference
from radixkv.errors import EngineClosed, EngineError, InvalidInput, PrefixHeld, RequestFailed
from radixkv.models.kv_recompute import Recheck
from radixkv.settings.kinds import is_int
from radixkv.telemetry.records import namespace_value

_log = logging.getLogger(__name__)

PIECE = 128
"""Tokens that are computed again between two steps: about a step's worth, and running streams wait that much longer."""


@dataclass(eq=False)
class _Job:
    """An audit that a caller waits for."""

    blocks: int
    future: Future[AuditReport]
    audited: int = 0
    differ: int = 0
    differences: list[Difference] = field(default_factory=list)


@dataclass
class _Walk:
    """A path on which a piece differs: the pieces from its beginning to that one are compared in order."""

    tokens: TokenIds
    namespace: Hashable
    start: int = 0


class Auditor:
    """A background task of a core: computes one piece of each requested audit after each step."""

    def __init__(self, core: Core) -> None:
        """Audit the cache of `core`."""
        self._core = core
        self._runs = CachedRuns(core)
        self._obstacle = _obstacle(core)
        self._jobs: deque[_Job] = deque()
        self._walk: _Walk | None = None
        self._rng = Random(0)

    @property
    def pending(self) -> int:
        """How many audits have not ended."""
        return len(self._jobs)

    @property
    def _runner(self) -> Forward:
        return self._core.runner

    def begin(self, blocks: int, future: Future[AuditReport]) -> None:
        """Queue an audit of at least `blocks` blocks; `future` gets the report."""
        if self._obstacle is not None:
            _fail(future, InvalidInput(self._obstacle))
            return
        if self not in self._core.background:
            self._core.background.append(self)
        self._jobs.append(_Job(blocks, future))

    # ---- as a background task

    def due_in(self, *, busy: bool) -> float | None:
        """Return 0.0 if there is a piece to audit; None for never."""
        return 0.0 if self._jobs else None

    def step(self, *, busy: bool) -> None:
        """Audit one piece if one is due. A failure goes to the future of the audit; only DeviceLost is raised."""
        if not self._jobs:
            return
        job = self._jobs[0]
        try:
            if job.future.cancelled() or not self._audit_piece(job) or (not self._walk and job.audited >= job.blocks):
                self._finish(job)
        except Exception as error:
            _log.exception("an audit failed")
            self._walk = None
            self._jobs.popleft()
            failed = EngineError(f"the audit raised {type(error).__name__}: {error}")
            failed.__cause__ = error
            _fail(job.future, failed)
            refuse_fatal(error)

    def close(self) -> None:
        """Fail the audits that have not ended."""
        while self._jobs:
            _fail(self._jobs.popleft().future, EngineClosed("the engine was closed during the audit"))

    def _finish(self, job: _Job) -> None:
        self._jobs.popleft()
        if job.future.set_running_or_notify_cancel():
            left_out = self._runs.count(compressed=True)
            job.future.set_result(AuditReport(job.audited, job.differ, tuple(job.differences), left_out))

    # ---- one piece

    def _audit_piece(self, job: _Job) -> bool:
        """Audit the next piece of a walk, or a random one; False if nothing is cached, nor being read."""
        if self._walk is not None:
            self._walk_on(self._walk, job)
            return True
        run = self._runs.random(self._rng)
        if run is None:
            return self._core.records.is_read or self._runs.count(compressed=False) > 0
        length = self._runner.recheck_tokens
        start = self._rng.randrange(run.start, len(run.tokens)) // length * length
        if not self._is_comparable(len(run.tokens) - start):  # eviction has cut this piece: the one before it is whole
            start -= length
        if start < 0:
            return False
        tokens = run.tokens[: start + length]
        with self._runs.blocks(tokens, run.namespace) as table:
            if table is None:  # it could not be read, and was dropped
                return True
            found = self._recheck(tokens, start, table, job)
        if found.positions:
            _log.warning("an audit: tokens from %d on are not what was cached; looking for the first", start)
            self._walk = _Walk(tokens, run.namespace)
        return True

    def _walk_on(self, walk: _Walk, job: _Job) -> None:
        tokens, start = walk.tokens[: walk.start + self._runner.recheck_tokens], walk.start
        walk.start += self._runner.recheck_tokens
        if walk.start >= len(walk.tokens):
            self._walk = None
        with self._runs.blocks(tokens, walk.namespace) as table:
            if table is None or not self._is_comparable(len(tokens) - start):  # evicted or dropped meanwhile
                self._walk = None
                return
            found = self._recheck(tokens, start, table, job)
        if found.positions:
            self._walk = None
            self._drop(tokens, walk.namespace, start, found, job)

    def _recheck(self, tokens: TokenIds, start: int, table: NDArray[np.int32], job: _Job) -> Recheck:
        size = self._core.cache.block_size
        found = self._runner.recheck(tokens, start, table[: -(-len(tokens) // size)])
        blocks = -(-len(tokens) // size) - start // size
        self._core.counters.audited_blocks += blocks
        job.audited += blocks
        return found

    def _is_comparable(self, count: int) -> bool:
        return count >= self._runner.recheck_tokens or not self._runner.row_dependent

    def _drop(self, tokens: TokenIds, namespace: Hashable, start: int, found: Recheck, job: _Job) -> None:
        """Drop the first run that differs, and report it."""
        first, last = start + found.positions[0], start + found.positions[-1]
        layer, part = found.layer or 0, found.part or ""
        dropped = drop_wrong(self._core, tokens, namespace, first)
        owner = namespace_value(namespace)
        difference = Difference(owner, first, last + 1, layer, part, found.worst, *dropped)
        differ = len({(start + position) // self._core.cache.block_size for position in found.positions})
        self._core.counters.differing_blocks += differ
        job.differ += differ
        job.differences.append(difference)
        _log.error("an audit found cached KV that its tokens do not give, and dropped it: %s", difference)


def _obstacle(core: Core) -> str | None:
    """Return why there can be no audit."""
    if not core.config.prefix_cache:
        return "with prefix_cache=False nothing is cached, so there is nothing to audit"
    if core.cache.state_rows:
        return (
            "this model has recurrent state, and cached KV cannot be computed again without the state before it: "
            "there is no audit for such a model"
        )
    if not core.runner.recheck_tokens:
        return "this engine's runner cannot compute cached KV again: load the engine with Engine.load"
    return core.runner.recheck_obstacle


def _fail(future: Future[AuditReport], error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def piece_tokens(block_size: int) -> int:
    """Return the tokens of a piece: whole blocks, one at least."""
    return max(PIECE // block_size, 1) * block_size


def check_blocks(blocks: object) -> None:
    """Raise InvalidInput unless `blocks` is how many blocks to audit."""
    if not is_int(blocks) or blocks < 1:
        raise InvalidInput(f"blocks is how many cached blocks to audit, an int of at least 1; got {blocks!r}")


# ---- dropping wrong KV


class Dropped(NamedTuple):
    """The cost of dropping a wrong run."""

    blocks: int  # freed, and the blocks of its continuations
    requests: int  # failed
    pins: int  # released


def drop_wrong(core: Core, tokens: TokenIds, namespace: Hashable, wrong: int) -> Dropped:
    """Drop a cached text from its wrong token on, with all its continuations, on the device and on the host.

    Requests that read it now fail with RequestFailed, and so do those that may have read it: see `_may_have_read`.
    Pins on it are released, and all kept scores of prompts are dropped. Between two steps only.
    """
    core.forget_scores()
    core.records.discard(tokens, namespace, wrong)
    cache, scheduler = core.cache, core.scheduler
    free = _free_blocks(cache)
    start, block = _owned_from(cache, tokens, namespace, wrong)
    prefix, index = tokens[: start + 1], wrong // cache.block_size
    pins = scheduler.admission.unpin(tokens, namespace, start)
    reading = [request for request in scheduler.running if _reads(request, block, index)]
    may_have_read = [
        request
        for request in (*scheduler.waiting, *scheduler.running)
        if any(_may_have_read(each, block) and _begins(each, prefix, namespace) for each in request.live)
    ]
    failed = list(dict.fromkeys([*reading, *may_have_read]))
    for request in failed:
        core.end(request, _unreliable(wrong))
    try:
        cache.discard(tokens, namespace, start)
    except PrefixHeld:  # a request holds a copy of it, right or not
        holders = [r for r in scheduler.running if any(_begins(each, prefix, namespace) for each in r.live)]
        for request in holders:
            core.end(request, _unreliable(wrong))
        failed += holders
        cache.discard(tokens, namespace, start)
    return Dropped(_free_blocks(cache) - free, len(failed), pins)


def _free_blocks(cache: PrefixCache) -> int:
    """Return the free blocks of all tiers."""
    return cache.free_blocks + cache.stats().host_free_blocks


def _owned_from(cache: PrefixCache, tokens: TokenIds, namespace: Hashable, wrong: int) -> tuple[int, int]:
    """Return the position from which tokens lie in the block that is wrong, and that block.

    As a rule that is the block's first position. But if two branches differ inside a block, the lower one has a copy
    of it. If the copy is wrong, the other block is not. The block is -1 for a host-resident token.
    """
    index, match = wrong // cache.block_size, cache.match(tokens, namespace)
    if match.length <= wrong:
        return max(index * cache.block_size, match.length), -1
    block = int(match.blocks[index])
    for start in range(index * cache.block_size, len(tokens)):
        if int(cache.match(tokens[: start + 1], namespace).blocks[index]) == block:
            return start, block
    raise AssertionError("the whole text has the block")


def _begins(stream: Stream, prefix: TokenIds, namespace: Hashable) -> bool:
    """Return whether a stream's text begins with a prefix, in its namespace (compared as a dict compares its keys)."""
    known = np.array(stream.tokens[: len(prefix)], np.int32)
    return stream.request.namespace in {namespace} and common_prefix(known, prefix) == len(prefix)


def _reads(request: Request, block: int, index: int) -> bool:
    tables = (stream.sequence.block_table for stream in request.live if stream.active)
    return any(len(table) > index and table[index] == block for table in tables)


def _may_have_read(stream: Stream, block: int) -> bool:
    """Return whether a stream with the wrong text may have read it elsewhere than in a block that it holds.

    A preempted stream holds no blocks any more, so it is not known which KV it sampled after. A host-resident run may
    have been loaded by a request that does not publish: its copy is in other blocks, and the run is still on the host.
    Scores are older than the blocks that a stream holds after a preemption, or were taken from another request.
    """
    scores = stream.request.scores
    if scores.missing > scores.first:
        return True
    if stream.active:
        return block < 0 and stream.counts.host_tokens > 0
    return stream.output_length > 0


def _unreliable(position: int) -> RequestFailed:
    return RequestFailed(
        f"an audit found that the cached KV from token {position} on, which this request reads, is wrong: its answer "
        "cannot be trusted. It was dropped from the cache: ask again"
    )
