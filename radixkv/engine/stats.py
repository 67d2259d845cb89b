"""Counters of an engine, and the frozen snapshots and audit reports that callers get."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from radixkv.cache import CacheStats
from radixkv.disk import NO_DISK, DiskStats
from radixkv.figures import Counts, counter, described, gauge

DRAFT_SOURCES = ("tree", "past", "own", "prediction")
"""The sources of drafts, by which drafted and accepted tokens are counted."""


_ENDED = "Ended requests by outcome; refused ones never began"
_DRAFTED = "Tokens that were drafted and verified, by the source of the draft"
_ACCEPTED = "Drafted tokens of replies, by the source of the draft"
_LOOKUPS = "Admitted prompts by miss reason"
_MISSED = "Computed prompt tokens, by miss reason"


@described
@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of an engine: `waiting` and `running` requests now, all other numbers since it was loaded.

    A prompt counts when its first step is committed, a computed token when its step is, and a sampled token at once.
    The `missed_` tokens add up to `computed_tokens` without `decode_tokens`. Audits count nowhere else. `cache`
    includes requests that ended before their first step.

    `device`, `dtype`, the backend of `attention` and the `kv_dtype` are the ones in use. `max_length` is
    the model's context in tokens, and `kv_bytes` the size of the pool.
    """

    model: str
    device: str
    dtype: str
    attention: str
    max_length: int  # tokens of the model's context
    kv_bytes: int  # of the pool
    cache: CacheStats
    kv_dtype: str = "auto"
    disk: DiskStats = NO_DISK

    uptime_s: float = gauge("seconds", "Seconds since the engine was loaded", "uptime_seconds")
    waiting: int = gauge("requests", "Running and waiting requests", "requests", state="waiting")
    running: int = gauge("requests", "Running and waiting requests", "requests", state="running")
    finished: int = counter("requests", _ENDED, "requests_ended", outcome="finished")
    cancelled: int = counter("requests", _ENDED, "requests_ended", outcome="cancelled")
    timed_out: int = counter("requests", _ENDED, "requests_ended", outcome="timed_out")
    failed: int = counter("requests", "Failed requests, with those that timed out", hidden="in radixkv:requests_ended")
    preemptions: int = counter("requests", "Preemptions of running requests")
    turn_admissions: int = counter(
        "requests", "Requests that were admitted before an older one of another group of namespaces"
    )
    overdue_admissions: int = counter(
        "requests", "Admitted requests that had waited too long since a later one overtook them"
    )
    coalesced_requests: int = counter("requests", "Requests that were delayed for a shared prefix")

    prompt_tokens: int = counter("tokens", "Prompt tokens, counted once per request")
    cached_tokens: int = counter("tokens", "Prompt tokens that were found in the cache")
    computed_tokens: int = counter("tokens", "Tokens that the model computed")
    decode_tokens: int = counter("tokens", "Computed tokens that are not of a prompt")
    recomputed_tokens: int = counter("tokens", "Tokens that were computed again after a preemption")
    coalesced_tokens: int = counter(
        "tokens", "Prompt tokens found in the cache because the request was delayed for a shared prefix"
    )
    output_tokens: int = counter("tokens", "Output tokens")
    forced_tokens: int = counter("tokens", "Output tokens without a draw, because a constraint left no choice")
    scored_tokens: int = counter("tokens", "Tokens of prompts whose log probability was computed")
    reused_scores: int = counter("tokens", "Tokens of prompts whose log probability an earlier request had computed")
    host_tokens: int = counter("tokens", "Tokens of requests loaded from the host", hidden="in radixkv:loaded_tokens")
    disk_tokens: int = counter("tokens", "Tokens whose KV was read from disk")
    wasted_tokens: int = counter("tokens", "Tokens computed for streams that had ended or failed")

    lookups_full: int = counter("requests", _LOOKUPS, "lookups", reason="full")
    lookups_never_seen: int = counter("requests", _LOOKUPS, "lookups", reason="never_seen")
    lookups_diverged: int = counter("requests", _LOOKUPS, "lookups", reason="diverged")
    lookups_evicted: int = counter("requests", _LOOKUPS, "lookups", reason="evicted")
    lookups_no_state: int = counter("requests", _LOOKUPS, "lookups", reason="no_state")
    lookups_limit: int = counter("requests", _LOOKUPS, "lookups", reason="limit")
    missed_full: int = counter("tokens", _MISSED, "missed_tokens", reason="full")
    missed_never_seen: int = counter("tokens", _MISSED, "missed_tokens", reason="never_seen")
    missed_diverged: int = counter("tokens", _MISSED, "missed_tokens", reason="diverged")
    missed_evicted: int = counter("tokens", _MISSED, "missed_tokens", reason="evicted")
    missed_no_state: int = counter("tokens", _MISSED, "missed_tokens", reason="no_state")
    missed_limit: int = counter("tokens", _MISSED, "missed_tokens", reason="limit")

    steps: int = counter("steps", "Forward passes of the model")
    eager_steps: int = counter("steps", "Forward passes on a GPU that no CUDA graph served")
    host_bound_rows: int = counter(
        "rows", "Times that a constrained stream was left out of a step, until the host had read its last token"
    )
    drafting_steps: int = counter(
        "steps", "Steps of streams that may draft; each gave a token, and accepted ones in addition"
    )
    drafts: int = counter("drafts", "Drafts that were verified")
    drafted_from_tree: int = counter("tokens", _DRAFTED, "drafted_tokens", source="tree")
    drafted_from_past: int = counter("tokens", _DRAFTED, "drafted_tokens", source="past")
    drafted_from_own: int = counter("tokens", _DRAFTED, "drafted_tokens", source="own")
    drafted_from_prediction: int = counter("tokens", _DRAFTED, "drafted_tokens", source="prediction")
    accepted_from_tree: int = counter("tokens", _ACCEPTED, "accepted_tokens", source="tree")
    accepted_from_past: int = counter("tokens", _ACCEPTED, "accepted_tokens", source="past")
    accepted_from_own: int = counter("tokens", _ACCEPTED, "accepted_tokens", source="own")
    accepted_from_prediction: int = counter("tokens", _ACCEPTED, "accepted_tokens", source="prediction")

    failed_loads: int = counter(
        "copies", "Failed copies from the host and to the host", "host_failures", direction="load"
    )
    failed_offloads: int = counter(
        "copies", "Failed copies from the host and to the host", "host_failures", direction="offload"
    )
    state_bytes: int = gauge("bytes", "Memory of all rows and slots of recurrent states, in bytes")
    state_copies: int = counter("copies", "Copies of recurrent states from slot to slot")
    state_copied_bytes: int = counter("bytes", "Bytes of these copies")
    audited_blocks: int = counter("blocks", "Cached blocks that an audit computed again")
    differing_blocks: int = counter("blocks", "Audited blocks whose content differed")

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


class Counters(Counts):
    """The running counters of an engine: those of EngineStats."""

    def __init__(self) -> None:
        super().__init__(EngineStats)

    def drafted(self, source: str, drafted: int, accepted: int) -> None:
        """Count the tokens of a draft that was verified."""
        counted = vars(self)
        self.drafts += 1
        counted[f"drafted_from_{source}"] += drafted
        counted[f"accepted_from_{source}"] += accepted


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
