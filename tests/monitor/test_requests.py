"""Test the sentences about misses and evictions, and the bars of the waterfall."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot
from textual.widgets import Static

from radixkv.prompt_breaks import RULES
from radixkv_monitor.views.evictions import eviction_sentence
from radixkv_monitor.views.requests import (
    DECODE,
    LENGTHS,
    PREFILL,
    WAITING,
    Axis,
    RequestRow,
    RequestsView,
    axis_of,
    bar,
    miss_sentence,
    miss_word,
    preempted_seconds,
)
from radixkv_monitor.views.sessions import SessionsView
from radixkv_monitor.views.table_view import TableView
from tests.monitor import samples
from tests.monitor.view_host import hosted, screen, state


def test_a_reply_with_drafts() -> None:
    request = samples.request(output_tokens=60, drafted_tokens=50, accepted_tokens=40)
    assert miss_sentence(request).endswith("40 of 50 drafted tokens were accepted: 3.0 tokens a step.")
    assert "draft" not in miss_sentence(samples.request(output_tokens=60))


def test_a_prompt_that_departs_from_what_is_cached() -> None:
    request = samples.request(cached_tokens=80, miss_reason="diverged", miss_at=80)
    assert miss_sentence(request) == (
        "80 of 100 prompt tokens (80%) were cached. At token 80 the prompt diverges from all cached prompts."
    )
    assert miss_word(request) == "diverged @80"


def test_a_prompt_whose_rest_was_evicted() -> None:
    request = samples.request(
        miss_reason="evicted",
        miss_at=60,
        miss_evicted_tokens=16,
        miss_evicted_ago=12.0,
        miss_pressure="to make room for 3 blocks when 1 were free",
    )
    assert miss_sentence(request).endswith(
        "From token 60 on, 16 more tokens would have matched, but were evicted 12 s before, to make room for 3 blocks "
        "when 1 were free."
    )


def test_new_and_whole_and_unadmitted_prompts() -> None:
    assert "never computed here" in miss_sentence(samples.request(miss_reason="never_seen", miss_at=60))
    assert "last token is always computed" in miss_sentence(samples.request(miss_reason="full", cached_tokens=99))
    waiting = samples.request(phase="waiting", admitted=None, first_token=None, ended=None, miss_reason=None)
    assert miss_sentence(waiting).startswith("It has not been admitted yet")
    assert miss_word(samples.request(admitted=None, miss_reason=None)) == ""
    assert miss_word(samples.request(miss_reason="full", miss_at=None)) == "full"


def test_computed_tokens_are_of_the_prompt() -> None:
    shown = state(
        live=[
            samples.request(number=1, prompt_tokens=100, cached_tokens=60, computed_tokens=75),
            samples.request(number=2, prompt_tokens=100, cached_tokens=60, computed_tokens=10),
        ]
    )
    rows = RequestsView().rows_of(shown)
    assert [row.computed for row in rows] == [40, 10]


def test_the_reason_of_the_wait_is_in_the_headline_the_filter_and_the_description() -> None:
    waiting = {"phase": "waiting", "admitted": None, "first_token": None, "ended": None, "finish": None}
    shown = state(live=[samples.request(number=1, waits_for="turn", **waiting), samples.request(number=2, **waiting)])

    async def script(pilot: Pilot[None]) -> None:
        words, view = " ".join(screen(pilot.app)).split(), pilot.app.query_one(RequestsView)
        assert "0 preempted · first in queue waits for its group's turn · newest" in " ".join(words)
        view.apply_filter("turn")
        assert [row.request.number for row in view.table.rows] == [1]
        assert "Waiting for 2.0 s. The first in queue waits for its group's turn." in screen(pilot.app)[-1]

    hosted(RequestsView(), shown, script, (80, 24))


def test_names_of_the_sender_are_in_a_column_the_filter_and_the_description() -> None:
    names = {"request_id": "req_17", "tenant": "ada", "label": "nightly"}
    shown = state(ended=[samples.request(number=1), samples.request(number=2, **names)], sessions=[
        samples.session(number=3, **names)])  # fmt: skip
    for view, key in ((RequestsView(), 2), (SessionsView(), 3)):

        async def script(pilot: Pilot[None], view: TableView[Any] = view, key: int = key) -> None:
            assert {"req_17", "nightly"} <= set("\n".join(screen(pilot.app)).split())
            for word in names.values():
                view.apply_filter(word)
                assert [view.key(row) for row in view.table.rows] == [key]
            assert "API id req_17" in str(view.query_one(".detail", Static).content)

        hosted(view, shown, script, (160, 40))
    plain = RequestsView()

    async def without(pilot: Pilot[None]) -> None:
        header = next(line for line in screen(pilot.app) if line.startswith("request "))
        assert "API id" not in header and "label" not in header and "miss reason" in header

    hosted(plain, state(ended=[samples.request(number=1)]), without, (120, 40))


def test_a_changed_part_and_both_texts_are_in_the_description() -> None:
    changed = {"miss_reason": "diverged", "changed_part": "tools[3]", "changed_rule": "tools-order"}
    rows = [samples.request(**changed, tenant="a" * 60, own_text="It is \\x1b[2J noon.", cached_text="a " * 40),
            samples.request(number=2, **changed | {"changed_rule": "later"}, cached_text=""),
            samples.request(number=3, miss_reason="diverged")]  # fmt: skip
    view = RequestsView()
    first, second, old = (view.detail(row, state()).plain for row in view.rows_of(state(ended=rows)))
    assert f"tools[3] was different before (tools-order). {RULES['tools-order'].remedy}" in first
    assert "(later).\nTo see both texts at this place, load the engine with expose_text=True" in second
    assert "expose_text" not in old and "different" not in old, "an old recording"

    async def script(pilot: Pilot[None]) -> None:
        lines = [line.strip() for line in screen(pilot.app)]
        assert {"Prompt: It is \\x1b[2J noon.", f"Cached: {'a ' * 34}a", "a a a a a"} <= set(lines)

    hosted(RequestsView(), state(ended=rows[:1]), script, (80, 24))


def test_its_own_bar_has_a_cell_for_each_part() -> None:
    times = {"submitted": 1000.0, "admitted": 1000.1, "first_token": 1000.2, "ended": 1060.0}
    (row,) = RequestsView().rows_of(state(ended=[samples.request(**times)]))
    (column,) = [each for each in RequestsView.columns if each.title == "its time"]
    assert "".join(text for text, _ in column.draw(row, 12)) == "░▒" + "█" * 10


def test_the_mean_itl_matches_one_stream() -> None:
    times = {"first_token": 1000.3, "ended": 1001.2, "output_tokens": 40}
    shown = state(ended=[samples.request(streams=4, **times), samples.request(number=2, **times)])
    four, one = RequestsView().rows_of(shown)
    assert four.itl is not None and abs(four.itl - 0.1) < 1e-9, "9 times between the 10 tokens of each stream"
    assert one.itl is not None and abs(one.itl - 0.9 / 39) < 1e-9


def test_an_ended_request_is_described_in_the_past_tense() -> None:
    unadmitted = samples.request(phase="cancelled", admitted=None, first_token=None, miss_reason=None)
    assert miss_sentence(unadmitted).startswith("It ended before it was admitted, so")
    tokenless = samples.request(phase="failed", number=2, first_token=None)
    shown = state(ended=[unadmitted, tokenless])
    first, second = (RequestsView().detail(row, shown).plain for row in RequestsView().rows_of(shown))
    assert "It waited for 1.0 s." in first
    assert "prefill 900 ms, no token; E2E 1.0 s." in second


def test_cached_tokens_without_their_recurrent_state() -> None:
    request = samples.request(cached_tokens=64, miss_reason="diverged", miss_at=80, miss_without_state=16)
    assert miss_sentence(request) == (
        "64 of 100 prompt tokens (64%) were cached. 16 more tokens had cached KV, but were computed again for their "
        "recurrent state. At token 80 the prompt diverges from all cached prompts."
    )


def test_an_eviction_and_its_regret() -> None:
    record = samples.eviction(node=7, start=32, tokens=64, blocks=4, idle_s=95.0, hits=2)
    assert eviction_sentence(record) == (
        "Tokens 32 to 96 of node 7 were evicted, to make room for 4 blocks when 0 were free: 4 blocks, unused for "
        "1.6 min; the cached prefixes of 2 requests ended here. They have not been requested since."
    )
    regretted = samples.eviction(time=1000.0, wanted_again=1012.0)
    assert "requested again 12 s later" in eviction_sentence(regretted)


GLYPHS = {WAITING[0]: 0, PREFILL[0]: 1, DECODE[0]: 2}
seconds = st.floats(0, 300, allow_nan=False)


@st.composite
def lives(draw: st.DrawFn) -> dict[str, object]:
    """Draw the times of one request, up to any phase."""
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
    assert " " not in drawn  # no gaps between the parts
    if request.live:
        assert text[-1] in GLYPHS  # a live request reaches the present


def test_a_bar_shows_how_long_each_part_took() -> None:
    request = samples.request(submitted=0.0, admitted=2.0, first_token=4.0, ended=8.0)
    assert "".join(text for text, _ in bar(request, Axis(0.0, 10.0), 10, 10.0)) == "░░▒▒████  "
    assert "".join(text for text, _ in bar(request, Axis(9.0, 19.0), 10, 19.0)) == "<         "


def test_a_bar_shows_preemptions() -> None:
    times = {"submitted": 0.0, "admitted": 1.0, "first_token": 3.0, "ended": 10.0}
    lost = samples.request(**times, preempted_ms=(1500, 2500, 5000, 8000))
    assert "".join(text for text, _ in bar(lost, Axis(0.0, 10.0), 20, 10.0)) == "░░▒──▒████──────████"
    still = samples.request(number=1, phase="preempted", **(times | {"ended": None}), preempted_ms=(6000,))
    assert "".join(text for text, _ in bar(still, Axis(0.0, 10.0), 10, 10.0)) == "░▒▒███────"
    assert preempted_seconds(lost, 0.0, 10.0) == 4.0 and preempted_seconds(still, 3.0, 10.0) == 4.0


def test_the_times_exclude_preemptions() -> None:
    ended = samples.request(
        submitted=0.0, admitted=1.0, first_token=3.0, ended=10.0, output_tokens=5, preemptions=2,
        preempted_ms=(1500, 2500, 5000, 8000), recomputed_tokens=81,
    )  # fmt: skip
    row = RequestRow(ended, 20.0, Axis(0.0, 20.0))
    assert row.itl == 1.0 and row.total == 10.0
    (shown,) = RequestsView().rows_of(state(now=20.0, ended=[ended]))
    assert shown.itl == 1.0
    text = RequestsView().detail(row, state()).plain
    assert "Queue time 1.0 s, prefill 1.0 s, decode 4.0 s (5 tokens, mean ITL 1.0 s, 1 tokens/s)" in text
    assert "preempted 2 times for 4.0 s; E2E 10 s. Computed again after it was preempted: 81 tokens." in text


def test_the_axis_shows_all_that_runs_if_it_can() -> None:
    runs = samples.request(phase="decode", ended=None, submitted=80.0)
    ended = samples.request(submitted=1.0)
    assert axis_of([ended], 100.0) == Axis(85.0, 100.0)
    assert axis_of([runs, ended], 100.0) == Axis(70.0, 100.0)
    assert axis_of([runs], 1000.0).length == LENGTHS[-1]
