"""The Pool view: a map of every block, by state, age or session, and a description of one block.

An engine with a host tier has a second map, of the blocks in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.content import Content
from textual.widgets import Static

from radixkv_monitor import detail, theme
from radixkv_monitor.block_map import is_node
from radixkv_monitor.block_modes import HOST_LEGEND, MODES, STATE_NAMES, ColourMode, LegendEntry, host_mode
from radixkv_monitor.formatting import share, size
from radixkv_monitor.occupancy import states
from radixkv_monitor.state import State
from radixkv_monitor.views import (
    LARGE,
    BlockSelected,
    HostBlockSelected,
    NodeSelected,
    Selection,
    Table,
)
from radixkv_monitor.widgets.block_pane import BlockPane
from radixkv_monitor.widgets.detail_pane import DETAIL_KEYS, DetailPane, DetailView, Headline

NO_BREAK = "\N{NO-BREAK SPACE}"


class PoolView(DetailView):
    """The block maps. O(blocks) an update, in numpy; only lines that differ are drawn.

    The keys act on the map that has the focus.
    """

    DEFAULT_CSS = """
    PoolView { layout: vertical; }
    PoolView > .legend { height: auto; max-height: 2; padding: 0 1; }
    PoolView > Container { height: 1fr; layout: vertical; }
    PoolView Vertical { height: 1fr; }
    PoolView #device { height: 2fr; }
    PoolView #host, PoolView #host-headline { display: none; }
    PoolView.-host #host, PoolView.-host #host-headline { display: block; }
    PoolView DetailPane { height: 6; border-top: solid $panel; }
    PoolView.-low DetailPane, PoolView.-low #host { display: none; }
    PoolView.-wide > Container { layout: horizontal; }
    PoolView.-wide Vertical { width: 1fr; }
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
        Binding("tab", "app.focus_next", "Other map, with a host tier", show=False),
        *DETAIL_KEYS,
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.device, self.host = BlockPane("device", id="device"), BlockPane("host", id="host")
        self.mode = 0
        self._node: int | None = None
        self._wanted: Selection | None = None  # what to show after loading
        self._legend: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        """Lay out headline, legend, maps and description."""
        yield Headline(id="device-headline")
        yield Static("", classes="legend", markup=False)
        with Container():
            with Vertical():
                yield self.device
                yield Headline(id="host-headline")
                yield self.host
            yield DetailPane()

    @property
    def pane(self) -> BlockPane:
        """The pane that the keys act on: the host's if it has the focus, else the device's."""
        return self.host if self.host.is_mounted and self.host.map.has_focus else self.device

    @property
    def block(self) -> int:
        """The first block of the cell under the cursor of the pane that the keys act on."""
        return self.pane.block

    def take_focus(self) -> None:
        """Focus the map that has the selected node."""
        pane = self.host if self._is_on_host(self._node) and self.host.display else self.device
        pane.map.focus(scroll_visible=False)

    def _is_on_host(self, node: int | None) -> bool:
        record = None if node is None or self._state is None else self._state.nodes.get(node)
        return record is not None and record.residence == "host"

    # ---- states

    def update(self, state: State) -> None:
        """Draw this state. The blocks of a large tree are first mapped in slices, with a notice."""
        self._state = state
        if not self.is_mounted or self._loading.is_running:
            return
        if self.device.blocks.is_another(state) and len(state.nodes) >= LARGE:
            self._loading.start(self._updating(state), self._show_progress, self._loaded)
            return
        for _ in self._updating(state):
            pass
        self.set_class(state.facts.host_blocks > 0, "-host")
        self._draw()

    def _updating(self, state: State) -> Iterator[float]:
        yield from self.device.blocks.updating(state)
        if state.facts.host_blocks:
            yield from self.host.blocks.updating(state)

    def _show_progress(self, share: float) -> None:
        assert self._state is not None
        blocks = self._state.facts.num_blocks + self._state.facts.host_blocks
        self._show_headline("device", f"{blocks:,} blocks · reading the owners of each: {100 * share:.0f}%")

    def _loaded(self) -> None:
        assert self._state is not None
        self.update(self._state)
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self.select(wanted)

    def _draw(self) -> None:
        state = self._state
        if state is None or self._loading.is_running or not self.device.is_mounted or not self.device.map.size.width:
            return
        mode = MODES[self.mode]
        legend = self.device.show(mode, self._node)
        counts = self.device.counts(len(legend))
        tier = "Device: " if state.facts.host_blocks else ""
        stored = "" if state.facts.kv_dtype == "auto" else f" · {state.facts.kv_dtype}"
        stored += "" if state.facts.tensor_parallel == 1 else f" · on each of {state.facts.tensor_parallel} ranks"
        marked = "" if self._node is None else f" · node {self._node} is highlighted"
        self._show_headline(
            "device",
            f"{tier}{_use(self.device, counts[0])}{stored}{_states_text(state)} · {_scale(self.device, mode)}{marked}",
        )
        if state.facts.host_blocks:
            counts += self._draw_host(state)
            legend += HOST_LEGEND
        self._update_legend(legend, counts)
        self._update_detail()

    def _draw_host(self, state: State) -> list[int]:
        """Draw the map of the host; return the count of used blocks."""
        mode = host_mode(MODES[self.mode])
        counts = self.host.counts(len(self.host.show(mode, self._node)))
        memory = size(state.facts.host_blocks * state.facts.bytes_per_block)
        self._show_headline("host", f"Host: {memory}, {_use(self.host, counts[0])} · {_scale(self.host, mode)}")
        return [self.host.blocks.map.num_blocks - counts[0]]

    def _show_headline(self, tier: str, text: str) -> None:
        self.query_one(f"#{tier}-headline", Headline).set_text(text)

    def _update_legend(self, legend: tuple[LegendEntry, ...], counts: list[int]) -> None:
        dark = self.app.current_theme.dark
        key = (dark, *((meaning.name, meaning.shade, count) for meaning, count in zip(legend, counts, strict=True)))
        if key != self._legend:
            self._legend = key
            swatch = "■" if theme.has_colours(self.app) else ""
            self.query_one(".legend", Static).update(_legend(legend, counts, dark, swatch))

    def _update_detail(self) -> None:
        if self._loading.is_running:
            return
        pane = self.pane
        self.query_one(DetailPane).show_detail(detail.block_detail(pane.blocks, pane.block, pane.map.per))

    def select(self, selection: Selection) -> None:
        """Highlight the selected node, and move the cursors to the selected blocks."""
        if self._loading.is_running:
            self._wanted = selection
            return
        if not self.is_mounted:
            return
        self._node = selection.node
        self.device.select(selection.node, selection.block)
        self.host.select(selection.node, selection.host_block)
        self._draw()

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
        """Return a row for each block, the pool's first; with a host tier, `residence` says the tier."""
        rows = list(self._rows(self.device, MODES[self.mode]))
        if self._state is None or not self._state.facts.host_blocks:
            return Table("pool", rows)
        host = self._rows(self.host, host_mode(MODES[self.mode]))
        return Table(
            "pool", [{**row, "residence": "device"} for row in rows] + [{**row, "residence": "host"} for row in host]
        )

    def selected_row(self) -> Mapping[str, Any] | None:
        """Return the row of the block under the cursor. O(blocks)."""
        if self._state is None or self.is_loading:
            return None
        mode = MODES[self.mode] if self.pane is self.device else host_mode(MODES[self.mode])
        return next(islice(self._rows(self.pane, mode), self.block, None), None)

    def _rows(self, pane: BlockPane, mode: ColourMode) -> Iterator[dict[str, Any]]:
        blocks = pane.blocks
        legend = mode.legend(blocks)
        states, owners = blocks.map.states().tolist(), blocks.map.tip.tolist()
        named = {slot: owner for owner, slot in blocks.map.slots.items()}
        for block, level in enumerate(pane.levels.tolist()):
            owner = named.get(owners[block], 0)
            yield {
                "block": block,
                "state": STATE_NAMES[states[block]],
                "node": owner if owner > 0 else None,
                "sequence": -owner if owner < 0 else None,
                MODES[self.mode].name + "_level": legend[level].name,
            }

    # ---- keys

    def action_mode(self, by: int) -> None:
        """Select the next or previous colour mode."""
        self.mode = (self.mode + by) % len(MODES)
        self._draw()

    def action_zoom(self, by: int) -> None:
        """Zoom in (-1) or out (1), until all blocks are in view."""
        pane, block = self.pane, self.block
        if pane.zoom(by):
            self._keep(pane, block)

    def action_fit(self) -> None:
        """Show all blocks."""
        pane, block = self.pane, self.block
        pane.fit()
        self._keep(pane, block)

    def _keep(self, pane: BlockPane, block: int) -> None:
        """Draw again, with the cursor on this block."""
        self._draw()
        pane.go_to(block)
        self._update_detail()

    def action_run(self, by: int) -> None:
        """Move to the next or previous block with another owner."""
        self.pane.go_to_run(by)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Describe the block under the cursor of the map that has the focus now."""
        if self._state is not None:
            self._update_detail()

    @on(BlockPane.Resized)
    def _resized(self, event: BlockPane.Resized) -> None:
        event.stop()
        self._keep(event.pane, event.pane.block)

    @on(BlockPane.Moved)
    def _moved(self, event: BlockPane.Moved) -> None:
        event.stop()
        pane, owner = event.pane, event.pane.owner
        self.post_message((HostBlockSelected if pane is self.host else BlockSelected)(pane.block))
        if owner is not None and is_node(owner):
            self.post_message(NodeSelected(owner))
        self._update_detail()

    @on(BlockPane.Opened)
    def _opened(self, event: BlockPane.Opened) -> None:
        event.stop()
        node = event.pane.owner
        if node is not None and not is_node(node) and self._state is not None:
            node = self._state.sequences[-node].node if -node in self._state.sequences else None
        if node is not None:
            self.post_message(NodeSelected(node, show=True))


def _use(pane: BlockPane, free: int) -> str:
    total = pane.blocks.map.num_blocks
    return f"{total:,} blocks, {share(total - free, total)} in use"


def _scale(pane: BlockPane, mode: ColourMode) -> str:
    return f"by {mode.title}{pane.scale}"


def _states_text(state: State) -> str:
    """Return the used rows and snapshots of recurrent states; "" for a model without such states."""
    found = states(state.stats)
    return "" if found is None else f" · {found.rows.counts} rows, {found.snapshots.counts} snapshots"


def _legend(legend: tuple[LegendEntry, ...], counts: list[int], dark: bool, swatch: str) -> Content:
    """Name the levels: the sign and the colour of each, its name, and its number of blocks."""
    parts: list[Content] = []
    for meaning, count in zip(legend, counts, strict=True):
        if meaning.name != "-":
            sign = Content.styled(f"{meaning.shade.sign}{swatch}", meaning.shade.on(dark))
            name = f" {meaning.name} ".replace(" ", NO_BREAK)
            parts.append(Content.assemble(sign, name, (f"{count:,}", "$foreground 60%")))
    return Content("   ").join(parts)
