"""Record the changes of a cache and of its engine, so that a reader can collect them from time to time.

A change of a node costs one mark in the cache's change tracker, and `collect` reads the node's present state. Memory
does not grow while no reader collects: marks are bounded by the tree, endings and evictions by ring buffers. All calls
are on the cache's thread, one at a time; only `pending` may be read from any thread.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import CacheStats, PrefixCache
from radixkv.cache.change_tracker import ChangeTracker, SequenceView
from radixkv.cache.events import ignore
from radixkv.cache.reuse import total
from radixkv.cache.tokens import WIDTH
from radixkv.cache.types import Node, Pressure, Purpose
from radixkv.telemetry.mirror import ENDED_REQUESTS, EVICTIONS, SESSIONS, keep_newest
from radixkv.telemetry.records import (
    NEXT_VICTIMS,
    Changes,
    EvictionRecord,
    NodeRecord,
    RequestRecord,
    SequenceRecord,
    SessionRecord,
    drawable,
    namespace_label,
)

NO_STATS: Mapping[str, float] = {}
NO_OWNERS: Mapping[int, tuple[int, int]] = {}
_CACHE_STATS = tuple((each.name, f"cache.{each.name}") for each in fields(CacheStats))

HEAD = 8  # token ids in a node's record
TEXT_TOKENS, TEXT_CHARACTERS = 40, 80
"""How many tokens of a node are decoded where text is exposed, and how many characters are kept."""
DIFFERENCE_TOKENS = 24  # that are decoded before and after the first difference of two prompts
_FEW = 48  # blocks; shorter lists are processed faster without numpy

Decode = Callable[[list[int]], str]
Eviction = tuple[int, int, int, int, int, bool, float, int, Pressure]
"""Arguments of an observer's `evicted`: number, node, start, tokens, blocks, gone, idle, hits, pressure."""


