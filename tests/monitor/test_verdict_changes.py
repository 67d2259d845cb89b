"""Test changes of the verdict: levels that hold, and short excursions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv_monitor.summary import Level, Reason, Verdict
from radixkv_monitor.verdict_changes import SEVERITIES, LevelChanges, VerdictChange, one_line, without

LEVELS: tuple[Level, ...] = ("good", "idle", "warn", "bad")
FAILED = Reason("failed", "bad", "3 requests failed")
HELD = Reason("held", "warn", "97% of the pool is held")
STALE = Reason("stale", "bad", "not connected")


def of(level: Level) -> Verdict:
    return Verdict(level, f"It is {level}", () if level in ("good", "idle") else (Reason("held", level, "held"),))


def logged(log: LevelChanges, *levels: Level, start: float = 0.0) -> list[VerdictChange]:
    """Pass a verdict per second; return the changes."""
    made = (log.take("engine-1", of(level), 1000.0 + start + at, start + at) for at, level in enumerate(levels))
    return [each for each in made if each is not None]


def names(changes: list[VerdictChange]) -> list[tuple[Level | None, Level, float]]:
    return [(each.previous, each.level, each.time) for each in changes]


def test_a_level_counts_from_its_start_once_it_held() -> None:
    log = LevelChanges(after=5.0)
    assert names(logged(log, "good", *["bad"] * 5)) == [(None, "good", 1000.0)]
    (change,) = logged(log, "bad", start=6.0)
    assert names([change]) == [("good", "bad", 1001.0)]
    assert (change.sentence, change.reasons, change.engine) == ("It is bad", of("bad").reasons, "engine-1")
    assert names(logged(log, *["good"] * 7, start=7.0)) == [("bad", "good", 1007.0)]


def test_a_short_excursion_is_no_change() -> None:
    log = LevelChanges(after=5.0)
    assert names(logged(log, *(["good"] + ["bad"] * 4) * 5)) == [(None, "good", 1000.0)]


def test_levels_that_alternate_count_as_the_milder_one_and_improve_to_the_worse_one() -> None:
    log = LevelChanges(after=5.0)
    assert names(logged(log, "good", *["warn", "bad"] * 6)) == [(None, "good", 1000.0), ("good", "warn", 1001.0)]
    assert names(logged(log, *["bad"] * 6, start=13.0)) == [("warn", "bad", 1012.0)]
    assert names(logged(log, *["good", "warn"] * 6, start=19.0)) == [("bad", "warn", 1019.0)]


def test_work_and_rest_are_no_change() -> None:
    assert names(logged(LevelChanges(after=0.0), *["good", "idle"] * 9)) == [(None, "good", 1000.0)]


def test_a_first_problem_must_hold_and_has_no_previous_level() -> None:
    assert names(logged(LevelChanges(after=5.0), *["warn"] * 6)) == [(None, "warn", 1000.0)]
    assert logged(LevelChanges(after=5.0), *["warn"] * 5) == []


@given(st.lists(st.sampled_from(LEVELS), max_size=40), st.integers(0, 6))
def test_every_change_is_of_a_level_that_held(levels: list[Level], after: int) -> None:
    """Compare with all verdicts of the last `after` seconds: none is milder than a worse level, nor worse than a better
    one.
    """
    log = LevelChanges(after=float(after))
    was: int | None = None
    for at, level in enumerate(levels):
        change = log.take("e", of(level), float(at), float(at))
        window = [SEVERITIES[each] for each in levels[max(0, at - after) : at + 1]]
        full = at >= after
        worst, best = max(window), min(window)
        current = was or 0
        if was is None and SEVERITIES[level] == 0:
            expected: int | None = 0
        elif full and best > current:
            expected = best
        elif full and worst < current:
            expected = worst
        else:
            expected = None
        assert (SEVERITIES[change.level] if change is not None else None) == expected
        if change is not None:
            was = SEVERITIES[change.level]


def test_ignored_reasons_change_the_level_and_the_sentence() -> None:
    both = Verdict("bad", "3 requests failed; 97% of the pool is held; pool 97% full", (FAILED, HELD))
    assert without(both, ()) is both and without(both, ("regret",)) is both
    assert without(both, ("failed",)) == Verdict("warn", "97% of the pool is held", (HELD,))
    assert without(both, ("held",)) == Verdict("bad", "3 requests failed", (FAILED,))
    assert without(both, ("held", "failed")) == Verdict("good", f"Only ignored problems: {both.sentence}")


def test_a_change_as_json_and_as_a_line() -> None:
    change = VerdictChange(1000.0, "engine-1", "good", "bad", "Lost\n\x1b[2J: \x9b", (STALE,))
    assert change.as_dict() == {
        "time": 1000.0,
        "engine": "engine-1",
        "from": "good",
        "to": "bad",
        "sentence": "Lost\n\x1b[2J: \x9b",
        "reasons": [{"name": "stale", "level": "bad", "sentence": "not connected"}],
    }
    assert str(change).endswith("  bad   Lost  [2J:  ")
    assert one_line("a\tb\u2028c\u202ed é●") == "a b c d é●"
