"""Test the Tree view: every key, the mouse, the filter, and a position that is stable while the tree changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from radixkv.cache import POLICIES, PrefixCache
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.recorder import Recorder
from radixkv.telemetry.records import NodeRecord, SequenceRecord
from radixkv_monitor import detail
from radixkv_monitor.state import State, StateCopier
from radixkv_monitor.tree_branch import SORTS
from radixkv_monitor.tree_rows import TreeRows
from radixkv_monitor.views import BlockSelected, NodeSelected, Selection
from radixkv_monitor.views.tree import TreeView
from tests.cache.verbs import publish
from tests.monitor import samples
from tests.monitor.view_host import FACTS, hosted, state

SIZES = ((80, 24), pytest.param((160, 48), marks=pytest.mark.long))
both_sizes = pytest.mark.parametrize("size", SIZES, ids=["80x24", "160x48"])


def node(number: int, parent: int, start: int = 0, tokens: int = 32, **values: object) -> NodeRecord:
    usual = {
        "blocks": (number, 2), "holders": 0, "locks": 0, "pins": 0, "hits": 0, "priority": 0, "demoted": False,
        "born": 900.0, "used": 1000.0 - number, "head": (number, 5, 6), "reused": 0,
    }  # fmt: skip
    return NodeRecord(id=number, parent=parent, start=start, tokens=tokens, **{**usual, **values})  # type: ignore[arg-type]


def small(next_victims: tuple[int, ...] | None = (4, 5), **values: object) -> State:
    """team: 2 -> (3 -> 5, 4); default: 7, held by request 12; one node is pinned and one is marked as done."""
    nodes = [
        node(1, 0, tokens=0, blocks=(), namespace="team", used=0.0), node(2, 1),
        node(3, 2, 32, 100, hits=9), node(4, 2, 32, 500, demoted=True), node(5, 3, 132, 8),
        node(6, 0, tokens=0, blocks=(), used=0.0, locks=1),
        node(7, 6, locks=2, holders=2, pins=1, used=1001.0, text="hello"),
    ]  # fmt: skip
    return state(
        nodes=nodes,
        sequences=[SequenceRecord(40, 12, 0, 7, 40, 32, (), 1000.0)],
        live=[samples.request(number=12, phase="decode", session=8, ended=None)],
        next_victims=next_victims,
        **values,
    )


def many(count: int = 60) -> State:
    return state(
        nodes=[node(1, 0, tokens=0, blocks=(), used=0.0), *(node(at, 1, used=1.0 * at) for at in range(2, count))]
    )


def run(
    script: Callable[[Pilot[None], TreeView], Awaitable[None]], shown: State, size: tuple[int, int] = (80, 24)
) -> list[object]:
    view = TreeView()
    view.sort_by("recency")

    async def focused(pilot: Pilot[None]) -> None:
        view.take_focus()
        await pilot.pause()
        await script(pilot, view)

    return list(hosted(view, shown, focused, size).selections)


def ids(view: TreeView) -> list[int]:
    return [branch.number for branch in view.rows.rows]


def at(view: TreeView) -> int | None:
    return None if view.lines.cursor is None else view.lines.cursor.node.id


def headline(view: TreeView) -> str:
    return str(view.query_one(".headline", Static).content)


@both_sizes
def test_keys_move_open_close_and_choose(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], view: TreeView) -> None:
        assert ids(view) == [6, 7, 1, 2, 3, 5, 4]
        await pilot.press("end")
        assert at(view) == 4
        await pilot.press("left")
        assert at(view) == 2, "a leaf leads to its parent"
        await pilot.press("left")
        assert ids(view) == [6, 7, 1, 2] and at(view) == 2
        await pilot.press("right", "right")
        assert ids(view) == [6, 7, 1, 2, 3, 5, 4] and at(view) == 3
        await pilot.press("o")
        assert ids(view) == [6, 7, 1, 2, 3, 4]
        await pilot.press("O", "j", "k", "pagedown")
        assert len(ids(view)) == 7 and at(view) == 4
        await pilot.press("C")
        assert ids(view) == [6, 7, 1, 2] and at(view) == 2, "the cursor goes up to what is still shown"
        await pilot.press("home", "down", "enter")

    selections = run(script, small(), size)
    assert isinstance(selections[-1], BlockSelected) and selections[-1].number == 7 and selections[-1].show
    assert [each.number for each in selections if isinstance(each, NodeSelected)][:3] == [4, 2, 3]


@both_sizes
def test_s_goes_through_all_orders_and_back(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], view: TreeView) -> None:
        seen = []
        view.sort_by("birth")
        for _ in SORTS:
            seen.append(view.rows.sort)
            await pilot.press("s")
        assert seen == list(SORTS) and view.rows.sort == seen[0]
        await pilot.press("S")
        assert view.rows.sort == seen[-1] and seen[-1] in headline(view)
        assert view.sort_by("size") and ids(view) == [1, 2, 4, 3, 5, 6, 7]
        assert not view.sort_by("colour")

    run(script, small(), size)


@both_sizes
def test_the_filter_shows_matches_n_walks_them_and_escape_ends_it(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], view: TreeView) -> None:
        await pilot.press("slash", *"min:100", "enter")
        assert ids(view) == [1, 2, 3, 4] and "2 match the filter" in headline(view) and at(view) == 3
        await pilot.press("n")
        assert at(view) == 4
        await pilot.press("n")
        assert at(view) == 3
        await pilot.press("N")
        assert at(view) == 4
        await pilot.press("escape")
        assert len(ids(view)) == 7 and not view.rows.is_filtered and at(view) == 4

    run(script, small(), size)


@pytest.mark.long
def test_a_filter_by_session_follows_the_holders() -> None:
    async def script(pilot: Pilot[None], view: TreeView) -> None:
        await pilot.press("slash", *"session:8")
        assert ids(view) == [6, 7]
        shown = small(line=2)
        moved = replace(shown.sequences[40], node=5)
        view.update(replace(shown, tick=3, sequences={40: moved}))
        assert {1, 2, 3, 5} <= set(ids(view)), "what it holds now, and what it held before, if we know that still"

    run(script, small())


def test_a_malformed_filter_is_explained_and_changes_nothing() -> None:
    async def script(pilot: Pilot[None], view: TreeView) -> None:
        await pilot.press("slash")
        view.query_one(Input).value = "min:"
        await pilot.pause()
        assert "min:" in headline(view) and "not a whole number" in headline(view) and len(ids(view)) == 7
        await pilot.press("4", "0")
        assert ids(view) == [1, 2, 3, 4]
        view.query_one(Input).value = ""
        await pilot.press("enter")
        assert len(ids(view)) == 7 and not view.query_one(Input).has_class("open")

    run(script, small())


@pytest.mark.long
@both_sizes
def test_f_follows_what_was_used_last_until_the_cursor_is_moved(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], view: TreeView) -> None:
        shown = small()
        await pilot.press("C", "f")
        assert at(view) == 7 and "following" in headline(view)
        hot = {**shown.nodes, 5: node(5, 3, 132, 8, used=2000.0)}
        view.update(replace(shown, tick=2, nodes=hot))
        assert at(view) == 5, "what hides it is opened"
        await pilot.press("up")
        await pilot.pause()
        assert not view.is_following and "following" not in headline(view)
        await pilot.press("f", "f")
        assert not view.is_following

    run(script, small(), size)


def test_untouched_the_view_stays_at_the_top() -> None:
    async def script(pilot: Pilot[None], view: TreeView) -> None:
        shown = many()
        view.update(replace(shown, tick=2, nodes={**shown.nodes, 99: node(99, 1, used=99.0)}))
        await pilot.pause()
        assert view.lines.top == 0 and at(view) == 1 and ids(view)[1] == 99

    run(script, many())


@pytest.mark.long
def test_a_click_moves_the_cursor_and_a_click_on_the_sign_closes() -> None:
    async def script(pilot: Pilot[None], view: TreeView) -> None:
        await pilot.click(view.lines, offset=(12, 2))
        assert at(view) == 7
        await pilot.click(view.lines, offset=(0, 3))
        assert at(view) == 1 and ids(view) == [6, 7, 1]
        await pilot.click(view.lines, offset=(12, 3))
        assert ids(view) == [6, 7, 1, 2, 3, 5, 4], "a click on the cursor opens"
        await pilot.click(view.lines, offset=(12, 11))

    run(script, small())


def test_what_others_select_is_opened_and_shown() -> None:
    async def script(pilot: Pilot[None], view: TreeView) -> None:
        await pilot.press("C")
        view.select(Selection(node=5))
        assert at(view) == 5
        view.select(Selection(node=77))
        assert at(view) == 5

    run(script, small())


def test_export_has_the_rows_as_they_are_shown() -> None:
    async def script(pilot: Pilot[None], view: TreeView) -> None:
        await pilot.press("slash", *"done")
        rows = view.export().rows
        assert [row["node"] for row in rows] == [1, 2, 4] and rows[-1]["done"] and rows[-1]["namespace"] == "team"

    run(script, small())


# ---- reuse


# ---- accounts


def described(shown: State, number: int) -> str:
    rows = TreeRows()
    rows.update(shown.nodes)
    description = detail.node_detail(shown, rows.branches[number])
    return "\n".join(
        [description.title, *(f"{name}: {value}" for name, value in description.facts), *description.notes]
    )


def test_why_a_node_is_held() -> None:
    shown = small()
    assert "Not held. Evictable after its descendants (1 node)." in described(shown, 3)
    assert "Evictable now" in described(shown, 5) and "Eviction takes 1 node before it." in described(shown, 5)
    assert "Eviction takes it next" in described(shown, 4) and "Marked as done by its user" in described(shown, 4)
    nodes = {**shown.nodes, 2: node(2, 1, locks=1), 3: node(3, 2, 32, 100, locks=3, holders=3)}
    nodes[4] = node(4, 2, 32, 500, locks=1)
    held = replace(shown, nodes=nodes, sequences={9: SequenceRecord(9, None, 0, 3, 132, 0, (), 0.0)})
    assert "Held by sequence 9 without a request." in described(held, 3)
    assert "2 holders that the engine did not report" in described(held, 3)
    assert "locked children, nodes 3, 4: sequence 9 without a request, at node 3." in described(held, 2)
    assert "Namespace team" in described(shown, 1)


def test_the_eviction_order_is_the_one_that_the_engine_sent() -> None:
    shown = small(next_victims=(5, 4))
    assert detail.next_to_go(shown) == "next victim: node 5 (2 blocks, idle 7.0 s)"
    assert "Eviction takes it next" in described(shown, 5) and "Eviction takes 1 node before it." in described(shown, 4)
    assert "Eviction takes at least 1 node before it." in described(replace(shown, next_victims=(5,)), 4)
    assert "Eviction takes" not in described(shown, 3), "eviction takes leaves"
    assert detail.next_to_go(replace(shown, next_victims=())) == "nothing is evictable"


def test_without_an_order_from_the_engine_none_is_shown() -> None:
    shown = small(next_victims=None)
    assert detail.next_to_go(shown) == "eviction order unknown"
    assert "The eviction order is unknown" in described(shown, 5) and "Eviction takes" not in described(shown, 5)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_victim_is_the_one_that_every_policy_takes(policy: str) -> None:
    """The monitor once ordered leaves by itself, and named the wrong one for `predictive`."""
    now = 0.0
    cache, recorder, mirror = PrefixCache(16, 4, policy, clock=lambda: now), Recorder(clock=lambda: now), Mirror()
    recorder.attach(cache)
    for number in (1, 2, 3, 4, 1, 3, 3, 5):
        now += 10
        publish(cache, [number] * 9)
    mirror.apply(recorder.collect())
    named = detail.next_to_go(StateCopier(replace(FACTS, eviction=policy), 1).take(mirror, []))
    publish(cache, [9] * 9)
    mirror.apply(recorder.collect())
    evicted = next(iter(mirror.evictions.values()))
    assert f"node {evicted.node} " in named
