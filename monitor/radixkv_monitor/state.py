"""One moment of one engine, as screens show it, and the changes since an earlier one.

The mappings of a state never change, and records are frozen, so states share the records that did not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.records import (
    Changes,
    EngineFacts,
    EvictionRecord,
    NodeRecord,
    RequestRecord,
    SequenceRecord,
    SessionRecord,
)
from radixkv.telemetry.what_if import WhatIfReport
from radixkv_monitor.formatting import clock

KINDS = ("nodes", "gone_nodes", "sequences", "gone_sequences", "requests", "sessions", "evictions")
LONG_STEP = 1.0
"""The seconds from which on a step is shown as running. Publishers send the age of a state once a second."""
REMEMBERED_TICKS = 64
"""The most ticks that `State.touched_since` looks back."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All counters and gauges of `engine` at one time; `stats` has the names of `Changes.stats`."""

    time: float
    engine: str
    stats: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Touched:
    """The ids that one tick changed, added or removed."""

    tick: int
    nodes: frozenset[int]
    sequences: frozenset[int]


@dataclass(frozen=True, slots=True, repr=False)
class State:
    """One engine at one time.

    `line` and `tick` are its place: states of one line follow each other tick by tick, without a gap or a reset. `now`
    is the time that ages are counted to: the clock's while live, the state's own `time` for a past one. `next_victims`
    are the nodes that the engine would evict next, the first one first; None if the engine did not send them. `history`
    holds about one sample a second of the last ten minutes, oldest first; the last is of this state.

    `stale`: the engine cannot be reached, and `now` is the time of its last news. `frozen`: the user froze the screen,
    or looks at the past. `baseline`: the sample that deltas are counted from, if the user set one. `end_reason`: why
    the engine ended, on the last state of a recording. `received`: the time at which the engine sent the newest frame.
    It is later than `time` while a long step runs, because the engine's thread reports between steps. `silence`: the
    seconds for which a connected engine has sent nothing; 0 unless it is silent. `control`: the engine executes the
    commands of this monitor.
    """

    line: int
    tick: int
    time: float
    now: float
    facts: EngineFacts
    stats: Mapping[str, float]
    nodes: Mapping[int, NodeRecord]
    sequences: Mapping[int, SequenceRecord]
    live: Mapping[int, RequestRecord]
    ended: Mapping[int, RequestRecord]
    sessions: Mapping[int, SessionRecord]
    evictions: Mapping[int, EvictionRecord]
    next_victims: tuple[int, ...] | None = None
    what_if: WhatIfReport | None = None
    history: tuple[Sample, ...] = ()
    recent: tuple[Touched, ...] = ()
    stale: bool = False
    frozen: bool = False
    baseline: Sample | None = None
    end_reason: str = ""
    received: float = 0.0
    silence: float = 0.0
    control: bool = False

    def __repr__(self) -> str:
        """Return a short text: a state may hold a hundred thousand records, and a traceback would show them all."""
        return f"<State of {self.facts.engine} at {self.time}, line {self.line}, tick {self.tick}>"

    @property
    def step_seconds(self) -> float | None:
        """How long the present step of the engine had run when the newest frame was sent; None below a second.

        Records and counters are then as of the start of the step. Engines that do not describe their process send the
        time of the newest change while they are idle, so without requests the age of their state is no step.
        """
        age = self.received - self.time
        busy = self.live or self.stats.get("running") or self.stats.get("waiting")
        return age if age >= LONG_STEP and (busy or "process_cpu_seconds" in self.stats) else None

    @property
    def past(self) -> bool:
        """Whether the engine has ended, cannot be reached or is silent, so that sentences are in the past tense."""
        return self.stale or self.silence > 0 or bool(self.end_reason)

    @property
    def until(self) -> str:
        """The words that follow "the last minute" if the minute did not end at present: " before 12:03:55"."""
        return f" before {clock(self.now)}" if self.past else ""

    def touched_since(self, earlier: State | None) -> Touched | None:
        """Return the ids of nodes and sequences that may differ from `earlier`; None if all may. O(ticks + ids)."""
        if (
            earlier is None
            or earlier.line != self.line
            or not self.tick - len(self.recent) <= earlier.tick <= self.tick
        ):
            return None
        since = [each for each in self.recent if each.tick > earlier.tick]
        nodes = frozenset[int]().union(*(each.nodes for each in since))
        return Touched(self.tick, nodes, frozenset[int]().union(*(each.sequences for each in since)))


