"""Frozen records of an engine's nodes, sequences, requests, sessions and evictions, and the checks of packed records.

Times are seconds since 1970. `blocks` are runs (first, count, first, count, ...) of block ids in logical order. A
missing number is None, or 0 where 0 has no other meaning. Values from a socket or a file are checked for number, type
and range before a record is made of them.

Fields are appended to the end of a record, with a default, and never placed next to a related field: a packed record
is a list, so a field is known by its place, and old recordings lack the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from operator import attrgetter, itemgetter
from types import NoneType
from typing import Any, Literal, Self, cast, get_args, get_origin, get_type_hints

Phase = Literal["waiting", "prefill", "decode", "paused", "preempted", "finished", "cancelled", "failed"]
MissReason = Literal["full", "never_seen", "diverged", "evicted", "limit"]

LIVE: frozenset[str] = frozenset({"waiting", "prefill", "decode", "paused", "preempted"})
"""Phases of a request that has not ended."""

NEXT_VICTIMS = 32
"""The most nodes of which the eviction order is sent."""


class Record:
    """Packs into a list of plain values, in the order of its fields, and back."""

    __slots__ = ()

    def pack(self) -> list[Any]:
        """Its values, in the order of the fields."""
        return list(layout_of(type(self)).values(self))

    @classmethod
    def unpack(cls, values: Sequence[Any]) -> Self:
        """The record of a packed list. Lists become tuples, and texts `drawable`: strangers may have chosen them.

        Values behind those that we know are left out, and those that have a default may be missing: records only ever
        grow at their end. Raises ValueError for too few values, and for wrong types or ranges.
        """
        layout = layout_of(cls)
        plain: list[Any] = [tuple(value) if type(value) is list else value for value in values[: len(layout.names)]]
        for at in layout.check(plain):
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
    thread. A record replaces the one with its id or number. `next_victims` are the ids of the nodes that would be
    evicted next, the first one first, at most `NEXT_VICTIMS`; None if they are unchanged, or unknown (old recordings).
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


MOST_INT = 2**63 - 1
MOST_BLOCKS = 2**31
_SIGNED = "priority"  # the one number that may be below zero
_LONGEST_NAME = 64
_RUNS = "blocks"  # (first, count, first, count, ...)
_INTS = {int}
_SIGNATURES = 1024  # combinations of types that were found right and are remembered: far more than honest peers send


class RecordLayout:
    """The values of one record class, in the order of its fields."""

    def __init__(self, record: type) -> None:
        hints = get_type_hints(record)
        every = fields(record)
        self.name = record.__name__
        self.names = tuple(each.name for each in every)
        self.needed = sum(each.default is MISSING for each in every)
        self.values = attrgetter(*self.names)
        self._kinds = [_kinds(hints[name]) for name in self.names]
        self._words = {at: words for at, name in enumerate(self.names) if (words := _words(hints[name]))}
        self._known: dict[tuple[type, ...], _Plan] = {}

    def check(self, values: Sequence[Any]) -> Sequence[int]:
        """ValueError if these are not the values of such a record; returns the places of those that are texts.

        Values at the end that have a default may be missing: an earlier release wrote them. O(values).
        """
        types = tuple(map(type, values))
        plan = self._known.get(types) or self._planned(types)
        if not plan.in_range(values):
            self._explain(values)
        for at in plan.tuples:
            self._check_numbers(at, values[at])
        for at, words in plan.words:
            self._demand(values[at] in words, at, values[at])
        return plan.texts

    def _planned(self, types: tuple[type, ...]) -> _Plan:
        """What is left to look at, once the types were found right."""
        if not self.needed <= len(types) <= len(self.names):
            raise ValueError(f"{self.name} has {self.needed} to {len(self.names)} values, not {len(types)}")
        for at, (kind, allowed) in enumerate(zip(types, self._kinds, strict=False)):
            if kind not in allowed:
                raise ValueError(f"{self.name}.{self.names[at]} cannot be a {kind.__name__}")
        plan = _Plan(types, self.names, self._words)
        if len(self._known) < _SIGNATURES:
            self._known[types] = plan
        return plan

    def _explain(self, values: Sequence[Any]) -> None:
        """Say which number is out of range; none is, if only their sum was."""
        for at, value in enumerate(values):
            if type(value) is int:
                least = -MOST_INT if self.names[at] == _SIGNED else 0
                self._demand(least <= value <= MOST_INT, at, value)
            elif type(value) is float:
                self._demand(isfinite(value), at, value)

    def _check_numbers(self, at: int, numbers: tuple[Any, ...]) -> None:
        """Token ids or runs of blocks; runs that cover more than there can be would cost whoever expands them."""
        if not numbers:
            return
        right = set(map(type, numbers)) == _INTS and min(numbers) >= 0 and max(numbers) < MOST_BLOCKS
        if right and self.names[at] == _RUNS:
            right = len(numbers) % 2 == 0 and sum(numbers[1::2]) <= MOST_BLOCKS
        self._demand(right, at, numbers)

    def _demand(self, right: bool, at: int, value: Any) -> None:
        if not right:
            raise ValueError(f"{self.name}.{self.names[at]} cannot be {str(value)[:80]}")


class _Plan:
    """How to look at values of certain types fast: most of the checks are one call each, and C runs it."""

    __slots__ = ("_counts", "_floats", "_signed", "texts", "tuples", "words")

    def __init__(self, types: tuple[type, ...], names: tuple[str, ...], words: dict[int, frozenset[str]]) -> None:
        ints = [at for at, kind in enumerate(types) if kind is int]
        self._counts = _getter([at for at in ints if names[at] != _SIGNED])
        self._signed = [at for at in ints if names[at] == _SIGNED]
        self._floats = _getter([at for at, kind in enumerate(types) if kind is float])
        self.tuples = [at for at, kind in enumerate(types) if kind is tuple]
        self.texts = [at for at, kind in enumerate(types) if kind is str]
        self.words = [(at, allowed) for at, allowed in words.items() if at < len(types) and types[at] is str]

    def in_range(self, values: Sequence[Any]) -> bool:
        """False if a number may be out of range."""
        counts, floats = self._counts, self._floats
        if counts is not None and not (min(counts(values)) >= 0 and max(counts(values)) <= MOST_INT):
            return False
        if floats is not None and not isfinite(sum(floats(values))):
            return False
        return all(abs(values[at]) <= MOST_INT for at in self._signed)


def _getter(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]] | None:
    """The values at these places, always as a tuple; None if there are none."""
    if not places:
        return None
    return itemgetter(*places, places[0])


_LAYOUTS: dict[type, RecordLayout] = {}


def layout_of(record: type) -> RecordLayout:
    """The shape of a record class, read once."""
    if record not in _LAYOUTS:
        _LAYOUTS[record] = RecordLayout(record)
    return _LAYOUTS[record]


def _kinds(hint: Any) -> frozenset[type]:
    """The exact types that a field may have: bool is no int here, but an int may stand for a float."""
    if get_origin(hint) is Literal:
        return frozenset({str})
    if get_origin(hint) is tuple:
        return frozenset({tuple})
    if parts := get_args(hint):  # X | None
        return frozenset().union(*map(_kinds, parts))
    return frozenset({float, int}) if hint is float else frozenset({cast(type, hint)})


def _words(hint: Any) -> frozenset[str]:
    """The words that a field may have, if they are listed."""
    if get_origin(hint) is Literal:
        return frozenset(get_args(hint))
    listed = [_words(part) for part in get_args(hint) if part is not NoneType]
    return frozenset().union(*listed)


def drawable(text: str) -> str:
    r"""The text with what moves a cursor, rings, or turns the writing round escaped as Python writes it. O(text).

    >>> drawable("naïve \x1b[2J\n")
    'naïve \\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def namespace_label(namespace: Hashable) -> str | None:
    """A namespace's name for people, None for the one without: a text or a number as it is, of others the type.

    Namespaces may be of a caller's class, and what its `str` does or tells is not for telemetry to find out.
    """
    if namespace is None:
        return None
    if isinstance(namespace, tuple):
        return f"({', '.join(namespace_label(each) or 'None' for each in namespace)})"[:_LONGEST_NAME]
    if type(namespace) not in (str, int, float, bool):
        return type(namespace).__name__
    return drawable(str(namespace)[:_LONGEST_NAME])
