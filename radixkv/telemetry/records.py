"""Frozen records of an engine's nodes, sequences, requests, sessions and evictions, and the checks of packed records.

Times are seconds since 1970. `blocks` are runs (first, count, first, count, ...) of block ids in logical order. A
missing number is None, or 0 where 0 has no other meaning. Values from a socket or a file are checked for number, type
and range before a record is made of them.

Fields are appended to the end of a record, with a default, and never placed next to a related field: a packed record
is a list, so a field is identified by its index, and old recordings lack new fields.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from operator import attrgetter
from typing import Any, Literal, Self, cast, get_args, get_origin, get_type_hints

Phase = Literal["waiting", "prefill", "decode", "paused", "preempted", "finished", "cancelled", "failed"]
MissReason = Literal["full", "never_seen", "diverged", "evicted", "limit"]
Residence = Literal["device", "host"]

TIMED_OUT = "RequestTimedOut"
"""The `finish` of a failed request whose own timeout ended it: the name of the error that its caller got."""

LIVE: frozenset[str] = frozenset({"waiting", "prefill", "decode", "paused", "preempted"})
"""Phases of a request that has not ended."""

PREEMPTIONS = 8
"""The most preemptions of a request that are sent."""

NEXT_VICTIMS = 32
"""The most nodes of the eviction order that are sent."""


class Record:
    """A record that packs into a list of plain values, in the order of its fields."""

    __slots__ = ()

    def pack(self) -> list[Any]:
        """Return the values in the order of the fields."""
        return list(layout_of(type(self)).values(self))

    @classmethod
    def unpack(cls, values: Sequence[Any]) -> Self:
        """Make a record of a packed list. Lists become tuples; texts are made `drawable`, because other programs chose
        them.

        Unknown values at the end are ignored, and missing values at the end take their defaults. Raises ValueError for
        too few values, and for wrong types or ranges.
        """
        return cls(*layout_of(cls).read(values))


@dataclass(frozen=True, slots=True)
class EngineFacts(Record):
    """The constant facts of a loaded engine; `engine` is a name that is new with every load.

    `num_blocks` are the blocks of the pool, and `host_blocks` the blocks of the second tier in host memory, 0 without
    one. Both have `block_size` tokens and `bytes_per_block` bytes, in the format `kv_dtype`, on each of
    `tensor_parallel` ranks. `control` is True if the engine executes the commands of this connection; never for clients
    over TCP.
    """

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
    host_blocks: int = 0
    control: bool = False
    kv_dtype: str = "auto"
    tensor_parallel: int = 1


@dataclass(frozen=True, slots=True)
class NodeRecord(Record):
    """A node of the tree. `parent` is 0 for a root; only roots have their `namespace`.

    `holders` are sequences and pins that end at this node, and `pins` are the pins among them. `locks` are holders plus
    locked children; a node with 0 locks is evictable. `head` are its first token ids (at most 8). `text` is the
    beginning of its text, if the engine exposes text. `residence` is the tier whose blocks it has: `blocks` of a node
    on the host are ids of host memory, a range of their own. All nodes below such a node are on the host too.

    `reused` is the number of requests that found this node, or its first tokens, in the cache, since it is cached. A
    request counts at every node of its cached prefix, so a node has at least the sum of its children; those that leave
    the tree change nothing. It is None if an older engine does not send it. `hits` are the requests whose cached prefix
    ended here. They follow the eviction policy: a removed last child leaves its hits to its parent, and a split leaves
    them all to the lower half, which may have more hits than `reused` then. A root has neither: its `reused` is 0.
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
    residence: Residence = "device"
    reused: int | None = None