def age_time(state: State, now: float) -> float:
    """Return the time to which the ages in a state count: `now`, or the state's time while a long step runs."""
    return state.time if state.step_seconds is not None else max(now, state.time)


@dataclass(repr=False)
class StateCopier:
    """Copy states from one engine's mirror, tick by tick, sharing the mappings that did not change.

    Not thread-safe.
    """

    facts: EngineFacts
    line: int
    _tick: int = 0
    _last: State | None = None
    _recent: tuple[Touched, ...] = field(default=())

    def take(self, mirror: Mirror, applied: Sequence[Changes], history: tuple[Sample, ...] = ()) -> State:
        """Return the state of `mirror` after `applied` was applied to it. O(records of the kinds that changed)."""
        self._tick += 1
        if any(changes.reset for changes in applied):
            self._last, self._recent = None, ()
        else:
            self._recent = (*self._recent[1 - REMEMBERED_TICKS :], _touched(self._tick, applied))
        last = self._last
        changed = {name for name in KINDS if last is None or any(getattr(changes, name) for changes in applied)}

        def kept(name: str, *kinds: str) -> Any:
            return getattr(last, name) if changed.isdisjoint(kinds) else dict(getattr(mirror, name))

        self._last = State(
            line=self.line,
            tick=self._tick,
            time=mirror.time,
            now=mirror.time,
            facts=self.facts,
            stats=dict(mirror.stats),
            nodes=kept("nodes", "nodes", "gone_nodes"),
            sequences=kept("sequences", "sequences", "gone_sequences"),
            live=kept("live", "requests"),
            ended=kept("ended", "requests"),
            sessions=kept("sessions", "sessions"),
            evictions=kept("evictions", "evictions"),
            next_victims=mirror.next_victims,
            what_if=None if mirror.what_if is None else WhatIfReport.from_fields(mirror.what_if),
            history=history,
            recent=self._recent,
        )
        return self._last


def _touched(tick: int, applied: Sequence[Changes]) -> Touched:
    return Touched(
        tick,
        frozenset(chain.from_iterable((*(node.id for node in each.nodes), *each.gone_nodes) for each in applied)),
        frozenset(chain.from_iterable((*(one.id for one in each.sequences), *each.gone_sequences) for each in applied)),
    )


# ---- sessions of nodes


SHARED, UNKNOWN = -1, -2
"""In place of a session's number: held by several sessions; held by none while the monitor was attached."""


class SessionTracker:
    """The session that held each node, as far as the monitor saw it, because an engine keeps no such record."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._state: State | None = None

    def update(self, state: State) -> set[int]:
        """Add this state; return the nodes whose session changed. O(open sequences x depth)."""
        if self._state is None or (self._state.line, self._state.facts) != (state.line, state.facts):
            self._of.clear()
        self._state = state
        changed = set()
        for sequence in state.sequences.values():
            session = session_of(state, sequence)
            if session is None:
                continue
            for node in path(state, sequence.node):
                known = self._of.get(node)
                if known not in (session, SHARED):
                    self._of[node] = session if known is None else SHARED
                    changed.add(node)
        if len(self._of) > 2 * len(state.nodes) + 64:
            self._of = {node: seen for node, seen in self._of.items() if node in state.nodes}
        return changed

    def of(self, owner: int) -> int:
        """Return the session of a node or of a sequence (its negated id), or SHARED or UNKNOWN."""
        if owner > 0:
            return self._of.get(owner, UNKNOWN)
        sequence = None if self._state is None else self._state.sequences.get(-owner)
        session = None if sequence is None or self._state is None else session_of(self._state, sequence)
        return UNKNOWN if session is None else session


def path(state: State, node: int) -> Iterator[int]:
    """Yield the ids from a node up to its root. O(depth)."""
    left = len(state.nodes)
    while (record := state.nodes.get(node)) is not None and left:
        yield node
        node, left = record.parent, left - 1


def session_of(state: State, sequence: SequenceRecord) -> int | None:
    """Return the session of the request that opened the sequence; None without one."""
    if sequence.request is None:
        return None
    request = state.live.get(sequence.request) or state.ended.get(sequence.request)
    return None if request is None else request.session
