"""Test samples over time: the parts of a series add up, and ten minutes are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv_monitor.history import Sampler, gauges, grown, of_one_engine, rate, series, value
from radixkv_monitor.state import Sample

STEPS = st.lists(st.tuples(st.floats(0.01, 30), st.integers(0, 1000)), min_size=1, max_size=40)


def samples_of(steps: list[tuple[float, int]]) -> tuple[Sample, ...]:
    sampler, time, counter = Sampler(), 1000.0, 0
    for pause, more in steps:
        time += pause
        counter += more
        sampler.note(time, "e", {"n": float(counter)})
    return sampler.samples


@given(STEPS, st.floats(1, 900), st.integers(1, 100))
def test_the_parts_of_a_series_add_up(steps: list[tuple[float, int]], seconds: float, points: int) -> None:
    history = samples_of(steps)
    now = history[-1].time
    parts = series(history, "n", now, seconds, points)
    assert len(parts) == points
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(grown(history, "n", now, seconds), abs=1e-6)
    assert grown(history, "n", now, seconds) <= history[-1].stats["n"] - history[0].stats["n"] + 1e-6
    assert rate(history, "n", now, seconds) * min(seconds, now - history[0].time) == pytest.approx(sum(parts), abs=1e-6)


@given(STEPS)
def test_samples_are_in_order_and_the_last_is_what_was_told_last(steps: list[tuple[float, int]]) -> None:
    history = samples_of(steps)
    times = [sample.time for sample in history]
    assert times == sorted(times)
    assert history[-1].stats["n"] == sum(more for _, more in steps)
    assert value(history, "n", times[-1] + 50) == history[-1].stats["n"]


def test_ten_minutes_are_kept_and_little_more() -> None:
    sampler = Sampler()
    for tick in range(20_000):
        sampler.note(tick / 10, "e", {"n": float(tick)})
    history = sampler.samples
    assert 600 <= history[-1].time - history[0].time <= 603
    assert 590 <= len(history) <= 620
    assert rate(history, "n", history[-1].time, 600) == pytest.approx(10, rel=0.01)


def test_a_silent_time_is_flat_and_what_comes_after_it_is_recent() -> None:
    sampler = Sampler()
    sampler.note(0.0, "e", {"n": 0.0})
    sampler.note(100.0, "e", {"n": 50.0})
    history = sampler.samples
    assert grown(history, "n", 100.0, 2.0) == 50.0
    assert value(history, "n", 98.0) == 0.0


def test_an_unseen_time_grew_steadily() -> None:
    sampler = Sampler()
    sampler.note(0.0, "e", {"n": 0.0})
    sampler.note(600.0, "e", {"n": 60_000.0}, unseen=True)
    history = sampler.samples
    assert rate(history, "n", 600.0, 10.0) == pytest.approx(100)
    assert series(history, "n", 600.0, 600.0, 3) == pytest.approx([20_000] * 3)


def test_a_clock_that_goes_back_begins_again() -> None:
    sampler = Sampler()
    sampler.note(1000.0, "e", {"n": 5.0})
    sampler.note(10.0, "e", {"n": 1.0})
    assert [sample.time for sample in sampler.samples] == [10.0]


def test_another_engine_counts_for_itself() -> None:
    history = (Sample(0.0, "a", {"n": 900.0}), Sample(1.0, "a", {"n": 1000.0}), Sample(2.0, "b", {"n": 10.0}))
    assert grown(of_one_engine(history), "n", 2.0, 60.0) == 0.0
    assert value(history, "n", 1.5) == 1000.0, "no line leads from one engine to the next"


def test_of_nothing() -> None:
    assert value((), "n", 1.0) == grown((), "n", 1.0, 60.0) == rate((), "n", 1.0, 60.0) == 0.0
    assert series((), "n", 1.0, 60.0, 3) == [0.0, 0.0, 0.0]
    assert gauges((), "n", 1.0, 60.0, 2) == [None, None]
    assert of_one_engine(()) == ()


def test_a_gauge_is_unknown_before_the_first_sample() -> None:
    history = (Sample(50.0, "e", {"running": 3.0}), Sample(60.0, "e", {"running": 3.0}))
    assert gauges(history, "running", 60.0, 60.0, 6) == [None, None, None, None, 3.0, 3.0]
