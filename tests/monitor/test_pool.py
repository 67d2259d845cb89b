"""Test the Pool view: every key, the mouse, the cells, and that only lines that differ are drawn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from radixkv.telemetry.records import NodeRecord, SequenceRecord
from radixkv_monitor import detail
from radixkv_monitor.block_modes import MODES, Blocks, ColourMode, host_mode
from radixkv_monitor.state import State
from radixkv_monitor.theme import CACHED, SELECTED, Shade
from radixkv_monitor.views import BlockSelected, NodeSelected, Selection
from radixkv_monitor.views.pool import PoolView
from radixkv_monitor.widgets.detail_pane import DetailPane
from radixkv_monitor.widgets.heat_map import GUTTER, HeatMap
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


@both_sizes
def test_states_are_on_screen_with_signs_and_counts(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        lines = screen(pilot.app)
        assert "64 blocks" in lines[0] and "by state" in lines[0] and "(fits)" in lines[0]
        for part in ("free 54", "cached 4", "active 3", "private 1", "pinned 2"):
            assert part in text(view, ".legend")
        cells = "".join(line[GUTTER : GUTTER + view.map.columns] for line in lines[2:4])
        assert cells[:10] == "░░░░····▓▓" and cells[20] == "▓" and cells[30] == "▒" and cells[50:52] == "██"

    run(script, small(), size)


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


@pytest.mark.long
@both_sizes
def test_n_goes_to_the_next_owner_and_enter_shows_its_node(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        seen = []
        for _ in range(6):
            await pilot.press("n")
            seen.append(view.block)
        assert seen == [4, 8, 10, 20, 21, 30]
        assert "Private to request 12, stream 0 (decode)" in description(
            view
        ) and "48 to 56 of the sequence" in description(view)
        await pilot.press("enter", "N", "N")
        assert view.block == 20

    selections = run(script, small(), size)
    shown = [each for each in selections if isinstance(each, NodeSelected) and each.show]
    assert [each.number for each in shown] == [3], "a private block leads to the node that its sequence holds"


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
        assert view.sort_by("references") and not view.sort_by("colour")
        assert "1 reader 6" in text(view, ".legend")

    run(script, small(), size)


@pytest.mark.long
@both_sizes
def test_zoom_keeps_the_cursor_on_its_block(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        assert "(fits)" in text(view, ".headline")
        fitting = view.zoom_level
        await pilot.press(*["down"] * 3)
        block = view.block
        await pilot.press("minus")
        assert view.zoom_level == fitting, "the whole pool is in view"
        await pilot.press("plus", "plus")
        assert view.zoom_level == fitting - 2 and view.block == block and "(fits)" not in text(view, ".headline")
        assert view.map.top > 0 or view.block < view.map.room(view.map.signs) * view.map.per
        await pilot.press("minus", "equals_sign", "0")
        assert view.zoom_level == fitting and view.block // view.map.per == block // view.map.per
        for _ in range(20):
            await pilot.press("plus")
        assert view.zoom_level == 0 and view.map.signs

    run(script, small(100_000), size)


def test_a_click_chooses_a_block_and_a_second_one_shows_its_node() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        await pilot.click(view.map, offset=(GUTTER + 9, 0))
        assert view.block == 9 and "active" in description(view)
        await pilot.click(view.map, offset=(GUTTER + 9, 0))
        await pilot.click(view.map, offset=(2, 0))
        await pilot.click(view.map, offset=(GUTTER + 5, 9))
        assert view.block == 9

    selections = run(script, small())
    assert isinstance(selections[-1], NodeSelected) and selections[-1].number == 3 and selections[-1].show


def test_what_others_select_is_lit_and_found() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        view.select(Selection(node=3, block=20))
        await pilot.pause()
        assert view.block == 20 and "node 3 is highlighted" in text(view, ".headline")
        assert np.flatnonzero(view.map._shown & 0x40).tolist() == [8, 9, 20]
        view.select(Selection(node=4, block=20))
        await pilot.pause()
        assert view.block == 50, "the node was selected after the block"
        view.select(Selection(node=99))
        assert not (view.map._shown & 0x40).any()

    run(script, small())


def test_a_cell_of_many_blocks_says_what_they_are() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        assert view.map.per > 1
        assert f"first of {view.map.per} in its cell" in description(view) and "4 cached" in description(view)

    run(script, small(100_000))


def test_only_lines_that_differ_are_drawn() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        drawn: list[int] = []
        draw = view.map.draw
        view.map.draw = lambda line, key: drawn.append(line) or draw(line, key)  # type: ignore[method-assign, func-returns-value]
        shown = small(2000)
        view.update(replace(shown, tick=2))
        await pilot.pause()
        assert not drawn
        line = 3
        block = view.map.cells_a_line * view.map.per * line
        view.update(replace(shown, tick=3, nodes={**shown.nodes, 9: node(9, (block, 2 * view.map.per))}))
        await pilot.pause()
        assert drawn == [line]

    run(script, small(2000))


def test_another_engine_has_another_pool() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        await pilot.press("end")
        other = small(16, line=2)
        view.update(replace(other, facts=replace(other.facts, engine="e2")))
        assert view.block == 15 and text(view, ".headline").startswith("16 blocks")

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
        heat = view.map
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


def cells_of(view: PoolView) -> str:
    """Return the characters of the map, in reading order."""
    room, columns = view.map.region, view.map.columns
    lines = screen(view.app)[room.y : room.bottom]
    return "".join(f"{line[GUTTER : GUTTER + columns]:<{columns}}" for line in lines).rstrip()


@pytest.mark.parametrize("no_colour", [True, False], ids=["NO_COLOR", "colour"])
def test_a_cell_of_several_blocks_shows_the_sign_of_most_of_them(
    no_colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half cells in grey were one block of the same character, from 2,304 blocks on."""
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")

    async def script(pilot: Pilot[None], view: PoolView) -> None:
        per = view.map.per
        assert per > 1 and "majority" in text(view, ".headline")
        assert ("■" in text(view, ".legend")) is not no_colour, "the legend shows what the cells show"
        signs = "".join(meaning.shade.sign for meaning in MODES[0].legend(view.blocks))
        states = view.blocks.map.states().tolist()
        groups = [states[first : first + per] for first in range(0, len(states), per)]
        expected = [signs[max(range(len(signs)), key=lambda s, g=group: (g.count(s), s))] for group in groups]
        if no_colour:
            expected[0] = "◆"  # the cursor
        assert cells_of(view) == "".join(expected)
        assert len(set(expected)) > 4

    shown = small(20_000)
    nodes = {100 + at: node(100 + at, (200 * at, 130 + at), locks=at % 2) for at in range(1, 60)}
    run(script, replace(shown, nodes={**shown.nodes, **nodes, 4: node(4, (15_000, 99), locks=1, holders=1, pins=1)},
                        sequences={40: SequenceRecord(40, 12, 0, 3, 56, 32, (18_000, 64), 1000.0)}))  # fmt: skip


