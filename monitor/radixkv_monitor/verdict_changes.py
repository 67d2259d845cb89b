"""Find the changes of the verdict's level.

A level counts once it held for some seconds, so a short excursion is no change. No clock is read: the caller passes the
times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from radixkv_monitor.summary import Level, Reason, Verdict

SEVERITIES: dict[Level, int] = {"good": 0, "idle": 0, "warn": 1, "bad": 2}
"""A working and an idle engine are equally well, so a change between the two is no change of the level."""
_Began = dict[int, tuple[float, float]]
"""The time and the tick since which all verdicts are on one side of a severity."""


@dataclass(frozen=True, slots=True)
class VerdictChange:
    """The verdict on `engine` changed its level at `time`, in seconds since 1970. `previous` is None for the first
    verdict of a source.
    """

    time: float
    engine: str
    previous: Level | None
    level: Level
    sentence: str
    reasons: tuple[Reason, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the change for JSON."""
        return {
            "time": self.time,
            "engine": self.engine,
            "from": self.previous,
            "to": self.level,
            "sentence": self.sentence,
            "reasons": [asdict(each) for each in self.reasons],
        }

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return f"{when}  {self.level:<4}  {one_line(self.sentence)}"


class LevelChanges:
    """The level of the verdicts of one source.

    A level counts after `after` seconds in which all verdicts were at least as severe, or at most as severe if it is an
    improvement. A first verdict without a problem counts at once.
    """

    def __init__(self, after: float = 5.0) -> None:
        self.after = after
        self._level: Level | None = None
        self._tick = -math.inf
        self._at_least: _Began = {}
        self._at_most: _Began = {}
        self._newest: dict[int, Verdict] = {}

    def take(self, engine: str, found: Verdict, when: float, tick: float) -> VerdictChange | None:
        """Add a verdict, and return the change of the level that it completes, if any.

        `when` is the time of the change, and `tick` the time by which levels hold, in seconds of a monotonic clock.
        """
        self._tick = tick
        severity = SEVERITIES[found.level]
        self._newest[severity] = found
        for bound in range(3):
            for began, holds in ((self._at_least, severity >= bound), (self._at_most, severity <= bound)):
                if holds:
                    began.setdefault(bound, (when, tick))
                else:
                    began.pop(bound, None)
        return self._change(engine)

    def _change(self, engine: str) -> VerdictChange | None:
        """Return the level that held for long enough, if it differs from the level before."""
        if self._level is None and 0 in self._at_most:
            return self._changed(engine, 0, self._at_most[0][0])
        current = SEVERITIES[self._level or "good"]
        worse = [(self._at_least, bound) for bound in (2, 1) if bound > current]
        better = [(self._at_most, bound) for bound in (0, 1) if bound < current]
        for began, bound in (*worse, *better):
            when, tick = began.get(bound, (0.0, math.inf))
            if self._tick - tick >= self.after:
                return self._changed(engine, bound, when)
        return None

    def _changed(self, engine: str, severity: int, when: float) -> VerdictChange:
        found = self._newest[severity]
        change = VerdictChange(when, engine, self._level, found.level, found.sentence, found.reasons)
        self._level = found.level
        return change


def without(found: Verdict, ignored: Iterable[str]) -> Verdict:
    """Return the verdict that the remaining reasons have after those with an ignored name are left out.

    The sentence then gives the remaining reasons.
    """
    names = frozenset(ignored)
    left = tuple(each for each in found.reasons if each.name not in names)
    if left == found.reasons:
        return found
    if not left:
        return Verdict("good", f"Only ignored problems: {found.sentence}", ())
    level = max((each.level for each in left), key=lambda each: SEVERITIES[each])
    text = "; ".join(each.sentence for each in left)
    return Verdict(level, text[:1].upper() + text[1:], left)


def reaches(level: Level, least: Level) -> bool:
    """Return whether a level is at least as severe as `least`."""
    return SEVERITIES[level] >= SEVERITIES[least]


def one_line(text: str) -> str:
    """Return the text with blanks in place of control characters and others that cannot be printed."""
    return "".join(each if each.isprintable() else " " for each in text)