@dataclass(frozen=True, slots=True)
class SequenceRecord(Record):
    """An open sequence: `blocks` are its private blocks, which no node owns; `node` is the deepest node that it locks.

    `request` is the number of its request and `index` the stream of that request; None if no request opened it.
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
    """A request, from its submission until some time after its end.

    `cached_tokens` are the prompt tokens found in the cache. `miss_*` explain the first miss: the reason and the token
    where it occurred. For "evicted", they are also the tokens that would have matched, the seconds since their eviction
    (at admission), and its cause. `miss_without_state` are cached tokens before it that were computed again, because
    the model's recurrent state was not kept there. `coalesced` is True if the request waited for another one to prefill
    their shared prefix. `host_tokens` are the cached tokens that were loaded from host memory. `preempted_ms` are the
    times of the newest preemptions, at most `PREEMPTIONS`, in milliseconds since the submission: begin, end, begin,
    end, ...; without the last end while the request is preempted. `request_id` is the id of the API request, which the
    server's log has too; it, `tenant` and `label` are the names that the sender gave the request.
    `disk_tokens` were read from a disk into host memory while it waited. `drafted_tokens` were verified, and
    `accepted_tokens` of them are tokens of its replies. `waits_for` is the reason why the first request of the wait
    queue is not admitted, in the words of `Scheduler.head_waits_for`; it is None for every other request.
    `changed_part` is the first part of the prompt that differs from an earlier prompt of its conversation, and
    `changed_rule` the rule that it breaks. `own_text` and `cached_text` are the texts of this prompt and of the nearest
    cached one around their first difference. They are only sent with the miss reason "diverged"; without texts, because
    the engine does not expose them, `cached_text` is empty.
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
    miss_without_state: int = 0
    host_tokens: int = 0
    preempted_ms: tuple[int, ...] = ()
    request_id: str | None = None
    tenant: str | None = None
    label: str | None = None
    disk_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    waits_for: str | None = None
    changed_part: str | None = None
    changed_rule: str | None = None
    own_text: str | None = None
    cached_text: str | None = None

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.phase in LIVE

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first token; None before it."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def queue_time(self) -> float | None:
        """Seconds from submission to the first admission; None before it."""
        return None if self.admitted is None else self.admitted - self.submitted

    @property
    def timed_out(self) -> bool:
        """Whether the request's own timeout ended it."""
        return self.phase == "failed" and self.finish == TIMED_OUT


@dataclass(frozen=True, slots=True)
class SessionRecord(Record):
    """A conversation: its requests so far, and their cached tokens. `tokens` is its present length.

    `request_id`, `tenant` and `label` are those of the newest request.
    """

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
    request_id: str | None = None
    tenant: str | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class EvictionRecord(Record):
    """An evicted run: `tokens` from `start` on, from the end of `node`; `gone` is True if the whole node was evicted.

    `idle_s` is the time since its last use, `pressure` the cause of the eviction. `wanted_again` is the time of the
    first request that needed it again (a regret); None until then.
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
    """The changes since the last collection. With `reset` they are the whole state, and replace all earlier ones.

    `stats` are all counters and gauges by name: the fields of EngineStats, the fields of CacheStats with the prefix
    "cache.", the sums over all steps "step_seconds" and "step_tokens", and "monitor_ns", the cost of telemetry on the
    engine's thread. "prefill_tokens" are the computed tokens of prompts and the recomputed ones; with "decode_tokens"
    they are
    "computed_tokens" and "recomputed_tokens" together. `ITL_NAMES` count the times between two tokens of a stream,
    `PROCESS_NAMES` describe the engine's process, and are measured once a second at most. A record replaces the one
    with its id or number. `next_victims` are the ids of the nodes that would be evicted next, the first one first, at
    most `NEXT_VICTIMS`, and `what_if` the fields of a WhatIfReport; None if unchanged, or unknown (old recordings).
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
    next_victims: tuple[int, ...] | None = None
    what_if: dict[str, Any] | None = None


ITL_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 10.0),
)
"""Upper bounds in seconds of the buckets of the inter-token latency (ITL): the time between two tokens of a stream."""
ITL_NAMES = (*(f"itl.{bound:g}" for bound in ITL_BOUNDS), "itl.inf")
"""The counters in `Changes.stats`: the number of times above the preceding bound and up to this one."""
PROCESS_NAMES = ("process_cpu_seconds", "process_rss_bytes", "device_memory_bytes", "device_memory_total_bytes")
"""The CPU time of the engine's process since its start, in all threads; its resident memory; and on a GPU the memory
that its allocator reserved, and that of the whole device. The last two are absent on a CPU.
"""

MOST_INT = 2**63 - 1
MOST_BLOCKS = 2**31
_SIGNED = "priority"  # the only number that may be negative
_LONGEST_NAME = 64
_RUNS = "blocks"  # (first, count, first, count, ...)
_INTS = {int}


