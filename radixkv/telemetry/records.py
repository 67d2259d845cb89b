"""What telemetry tells of an engine: frozen records of nodes, sequences, requests, sessions and evictions.

Knows numbers, short names and how a record becomes a list for the wire. Knows no cache, no engine and no socket; reads
nothing but what it is given. Times are seconds since 1970; `blocks` are runs (first, count, first, count, ...) of block
ids in logical order; a missing number is None, or 0 where 0 cannot be meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from radixkv.telemetry.shapes import shape_of
from radixkv.telemetry.texts import drawable

Phase = Literal["waiting", "prefill", "decode", "paused", "preempted", "finished", "cancelled", "failed"]
MissReason = Literal["full", "never_seen", "diverged", "evicted", "limit"]

LIVE: frozenset[str] = frozenset({"waiting", "prefill", "decode", "paused", "preempted"})
"""Phases of a request that has not ended."""


class Record:
    """Packs into a list of plain values, in the order of its fields, and back."""

    __slots__ = ()

    def pack(self) -> list[Any]:
        """Its values, in the order of the fields."""
        return list(shape_of(type(self)).values(self))

    @classmethod
    def unpack(cls, values: Sequence[Any]) -> Self:
        """The record of a packed list. Lists become tuples, and texts `drawable`: strangers may have chosen them.

        Values behind those that we know are left out, and those that have a default may be missing: records only ever
        grow at their end. Raises ValueError for too few values, and for wrong types or ranges.
        """
        shape = shape_of(cls)
        plain: list[Any] = [tuple(value) if type(value) is list else value for value in values[: len(shape.names)]]
        for at in shape.check(plain):
            plain[at] = drawable(plain[at])
        return cls(*plain)


@dataclass(frozen=True, slots=True)
class EngineFacts(Record):
    """What does not change while an engine lives; `engine` is a name of its own, new with every load."""

    engine: str
    pid: int
    started: float
    version: str
    model: str
    device: str
    dtype: str
    attention: str
    eviction: str
    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_length: int
    max_sequences: int
    max_batch_tokens: int
    prefill_chunk: int
    exposes_text: bool = False


@dataclass(frozen=True, slots=True)
class NodeRecord(Record):
    """A node of the tree. `parent` is 0 for a root; only roots name their `namespace`.

    `holders` are sequences and pins that end here, `locks` adds one for each locked child: 0 is evictable. `pins` are
    part of holders. `head` are its first token ids (at most 8), `text` what it says, if the engine exposes text.
    """

    id: int
    parent: int
    start: int
    tokens: int
    blocks: tuple[int, ...]
    holders: int
    locks: int
    pins: int
    hits: int
    priority: int
    demoted: bool
    born: float
    used: float
    namespace: str | None = None
    head: tuple[int, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class SequenceRecord(Record):
    """An open sequence: `blocks` are those that it alone holds, which no node names; `node` is the deepest it locks.

    `request` is the number of its request and `index` which stream of it; None for one that no request opened.
    """

    id: int
    request: int | None
    index: int
    node: int
    length: int
    cached: int
    blocks: tuple[int, ...]
    opened: float


@dataclass(frozen=True, slots=True)
class RequestRecord(Record):
    """A request, from its submission to some time behind its end.

    `cached_tokens` of its prompt were found, once. `miss_*` say why not more: the reason, the first token that was not
    found, and for "evicted" how many tokens would have matched, how long ago they went (seconds, at admission), and
    what for. `coalesced` says that it waited for a neighbour to compute its prefix.
    """

    number: int
    phase: Phase
    session: int | None
    namespace: str | None
    priority: int
    streams: int
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    output_tokens: int
    preemptions: int
    coalesced: bool
    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    finish: str | None = None
    miss_reason: MissReason | None = None
    miss_at: int | None = None
    miss_evicted_tokens: int = 0
    miss_evicted_ago: float | None = None
    miss_pressure: str | None = None

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.phase in LIVE

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first token; None before it."""
        return None if self.first_token is None else self.first_token - self.submitted


@dataclass(frozen=True, slots=True)
class SessionRecord(Record):
    """A conversation: its requests so far, and what they found. `tokens` is how long it is now."""

    number: int
    namespace: str | None
    requests: int
    live: int
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    started: float
    used: float
    closed: bool = False


@dataclass(frozen=True, slots=True)
class EvictionRecord(Record):
    """A run that was evicted: `tokens` from `start` on, off the tail of `node`; `gone` if nothing was left of it.

    `idle_s` is how long nobody had used it, `pressure` what it made room for. `wanted_again` is when somebody asked for
    it again: a regret; None until then.
    """

    number: int
    time: float
    node: int
    start: int
    tokens: int
    blocks: int
    idle_s: float
    hits: int
    gone: bool
    pressure: str
    wanted_again: float | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed since the last time; with `reset` it is everything, and what was known before is void.

    `stats` are all counters and gauges, flat, by the names of EngineStats and, behind "cache.", of CacheStats; and
    "step_seconds" and "step_tokens", sums over all steps, and "monitor_ns", what telemetry has cost the engine's
    thread. A record replaces the one with its id or number.
    """

    time: float
    reset: bool = False
    stats: dict[str, float] = field(default_factory=dict)
    nodes: tuple[NodeRecord, ...] = ()
    gone_nodes: tuple[int, ...] = ()
    sequences: tuple[SequenceRecord, ...] = ()
    gone_sequences: tuple[int, ...] = ()
    requests: tuple[RequestRecord, ...] = ()
    sessions: tuple[SessionRecord, ...] = ()
    evictions: tuple[EvictionRecord, ...] = ()
