"""Test that a large tree is read in slices: a notice at once, keys in between, and the same screen at the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from radixkv_monitor import block_map, tree_rows, views
from radixkv_monitor.state import State, Touched
from radixkv_monitor.views import Selection
from radixkv_monitor.views.pool import PoolView
from radixkv_monitor.views.tree import TreeView
from tests.monitor.samples import node
from tests.monitor.view_host import hosted, screen, state

COUNT = 200


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a tree of a hundred nodes a large one, and each slice one step of ten nodes, when the test asks for it."""
    for module in ("tree", "pool"):
        monkeypatch.setattr(f"radixkv_monitor.views.{module}.LARGE", 100)
    for module in (tree_rows, block_map):
        monkeypatch.setattr(module, "SLICE", 10)
    monkeypatch.setattr(views, "SECONDS", 0.0)
    monkeypatch.setattr(views, "PAUSE", 3600.0)


def large(**values: object) -> State:
    """A root, and 200 nodes of a block each below it."""
    nodes = [node(id=1, parent=0, tokens=0, blocks=(), head=())]
    nodes += [node(id=2 + at, parent=1, tokens=16, blocks=(at, 1), used=900.0 + at) for at in range(COUNT)]
    shown = state(nodes=nodes, **values)
    return replace(shown, facts=replace(shown.facts, num_blocks=2 * COUNT))


def headline(view: TreeView | PoolView) -> str:
    return str(view.query(".headline").first(Static).content)


def read_all(view: TreeView | PoolView) -> int:
    """Read all slices; return how many headlines there were."""
    seen = set()
    while view.is_loading:
        seen.add(headline(view))
        view._loading._slice()
    return len(seen)


def run(view: TreeView | PoolView, script: Callable[[Pilot[None]], Awaitable[None]]) -> None:
    hosted(view, None, script, (100, 24))


def test_a_large_tree_shows_its_progress_and_then_its_rows() -> None:
    view = TreeView()
    view.sort_by("recency")

    async def script(pilot: Pilot[None]) -> None:
        view.update(large())
        assert "reading 201 nodes: 0%" in headline(view)
        view._loading._slice()
        await pilot.pause()
        text = "\n".join(screen(pilot.app))
        assert text.count("reading 201 nodes: ") == 2 and "nothing is cached" not in text
        assert read_all(view) > 10
        await pilot.pause()
        assert "200 nodes in 1 namespace" in headline(view) and len(view.rows.rows) == 201
        assert [branch.number for branch in view.rows.rows[:3]] == [1, COUNT + 1, COUNT]
        assert "184-216" not in screen(pilot.app)[2] and view.lines.virtual_size.height == 202
        await pilot.press("end")
        assert view.lines.cursor is not None and view.lines.cursor.number == 2, "it scrolls to all rows"

    run(view, script)


def test_keys_filters_and_selections_while_a_tree_is_read_are_kept() -> None:
    view = TreeView()
    view.sort_by("recency")

    async def script(pilot: Pilot[None]) -> None:
        first = large()
        view.update(first)
        await pilot.press("down", "O", "C", "s", "slash", *"min:17")
        assert view.is_loading, "the keys were handled between slices"
        nodes = {**first.nodes, 50: replace(first.nodes[50], tokens=20), 999: node(id=999, parent=1, tokens=99)}
        newer = replace(first, tick=2, nodes=nodes, recent=(Touched(2, frozenset({50, 999}), frozenset()),))
        view.update(newer)
        view.select(Selection(node=50))
        read_all(view)
        assert view.rows.sort == "size" and "2 match the filter" in headline(view)
        assert [branch.number for branch in view.rows.rows] == [1, 999, 50]
        assert view.lines.cursor is not None and view.lines.cursor.number == 50

    run(view, script)
