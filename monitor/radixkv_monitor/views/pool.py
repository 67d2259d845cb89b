"""The Pool view: a map of every block, by state, age, references or session, and a description of one block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.content import Content
from textual.widgets import Static

from radixkv_monitor import detail
from radixkv_monitor.block_map import is_node
from radixkv_monitor.block_modes import MODES, STATE_NAMES, Blocks, LegendEntry, Levels, reduce
from radixkv_monitor.formatting import share
from radixkv_monitor.state import State
from radixkv_monitor.summary import states
from radixkv_monitor.views import BlockSelected, NodeSelected, Selection, Table, View
from radixkv_monitor.widgets.detail_pane import DetailPane
from radixkv_monitor.widgets.heat_map import HeatMap

WIDE, LOW = 120, 14
"""The width from which the description is at the right of the map, and the height from which there is room for it
below.
"""
NO_BREAK = "\N{NO-BREAK SPACE}"
ZOOM_LEVELS = ((1, True), (1, False), *((2**power, False) for power in range(1, 17)))
"""From near to far: blocks per cell, and whether cells have signs."""


class PoolView(View):
    """The block map. O(blocks) an update, in numpy; only lines that differ are drawn."""

    DEFAULT_CSS = """
    PoolView { layout: vertical; }
    PoolView > .headline { height: 1; color: $text-muted; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    PoolView > .legend { height: auto; max-height: 2; padding: 0 1; }
    PoolView > Container { height: 1fr; layout: vertical; }
    PoolView DetailPane { height: 6; border-top: solid $panel; }
    PoolView.-low DetailPane { display: none; }
    PoolView.-wide > Container { layout: horizontal; }
    PoolView.-wide HeatMap { width: 1fr; }
    PoolView.-wide DetailPane { width: 42; height: 1fr; border-top: none; border-left: solid $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "mode(1)", "Colour by"),
        Binding("C", "mode(-1)", "Previous colours", show=False),
        Binding("s", "mode(1)", "Colour by", show=False),
        Binding("S", "mode(-1)", "Previous colours", show=False),
        Binding("plus,equals_sign", "zoom(-1)", "Zoom in", key_display="+"),
        Binding("minus", "zoom(1)", "Zoom out", key_display="-"),
        Binding("0", "fit", "Fit"),
        Binding("n", "run(1)", "Next owner", show=False),
        Binding("N", "run(-1)", "Previous owner", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.blocks = Blocks()
        self.mode = 0
        self._zoom: int | None = None  # an index of ZOOM_LEVELS; None: the nearest that fits
        self._levels: Levels = np.empty(0, np.uint8)
        self._node: int | None = None
        self._state: State | None = None
        self._legend: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        """Lay out headline, legend, map and description."""
        yield Static("", classes="headline", markup=False)
        yield Static("", classes="legend", markup=False)
        with Container():
            yield HeatMap()
            yield DetailPane()

    @property
    def map(self) -> HeatMap:
        """The widget with the cells."""
        return self.query_one(HeatMap)

    def on_mount(self) -> None:
        """Draw a state that arrived before the widget was mounted."""
        if self._state is not None:
            self._draw()

    def on_resize(self, event: events.Resize) -> None:
        """Move the description to where there is room, or hide it."""
        self.set_class(event.size.width >= WIDE, "-wide")
        self.set_class(event.size.width < WIDE and event.size.height < LOW, "-low")

    def take_focus(self) -> None:
        """Focus the map."""
        self.map.focus(scroll_visible=False)

    # ---- states

    def update(self, state: State) -> None:
        """Draw this state."""
        self._state = state
        self.blocks.update(state)
        if self.is_mounted:
            self._draw()

    def _draw(self) -> None:
        heat = self.map
        if self._state is None or not heat.size.width:
            return
        mode = MODES[self.mode]
        self._levels = mode.levels(self.blocks)
        legend = mode.legend(self.blocks)
        per, signs = ZOOM_LEVELS[self.zoom_level]
        heat.set_zoom(per, signs)
        cells = reduce(self._levels, per, len(legend))
        heat.show(cells, [meaning.shade for meaning in legend], self._marked(per, len(cells)))
        self._update_text(legend)

    @property
    def zoom_level(self) -> int:
        """The index in ZOOM_LEVELS: the user's choice, else the nearest that shows the whole pool."""
        if self._zoom is not None:
            return self._zoom
        blocks = self.blocks.map.num_blocks
        fitting = (place for place, (per, signs) in enumerate(ZOOM_LEVELS) if -(-blocks // per) <= self.map.room(signs))
        return next(fitting, len(ZOOM_LEVELS) - 1)

    def _marked(self, per: int, cells: int) -> npt.NDArray[np.bool_] | None:
        """Mark the cells with blocks of the selected node."""
        if self._node is None:
            return None
        marked = np.zeros(cells, np.bool_)
        marked[self.blocks.map.blocks_of(self._node) // per] = True
        return marked

    def _update_text(self, legend: tuple[LegendEntry, ...]) -> None:
        counts = np.bincount(self._levels, minlength=len(legend)).tolist()
        dark = self.app.current_theme.dark
        key = (dark, *((meaning.name, meaning.shade, count) for meaning, count in zip(legend, counts, strict=True)))
        per, signs = ZOOM_LEVELS[self.zoom_level]
        size = "1 block per cell" if signs else f"{per} block{'s' if per > 1 else ''} per cell"
        fit = " (fits)" if self._zoom is None else ""
        marked = "" if self._node is None else f" · node {self._node} is highlighted"
        total = self.blocks.map.num_blocks
        used = share(total - counts[0], total)
        self.query_one(".headline", Static).update(
            f"{total:,} blocks, {used} in use{self._states_text()} · by {MODES[self.mode].name} · {size}{fit}{marked}",
            layout=False,
        )
        if key != self._legend:
            self._legend = key
            self.query_one(".legend", Static).update(_legend(legend, counts, dark))
        self._update_detail()

    def _states_text(self) -> str:
        """Return the used rows and snapshots of recurrent states; "" for a model without such states."""
        found = None if self._state is None else states(self._state.stats)
        return "" if found is None else f" · {found.rows.counts} rows, {found.snapshots.counts} snapshots"

    def _update_detail(self) -> None:
        self.query_one(DetailPane).show_detail(detail.block_detail(self.blocks, self.block, self.map.per))

    @property
    def block(self) -> int:
        """The first block of the cell under the cursor."""
        return self.map.cursor * self.map.per

    def select(self, selection: Selection) -> None:
        """Highlight the selected node, and move the cursor to the selected block."""
        if not self.is_mounted:
            return
        self._node = selection.node
        block = self._chosen(selection)
        if block is not None and block // self.map.per != self.map.cursor:
            self.map.go_to(block // self.map.per)
        self._draw()

    def _chosen(self, selection: Selection) -> int | None:
        """Return the selected block, or the selected node's first block if the node lacks it."""
        block, node = selection.block, selection.node
        own = [] if node is None else self.blocks.map.blocks_of(node).tolist()
        return own[0] if own and block not in own else block

    @classmethod
    def sorts(cls) -> Sequence[str]:
        """Return the names of the colour modes."""
        return [mode.name for mode in MODES]

    def sort_by(self, name: str) -> bool:
        """Colour by the mode of this name."""
        names = [mode.name for mode in MODES]
        if name not in names:
            return False
        self.mode = names.index(name)
        if self.is_mounted:
            self._draw()
        return True

    def export(self) -> Table:
        """Return a row for each block."""
        blocks, levels = self.blocks, self._levels
        legend = MODES[self.mode].legend(blocks)
        states, owners = blocks.map.states().tolist(), blocks.map.tip.tolist()
        named = {slot: owner for owner, slot in blocks.map.slots.items()}
        return Table(
            "pool",
            [
                {
                    "block": block,
                    "state": STATE_NAMES[states[block]],
                    "node": owner if owner > 0 else None,
                    "sequence": -owner if owner < 0 else None,
                    MODES[self.mode].name + "_level": legend[level].name,
                }
                for block, level in enumerate(levels.tolist())
                for owner in (named.get(owners[block], 0),)
            ],
        )

    # ---- keys

    def action_mode(self, by: int) -> None:
        """Select the next or previous colour mode."""
        self.mode = (self.mode + by) % len(MODES)
        self._draw()

    def action_zoom(self, by: int) -> None:
        """Zoom in (-1) or out (1), until the whole pool is in view."""
        block = self.block
        zoom = min(max(self.zoom_level + by, 0), len(ZOOM_LEVELS) - 1)
        if (
            by > 0
            and self.map.room(ZOOM_LEVELS[self.zoom_level][1]) * ZOOM_LEVELS[self.zoom_level][0]
            >= self.blocks.map.num_blocks
        ):
            return
        self._zoom = zoom
        self._keep(block)

    def action_fit(self) -> None:
        """Show the whole pool."""
        block, self._zoom = self.block, None
        self._keep(block)

    def _keep(self, block: int) -> None:
        """Draw again, with the cursor on this block."""
        self._draw()
        self.map.go_to(block // self.map.per)
        self._update_detail()

    def action_run(self, by: int) -> None:
        """Move to the next or previous block with another owner."""
        tips = self.blocks.map.tip
        cuts = np.flatnonzero(np.diff(tips)) + 1
        if by > 0:
            found = cuts[cuts >= (self.map.cursor + 1) * self.map.per][:1]
        else:
            found = cuts[cuts < self.block][-1:]
        for block in found.tolist():
            self.map.go_to(block // self.map.per)

    @on(HeatMap.Resized)
    def _resized(self, event: HeatMap.Resized) -> None:
        event.stop()
        self._keep(self.block)

    @on(HeatMap.Moved)
    def _moved(self, event: HeatMap.Moved) -> None:
        event.stop()
        self.post_message(BlockSelected(self.block))
        owner = self.blocks.map.owner(self.block) if self.block < self.blocks.map.num_blocks else None
        if owner is not None and is_node(owner):
            self.post_message(NodeSelected(owner))
        self._update_detail()

    @on(HeatMap.Opened)
    def _opened(self, event: HeatMap.Opened) -> None:
        event.stop()
        owner = self.blocks.map.owner(self.block)
        node = None if owner is None else owner
        if node is not None and not is_node(node) and self._state is not None:
            node = self._state.sequences[-node].node if -node in self._state.sequences else None
        if node is not None:
            self.post_message(NodeSelected(node, show=True))


def _legend(legend: tuple[LegendEntry, ...], counts: list[int], dark: bool) -> Content:
    parts: list[Content] = []
    for meaning, count in zip(legend, counts, strict=True):
        if meaning.name != "-":
            sign = Content.styled(f"{meaning.shade.sign}■", meaning.shade.on(dark))
            name = f" {meaning.name} ".replace(" ", NO_BREAK)
            parts.append(Content.assemble(sign, name, (f"{count:,}", "$foreground 60%")))
    return Content("   ").join(parts)
