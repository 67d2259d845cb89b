"""The length of a draft: longer where rows are cheap and tokens are accepted, and none where that does not pay."""

from __future__ import annotations

from array import array
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.engine.draft_length import DraftLength, RowCosts, SentDraft, Tally
from radixkv.engine.drafts import Draft
from radixkv.engine.scheduler import Work

ROWS = (1, 2, 4, 8, 16)
CHEAP, DEAR = ((1, 1.0), (16, 1.1)), tuple((rows, float(rows)) for rows in ROWS)
costs = st.lists(st.floats(0.01, 10), min_size=2, max_size=5).map(
    lambda seconds: tuple(zip(ROWS, seconds, strict=False))
)


def work(streams: int) -> list[Work]:
    """Return decodes of streams."""
    return [Work(cast(Any, None), 0, array("i", [0]), cast(Any, None)) for _ in range(streams)]


def longest(length: DraftLength, streams: int, source: str = "own", tally: Tally | None = None) -> int:
    """Return the length of the first draft in a step of this many decodes."""
    tally, step = Tally() if tally is None else tally, length.begin(work(streams))
    return step.best(Draft(array("i", range(16)), source, 24), 16, tally) if step.wants(tally) else 0


@given(costs, st.lists(st.tuples(st.integers(1, 40), st.floats(0.001, 100)), max_size=8))
def test_seconds_are_positive_and_grow_with_the_rows_up_to_each_correction(measured: Any, corrections: Any) -> None:
    found = RowCosts(measured)
    seconds = [found.seconds(rows) for rows in range(1, 70)]
    assert seconds == pytest.approx(sorted(seconds)) and seconds[0] == min(each for _, each in measured)
    for rows, took in corrections:
        before = found.seconds(rows)
        found.correct(rows, took)
        assert min(took, before) * 0.999 <= found.seconds(rows) <= max(took, before) * 1.001
    assert all(found.seconds(rows) > 0 for rows in range(1, 70))


@given(costs, st.integers(1, 64), st.sampled_from(["tree", "past", "own", "prediction"]))
def test_a_draft_has_the_most_expected_tokens_a_second(measured: Any, streams: int, source: str) -> None:
    length = DraftLength(RowCosts(measured), 16)
    seconds, chance = length.costs.seconds, length.rate(source, 24).mean
    rates = [
        (streams + sum(chance**at for at in range(1, count + 1))) / seconds(streams + count) for count in range(17)
    ]
    rates[0] *= 1.03  # a draft must gain that much
    assert rates[longest(length, streams, source=source)] == pytest.approx(max(rates))


def test_costs_and_streams_decide() -> None:
    assert longest(DraftLength(RowCosts(CHEAP), 16), 1) > 8
    dear = DraftLength(RowCosts(DEAR), 16)
    assert [longest(dear, streams) for streams in (1, 8, 64)] == [0, 0, 0]
    stepped = RowCosts(((1, 1.0), (2, 1.4), (16, 7.0)))  # a row costs little beside one stream, not beside many
    assert longest(DraftLength(stepped, 16), 1) > 0 == longest(DraftLength(stepped, 16), 64)


def test_rows_between_two_measured_numbers_cost_as_much_as_the_larger_one() -> None:
    found = RowCosts(((1, 1.0), (8, 3.0), (12, 4.0)))
    assert [found.seconds(rows) for rows in (8, 9, 12, 13)] == [3.0, 4.0, 4.0, 4.25]


def test_a_stream_whose_drafts_fail_pauses_longer_each_time_and_recovers() -> None:
    length, tally, pauses = DraftLength(RowCosts(CHEAP), 16), Tally(), []
    for _ in range(8):
        length.verified(SentDraft("own", 24, 4), 0, tally, ended=False)
        pauses.append(tally.pause)
        while tally.pause:
            assert not longest(length, 1, tally=tally)
    assert pauses == [0, 4, 8, 16, 32, 32, 32, 32]
    low = length.rate("own", 24).mean
    for _ in range(80):
        length.verified(SentDraft("own", 24, 4), 4, tally, ended=False)
    assert not tally.pause and length.rate("own", 24).mean > low and longest(length, 1, tally=tally) > 4