def test_without_colours_the_map_zooms_from_one_block_a_sign_to_all_in_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")

    async def script(pilot: Pilot[None], view: PoolView) -> None:
        fitting = view.map.per
        await pilot.press("plus")
        for _ in range(16):
            view.action_zoom(-1)
        assert view.map.per == 1 and view.map.signs and "1 block per cell" in text(view, ".headline")
        view.select(Selection(node=3, block=20))
        await pilot.pause()
        assert cells_of(view)[:23] == "░░░░····▓▓··········◆··", "a sign for each block"
        for _ in range(16):
            view.action_zoom(1)
        assert view.map.per == fitting and view.map.signs

    run(script, small(5000))


def test_the_description_of_a_block_scrolls() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        pane = view.query_one(DetailPane)
        await pilot.press("end", "left", "home")
        assert pane.max_scroll_y > 0
        await pilot.press("J")
        assert pane.scroll_y == 1
        await pilot.press("K")
        assert pane.scroll_y == 0

    shown = small()
    run(script, replace(shown, facts=replace(shown.facts, host_blocks=8)))


def test_legends_have_the_bounds_of_their_levels() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        view.sort_by("age")
        for name in ("held now", "< 10 s", "10 s-1 min", "1-10 min", "10 min-1 h", "> 1 h"):
            assert f" {name} " in text(view, ".legend"), name
        assert "by idle time" in text(view, ".headline")

    run(script, small())


def test_half_cells_with_one_state_show_its_sign() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        assert view.map.per == 1 and not view.map.signs
        columns = view.map.columns
        drawn = cells_of(view)
        assert drawn[1:4] == "░░░" and drawn[10] == "·", "two equal blocks, one above the other"
        assert drawn[8:10] == "▀▀", f"blocks 8 and 9 are active, {8 + columns} and {9 + columns} are free"

    shown = small(1500)
    columns = 64
    run(script, replace(shown, nodes={**shown.nodes, 2: node(2, (0, 4, columns, 4), tokens=128)}))


@pytest.mark.parametrize("mode", [*MODES, host_mode(MODES[0])], ids=lambda mode: mode.name)
def test_the_levels_of_a_mode_have_different_signs(mode: ColourMode) -> None:
    blocks = Blocks()
    blocks.update(small())
    signs = [meaning.shade.sign for meaning in mode.legend(blocks)]
    assert len({*signs, "▀", SELECTED.sign}) == len(signs) + 2 and all(len(sign) == 1 for sign in signs)


@pytest.mark.parametrize(("terminal", "colours"), [("vt100", False), ("xterm-256color", True), ("no-such-thing", True)])
def test_a_terminal_without_colours_is_recognised(terminal: str, colours: bool) -> None:
    """In a process each, because the terminal library reads one entry per process."""
    code = "from radixkv_monitor.theme import _terminal_has_colours; print(_terminal_has_colours())"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TERM": terminal}, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(colours)


def test_lit_shades_go_to_white_on_dark_and_to_black_on_light() -> None:
    highlighted = CACHED.highlighted()
    assert highlighted.dark > CACHED.dark and highlighted.light < CACHED.light and highlighted.sign == CACHED.sign


@pytest.mark.long
def test_the_map_fits_any_size() -> None:
    async def script(pilot: Pilot[None], view: PoolView) -> None:
        for size in ((40, 10), (200, 60), (12, 8), (120, 40)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            heat = view.query_one(HeatMap)
            assert heat.virtual_size.height <= max(heat.size.height, 1), size

    run(script, small(100_000))