class Recorder:
    """Observe a cache, take reports of requests and sessions, and return at each `collect` all changes since the last.

    `clock` returns seconds since 1970. `decode` makes text of token ids; with None, no record has text.

    >>> recorder = Recorder()
    >>> cache = PrefixCache(8, 4)
    >>> recorder.attach(cache)
    >>> sequence = cache.open([1, 2, 3])
    >>> recorder.collect().sequences[0].length
    0
    """

    def __init__(self, clock: Callable[[], float] = time.time, decode: Decode | None = None) -> None:
        self._clock = clock
        self._texts = None if decode is None else _Texts(decode)
        self._reset_due = True
        self.cost_ns = 0  # time that collecting took on the caller's thread
        self._events = EventBuffer(clock)
        # The last collected records, where new ones are compared with them.
        self._sequences: dict[int, SequenceRecord] = {}
        self._live: dict[int, RequestRecord] = {}
        self._evictions: OrderedDict[int, EvictionRecord] = OrderedDict()
        self._next_victims: tuple[int, ...] | None = None
        # The records to collect next.
        self._requests: dict[int, RequestRecord] = {}
        self._ended: OrderedDict[int, RequestRecord] = OrderedDict()  # requests that no collection has shown as live
        self._sessions: OrderedDict[int, SessionRecord] = OrderedDict()
        self._differences: OrderedDict[int, tuple[list[int], ...]] = OrderedDict()  # of prompts to cached ones

    def attach(self, cache: PrefixCache) -> None:
        """Observe `cache` from now on, in place of any other; the next `collect` returns its whole state. O(nodes)."""
        self._cache = cache
        self._tracker: ChangeTracker = cache.watch(self._events)
        self._offset = self._clock() - self._tracker.now()
        self._reset_due = True

    # ---- reports of the engine

    def request(self, record: RequestRecord) -> None:
        """Report a request's present state; only the last report before a `collect` counts."""
        number = record.number
        if record.live:
            if self._live.get(number) != record:
                self._requests[number] = record
        elif number in self._live:
            self._requests[number] = record
        else:  # it was never shown as live, so its end may be dropped
            self._requests.pop(number, None)
            keep_newest(self._ended, number, record, ENDED_REQUESTS)

    def session(self, record: SessionRecord) -> None:
        """Report a session's present state; only the last report before a `collect` counts."""
        keep_newest(self._sessions, record.number, record, SESSIONS)

    def difference(self, number: int, tokens: NDArray[np.int32], namespace: Hashable, at: int) -> None:
        """Report that a request's prompt diverges from the cached ones at a token. Costs a match if text is exposed."""
        if self._texts is not None:
            cached = self._cache.cached_after(tokens, namespace, DIFFERENCE_TOKENS)
            before, own = tokens[max(at - DIFFERENCE_TOKENS, 0) : at], tokens[at : at + DIFFERENCE_TOKENS]
            keep_newest(self._differences, number, (before.tolist(), own.tolist(), cached), ENDED_REQUESTS)

    # ---- collecting

    @property
    def pending(self) -> bool:
        """Whether nodes, evictions, requests or sessions have changed. May be read from any thread."""
        reports = self._requests or self._ended or self._sessions or self._events.evictions or self._events.regrets
        return bool(self._reset_due or self._tracker or reports)

    def collect(
        self, stats: Mapping[str, float] = NO_STATS, owners: Mapping[int, tuple[int, int]] = NO_OWNERS
    ) -> Changes:
        """Return the changes since the last call; the first call returns the whole state, with a reset.

        `stats` are added to the cache's. `owners` maps a sequence's id to the number of its request and the
        index of its stream. O(changes + open sequences + their own blocks).
        """
        started = time.perf_counter_ns()
        all_stats = {**self._cache_stats(), **stats}  # first, because it releases expired pins
        nodes, gone_nodes = self._tracker.look()
        sequences, gone_sequences = self._sequence_changes(owners)
        requests = (*self._ended.values(), *self._requests.values())
        reset, self._reset_due = self._reset_due, False
        victims = tuple(self._cache.next_victims(NEXT_VICTIMS))
        changed = reset or victims != self._next_victims
        self._next_victims = victims
        changes = Changes(
            time=self._clock(),
            reset=reset,
            stats=all_stats,
            nodes=tuple(self._node_records(nodes, gone_nodes)),
            gone_nodes=tuple(gone_nodes),
            sequences=sequences,
            gone_sequences=gone_sequences,
            requests=tuple(map(self._with_texts, requests)),
            sessions=tuple(self._sessions.values()),
            evictions=tuple(self._new_evictions()),
            next_victims=victims if changed else None,
        )
        self._remember_collected(requests)
        self.cost_ns += time.perf_counter_ns() - started
        all_stats["monitor_ns"] = all_stats.get("monitor_ns", 0) + self.cost_ns
        return changes

    # ---- inside

    def _with_texts(self, record: RequestRecord) -> RequestRecord:
        if self._texts is None or record.number not in self._differences:
            return record
        before, *both = self._differences[record.number]
        own, cached = (self._texts.difference(before, each) for each in both)
        return replace(record, own_text=own, cached_text=cached)

    def _cache_stats(self) -> dict[str, float]:
        stats = self._cache.stats()
        return {sent_name: getattr(stats, name) for name, sent_name in _CACHE_STATS}

    def _node_records(self, nodes: list[Node], gone: list[int]) -> list[NodeRecord]:
        pins, offset, texts = self._tracker.pins(), self._offset, self._texts
        if texts is None:
            return [node_record(node, pins[node.id], offset) for node in nodes]
        texts.forget(gone)
        return [node_record(node, pins[node.id], offset, texts.of(node) if node.key else None) for node in nodes]

    def _sequence_changes(
        self, owners: Mapping[int, tuple[int, int]]
    ) -> tuple[tuple[SequenceRecord, ...], tuple[int, ...]]:
        before = self._sequences
        now = {each.id: self._sequence(each, owners.get(each.id, (None, 0))) for each in self._tracker.sequences()}
        self._sequences = now
        changed = [record for number, record in now.items() if before.get(number) != record]
        gone = tuple(number for number in before if number not in now)
        for number in gone:
            self._events.opened_at.pop(number, None)  # in case the cache has dropped the observer
        return tuple(changed), gone

    def _sequence(self, each: SequenceView, owner: tuple[int | None, int]) -> SequenceRecord:
        opened = self._events.opened_at.get(each.id)
        if opened is None:  # it was opened before the cache was observed
            opened = self._events.opened_at[each.id] = self._clock()
        return SequenceRecord(each.id, *owner, each.node, each.length, each.cached, runs(each.blocks), opened)

    def _new_evictions(self) -> list[EvictionRecord]:
        """New evictions, and older ones whose text was requested again."""
        records: dict[int, EvictionRecord] = {}
        evictions, regrets = self._events.evictions, self._events.regrets
        while evictions:
            when, (number, node, start, tokens, blocks, gone, idle, hits, pressure) = evictions.popleft()
            record = EvictionRecord(number, when, node, start, tokens, blocks, idle, hits, gone, str(pressure))
            records[number] = record
            keep_newest(self._evictions, number, record, EVICTIONS)
        while regrets:
            number, ago = regrets.popleft()
            known = self._evictions.get(number)
            if known is not None and known.wanted_again is None:
                records[number] = self._evictions[number] = replace(known, wanted_again=known.time + ago)
        return list(records.values())

    def _remember_collected(self, requests: tuple[RequestRecord, ...]) -> None:
        for record in requests:
            if record.live:
                self._live[record.number] = record
            else:
                self._live.pop(record.number, None)
        self._requests, self._ended, self._sessions = {}, OrderedDict(), OrderedDict()


