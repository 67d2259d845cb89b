"""Test Sessions, Evictions and Requests: every key, both sizes, a cursor that stays on its row, and narrow layouts.

Also test that exported tables read back as the same values.
"""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from textual.pilot import Pilot

from radixkv_monitor.detail import Detail
from radixkv_monitor.state import State
from radixkv_monitor.views import NodeSelected, RequestSelected, Selection, Table
from radixkv_monitor.views.evictions import EvictionsView
from radixkv_monitor.views.requests import RequestsView
from radixkv_monitor.views.sessions import SessionsView
from radixkv_monitor.views.table_view import TableView
from radixkv_monitor.widgets.detail_pane import _text
from tests.monitor import samples
from tests.monitor.view_host import hosted, screen, state

REQUESTS = state(
    live=[
        samples.request(number=3, phase="waiting", admitted=None, first_token=None, ended=None, submitted=1001.0),
        samples.request(number=4, phase="decode", ended=None, namespace="red", submitted=1000.5, output_tokens=7),
    ],
    ended=[
        samples.request(number=1, miss_reason="diverged", miss_at=60),
        samples.request(number=2, phase="failed", miss_reason="never_seen", miss_at=0, cached_tokens=0, finish=None),
    ],
    stats={"running": 1, "waiting": 1},
)
SESSIONS = state(
    sessions=[
        samples.session(number=1, used=990.0),
        samples.session(number=2, used=1001.0, live=1, tokens=90, namespace="red"),
        samples.session(number=3, used=980.0, prompt_tokens=0, cached_tokens=0, requests=0),
    ]
)
EVICTIONS = state(
    nodes=[samples.node(id=5)],
    evictions=[
        samples.eviction(number=1, node=5, time=990.0),
        samples.eviction(number=2, node=6, time=1001.0, wanted_again=1001.5, tokens=320),
    ],
    stats={"cache.evicted_tokens": 352, "cache.regret_tokens": 320, "cache.query_tokens": 3200},
)
BOTH = pytest.mark.parametrize("size", [(80, 24), pytest.param((160, 48), marks=pytest.mark.long)])


def numbers(view: TableView) -> list[object]:  # type: ignore[type-arg]
    return [view.key(row) for row in view.table.rows]


def test_the_cursor_tells_the_miss_and_selects_the_request() -> None:
    view = RequestsView()

    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("end")
        await pilot.pause()
        assert view.table.cursor is not None and view.table.cursor.request.number == 1
        assert any("At token 60 the prompt diverges" in line for line in screen(pilot.app))
        await pilot.press("up", "home", "down", "k", "j")
        assert view.table.cursor is not None and view.table.cursor.request.number == 3

    app = hosted(view, REQUESTS, script)
    assert [each.number for each in app.selections if isinstance(each, RequestSelected)][:2] == [1, 2]


def evictions(newest: int, most: int = 200) -> State:
    kept = range(max(1, newest - most + 1), newest + 1)
    return state(evictions=[samples.eviction(number=each, node=each, time=900.0 + each) for each in kept])


def line_of_cursor(view: TableView) -> int:  # type: ignore[type-arg]
    """Return the line of the screen with the cursor, counted from the table's first row."""
    return numbers(view).index(view.key(view.table.cursor)) - view.table.top


def test_the_cursor_stays_on_the_newest_row_until_it_is_moved() -> None:
    view = EvictionsView()

    async def script(pilot: Pilot[None]) -> None:
        for newest in (60, 75):
            view.update(evictions(newest))
            await pilot.pause()
            assert view.table.cursor is not None and view.table.cursor.eviction.number == newest
            assert any(f"of node {newest} were evicted" in line for line in screen(pilot.app))
        await pilot.press(*["down"] * 5)
        assert view.table.cursor is not None and view.table.cursor.eviction.number == 70
        for newest in (90, 120):
            view.update(evictions(newest))
            await pilot.pause()
            assert view.table.cursor.eviction.number == 70 and line_of_cursor(view) == 5
            assert any("of node 70 were evicted" in line for line in screen(pilot.app))
        await pilot.press("home")
        view.update(evictions(121))
        await pilot.pause()
        assert view.table.cursor.eviction.number == 121 and line_of_cursor(view) == 0

    hosted(view, evictions(50), script, (100, 30))


