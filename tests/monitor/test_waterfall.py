"""Bars fill their cell exactly, in order, whatever the times are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv_monitor.waterfall import DECODE, LENGTHS, PREFILL, WAITING, Axis, axis_of, bar
from tests.monitor import samples

GLYPHS = {WAITING[0]: 0, PREFILL[0]: 1, DECODE[0]: 2}
seconds = st.floats(0, 300, allow_nan=False)


@st.composite
def lives(draw: st.DrawFn) -> dict[str, object]:
    """The times of one request, up to any phase."""
    times = sorted(draw(st.lists(seconds, min_size=4, max_size=4)))
    known = draw(st.integers(1, 4))
    submitted, admitted, first, ended = (t if i < known else None for i, t in enumerate(times))
    phase = ("waiting", "prefill", "decode", "finished")[known - 1]
    return {"submitted": submitted, "admitted": admitted, "first_token": first, "ended": ended, "phase": phase}


@given(lives(), st.integers(3, 120), seconds)
def test_a_bar_is_as_wide_as_its_cell_and_its_parts_stand_in_order(
    life: dict[str, object], width: int, more: float
) -> None:
    request = samples.request(**life)
    now = max(time for time in life.values() if isinstance(time, float)) + more
    text = "".join(piece for piece, _ in bar(request, Axis(now - 60, now), width, now))
    assert len(text) == width
    order = [GLYPHS[glyph] for glyph in text if glyph in GLYPHS]
    assert order == sorted(order)
    drawn = text.strip()
    assert " " not in drawn  # nothing between the parts
    if request.live:
        assert text[-1] in GLYPHS  # what runs runs up to now


def test_a_bar_shows_how_long_each_part_took() -> None:
    request = samples.request(submitted=0.0, admitted=2.0, first_token=4.0, ended=8.0)
    assert "".join(text for text, _ in bar(request, Axis(0.0, 10.0), 10, 10.0)) == "░░▒▒████  "
    assert "".join(text for text, _ in bar(request, Axis(9.0, 19.0), 10, 19.0)) == "<         "


def test_a_part_too_short_to_see_is_seen() -> None:
    request = samples.request(submitted=5.0, admitted=5.001, first_token=5.002, ended=8.0)
    assert "".join(text for text, _ in bar(request, Axis(0.0, 10.0), 10, 10.0)) == "   ░▒███  "


def test_the_axis_shows_all_that_runs_if_it_can() -> None:
    runs = samples.request(phase="decode", ended=None, submitted=80.0)
    ended = samples.request(submitted=1.0)
    assert axis_of([ended], 100.0) == Axis(85.0, 100.0)
    assert axis_of([runs, ended], 100.0) == Axis(70.0, 100.0)
    assert axis_of([runs], 1000.0).length == LENGTHS[-1]
