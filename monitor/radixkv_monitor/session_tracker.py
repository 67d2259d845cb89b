"""Track which session held each node, as far as the monitor saw it, because an engine keeps no such record."""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.telemetry.records import SequenceRecord
from radixkv_monitor.state import State

SHARED, UNKNOWN = -1, -2
"""In place of a session's number: held by several sessions; held by none while the monitor was attached."""


class SessionTracker:
    """The session that held each node."""

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
