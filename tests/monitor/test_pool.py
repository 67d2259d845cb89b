"""Test the Pool view: every key, the mouse, the cells, and that only lines that differ are drawn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from radixkv.telemetry.records import NodeRecord, SequenceRecord
from radixkv_monitor import detail
from radixkv_monitor.block_modes import MODES, Blocks
from radixkv_monitor.state import State
from radixkv_monitor.theme import Shade
from radixkv_monitor.views import BlockSelected, NodeSelected, Selection
from radixkv_monitor.views.pool import PoolView
from radixkv_monitor.widgets import heat_map
from radixkv_monitor.widgets.detail_pane import DetailPane
from radixkv_monitor.widgets.heat_map import GUTTER
from tests.monitor import samples
from tests.monitor.view_host import hosted, screen, state

both_sizes = pytest.mark.parametrize(
    "size", [(80, 24), pytest.param((160, 48), marks=pytest.mark.long)], ids=["80x24", "160x48"]
)


def node(number: int, blocks: tuple[int, ...], start: int = 0, tokens: int = 32, **values: object) -> NodeRecord:
    usual = {
        "parent": 1, "holders": 0, "locks": 0, "pins": 0, "hits": 0, "priority": 0, "demoted": False, "born": 900.0,
        "used": 990.0,
    }  # fmt: skip
    return NodeRecord(id=number, start=start, tokens=tokens, blocks=blocks, **{**usual, **values})  # type: ignore[arg-type]


def small(num_blocks: int = 64, **values: object) -> State:
    """Node 2 is cached in blocks 0-3, 3 is held in 8-9 and 20, sequence 40 holds block 30 alone, node 4 is pinned."""
    shown = state(
        nodes=[
            node(1, (), tokens=0, parent=0, locks=2), node(2, (0, 4), tokens=64),
            node(3, (8, 2, 20, 1), tokens=40, locks=1), node(4, (50, 2), locks=1, holders=1, pins=1),
        ],
        sequences=[SequenceRecord(40, 12, 0, 3, 56, 32, (30, 1), 1000.0)],
        live=[samples.request(number=12, phase="decode", session=8, ended=None)],
        **values,
    )  # fmt: skip
    return replace(shown, facts=replace(shown.facts, num_blocks=num_blocks))


def run(
    script: Callable[[Pilot[None], PoolView], Awaitable[None]], shown: State, size: tuple[int, int] = (80, 24)
) -> list[object]:
    view = PoolView()

    async def focused(pilot: Pilot[None]) -> None:
        view.take_focus()
        await pilot.pause()
        await script(pilot, view)

    return list(hosted(view, shown, focused, size).selections)


def text(view: PoolView, part: str) -> str:
    return str(view.query_one(part, Static).content).replace("\N{NO-BREAK SPACE}", " ")


def description(view: PoolView) -> str:
    detail = view.query_one(DetailPane).detail
    assert detail is not None
    return "\n".join([detail.title, *(f"{name}: {value}" for name, value in detail.facts), *detail.notes])


@pytest.fixture(autouse=True)
def small_cells(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw a cell a character, except in the test of cells that grow."""
    if "grow" not in request.node.name:
        monkeypatch.setattr(heat_map, "TALLEST", 1)