class _Texts:
    """The texts of nodes, decoded again only when a node's first tokens have changed."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, tuple[list[int], str]] = {}

    def of(self, node: Node) -> str:
        """The first characters of a node's text."""
        ids = tokens(node, TEXT_TOKENS)
        known = self._known.get(node.id)
        if known is None or known[0] != ids:
            known = self._known[node.id] = ids, node_text(ids, self._decode)
        return known[1]

    def difference(self, before: list[int], after: list[int]) -> str:
        """Return the characters around the first token of `after`, half of them before it."""
        half = TEXT_CHARACTERS // 2
        whole, begin = node_text([*before, *after], self._decode, None), node_text(before, self._decode, None)
        return whole[max(len(begin) - half, 0) : len(begin) + half]

    def forget(self, gone: list[int]) -> None:
        """Drop the texts of removed nodes."""
        for number in gone:
            self._known.pop(number, None)


class EventBuffer:
    """A cache's observer: it notes events in bounded buffers until the next collection.

    Its methods are closures over the buffers: access through `self` would be a third of an event's cost. An event only
    notes its arguments, and the time where that is needed.
    """

    rooted = uprooted = inserted = grown = split = merged = trimmed = copied = staticmethod(ignore)

    opened: Callable[[int, Hashable, int, int, Purpose], None]
    forked: Callable[[int, int], None]
    closed: Callable[[int, int], Any]
    evicted: Callable[..., None]
    regretted: Callable[[int, int, float], None]

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds since 1970."""
        self.opened_at: dict[int, float] = {}
        """When each open sequence was opened, by its id."""
        self.evictions: deque[tuple[float, Eviction]] = deque(maxlen=EVICTIONS)
        """The time and the arguments of each eviction."""
        self.regrets: deque[tuple[int, float]] = deque(maxlen=EVICTIONS)
        """The number of an eviction, and the seconds until a request needed its text again."""
        opened_at = self.opened_at
        note_eviction, note_regret = self.evictions.append, self.regrets.append

        def opened(sequence: int, namespace: Hashable, asked: int, hit: int, purpose: Purpose) -> None:
            opened_at[sequence] = clock()

        def forked(sequence: int, parent: int) -> None:
            opened_at[sequence] = clock()

        def evicted(*eviction: *Eviction) -> None:
            note_eviction((clock(), eviction))

        def regretted(number: int, tokens: int, ago: float) -> None:
            note_regret((number, ago))

        self.opened, self.forked = opened, forked
        self.closed = opened_at.pop  # `pop` removes the sequence; the closed length is its default value
        self.evicted, self.regretted = evicted, regretted


def node_record(node: Node, pins: int, offset: float, text: str | None = None) -> NodeRecord:
    """Make the record of a node's present state. O(its blocks)."""
    parent = node.parent
    return NodeRecord(
        node.id,
        0 if parent is None else parent.id,
        node.start,
        len(node.key) // WIDTH,
        runs(node.blocks),
        node.direct_holders,
        node.locks,
        pins,
        node.hits,
        node.priority,
        node.demoted,
        node.born_at + offset,
        node.used_at + offset,
        None if node.namespace is None else namespace_label(node.namespace.value),
        tuple(tokens(node, HEAD)),
        text,
        node.residence,
        total(node.reuse),
    )


def tokens(node: Node, most: int) -> list[int]:
    """The first token ids of a node."""
    return array("i", bytes(node.key[: most * WIDTH])).tolist()


def node_text(ids: list[int], decode: Decode, most: int | None = TEXT_CHARACTERS) -> str:
    """Decode tokens to at most `most` printable characters on one line; an error becomes its name."""
    try:
        text = decode(ids)
    except Exception as error:
        return f"<{type(error).__name__}>"
    return drawable(text[:most])


def runs(blocks: array[int]) -> tuple[int, ...]:
    """Encode block ids in order as runs: first, count, first, count, ...

    >>> runs(array("i", [4, 5, 6, 9, 2, 3]))
    (4, 3, 9, 1, 2, 2)
    """
    if len(blocks) > _FEW:
        ids = np.array(blocks, np.int32)
        starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
        counts = np.diff(starts, append=len(ids))
        return tuple(np.stack((ids[starts], counts), axis=1).ravel().tolist())
    found: list[int] = []
    last = -2
    for block in blocks:
        if block == last + 1:
            found[-1] += 1
        else:
            found += (block, 1)
        last = block
    return tuple(found)
