"""Test latencies over windows, their percentiles and buckets, and the view of their histograms."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from radixkv.telemetry.mirror import ENDED_REQUESTS
from radixkv.telemetry.records import ITL_BOUNDS, ITL_NAMES
from radixkv_monitor.latency import BOUNDS, as_rows, bucket_counts, latencies, quantile
from radixkv_monitor.state import Sample, State
from radixkv_monitor.summary import summarise
from radixkv_monitor.views.latency import KINDS, LatencyView
from tests.monitor.samples import request
from tests.monitor.view_host import FACTS, hosted, screen, state

BUCKETS = len(ITL_BOUNDS) + 1
TIMES = st.lists(st.floats(0, 20), min_size=1, max_size=200)


def itl(**counts: float) -> dict[str, float]:
    """Return all ITL counters, with the given ones: `itl(b3=5)` counts 5 in the bucket with index 3."""
    return {name: counts.get(f"b{at}", 0.0) for at, name in enumerate(ITL_NAMES)}


# ---- percentiles and buckets


@given(TIMES, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_an_estimate_is_within_the_bucket_of_the_measured_percentile(times: list[float], share: float) -> None:
    counts = [0] * BUCKETS
    for each in times:
        counts[bisect_left(ITL_BOUNDS, each)] += 1
    estimate = quantile(counts, share)
    rank = max(0, -int(-share * len(times) // 1) - 1)
    measured = bisect_left(ITL_BOUNDS, sorted(times)[rank])
    assert estimate is not None
    low, high = (0.0, *ITL_BOUNDS, inf)[measured : measured + 2]
    assert low <= estimate <= high


@given(st.lists(st.floats(0, 1e6), max_size=100))
def test_every_time_is_in_the_bucket_up_to_its_bound(times: list[float]) -> None:
    counts = bucket_counts(times)
    assert sum(counts) == len(times) and len(counts) == len(BOUNDS) + 1
    for at, bound in enumerate(BOUNDS):
        assert sum(counts[: at + 1]) == sum(each <= bound for each in times)


def test_a_time_without_an_upper_bound_is_no_number_in_json() -> None:
    counts = dict(zip(ITL_NAMES, [0.0] * (BUCKETS - 2) + [90.0, 10.0], strict=True))
    history = (Sample(940.0, FACTS.engine, itl()), Sample(1000.0, FACTS.engine, counts))
    found = summarise(state(1000.0, stats=counts, history=history))
    assert found.itl is not None and found.itl.p99 == inf and found.itl.count == 100
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["itl"]["p99"] is None


# ---- windows


def ended_at(number: int, end: float, **values: Any) -> Any:
    """Return a request that took two seconds: 0.5 s in the queue, 1 s to the first token."""
    return request(number=number, submitted=end - 2.0, admitted=end - 1.5, first_token=end - 1.0, ended=end, **values)


def test_the_newest_requests_are_a_window_that_begins_with_the_first_end() -> None:
    requests = [ended_at(at, 990.0 + at / 64) for at in range(ENDED_REQUESTS)]
    found = latencies(state(1000.0, ended=requests), 60.0)
    assert found.e2e.window == f"10 s (newest {ENDED_REQUESTS})" and found.e2e.percentiles.count == ENDED_REQUESTS
    early = sum(each.first_token < 990.0 for each in requests)
    assert found.ttft.percentiles.count == ENDED_REQUESTS - early, "others of that time were dropped already"


def test_a_queue_time_counts_when_it_ended() -> None:
    waited = request(submitted=900.0, admitted=990.0, first_token=991.0, ended=992.0)
    assert latencies(state(1000.0, ended=[waited]), 60.0).queue_time.percentiles.median == 90.0


def test_a_request_counts_in_the_window_of_its_event() -> None:
    requests = [ended_at(1, 1000.0), ended_at(2, 941.2), ended_at(3, 939.0)]
    found = latencies(state(1000.0, ended=requests), 60.0)
    assert (found.e2e.percentiles.count, found.ttft.percentiles.count) == (2, 2)
    assert found.queue_time.percentiles.count == 1, "the second one was admitted before the last minute"
    assert found.e2e.percentiles.median == pytest.approx(2.0) and found.ttft.percentiles.p99 == pytest.approx(1.0)
    assert found.e2e.scope == "2 requests, 1 min"
    assert latencies(state(1000.0, ended=requests), None).e2e.scope == "3 requests, since load"


def test_hits_and_misses_are_apart_and_together() -> None:
    requests = [ended_at(1, 1000.0), ended_at(2, 1000.0, cached_tokens=0), ended_at(3, 1000.0, cached_tokens=10)]
    found = latencies(state(1000.0, ended=requests), 60.0)
    assert [each.percentiles.count for each in (found.ttft, found.ttft_hit, found.ttft_miss)] == [3, 1, 2]


def test_requests_that_did_not_finish_have_no_end_to_end_latency() -> None:
    requests = [ended_at(1, 1000.0, phase="failed"), ended_at(2, 1000.0, phase="cancelled")]
    found = latencies(state(1000.0, ended=requests), 60.0)
    assert (found.e2e.percentiles.count, found.ttft.percentiles.count) == (0, 2)


@pytest.mark.parametrize("seconds", [60.0, 600.0, None])
def test_records_that_do_not_reach_back_name_their_span(seconds: float | None) -> None:
    """A long request began before the span of the records; its events before the span are not counted."""
    requests = [ended_at(number, 962.0 + number * 38 / ENDED_REQUESTS) for number in range(ENDED_REQUESTS)]
    requests.append(
        request(number=9999, phase="decode", submitted=950.0, admitted=951.0, first_token=961.0, ended=None)
    )
    live = {each.number: each for each in requests[ENDED_REQUESTS:]}
    ended = requests[:ENDED_REQUESTS]
    found = latencies(state(1000.0, ended=ended, live=live), seconds)
    assert found.e2e.window == found.ttft.window == "38 s (newest 512)"
    assert found.e2e.percentiles.count == ENDED_REQUESTS
    assert found.ttft.percentiles.p99 == pytest.approx(1.0), "that of the long request is 11 s, and lies before"


def watched(seconds: float, before: dict[str, float], after: dict[str, float]) -> State:
    history = (Sample(2000.0 - seconds, FACTS.engine, before), Sample(2000.0, FACTS.engine, after))
    return state(2000.0, stats=after, history=history)


def test_token_latencies_are_the_growth_of_their_counters() -> None:
    shown = watched(60.0, itl(b5=100, b9=1), itl(b5=130, b9=21))
    minute, all_of_it = (latencies(shown, seconds).itl for seconds in (60.0, None))
    assert minute.counts is not None and all_of_it.counts is not None
    assert (minute.counts[5], minute.counts[9], minute.scope) == (30, 20, "50 tokens, 1 min")
    assert (all_of_it.counts[5], all_of_it.counts[9], all_of_it.scope) == (130, 21, "151 tokens, since load")
    assert latencies(shown, 600.0).itl.window == "1.0 min so far"


def test_an_older_engine_sends_no_token_latencies() -> None:
    found = latencies(watched(60.0, {}, {}), 60.0).itl
    assert found.counts is None and found.scope == "not sent by this engine"
    assert summarise(watched(60.0, {}, {})).itl is None and as_rows({"itl": found}) == []


# ---- drawing


def some() -> State:
    requests = [ended_at(number, 2000.0 - number) for number in range(40)]
    shown = watched(60.0, itl(), itl(b5=90, b9=10))
    return replace(shown, ended={each.number: each for each in requests})


def test_w_changes_the_window_and_the_export_follows() -> None:
    view = LatencyView()

    async def script(pilot: Pilot[None]) -> None:
        for window in (600.0, None, 60.0):
            await pilot.press("w")
            assert view.window == window
        await pilot.press("W")
        assert view.window is None
        rows = view.export().rows
        assert {row["window"] for row in rows} == {"since load"}
        assert sum(int(row["count"]) for row in rows if row["latency"] == "e2e") == 40
        assert {row["up_to_s"] for row in rows if row["latency"] == "itl"} == {0.01, 0.05}

    hosted(view, some(), script, (80, 24))


@pytest.mark.parametrize("size", [(38, 8), (20, 5)])
def test_without_room_each_histogram_is_one_line(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None]) -> None:
        lines = screen(pilot.app)
        assert "p50, p90" in lines[0]
        for at, title in enumerate(KINDS.values(), 1):
            assert at >= size[1] or title in lines[at]
        if size[0] > 20:
            assert "1.0 s  1.0 s  1.0 s" in lines[1]

    hosted(LatencyView(), some(), script, size)
