"""Colour the blocks of the pool by state, age or session.

A mode gives each block a level, which is an index into the legend of the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.telemetry.records import Residence
from radixkv_monitor import theme
from radixkv_monitor.block_map import NO_OWNER, BlockMap, Owner, is_node
from radixkv_monitor.state import SHARED, UNKNOWN, SessionTracker, State
from radixkv_monitor.theme import Shade

Levels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A level's name and shade."""

    name: str
    shade: Shade


@dataclass(frozen=True, slots=True)
class ColourMode:
    """One way to colour blocks: a level for each, and the legend of the levels. `title` is its name on the screen."""

    name: str
    title: str
    levels: Callable[[Blocks], Levels]
    legend: Callable[[Blocks], tuple[LegendEntry, ...]]


class Blocks:
    """The blocks of one tier of the engine that is shown: their owners, and the sessions that held them."""

    def __init__(self, residence: Residence = "device") -> None:
        self.residence = residence
        self.map = BlockMap(0, 1, residence)
        self.state: State | None = None
        self.sessions = SessionTracker()
        self.session_shades: list[int | None] = [None] * len(theme.SESSIONS)  # the session of each shade

    def update(self, state: State) -> None:
        """Update to this state. O(touched since the last one + depth of open sequences), or O(all) after a gap."""
        for _ in self.updating(state):
            pass

    def updating(self, state: State) -> Iterator[float]:
        """Do the work of `update` in slices, and yield the completed share after each."""
        last = self.state
        if self.is_another(state):
            on_host = self.residence == "host"
            blocks = state.facts.host_blocks if on_host else state.facts.num_blocks
            self.map = BlockMap(blocks, state.facts.block_size, self.residence)
        touched = state.touched_since(last)
        sequences = {} if self.residence == "host" else state.sequences
        if touched is None:
            yield from self.map.updating(state.nodes, sequences)
        else:
            yield from self.map.updating(state.nodes, sequences, touched.nodes, touched.sequences)
        self.state = state
        self.sessions.update(state)

    def is_another(self, state: State) -> bool:
        """Return whether nothing of the map is of use for this state: it is the first one, or of another line."""
        last = self.state
        return last is None or last.line != state.line or last.facts.engine != state.facts.engine

    def per_slot(self, values: Callable[[Owner], float], default: float) -> npt.NDArray[np.float64]:
        """Return a value for each slot of the map. O(owners)."""
        array = np.full(self.map.capacity, default)
        slots = self.map.slots
        array[np.fromiter(slots.values(), np.intp, len(slots))] = [values(owner) for owner in slots]
        return array


# ---- modes


STATE_NAMES = ("free", "cached", "active", "private", "pinned")
"""Indexed by the states of block_map."""


_STATES = tuple(map(LegendEntry, STATE_NAMES, (theme.FREE, theme.CACHED, theme.ACTIVE, theme.PRIVATE, theme.PINNED)))


def _age_levels(blocks: Blocks) -> Levels:
    """0 free, 1 held, 2 and more: by the time since the tip was used."""
    state = blocks.state
    assert state is not None
    used = blocks.per_slot(lambda owner: state.nodes[owner].used if is_node(owner) else state.now, state.now)
    levels = (2 + np.digitize(state.now - used, theme.AGE_LIMITS)).astype(np.uint8)[blocks.map.tip]
    levels[blocks.map.holding > 0] = 1
    levels[blocks.map.owners == 0] = 0
    return levels


_AGES = (
    LegendEntry("free", theme.FREE),
    LegendEntry("held now", theme.ACTIVE),
    *map(LegendEntry, ("< 10 s", "10 s-1 min", "1-10 min", "10 min-1 h", "> 1 h"), theme.AGES),
)


def _session_levels(blocks: Blocks) -> Levels:
    """0 free, 1 no session, 2 several sessions, 3 a session without a shade, 4 and more: sessions with a shade."""
    slots = blocks.map.slots
    sessions = blocks.per_slot(blocks.sessions.of, UNKNOWN).astype(np.int64)
    size = np.bincount(blocks.map.tip, minlength=blocks.map.capacity)
    sizes: dict[int, int] = {}
    for slot in slots.values():
        sizes[int(sessions[slot])] = sizes.get(int(sessions[slot]), 0) + int(size[slot])
    assign_shades(blocks.session_shades, sizes)
    level = {UNKNOWN: 1, SHARED: 2}
    level |= {session: 4 + place for place, session in enumerate(blocks.session_shades) if session is not None}
    by_slot = np.array([level.get(session, 3) for session in sessions.tolist()], np.uint8)
    by_slot[NO_OWNER] = 0
    levels: Levels = by_slot[blocks.map.tip]
    return levels


def assign_shades(session_shades: list[int | None], sizes: dict[int, int]) -> None:
    """Give free shades to the largest sessions; a session keeps its shade while it has blocks."""
    for place, session in enumerate(session_shades):
        if session is not None and not sizes.get(session):
            session_shades[place] = None
    waiting = sorted((s for s in sizes if s >= 0 and s not in session_shades), key=lambda s: (-sizes[s], s))
    for place, session in enumerate(session_shades):
        if session is None and waiting:
            session_shades[place] = waiting.pop(0)


def _session_legend(blocks: Blocks) -> tuple[LegendEntry, ...]:
    return (
        LegendEntry("free", theme.FREE),
        LegendEntry("no session", theme.UNKNOWN),
        LegendEntry("several", theme.SHARED),
        LegendEntry("others", theme.OTHERS),
        *(
            LegendEntry("-" if session is None else f"session {session}", shade)
            for session, shade in zip(blocks.session_shades, theme.SESSIONS, strict=True)
        ),
    )


MODES = (
    ColourMode("state", "state", lambda blocks: blocks.map.states(), lambda _: _STATES),
    ColourMode("age", "idle time", _age_levels, lambda _: _AGES),
    ColourMode("session", "session", _session_levels, _session_legend),
)


HOST_STATE_NAMES = ("free", "on the host")
"""Indexed by the first two states of block_map; blocks of host memory have no others."""
HOST_LEGEND = (LegendEntry(HOST_STATE_NAMES[1], theme.HOST),)
_HOST_STATE = ColourMode(
    "state",
    "state",
    lambda blocks: (blocks.map.owners > 0).astype(np.uint8),
    lambda _: (LegendEntry("free", theme.FREE), *HOST_LEGEND),
)


def host_mode(mode: ColourMode) -> ColourMode:
    """Return the mode for blocks of host memory, which have no sessions."""
    return mode if mode.name == "age" else _HOST_STATE


# ---- fewer cells than blocks


def reduce(levels: Levels, per: int, meanings: int) -> Levels:
    """Return one level for each `per` blocks: the most frequent one, the highest of equals. O(blocks x meanings)."""
    if per == 1:
        return levels
    full = len(levels) // per * per
    cells = [_commonest(levels[:full].reshape(-1, per), meanings)] if full else []
    if full < len(levels):
        cells.append(_commonest(levels[full:].reshape(1, -1), meanings))
    return np.concatenate(cells) if cells else levels


def _commonest(groups: Levels, meanings: int) -> Levels:
    counts = np.stack([(groups == level).sum(axis=1) for level in range(meanings - 1, -1, -1)])
    commonest: Levels = (meanings - 1 - counts.argmax(axis=0)).astype(np.uint8)
    return commonest
