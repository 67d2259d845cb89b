"""Warnings about the times of a trace: a wrong unit, a clock that goes back, a long gap.

A wrong unit changes results without an error: a replay runs a thousand times too fast, and policies that learn from
times learn nothing. All limits are far from plausible traffic.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from radixkv_traces.formats import Request

FASTEST = 2000.0  # tokens per second of an answer to one request
BUSIEST = 1000.0  # requests per second
SLOWEST = 12 * 3600.0  # seconds: median pause of a session
RAREST = 3600.0  # seconds: mean time between requests
ENOUGH_TURNS, ENOUGH_REQUESTS = 10, 100  # fewer are no evidence
LONG_GAP = 3600.0  # seconds
_LEAST_OUTPUT = 16  # tokens of an answer whose duration counts


def warnings(requests: Iterable[Request]) -> list[str]:
    """Return a sentence for each property of the times that is not plausible. O(n log n).

    A trace without times has no warning.
    """
    turns = _Turns()
    times = []
    for request in requests:
        turns.add(request)
        times.append(request.timestamp / 1000)
    times.sort()
    span = times[-1] - times[0] if times else 0.0
    if not span:
        return []
    found = (_unit(turns, len(times) / span, len(times)), turns.out_of_order(), _gap(times, span))
    return [text for text in found if text is not None]


class _Turns:
    """The pauses between a session's requests in file order; requests at the same time run in parallel."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}
        self.pauses: list[float] = []  # seconds
        self.answers = self.too_fast = self.back = 0

    def add(self, request: Request) -> None:
        if request.session is None:
            return
        now, output = request.timestamp / 1000, request.output_length or 0
        before, tokens = self._last.get(request.session, (now, 0))
        self._last[request.session] = (now, output)
        pause = now - before
        self.back += pause < 0
        if pause > 0:
            self.pauses.append(pause)
            self.answers += tokens >= _LEAST_OUTPUT
            self.too_fast += tokens >= _LEAST_OUTPUT and tokens > FASTEST * pause

    def out_of_order(self) -> str | None:
        if self.back * 100 <= len(self.pauses):
            return None
        return f"{self.back:,} requests are earlier than the preceding request of their session in the file"


def _unit(turns: _Turns, rate: float, requests: int) -> str | None:
    if turns.answers >= ENOUGH_TURNS and turns.too_fast * 2 > turns.answers:
        return (
            f"in {turns.too_fast:,} of {turns.answers:,} turns the session continues before an engine could write the "
            f"answer (at {FASTEST:,.0f} tokens/s): the times may be seconds, where milliseconds are expected"
        )
    if requests >= ENOUGH_REQUESTS and rate > BUSIEST:
        return f"{rate:,.0f} requests per second: the times may be seconds, where milliseconds are expected"
    if len(turns.pauses) >= ENOUGH_TURNS and (pause := median(turns.pauses)) > SLOWEST:
        return (
            f"sessions pause for {pause / 3600:,.0f} hours (median): the times may be microseconds, where milliseconds "
            "are expected"
        )
    if requests >= ENOUGH_REQUESTS and rate * RAREST < 1:
        return (
            f"one request in {1 / rate / 3600:,.0f} hours: the times may be microseconds, where milliseconds are "
            "expected"
        )
    return None


def _gap(times: list[float], span: float) -> str | None:
    longest, start = max((after - before, before) for before, after in pairwise(times))
    if len(times) < ENOUGH_REQUESTS or longest < max(LONG_GAP, span / 2):
        return None
    return (
        f"no request arrives for {longest / 3600:,.1f} of {span / 3600:,.1f} hours, from second {start:,.0f} on: the "
        "file may hold several recordings; --start and --end select one"
    )