def test_a_row_that_is_gone_is_said_to_be() -> None:
    view = EvictionsView()

    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("end", "up")
        view.update(evictions(100, 60))
        await pilot.pause()
        text = " ".join(" ".join(screen(pilot.app)).split())
        assert "The selected eviction is no longer listed. The one in its place:" in text
        assert view.table.cursor is not None
        assert f"of node {view.table.cursor.eviction.number} were evicted" in text
        await pilot.press("up")
        await pilot.pause()
        assert "no longer listed" not in " ".join(screen(pilot.app))
        await pilot.press("slash", *"#70", "enter")
        await pilot.pause()
        assert numbers(view) == [70] and "no longer listed" not in " ".join(screen(pilot.app))

    hosted(view, evictions(50), script, (100, 30))


def test_failed_timed_out_and_cancelled_requests_differ() -> None:
    view = RequestsView()
    ended = [
        samples.request(number=1, phase="failed", finish="InvalidInput"),
        samples.request(number=2, phase="failed", finish="RequestTimedOut"),
        samples.request(number=3, phase="cancelled", finish="RequestCancelled"),
        samples.request(number=4),
    ]

    async def script(pilot: Pilot[None]) -> None:
        text = "\n".join(screen(pilot.app))
        assert "newest 4 ended: 1 finished, 1 failed, 1 timed out, 1 cancelled" in text
        assert all(word in text for word in ("✗ failed", "◷ timed out", "∅ cancelled", "✓ finished"))
        await pilot.press("slash", *"timed", "enter")
        await pilot.pause()
        assert numbers(view) == [2]
        assert any("timed out: RequestTimedOut" in line for line in screen(pilot.app))

    hosted(view, state(ended=ended), script, (160, 40))


def test_preempted_requests_are_not_counted_as_waiting_ones() -> None:
    phases = ("waiting", "preempted", "preempted", "decode")
    live = [samples.request(number=at, phase=phase, ended=None) for at, phase in enumerate(phases)]
    shown = state(live=live, stats={"running": 1.0, "waiting": 3.0})  # an engine's wait queue has the preempted ones
    view = RequestsView()
    assert view.headline(view.rows_of(shown), shown).startswith("1 running, 1 waiting, 2 preempted · ")


def test_a_session_whose_requests_wait_is_waiting() -> None:
    live = [
        samples.request(number=1, session=1, phase="waiting", ended=None),
        samples.request(number=2, session=2, phase="preempted", ended=None),
        samples.request(number=3, session=3, phase="waiting", ended=None),
        samples.request(number=4, session=3, phase="decode", ended=None),
    ]
    sessions = [samples.session(number=each, live=1, used=1000.0 + each) for each in (1, 2, 3)]
    view = SessionsView()

    async def script(pilot: Pilot[None]) -> None:
        text = screen(pilot.app)
        assert any("3 sessions: 1 running, 2 waiting" in line for line in text)
        statuses = {row.session.number: row.status for row in view.table.rows}
        assert statuses == {1: "waiting", 2: "waiting", 3: "running"}

    hosted(view, state(live=live, sessions=sessions), script)


@pytest.mark.parametrize(
    ("view", "shown", "orders"),
    [
        (RequestsView, REQUESTS, [[4, 3, 2, 1], [4, 3, 2, 1], None, None, None, None, None]),
        (SessionsView, SESSIONS, [[2, 1, 3], None, [1, 2, 3], None, [1, 2, 3], [1, 3, 2]]),
        (EvictionsView, EVICTIONS, [[2, 1], [2, 1], [2, 1], None, None]),
    ],
)
def test_s_goes_through_the_orders_and_back(view: type, shown: object, orders: list[object]) -> None:
    widget = view()

    async def script(pilot: Pilot[None]) -> None:
        for order, expected in zip(widget.orders(), orders, strict=True):
            assert widget.order is order
            assert any(line.strip().startswith(f"by {order.sort} ·") for line in screen(pilot.app))
            keyed = [order.key(row) for row in widget.table.rows]
            known = [key for key in keyed if key is not None]
            assert known == sorted(known, reverse=order.descending)
            assert keyed[len(known) :] == [None] * (len(keyed) - len(known))
            if expected is not None:
                assert numbers(widget) == expected
            await pilot.press("s")
            await pilot.pause()
        assert widget.order is widget.orders()[0]
        await pilot.press("S")
        assert widget.order is widget.orders()[-1]

    hosted(widget, shown, script)  # type: ignore[arg-type]


