"""Test that docs/monitor.md names every key and every option, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from textual.binding import Binding, BindingType

from radixkv_monitor.dialogs import KEYS, key_name
from radixkv_monitor.options import EXIT_STATUSES, parser
from radixkv_monitor.views import VIEWS, FilteredView
from radixkv_monitor.views.evictions import EvictionsView
from radixkv_monitor.views.latency import LatencyView
from radixkv_monitor.views.pool import PoolView
from radixkv_monitor.views.requests import RequestsView
from radixkv_monitor.views.sessions import SessionsView
from radixkv_monitor.views.table_view import TableView
from radixkv_monitor.views.tree import TreeView
from radixkv_monitor.widgets.flat_tree import FlatTree
from radixkv_monitor.widgets.heat_map import HeatMap
from radixkv_monitor.widgets.table import RowTable

MANUAL = (Path(__file__).parents[2] / "docs" / "monitor.md").read_text(encoding="utf-8")


def part(heading: str) -> str:
    """Return the text below a heading, up to the next one."""
    return re.split(r"^#+ ", MANUAL.split(f"{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def named(heading: str) -> list[str]:
    """Return the keys in the first column of the tables below a heading."""
    rows = re.findall(r"^\| (`[^|]*`) \|", part(heading), re.MULTILINE)
    return [key for row in rows for key in re.findall(r"`(\S+)`", row)]


def bound(bindings: Iterable[BindingType]) -> set[str]:
    return {key_name(binding.key) for binding in Binding.make_bindings(bindings)}


@pytest.mark.parametrize(
    ("heading", "bindings"),
    [
        ("## Keys", [*KEYS, Binding("ctrl+p", "command_palette")]),
        ("### 2 Tree", [*FilteredView.BINDINGS, *TreeView.BINDINGS, *FlatTree.BINDINGS]),
        ("### 7 Latency", [*LatencyView.BINDINGS]),
        ("### 3 Pool", [*PoolView.BINDINGS, *HeatMap.BINDINGS]),
        (
            "### 4 Sessions, 5 Evictions, 6 Requests",
            [*FilteredView.BINDINGS, *TableView.BINDINGS, *RequestsView.BINDINGS, *RowTable.BINDINGS],
        ),
    ],
)
def test_every_key_is_in_the_manual_once(heading: str, bindings: list[BindingType]) -> None:
    assert sorted(named(heading)) == sorted(bound(bindings))


def test_the_lists_have_the_keys_of_lists_and_no_others() -> None:
    for view in (SessionsView, EvictionsView):
        assert view.BINDINGS is TableView.BINDINGS
    assert bound(RequestsView.BINDINGS) == {"x"}


def test_every_option_is_in_the_manual() -> None:
    options = {name for action in parser()._actions for name in action.option_strings if name.startswith("--")}
    documented = set(re.findall(r"^\| `(--[\w-]+)", part("## Start"), re.MULTILINE))
    assert documented == options - {"--help"}


def test_every_exit_status_is_in_the_manual_and_in_the_help() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", part("## Start"), re.MULTILINE)
    assert {int(status): meaning.replace("`", "") for status, meaning in rows} == EXIT_STATUSES
    shown = parser().format_help()
    assert all(f"  {status:<5}{meaning}\n" in shown for status, meaning in EXIT_STATUSES.items())


def test_every_view_has_its_place_in_the_manual() -> None:
    headings = " ".join(re.findall(r"^### (.*)$", MANUAL, re.MULTILINE))
    for number, view in enumerate(VIEWS, 1):
        assert f"{number} {view.title}" in headings
