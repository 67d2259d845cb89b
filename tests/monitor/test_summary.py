"""Test the summary's numbers and its sentence: no division by zero, shares that add up, the worst fact first."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.telemetry.mirror import ENDED_REQUESTS, Mirror
from radixkv.telemetry.records import ITL_NAMES, Changes
from radixkv_monitor.alert_settings import Thresholds
from radixkv_monitor.latency import is_hit, latencies, percentile, percentiles
from radixkv_monitor.occupancy import Part
from radixkv_monitor.print_once import to_text
from radixkv_monitor.state import Sample, State, StateCopier
from radixkv_monitor.summary import summarise, verdict
from tests.monitor.fake_feed import FACTS
from tests.monitor.samples import eviction, request

COUNT = st.integers(0, 10**9)
NAMES = [
    "waiting",
    "running",
    "finished",
    "failed",
    "cancelled",
    "steps",
    "step_seconds",
    "step_tokens",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "output_tokens",
    "preemptions",
    "recomputed_tokens",
    "audited_blocks",
    "differing_blocks",
    "monitor_ns",
    "cache.free_blocks",
    "cache.cached_blocks",
    "cache.held_blocks",
    "cache.pinned_blocks",
    "cache.query_tokens",
    "cache.regret_tokens",
    "cache.evicted_tokens",
]


def state_of(stats: dict[str, float], **values: object) -> State:
    changes = Changes(time=2000.0, reset=True, stats=stats)
    mirror = Mirror()
    mirror.apply(changes)
    history = (Sample(1950.0, FACTS.engine, {}), Sample(2000.0, FACTS.engine, stats))
    taken = StateCopier(FACTS, 1).take(mirror, [changes], history)
    return replace(taken, **values)  # type: ignore[arg-type]


def said(stats: dict[str, float], **values: object) -> tuple[str, str]:
    state = state_of(stats, **values)
    found = verdict(state, summarise(state))
    return found.level, found.sentence


USUAL = {"running": 2, "prompt_tokens": 1000, "cached_tokens": 930, "finished": 5, "cache.cached_blocks": 45}


@given(st.dictionaries(st.sampled_from(NAMES), st.one_of(COUNT, st.floats(0, 1e9))), st.booleans(), st.integers(0, 3))
def test_any_numbers_make_a_summary_a_sentence_and_json(stats: dict[str, float], stale: bool, waiting: int) -> None:
    live = {n: request(number=n, phase="waiting", submitted=1990.0 - n, first_token=None) for n in range(waiting)}
    state = state_of(stats, stale=stale, live=live)
    summary = summarise(state)
    blocks = summary.pool
    assert blocks.free + blocks.active + blocks.cached + blocks.pinned == FACTS.num_blocks
    assert min(blocks.free, blocks.active, blocks.cached, blocks.pinned) >= 0
    for part in (summary.hit_minute, summary.hit_run, summary.hit_lifetime, summary.regret_minute):
        assert part.share is None or 0 <= part.share <= 1
    found = verdict(state, summary)
    assert found.sentence[0].isupper() or found.sentence[0].isdigit()
    assert (found.level == "bad") == bool(stale or summary.differing_blocks or summary.failed_minute)
    json.dumps(summary.as_dict())


@given(st.lists(st.floats(0, 1e6), max_size=50), st.floats(0, 1), st.floats(0, 1))
def test_percentiles_rise_and_were_measured(values: list[float], one: float, other: float) -> None:
    values.sort()
    low, high = (percentile(values, share) for share in sorted((one, other)))
    if not values:
        assert low is None and high is None
        return
    assert low is not None and high is not None
    assert low <= high
    assert low in values and high in values
    found = percentiles(values)
    assert found.median is not None and found.p90 is not None
    assert found.count == len(values) and found.median <= found.p90
    assert sum(value <= found.p90 for value in values) >= 0.9 * len(values)


def test_healthy() -> None:
    level, sentence = said(USUAL)
    assert level == "good"
    assert sentence == (
        "Running: 93% of 1,000 prompt tokens from cache and 0 preemptions in the last minute; pool 70% full"
    )


def test_before_the_first_request_and_between_requests() -> None:
    assert said({})[1] == "Ready, no request yet: pool 0% full"
    state = state_of({"prompt_tokens": 10, "cached_tokens": 5}, now=9000.0)
    assert verdict(state, summarise(state)).sentence.startswith("Idle: 50% of 10 prompt tokens from cache since load")


def test_an_engine_with_a_preempted_request_is_not_idle() -> None:
    live = {1: request(number=1, phase="preempted", ended=None, submitted=1800.0, admitted=1801.0, first_token=1802.0)}
    state = state_of({"waiting": 1.0}, live=live, history=())
    summary = summarise(state)
    assert (summary.waiting, summary.preempted) == (0, 1)
    assert verdict(state, summary, Thresholds(preemptions=None)).sentence.startswith("Running: ")


YOUNG = replace(FACTS, started=1940.0)
"""An engine that was watched since its start."""


@pytest.mark.parametrize(
    ("stats", "values", "level", "opening"),
    [
        ({"audited_blocks": 120, "differing_blocks": 3}, {}, "bad", "3 of 120 audited blocks differ when recomputed"),
        ({}, {"stale": True}, "bad", "Not connected"),
        ({"failed": 2}, {}, "bad", "2 requests failed in the last minute"),
        ({"preemptions": 7}, {"facts": YOUNG}, "warn", "7 preemptions in the last minute"),
        ({"preemptions": 7}, {}, "warn", "7 preemptions of requests of the last minute"),
        ({"cache.query_tokens": 100, "cache.regret_tokens": 12}, {}, "warn", "12% of the tokens requested"),
        ({"cache.held_blocks": 64, "cache.cached_blocks": 0}, {}, "warn", "100% of the pool is held"),
    ],
)
def test_what_is_wrong_stands_first(
    stats: dict[str, float], values: dict[str, object], level: str, opening: str
) -> None:
    found, sentence = said(USUAL | stats, **values)
    assert found == level
    assert sentence.startswith(opening)
    assert "prompt tokens from cache" in sentence


def test_a_timeout_is_a_warning_and_a_cancel_is_a_fact() -> None:
    level, sentence = said(USUAL | {"failed": 3, "timed_out": 3})
    assert level == "warn" and sentence.startswith("3 requests timed out in the last minute; 93%")
    assert "failed" not in sentence
    level, sentence = said(USUAL | {"failed": 4, "timed_out": 3})
    assert level == "bad" and sentence.startswith("1 request failed in the last minute; 3 requests timed out")
    level, sentence = said(USUAL | {"cancelled": 2})
    assert level == "good" and sentence.endswith("2 requests cancelled in the last minute")


def test_slow_percentiles_cross_their_thresholds() -> None:
    buckets = {"itl.0.01": 98.0, "itl.2": 2.0}
    ended = {1: request(number=1, submitted=1980.0, admitted=1985.0, first_token=1990.0, ended=1995.0)}
    state = state_of(USUAL | dict.fromkeys(ITL_NAMES, 0.0) | buckets, ended=ended)
    summary = summarise(state)
    assert not verdict(state, summary, Thresholds(ttft_p90=None, queue_time_p90=None)).reasons
    assert [each.name for each in verdict(state, summary).reasons] == ["ttft_p90", "queue_time_p90"]
    slow = Thresholds(
        ttft_p50=10.0, ttft_p90=None, queue_time_p90=5.0, itl_p50=0.02, itl_p99=1.0, hit_rate=0.95, held=None
    )
    found = verdict(state, summary, slow)
    assert [each.name for each in found.reasons] == ["ttft_p50", "queue_time_p90", "itl_p99", "hit_rate"]
    assert found.level == "warn" and "TTFT p50 10 s of 1 request, 1 min" in found.sentence


def test_missed_tokens_are_the_growth_of_the_engines_counters() -> None:
    before = {"missed_full": 5, "missed_never_seen": 100, "missed_evicted": 7, "missed_no_state": 0}
    now = {"missed_full": 9, "missed_never_seen": 130, "missed_evicted": 57, "missed_no_state": 0}
    state = state_of(now, history=(Sample(1990.0, "e", before), Sample(2000.0, "e", now)))
    summary = summarise(state)
    assert list(summary.missed_tokens.items()) == [("evicted", 50), ("never_seen", 30)]
    assert "misses      130 never seen, 57 evicted tokens, since load" in to_text(state)
    assert "misses      not sent by this engine" in to_text(state_of(USUAL))


def test_times_to_the_first_token_are_told_apart_by_what_was_cached() -> None:
    ended = {
        1: request(number=1, cached_tokens=50, prompt_tokens=100, submitted=1990.0, first_token=1990.2),
        2: request(number=2, cached_tokens=49, prompt_tokens=100, submitted=1990.0, first_token=1991.0),
        3: request(number=3, cached_tokens=0, prompt_tokens=0, submitted=1990.0, first_token=None),
        4: request(number=4, cached_tokens=0, prompt_tokens=9, submitted=1930.0, first_token=1931.0),
    }
    summary = summarise(state_of({}, ended=ended))
    assert summary.ttft_hit.count == summary.ttft_miss.count == 1
    assert summary.ttft_hit.median == pytest.approx(0.2)
    assert summary.ttft_miss.median == pytest.approx(1.0)
    assert [is_hit(each) for each in ended.values()] == [True, False, False, False]


def test_admissions_in_turn_and_the_reason_of_the_first_wait_are_told() -> None:
    turns = {"preemptions": 7, "turn_admissions": 12, "overdue_admissions": 1, "waiting": 1}
    live = {1: request(phase="waiting", submitted=1995.0, admitted=None, ended=None, waits_for="blocks")}
    state = state_of(USUAL | turns, facts=YOUNG, live=live)
    summary = summarise(state)
    assert (summary.preemptions_minute, summary.waits_for) == (7, "blocks")
    assert "2 running, 1 waiting, first in queue waits for blocks; since load" in to_text(state)
    assert "7 preemptions, 12 admitted in turn, 1 overdue\n" in to_text(state)


def test_a_run_counts_from_its_baseline() -> None:
    baseline = Sample(1990.0, FACTS.engine, {"prompt_tokens": 900, "cached_tokens": 900})
    assert summarise(state_of(USUAL, baseline=baseline)).hit_run == Part(30, 100)
    assert summarise(state_of(USUAL)).hit_run == Part(930, 1000)


def first_look(**values: object) -> State:
    """Return the state of an old engine at the moment at which a monitor attaches."""
    stats = {"preemptions": 40.0, "failed": 9.0, "finished": 700.0, "prompt_tokens": 1e6, "cached_tokens": 5e5}
    return state_of(stats, history=(Sample(2000.0, FACTS.engine, stats),), **values)


def test_the_first_look_knows_the_last_minute_from_records() -> None:
    old = {"submitted": 1900.0, "admitted": 1901.0, "first_token": 1902.0}
    ended = {
        1: request(number=1, phase="failed", ended=1990.0, prompt_tokens=100, **old),
        2: request(number=2, phase="failed", ended=1939.0, preemptions=8, **old),
        3: request(number=3, ended=1995.0, submitted=1950.0, admitted=1951.0, prompt_tokens=100, cached_tokens=25),
    }
    live = {4: request(number=4, phase="decode", ended=None, preemptions=2, admitted=1980.0, prompt_tokens=300)}
    evictions = {
        1: eviction(number=1, time=1995.0, tokens=50, wanted_again=1999.0),
        2: eviction(number=2, time=1900.0, tokens=16, wanted_again=1930.0),
    }
    state = first_look(ended=ended, live=live, evictions=evictions)
    summary = summarise(state)
    assert (summary.failed_minute, summary.requests_minute, summary.preemptions_minute) == (1, 2, 2)
    assert summary.hit_minute == Part(25 + 60, 400)
    assert summary.regret_minute == Part(50, 400)
    assert summary.evicted_per_second == 5.0
    assert summary.output_per_second is None and summary.watched == 0
    found = verdict(state, summary)
    assert found.level == "bad"
    assert found.sentence.startswith(
        "1 request failed in the last minute; 2 preemptions of requests of the last minute"
    )
    json.dumps(summary.as_dict())


def test_the_first_look_at_an_old_engine_at_rest_finds_nothing() -> None:
    summary = summarise(first_look())
    assert (summary.failed_minute, summary.preemptions_minute, summary.requests_minute) == (0, 0, 0)
    assert summary.preemptions == 40


def test_a_preemption_counts_in_the_minute_in_which_it_began() -> None:
    old = {"phase": "decode", "ended": None, "submitted": 1800.0, "admitted": 1801.0}
    live = {
        1: request(number=1, preemptions=3, preempted_ms=(20_000, 30_000, 139_000, 150_000, 141_000, 199_500), **old)
    }
    ended = {2: request(number=2, preemptions=1, preempted_ms=(500, 900), submitted=1900.0, ended=1990.0)}
    assert summarise(first_look(live=live, ended=ended)).preemptions_minute == 1


def test_times_after_a_clock_was_set_back_are_in_no_window() -> None:
    later = {"submitted": 5600.0, "admitted": 5600.5, "first_token": 5601.0, "ended": 5602.0}
    ended = {1: request(number=1, phase="failed", **later), 2: request(number=2, preemptions=1, **later)}
    evictions = {1: eviction(number=1, time=5600.0, wanted_again=5601.0)}
    summary = summarise(first_look(ended=ended, evictions=evictions))
    assert (summary.failed_minute, summary.requests_minute, summary.preemptions_minute) == (0, 0, 0)
    assert summary.hit_minute.whole == summary.regret_minute.part == summary.evicted_per_second == 0
    assert summary.ttft.count == summary.e2e.count == summary.queue_time.count == 0
    assert latencies(state_of({}, ended=ended), None).ttft.percentiles.count == 2


def test_warnings_and_facts_are_of_the_last_minute_not_since_load() -> None:
    before = {"cache.query_tokens": 1000.0, "cache.regret_tokens": 900.0, "cancelled": 5.0, "failed": 3.0}
    stats = before | {"cache.query_tokens": 2000.0}
    history = (Sample(1930.0, FACTS.engine, before), Sample(2000.0, FACTS.engine, stats))
    state = state_of(stats, history=history)
    found = verdict(state, summarise(state), Thresholds(failed=0))
    assert not found.reasons and "cancelled" not in found.sentence


def test_each_percentile_names_its_own_window() -> None:
    counts = dict.fromkeys(ITL_NAMES, 0.0)
    history = (Sample(1980.0, FACTS.engine, counts), Sample(2000.0, FACTS.engine, counts | {"itl.0.5": 8.0}))
    state = state_of(counts | {"itl.0.5": 8.0}, history=history)
    found = verdict(state, summarise(state), Thresholds(itl_p50=0.3))
    assert found.sentence.startswith("ITL p50 400 ms of 8 tokens, 20 s so far;")


def test_growth_before_the_first_sample_is_in_no_window_unless_it_is_there_as_a_whole() -> None:
    stats = {"failed": 9.0, "finished": 300.0, "output_tokens": 9000.0, "prompt_tokens": 5000.0}
    history = (Sample(1998.0, FACTS.engine, stats), Sample(2000.0, FACTS.engine, stats))
    born = replace(FACTS, started=1970.0)
    summary = summarise(state_of(stats, facts=born, history=history))
    assert (summary.output_per_second, summary.rate_window) == (0.0, 2.0), "not the mean since load"
    assert (summary.failed_minute, summary.requests_minute, summary.watched) == (9, 309, 30.0)
    older = summarise(state_of(stats, facts=replace(FACTS, started=1930.0), history=history))
    assert (older.failed_minute, older.requests_minute, older.watched) == (0, 0, 2.0)


def test_the_cpu_time_before_the_engine_was_loaded_is_no_share_of_a_core() -> None:
    """A process may have used 40 s before it loaded the engine 4 s ago, and an old sample may lack the time."""
    stats = {"process_cpu_seconds": 42.0, "process_rss_bytes": 1e9}
    born = replace(FACTS, started=1996.0)
    newest, older = (
        Sample(2000.0, FACTS.engine, stats),
        Sample(1998.0, FACTS.engine, stats | {"process_cpu_seconds": 41.0}),
    )
    without = Sample(1997.0, FACTS.engine, {})
    found = [
        summarise(state_of(stats, facts=born, history=history)).process
        for history in ((newest,), (without, newest), (without, older, newest))
    ]
    assert [each.cpu_share for each in found if each is not None] == [None, None, 0.5]


def test_reasons_name_their_threshold_and_a_threshold_can_be_switched_off() -> None:
    live = {1: request(number=1, phase="waiting", submitted=1960.0, admitted=None, first_token=None, ended=None)}
    ended = {2: request(number=2, phase="failed", submitted=1990.0, ended=1995.0)}
    state = state_of({"cache.held_blocks": 62.0, "waiting": 1.0, "failed": 1.0}, live=live, ended=ended)
    found = verdict(state, summarise(state))
    assert [(each.name, each.level) for each in found.reasons] == [
        ("failed", "bad"),
        ("longest_wait", "warn"),
        ("held", "warn"),
    ]
    assert found.level == "bad" and all(each.sentence.lower() in found.sentence.lower() for each in found.reasons)
    patient = verdict(state, summarise(state), Thresholds(failed=None, longest_wait=60.0, held=None))
    assert patient.level == "good" and not patient.reasons


def test_a_minute_that_the_records_do_not_reach_is_named_by_its_seconds() -> None:
    def busy(requests: int) -> State:
        ended = {
            number: request(number=number, submitted=1985.0, admitted=1986.0, ended=1987.0 + 0.01 * number)
            for number in range(requests)
        }
        state = state_of(USUAL, ended=ended)
        return replace(state, history=(Sample(1998.0, FACTS.engine, USUAL), Sample(2000.0, FACTS.engine, USUAL)))

    state = busy(ENDED_REQUESTS)
    summary = summarise(state)
    assert (summary.covered, summary.minute_name, summary.minute) == (13.0, "13 s", "the last 13 s")
    assert " in the last 13 s; pool" in verdict(state, summary).sentence
    assert summarise(busy(ENDED_REQUESTS - 1)).minute == "the last minute"
    assert summarise(state_of(USUAL)).minute_name == "1 min"
