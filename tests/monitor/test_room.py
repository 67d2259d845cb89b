"""Where room is short: a table that gets a scroll bar, an account in a narrow pane."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from radixkv_monitor.account import Account
from radixkv_monitor.views.sessions import SessionsView
from radixkv_monitor.widgets.detail_pane import _text
from tests.monitor import samples
from tests.monitor.view_host import hosted, screen, state


@pytest.mark.parametrize("size", [(80, 24), (160, 48), (44, 12)])
def test_a_scroll_bar_that_comes_takes_its_room_from_a_column_that_has_some(size: tuple[int, int]) -> None:
    few, many = (
        state(now=1000.0, sessions=[samples.session(number=n, used=1000.0 - 0.188 * n) for n in range(1, most)])
        for most in (4, 90)
    )
    view = SessionsView()
    wide: list[int] = []

    async def script(pilot: Pilot[None]) -> None:
        assert any("188 ms" in line or "#1" in line for line in screen(pilot.app))
        wide.append(view.table.wide)
        view.update(many)
        for _ in range(3):
            await pilot.pause()
        assert view.table.show_vertical_scrollbar and view.table.wide == wide[0] == size[0] - 1
        head, *rows = [line for line in screen(pilot.app) if line.startswith(("session", "#"))]
        if size[0] >= 80:
            assert "last used" in head and "188 ms" in rows[0] and "940 ms" in rows[4] and "1.1 s" in rows[5]
        width = view.table.wide
        assert sum(cells + 1 for _, cells in view.table._shown) <= width

    hosted(view, few, script, size)


IDS = "5277 1282 14625 18664 15689 20687"
FACTS = (("tokens", "37"), ("namespace", "team-blue"), ("begins with", IDS), ("hits", "0"))


def lines(width: int) -> list[str]:
    return [line.rstrip() for line in _text(Account("Node 6", FACTS, ["Held by nobody."]), width).plain.split("\n")]


def test_an_account_has_short_facts_in_columns_and_long_ones_alone() -> None:
    assert lines(76) == [
        "Node 6",
        "Held by nobody.",
        "tokens       37          namespace    team-blue   hits         0",
        "begins with  5277 1282 14625 18664 15689 20687",
    ]


def test_in_a_narrow_pane_each_fact_has_its_line_and_a_long_one_is_hung_in() -> None:
    assert lines(40) == [
        "Node 6",
        "Held by nobody.",
        "tokens       37",
        "namespace    team-blue",
        "begins with  5277 1282 14625 18664 15689",
        "             20687",
        "hits         0",
    ]
    assert all(len(line) <= 40 for line in lines(40))


def test_a_pane_that_is_no_wider_than_the_names_still_says_everything() -> None:
    said = " ".join(" ".join(lines(5)).split())
    assert "20687" in said and "namespace team- blue" in said