def test_few_blocks_grow_to_fill_the_map() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        heat = view.pane.map
        rows = -(-64 // heat.columns)
        tall = heat.tall
        assert tall > 1 and heat.virtual_size.height == tall * rows <= heat.size.height
        await pilot.press("down", "right")
        assert view.block == heat.columns + 1 and heat.top == 0
        line = heat.render_line(tall).text
        assert line[:GUTTER] == f"{heat.columns:>8}▸" and line[GUTTER : GUTTER + 2 * tall] == "▓" * (2 * tall - 1) + " "
        assert heat.render_line(tall + 1).text == " " * GUTTER + line[GUTTER:]
        assert not heat.render_line(2 * tall - 1).text.strip()
        await pilot.click(heat, offset=(GUTTER + 2 * tall * 2 + 3, 2 * tall - 2))
        assert view.block == heat.columns + 2
        await pilot.press("end", "pageup")
        assert view.block == 0

    run(script, small(), (160, 48))


@pytest.mark.parametrize(("name", "ranks", "shows"), [("auto", 1, False), ("int8", 2, True)])
def test_the_headline_names_a_format_of_kv_and_ranks(name: str, ranks: int, shows: bool) -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        assert (f" · {name} · on each of {ranks} ranks" in screen(pilot.app)[0]) == shows
        assert (" ranks" in screen(pilot.app)[0]) == shows

    shown = small()
    run(script, replace(shown, facts=replace(shown.facts, kv_dtype=name, tensor_parallel=ranks)))


@both_sizes
def test_arrows_move_and_say_block_and_node(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        await pilot.press("right", "l", "left")
        assert view.block == 1 and "Block 1" in description(view) and "node 2" in description(view)
        await pilot.press("h", "left", "left")
        assert view.block == 0
        await pilot.press("end")
        assert view.block == 63
        await pilot.press("home", "pagedown")
        assert view.block == 63
        await pilot.press("pageup", "down", "j", "up", "k")
        assert view.block == 0

    selections = run(script, small(), size)
    assert isinstance(selections[0], BlockSelected) and selections[0].number == 1
    assert isinstance(selections[1], NodeSelected) and selections[1].number == 2 and not selections[1].show


@both_sizes
def test_c_and_s_go_through_the_modes(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        for mode in MODES:
            assert f"by {mode.title}" in text(view, ".headline")
            await pilot.press("c")
        await pilot.press("C")
        assert "by session" in text(view, ".headline") and "session 8 4" in text(view, ".legend")
        await pilot.press("s", "s", "S")
        assert "by state" in text(view, ".headline")
        assert view.sort_by("age") and not view.sort_by("colour") and not view.sort_by("references")
        assert "held now 6" in text(view, ".legend")

    run(script, small(), size)


def test_a_click_chooses_a_block_and_a_second_one_shows_its_node() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        await pilot.click(view.pane.map, offset=(GUTTER + 9, 0))
        assert view.block == 9 and "active" in description(view)
        await pilot.click(view.pane.map, offset=(GUTTER + 9, 0))
        await pilot.click(view.pane.map, offset=(2, 0))
        await pilot.click(view.pane.map, offset=(GUTTER + 5, 9))
        assert view.block == 9

    selections = run(script, small())
    assert isinstance(selections[-1], NodeSelected) and selections[-1].number == 3 and selections[-1].show


def test_what_others_select_is_lit_and_found() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        view.select(Selection(node=3, block=20))
        await pilot.pause()
        assert view.block == 20 and "node 3 is highlighted" in text(view, ".headline")
        assert np.flatnonzero(view.pane.map._shown & 0x40).tolist() == [8, 9, 20]
        view.select(Selection(node=4, block=20))
        await pilot.pause()
        assert view.block == 50, "the node was selected after the block"
        view.select(Selection(node=99))
        assert not (view.pane.map._shown & 0x40).any()

    run(script, small())


def test_export_has_every_block() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        rows = view.export().rows
        assert len(rows) == 64
        assert rows[20] == {"block": 20, "state": "active", "node": 3, "sequence": None, "state_level": "active"}
        assert rows[30]["sequence"] == 40 and rows[5]["node"] is None

    run(script, small())


def test_token_spans_and_owners_of_a_block() -> None:
    blocks = Blocks()
    shown = small()
    deeper = node(5, (20, 1), start=40, tokens=5)
    shown = replace(shown, nodes={**shown.nodes, 5: deeper})
    blocks.update(shown)
    description = detail.block_detail(blocks, 20, 1)
    assert ("owners", "node 5, node 3") in description.facts and (
        "tokens",
        "32 to 45 of the sequence",
    ) in description.facts
    assert detail.token_span(shown, 3, 9) == (16, 32) and detail.token_span(shown, 3, 50) is None
    assert detail.block_detail(blocks, 999, 1).title == "No block"
    assert "1 pin" in detail.block_detail(blocks, 50, 1).notes[0]


def test_halves_show_two_cells_in_one_sign_and_the_cursor_and_lit_cells_stand_out() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        heat = view.pane.map
        heat.set_zoom(1, False)
        width = heat.columns
        cells = np.zeros(2 * width, np.uint8)
        cells[1], cells[width + 1] = 1, 2
        shades = [Shade("#000001", "#000001", "a"), Shade("#000002", "#000002", "b"), Shade("#000003", "#000003", "c")]
        heat.show(cells, shades, cells == 2)
        strip = heat.render_line(0).crop(GUTTER)
        colours = [(style.color.name, style.bgcolor.name) for _, style, _ in list(strip)[:3]]  # type: ignore[union-attr]
        assert colours == [("#ffffff", "#000001"), ("#000002", shades[2].highlighted().dark), ("#000001", "#000001")]

    run(script, small())
