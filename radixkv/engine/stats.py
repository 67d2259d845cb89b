"""Counters of an engine, and the frozen snapshots and audit reports that callers get."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from radixkv.cache import CacheStats
from radixkv.cache.quotas import NamespaceUsage
from radixkv.disk import NO_DISK, DiskStats

DRAFT_SOURCES = ("tree", "past", "own", "prediction")
"""The sources of drafts, by which drafted and accepted tokens are counted."""


@dataclass
class Counters:
    """The running counters of an engine; they only grow."""

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
    forced_tokens: int = 0
    host_tokens: int = 0
    failed_loads: int = 0
    failed_offloads: int = 0
    wasted_tokens: int = 0
    host_bound_rows: int = 0
    scored_tokens: int = 0
    reused_scores: int = 0
    decode_tokens: int = 0
    disk_tokens: int = 0
    drafting_steps: int = 0
    drafted_from_tree: int = 0
    drafted_from_past: int = 0
    drafted_from_own: int = 0
    drafted_from_prediction: int = 0
    accepted_from_tree: int = 0
    accepted_from_past: int = 0
    accepted_from_own: int = 0
    accepted_from_prediction: int = 0
    drafts: int = 0
    turn_admissions: int = 0
    turn_preemptions: int = 0
    overdue_admissions: int = 0

    def drafted(self, source: str, drafted: int, accepted: int) -> None:
        """Count the tokens of a draft that was verified."""
        counted = vars(self)
        self.drafts += 1
        counted[f"drafted_from_{source}"] += drafted
        counted[f"accepted_from_{source}"] += accepted


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of an engine: `waiting` and `running` requests now, all other numbers since it was loaded.

    `model`, `device`, `dtype`, `attention`, `max_length` (tokens of the model's context), `kv_bytes` (memory of the
    pool) and `kv_dtype` (its format) do not change. `uptime_s` are seconds since the load. `finished`, `cancelled` and
    `failed` count requests. `prompt_tokens` and `cached_tokens` are counted once per request, when its first step is
    committed, `computed_tokens` when their step is committed, and `output_tokens` when they are sampled.
    `forced_tokens` are output tokens that were not sampled, since a constraint left no choice. `preemptions` counts
    requests that were preempted: when blocks ran out, or so that another group of namespaces gets its turn
    (`turn_preemptions`). `recomputed_tokens` were computed again because of that; `computed_tokens` counts them once.
    `turn_admissions` are requests that were admitted before an older one of another group, and `overdue_admissions`
    went before others because they had been overtaken `max_delay` seconds ago or `max_overtakes` times.
    `coalesced_requests` waited while another request computed their prefix, and hit `coalesced_tokens` more because of
    that. `failed` includes requests that `timed_out`. `audited_blocks` were recomputed by audits, which count nowhere
    else, and `differing_blocks` of them differed. `cache` has the pool's own counters and gauges, which include
    requests that ended before their first step. Of a model with recurrent state, `state_bytes` is the memory of all
    slots, and `state_copies` of `state_copied_bytes` went from slot to slot. `namespace_usage` has the blocks of each
    namespace with a limit. `host_tokens` were loaded from host memory in place of being computed. `failed_loads`
    raised, so that their requests computed the tokens; `failed_offloads` raised, so that the blocks that left the
    pool in a step were lost. An overlapped engine launches a step before it has the results of the preceding one.
    `wasted_tokens` were computed for streams that had ended or failed. `host_bound_rows` counts how often a stream was
    left out of a step, because the host must read its last token first to constrain the next one.
    `eager_steps` are forwards on a GPU that no CUDA graph served. `scored_tokens` are tokens of
    prompts, and continuations of them, with a computed score; `reused_scores` were taken from other requests.
    `decode_tokens` are the computed tokens that are not of a prompt; `computed_tokens` include them. `disk_tokens` were
    read from a disk into host memory, and `disk` has the numbers of its folder.
    Where the engine speculates, `drafting_steps` counts the steps of streams that may draft. Each gave a token, and
    accepted tokens came in addition. `drafts` were verified, with tokens by the source of their text: the tree
    (`drafted_from_tree`, `accepted_from_tree`), past text of the namespace (`drafted_from_past`, `accepted_from_past`),
    the request's own text (`drafted_from_own`, `accepted_from_own`), or a prediction (`drafted_from_prediction`,
    `accepted_from_prediction`).
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
    forced_tokens: int
    cache: CacheStats
    state_bytes: int = 0
    state_copies: int = 0
    state_copied_bytes: int = 0
    namespace_usage: tuple[NamespaceUsage, ...] = ()
    host_tokens: int = 0
    failed_loads: int = 0
    failed_offloads: int = 0
    wasted_tokens: int = 0
    host_bound_rows: int = 0
    eager_steps: int = 0
    scored_tokens: int = 0
    reused_scores: int = 0
    decode_tokens: int = 0
    kv_dtype: str = "auto"
    disk_tokens: int = 0
    disk: DiskStats = NO_DISK
    drafting_steps: int = 0
    drafted_from_tree: int = 0
    drafted_from_past: int = 0
    drafted_from_own: int = 0
    drafted_from_prediction: int = 0
    accepted_from_tree: int = 0
    accepted_from_past: int = 0
    accepted_from_own: int = 0
    accepted_from_prediction: int = 0
    drafts: int = 0
    turn_admissions: int = 0
    turn_preemptions: int = 0
    overdue_admissions: int = 0

    @property
    def requests(self) -> int:
        """All requests so far."""
        return self.waiting + self.running + self.finished + self.cancelled + self.failed

    @property
    def drafted_tokens(self) -> int:
        """The drafted tokens of all sources."""
        return sum(int(getattr(self, f"drafted_from_{source}")) for source in DRAFT_SOURCES)

    @property
    def accepted_tokens(self) -> int:
        """The accepted tokens of all sources."""
        return sum(int(getattr(self, f"accepted_from_{source}")) for source in DRAFT_SOURCES)

    @property
    def tokens_per_step(self) -> float:
        """The decoded tokens of a step of a stream that may draft; 1.0 without speculation."""
        return 1 + self.accepted_tokens / self.drafting_steps if self.drafting_steps else 1.0

    @property
    def audit(self) -> str:
        """The results of all audits, as a sentence."""
        return str(AuditReport(self.audited_blocks, self.differing_blocks))

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were cached, 0..1; 0 before the first request."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """A cached run whose KV differs from the recomputed KV of its tokens, and the consequences.

    The first and the last wrong token are at `start` and `end - 1`. The first differs in `part` ("key" or "value") of
    `layer`; the largest deviation is `deviation` root mean squares. `dropped_blocks` were dropped from the cache: the
    run, and every run after it. `failed_requests` were reading it, `released_pins` held it.
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
    """The numbers of recomputed and of differing blocks, the differences, and the compressed prefixes, left out."""

    blocks: int
    differ: int
    differences: tuple[Difference, ...] = ()
    compressed: int = 0

    def __str__(self) -> str:
        """Return the report as a sentence."""
        left = f"; compressed prefixes left out: {self.compressed:,}" if self.compressed else ""
        return f"{self.blocks:,} blocks audited, {self.differ:,} differ{left}"
