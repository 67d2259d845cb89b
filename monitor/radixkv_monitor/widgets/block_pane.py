"""A map of the blocks of one tier, the pool or host memory: its zoom, its highlighted node, and its cursor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from textual import on
from textual.app import ComposeResult
from textual.containers import Container
from textual.message import Message

from radixkv.telemetry.records import Residence
from radixkv_monitor import theme
from radixkv_monitor.block_map import Owner
from radixkv_monitor.block_modes import Blocks, ColourMode, LegendEntry, Levels, reduce
from radixkv_monitor.widgets.heat_map import HeatMap

PLAIN_ZOOM_LEVELS = tuple((2**power, True) for power in range(18))
"""From near to far: blocks per cell, and whether a character is one cell with its sign. For screens without colours."""
ZOOM_LEVELS = ((1, True), (1, False), *PLAIN_ZOOM_LEVELS[2:])
"""The same for screens with colours: two blocks share a character where each can have its own colour."""


class BlockPane(Container):
    """The map of one tier. O(blocks) an update, in numpy."""

    DEFAULT_CSS = """
    BlockPane { height: 1fr; }
    """

    class Event(Message):
        """An event of the cells of `pane`."""

        def __init__(self, pane: BlockPane) -> None:
            super().__init__()
            self.pane = pane

    class Moved(Event):
        """The cursor moved to another block."""

    class Opened(Event):
        """Enter was pressed, or the block under the cursor was clicked."""

    class Resized(Event):
        """The number of visible cells changed."""

    def __init__(self, residence: Residence = "device", *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.blocks = Blocks(residence)
        self.levels: Levels = np.empty(0, np.uint8)
        self._zoom: int | None = None  # an index of ZOOM_LEVELS; None: the nearest that fits

    def compose(self) -> ComposeResult:
        """Lay out the cells."""
        yield HeatMap()

    @property
    def map(self) -> HeatMap:
        """The widget with the cells."""
        return self.query_one(HeatMap)

    @property
    def block(self) -> int:
        """The first block of the cell under the cursor."""
        return self.map.cursor * self.map.per

    @property
    def owner(self) -> Owner | None:
        """The owner of that block; None if it is free."""
        return self.blocks.map.owner(self.block) if self.block < self.blocks.map.num_blocks else None

    # ---- drawing

    def show(self, mode: ColourMode, node: int | None) -> tuple[LegendEntry, ...]:
        """Draw the blocks in this mode, with a node's highlighted; return the legend."""
        self.levels = mode.levels(self.blocks)
        legend = mode.legend(self.blocks)
        per, signs = self.zoom_levels[self.zoom_level]
        self.map.set_zoom(per, signs)
        cells = reduce(self.levels, per, len(legend))
        self.map.show(cells, [meaning.shade for meaning in legend], self._marked(per, len(cells), node))
        return legend

    def _marked(self, per: int, cells: int, node: int | None) -> npt.NDArray[np.bool_] | None:
        """Mark the cells with blocks of the highlighted node."""
        if node is None:
            return None
        marked = np.zeros(cells, np.bool_)
        marked[self.blocks.map.blocks_of(node) // per] = True
        return marked

    def counts(self, levels: int) -> list[int]:
        """Count the blocks of each level."""
        found: list[int] = np.bincount(self.levels, minlength=levels).tolist()
        return found

    # ---- zoom

    @property
    def zoom_levels(self) -> tuple[tuple[int, bool], ...]:
        """The levels that this screen can show."""
        return ZOOM_LEVELS if theme.has_colours(self.app) else PLAIN_ZOOM_LEVELS

    @property
    def zoom_level(self) -> int:
        """The index in `zoom_levels`: the user's choice, else the nearest that shows all blocks."""
        if self._zoom is not None:
            return self._zoom
        blocks, levels = self.blocks.map.num_blocks, self.zoom_levels
        fitting = (place for place, (per, signs) in enumerate(levels) if -(-blocks // per) <= self.map.room(signs))
        return next(fitting, len(levels) - 1)

    @property
    def scale(self) -> str:
        """Describe the zoom: the blocks of a cell, and whether all blocks are in view."""
        per, _ = self.zoom_levels[self.zoom_level]
        size = " · 1 block per cell" if per == 1 else f" · {per:,} blocks per cell, majority"
        return f"{size} (fits)" if self._zoom is None else size

    def zoom(self, by: int) -> bool:
        """Zoom in (-1) or out (1), until all blocks are in view; return whether it changed."""
        per, signs = self.zoom_levels[self.zoom_level]
        if by > 0 and self.map.room(signs) * per >= self.blocks.map.num_blocks:
            return False
        self._zoom = min(max(self.zoom_level + by, 0), len(self.zoom_levels) - 1)
        return True

    def fit(self) -> None:
        """Show all blocks."""
        self._zoom = None

    # ---- the cursor

    def go_to(self, block: int) -> None:
        """Move the cursor to the cell of this block."""
        self.map.go_to(block // self.map.per)

    def select(self, node: int | None, block: int | None) -> None:
        """Move the cursor to the selected block, or to the first block of the selected node if the node lacks it."""
        own = [] if node is None else self.blocks.map.blocks_of(node).tolist()
        block = own[0] if own and block not in own else block
        if block is not None and block // self.map.per != self.map.cursor:
            self.go_to(block)

    def go_to_run(self, by: int) -> None:
        """Move to the next or previous block with another owner."""
        cuts = np.flatnonzero(np.diff(self.blocks.map.tip)) + 1
        if by > 0:
            found = cuts[cuts >= (self.map.cursor + 1) * self.map.per][:1]
        else:
            found = cuts[cuts < self.block][-1:]
        for block in found.tolist():
            self.go_to(block)

    @on(HeatMap.Resized)
    def _resized(self, event: HeatMap.Resized) -> None:
        event.stop()
        self.post_message(self.Resized(self))

    @on(HeatMap.Moved)
    def _moved(self, event: HeatMap.Moved) -> None:
        event.stop()
        self.post_message(self.Moved(self))

    @on(HeatMap.Opened)
    def _opened(self, event: HeatMap.Opened) -> None:
        event.stop()
        self.post_message(self.Opened(self))
