"""Warnings about units and gaps of times, and none about plausible traces."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from radixkv_traces.formats import TraceRequest, open_trace, sample
from radixkv_traces.generate import KINDS, generate
from radixkv_traces.time_checks import warnings
from tests.selection import mostly_long


def request(at: float, session: str | None = None, output: int = 100) -> TraceRequest:
    return TraceRequest(at, 10, output, array("q", [1]), session)


@pytest.mark.parametrize("name", ["conversation", "cc_agent", "chat", "taubench", "recording"])
def test_samples_have_no_warning(name: str) -> None:
    assert warnings(open_trace(sample(name))) == []


@pytest.mark.parametrize("kind", mostly_long(KINDS, "chat"))
def test_made_up_traces_have_none_and_a_wrong_unit_has_one(kind: str) -> None:
    made = list(generate(KINDS[kind], 60, 1))
    assert warnings(made) == []
    fast = warnings([replace(each, timestamp=each.timestamp / 1000) for each in made])
    assert len(fast) == 1 and "may be seconds" in fast[0]
    slow = warnings([replace(each, timestamp=each.timestamp * 1e6) for each in made])
    assert len(slow) == 1 and "may be microseconds" in slow[0]


def test_without_sessions_the_rate_of_requests_shows_the_unit() -> None:
    assert warnings([request(300.0 * i) for i in range(200)]) == []
    assert "may be seconds" in warnings([request(0.3 * i) for i in range(200)])[0]
    assert "may be microseconds" in warnings([request(3e7 * i) for i in range(200)])[0]


def test_a_long_gap_and_a_clock_that_goes_back() -> None:
    parts = [request(start + 1000.0 * i) for start in (0.0, 9e6) for i in range(100)]
    (gap,) = warnings(parts)
    assert "no request arrives for 2.5 of 2.5 hours, from second 99 on" in gap
    (back,) = warnings([request(10_000.0 * (i if i % 2 else i - 3), "s") for i in range(40)])
    assert "19 requests are earlier" in back


def test_too_few_requests_are_no_evidence_and_equal_times_are_none() -> None:
    assert warnings([]) == warnings([request(0.0)] * 500) == []
    assert warnings([request(float(i), "s") for i in range(5)]) == []