def test_the_filter_leaves_rows_with_all_its_words() -> None:
    view = RequestsView()

    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"red dec", "enter")
        await pilot.pause()
        assert numbers(view) == [4]
        assert any("1 of 4 shown" in line for line in screen(pilot.app))
        assert view.table.has_focus
        assert len(view.export().rows) == 1
        await pilot.press("slash", *"x")
        await pilot.pause()
        assert numbers(view) == []
        assert any("no row has all of these words" in line for line in screen(pilot.app))
        await pilot.press("escape")
        await pilot.pause()
        assert numbers(view) == [4, 3, 2, 1]
        assert view.table.has_focus

    hosted(view, REQUESTS, script)


@BOTH
def test_evictions_show_regret_and_lead_to_the_node(size: tuple[int, int]) -> None:
    view = EvictionsView()

    async def script(pilot: Pilot[None]) -> None:
        text = screen(pilot.app)
        assert any("352 tokens evicted since load; 320 of 3,200 requested tokens" in line for line in text)
        assert any("! after 500 ms" in line for line in text)
        await pilot.press("enter")  # node 6 is no longer cached
        await pilot.pause()
        await pilot.press("down", "enter")
        await pilot.pause()

    app = hosted(view, EVICTIONS, script, size)
    assert [(each.number, each.show) for each in app.selections if isinstance(each, NodeSelected)] == [(5, True)]


def test_what_another_view_selected_gets_the_cursor() -> None:
    view = RequestsView()

    async def script(pilot: Pilot[None]) -> None:
        view.select(Selection(request=2))
        assert view.table.cursor is not None and view.table.cursor.request.number == 2
        view.select(Selection(request=77))
        assert view.table.cursor is not None and view.table.cursor.request.number == 2

    hosted(view, REQUESTS, script)


def test_a_click_moves_the_cursor_and_a_second_opens() -> None:
    view = EvictionsView()

    async def script(pilot: Pilot[None]) -> None:
        await pilot.click(view.table, offset=(5, 2))
        assert view.table.cursor is not None and view.table.cursor.eviction.number == 1
        await pilot.click(view.table, offset=(5, 2))
        await pilot.pause()

    app = hosted(view, EVICTIONS, script)
    assert [each.number for each in app.selections] == [5]


IDS = "5277 1282 14625 18664 15689 20687"
FACTS = (("tokens", "37"), ("namespace", "team-blue"), ("begins with", IDS), ("hits", "0"))


def lines(width: int) -> list[str]:
    return [
        line.rstrip() for line in _text(Detail("Node 6", FACTS, ["Not held. Evictable now."]), width).plain.split("\n")
    ]


def test_an_account_has_short_facts_in_columns_and_long_ones_alone() -> None:
    assert lines(76) == [
        "Node 6",
        "Not held. Evictable now.",
        "tokens       37          namespace    team-blue   hits         0",
        "begins with  5277 1282 14625 18664 15689 20687",
    ]


def test_in_a_narrow_pane_each_fact_has_its_line_and_a_long_one_is_hung_in() -> None:
    assert lines(40) == [
        "Node 6",
        "Not held. Evictable now.",
        "tokens       37",
        "namespace    team-blue",
        "begins with  5277 1282 14625 18664 15689",
        "             20687",
        "hits         0",
    ]
    assert all(len(line) <= 40 for line in lines(40))


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
ROWS = st.lists(st.fixed_dictionaries({"id": st.integers(), "what": VALUES, "blocks": st.lists(st.integers())}))


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
@given(ROWS)
def test_json_reads_back(rows: list[dict[str, object]]) -> None:
    assert json.loads(Table("x", rows).to_json()) == rows


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
@given(ROWS)
def test_csv_has_a_line_for_each_row(rows: list[dict[str, object]]) -> None:
    read = list(csv.DictReader(io.StringIO(Table("x", rows).to_csv(), newline="")))
    assert [row["id"] for row in read] == [str(row["id"]) for row in rows]
    assert [row["blocks"] for row in read] == [" ".join(map(str, row["blocks"])) for row in rows]  # type: ignore[call-overload]
