"""A request's life as a bar on a time axis: waiting, prefill, decode. Knows records; knows no screen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from radixkv.telemetry.records import RequestRecord

LENGTHS = (15.0, 30.0, 60.0, 120.0)
"""Seconds that an axis may show: few, so that bars do not change their scale at every turn."""

WAITING, PREFILL, DECODE = ("░", "warn"), ("▒", "info"), ("█", "good")
"""How each part is drawn: a glyph that tells it apart without colours, and a style."""


@dataclass(frozen=True)
class Axis:
    """The times that a waterfall shows."""

    start: float
    end: float

    @property
    def length(self) -> float:
        """In seconds."""
        return self.end - self.start

    def cell(self, time: float, width: int) -> int:
        """Where a time is, in cells from the left; outside of the axis it is cut to it."""
        place = (time - self.start) / self.length * width
        return min(max(int(place), 0), width)


def axis_of(requests: Iterable[RequestRecord], now: float) -> Axis:
    """The axis up to now that shows all requests that run from their beginning, or the longest."""
    oldest = min((each.submitted for each in requests if each.live), default=now)
    length = next((each for each in LENGTHS if now - oldest <= each), LENGTHS[-1])
    return Axis(now - length, now)


def bar(request: RequestRecord, axis: Axis, width: int, now: float) -> list[tuple[str, str]]:
    """Pieces of text, `width` cells in all, each with its style.

    The parts stand in order, without a gap, and end where they should; one that was too short to see takes a cell of
    the one before it. What lies before the axis is left out.
    """
    end = now if request.ended is None else request.ended
    if end < axis.start:
        return [("<", "dim"), (" " * (width - 1), "plain")]
    right = max(axis.cell(end, width), 1)
    pieces = [(" " * (width - right), "plain")]
    for start, stop, (glyph, style) in reversed(_parts(request, end)):
        first = min(axis.cell(start, width), right - 1)
        if first < 0 or stop < axis.start:
            break
        pieces.append((glyph * (right - first), style))
        right = first
    return [(" " * right, "plain"), *reversed(pieces)]


def _parts(request: RequestRecord, end: float) -> list[tuple[float, float, tuple[str, str]]]:
    """What it did from when to when, and how that is drawn; what took no time is left out, but for the last."""
    admitted = end if request.admitted is None else request.admitted
    first = end if request.first_token is None else request.first_token
    parts = [(request.submitted, admitted, WAITING), (admitted, first, PREFILL), (first, end, DECODE)]
    reached = 1 + (request.admitted is not None) + (request.first_token is not None)
    return [part for index, part in enumerate(parts[:reached], 1) if part[1] > part[0] or index == reached]
