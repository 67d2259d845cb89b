"""Counters of an engine, and the frozen picture of them that callers get. Knows numbers only."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from radixkv.cache import CacheStats


@dataclass
class Counters:
    """What the engine counts as it goes; only ever grows."""

    steps: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    coalesced_requests: int = 0
    coalesced_tokens: int = 0
    timed_out: int = 0
    audited_blocks: int = 0
    differing_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of an engine: `waiting` and `running` requests now, everything else since it was loaded.

    Prompt and cached tokens are counted once a request, when its first step is committed; computed tokens when their
    step is; output tokens when they were sampled. `preemptions` counts requests that gave way when blocks ran out (they
    are waiting then), `recomputed_tokens` what was computed again for them, which is not in `computed_tokens` twice.
    `coalesced_requests` waited for a neighbour to compute their prefix and found `coalesced_tokens` more in the cache.
    `failed` includes those that `timed_out`. Of `audited_blocks`, which were computed again, `differing_blocks` were
    not what they should be; audits count nowhere else. `cache` has the pool's own counters and gauges, which also count
    requests that ended before their first step.
    """

    model: str
    device: str
    dtype: str
    attention: str
    max_length: int
    kv_bytes: int
    uptime_s: float
    waiting: int
    running: int
    finished: int
    cancelled: int
    failed: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    preemptions: int
    recomputed_tokens: int
    coalesced_requests: int
    coalesced_tokens: int
    timed_out: int
    audited_blocks: int
    differing_blocks: int
    cache: CacheStats

    @property
    def requests(self) -> int:
        """All requests so far."""
        return self.waiting + self.running + self.finished + self.cancelled + self.failed

    @property
    def audit(self) -> str:
        """What audits and the scrubber found so far, as a sentence."""
        return str(AuditReport(self.audited_blocks, self.differing_blocks))

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were found in the cache, 0..1; 0 before the first request."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """A cached run that was not what its tokens give, and what was done about it.

    The first and the last wrong token lie at `start` and `end - 1`; the first is off in `part` ("key" or "value") of
    `layer`, and the worst by `deviation` root mean squares. `dropped_blocks` left the cache: those of the run, and of
    whatever was computed behind it. `failed_requests` read it at that moment, `released_pins` held it.
    """

    namespace: Hashable
    start: int
    end: int
    layer: int
    part: str
    deviation: float
    dropped_blocks: int
    failed_requests: int
    released_pins: int


@dataclass(frozen=True, slots=True)
class AuditReport:
    """How many cached blocks were computed again, in how many of them something differed, and what."""

    blocks: int
    differ: int
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        """The sentence that one wants to read."""
        return f"{self.blocks:,} blocks audited, {self.differ:,} differ"