class RecordLayout:
    """The values of one record class, in the order of its fields."""

    def __init__(self, record: type) -> None:
        hints, declared = get_type_hints(record), fields(record)
        self.name = record.__name__
        self.needed = sum(each.default is MISSING for each in declared)
        self.values = attrgetter(*(each.name for each in declared))
        self._readers = [_reader(f"{self.name}.{each.name}", hints[each.name]) for each in declared]

    def read(self, values: Sequence[Any]) -> list[Any]:
        """Check the values of a record, and return those that this version has. O(values).

        Values at the end that have a default may be missing. Raises ValueError.
        """
        if len(values) < self.needed:
            raise ValueError(f"{self.name} has {self.needed} to {len(self._readers)} values, not {len(values)}")
        return [read(value) for read, value in zip(self._readers, values, strict=False)]


def _reader(name: str, hint: Any) -> Callable[[Any], Any]:
    """Return a function that checks a value of a field, and returns it; it raises ValueError.

    A bool is not accepted as an int; an int is accepted as a float.
    """
    kinds, words = _allowed_types(hint), _allowed_words(hint)
    least = -MOST_INT if name.endswith(f".{_SIGNED}") else 0
    are_runs = name.endswith(f".{_RUNS}")

    def read(value: Any) -> Any:
        kind = type(value)
        if kind is list:
            kind, value = tuple, tuple(value)
        if kind not in kinds:
            raise ValueError(f"{name} cannot be a {kind.__name__}")
        if kind is int:
            right = least <= value <= MOST_INT
        elif kind is float:
            right = isfinite(value)
        elif kind is str:
            right = not words or value in words
            value = drawable(value)
        else:
            right = kind is not tuple or _are_numbers(value, are_runs)
        if not right:
            raise ValueError(f"{name} cannot be {str(value)[:80]}")
        return value

    return read


def _are_numbers(values: tuple[Any, ...], are_runs: bool) -> bool:
    """Whether values are token ids, or runs of blocks; runs are limited in total, because a reader expands them."""
    if not values:
        return True
    right = set(map(type, values)) == _INTS and min(values) >= 0 and max(values) < MOST_BLOCKS
    return right and not (are_runs and (len(values) % 2 or sum(values[1::2]) > MOST_BLOCKS))


_LAYOUTS: dict[type, RecordLayout] = {}


def layout_of(record: type) -> RecordLayout:
    """Return the layout of a record class, computed once."""
    if record not in _LAYOUTS:
        _LAYOUTS[record] = RecordLayout(record)
    return _LAYOUTS[record]


def _allowed_types(hint: Any) -> frozenset[type]:
    """The exact types of a field."""
    if get_origin(hint) is Literal:
        return frozenset({str})
    if get_origin(hint) is tuple:
        return frozenset({tuple})
    if parts := get_args(hint):  # X | None
        return frozenset().union(*map(_allowed_types, parts))
    return frozenset({float, int}) if hint is float else frozenset({cast(type, hint)})


def _allowed_words(hint: Any) -> frozenset[str]:
    """The values of a `Literal` field; empty for other fields."""
    if get_origin(hint) is Literal:
        return frozenset(get_args(hint))
    return frozenset().union(*map(_allowed_words, get_args(hint)))


def drawable(text: str) -> str:
    r"""Escape control and direction characters as Python writes them, so that a text is safe in a terminal. O(text).

    >>> drawable("naïve \x1b[2J\n")
    'naïve \\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class NamespaceId(int):
    """A namespace as the engine passes it to the cache: a number, with the value of the caller and its label.

    It is hashed and compared as an int, without code of the value's class. `used` orders the uses of namespaces, and
    `turn` is the namespace that names its group for `radixkv.turns`, None if it does so itself.
    """

    def __new__(cls, number: int, value: Hashable) -> Self:
        """Number a namespace."""
        made = super().__new__(cls, number)
        made.value, made.label = value, namespace_label(value)
        return made

    value: Hashable
    label: str | None
    used: int = 0
    turn: Self | None = None


def namespace_value(namespace: Hashable) -> Hashable:
    """Return the namespace as its caller named it."""
    return namespace.value if isinstance(namespace, NamespaceId) else namespace


def namespace_label(namespace: Hashable) -> str | None:
    """The name of a namespace for display, None for the default namespace.

    Texts and numbers are shown as they are, values of other classes by the name of their type. Their `str` is never
    called, because a caller's class may be slow or reveal secrets.
    """
    if namespace is None:
        return None
    if type(namespace) is NamespaceId:
        return namespace.label
    if isinstance(namespace, tuple):
        return f"({', '.join(namespace_label(each) or 'None' for each in namespace)})"[:_LONGEST_NAME]
    if type(namespace) not in (str, int, float, bool):
        return type(namespace).__name__
    return drawable(str(namespace)[:_LONGEST_NAME])
