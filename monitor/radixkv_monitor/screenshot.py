"""Draw an app's screen as an SVG picture that is small, the same on every machine, and loads no font.

Each run of cells in one style is one element of stated length, so columns align in every font.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from rich.cells import cell_len
from rich.color import Color, blend_rgb
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from textual._compositor import LayoutUpdate
from textual.app import App

WIDE, HIGH, BASE, MARGIN = 12, 24, 18, 14
"""The pixels of a cell and its base line, and the margin."""


@dataclass(frozen=True, slots=True)
class CellStyle:
    """The style of a run of cells: colours as #rrggbb, and CSS rules for the text."""

    colour: str
    ground: str
    rules: str = ""


@dataclass(frozen=True, slots=True)
class StyledRun:
    """Cells of one line in one style."""

    x: int
    y: int
    cells: int
    text: str
    style: CellStyle


def screenshot(app: App[Any]) -> str:
    """Draw the screen of `app`, dialogs included. O(cells)."""
    drawn = app.screen._compositor.render_update(full=True, screen_stack=app._background_screens, simplify=True)
    assert isinstance(drawn, LayoutUpdate)
    return svg([[segment for strip in strips for segment in strip] for strips in drawn.strips], *app.size)


def svg(lines: Sequence[Iterable[Segment]], width: int, height: int) -> str:
    """Draw lines of `width` cells. O(cells)."""
    runs = [run for y, line in enumerate(lines) for run in _runs(y, line)]
    grounds = [(run.style.ground, run.cells) for run in runs]
    common = max(dict(grounds), key=lambda each: sum(cells for ground, cells in grounds if ground == each), default="")
    styles = sorted({(run.style.colour, run.style.rules) for run in runs})
    names = {style: f"l{number}" for number, style in enumerate(styles)}
    across, down = width * WIDE + 2 * MARGIN, height * HIGH + 2 * MARGIN
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" xml:space="preserve">',
            f'<style>text{{font:20px "DejaVu Sans Mono",Menlo,Consolas,monospace;white-space:pre}}'
            f"{''.join(_rule(names[style], *style) for style in styles)}</style>",
            f'<rect width="{across}" height="{down}" rx="10" fill="{common or "#000000"}"/>',
            f'<g transform="translate({MARGIN} {MARGIN})">',
            *_grounds(runs, common),
            *(_text(run, names[run.style.colour, run.style.rules]) for run in runs if not run.text.isspace()),
            "</g>\n</svg>\n",
        )
    )


def _rule(name: str, colour: str, rules: str) -> str:
    return f".{name}{{fill:{colour}{rules}}}"


def _runs(y: int, line: Iterable[Segment]) -> Iterator[StyledRun]:
    """Yield the line as few runs as its styles allow. Blanks take the text colour of the run before them."""
    x, pending = 0, None
    for text, look, control in line:
        if control or not text:
            continue
        style = _cell_style(look or Style.null())
        if pending is not None and (pending.style == style or (text.isspace() and _same_blank(pending.style, style))):
            pending = StyledRun(pending.x, y, pending.cells + cell_len(text), pending.text + text, pending.style)
        else:
            if pending is not None:
                yield pending
            pending = StyledRun(x, y, cell_len(text), text, style)
        x += cell_len(text)
    if pending is not None:
        yield pending


def _same_blank(before: CellStyle, blank: CellStyle) -> bool:
    """Return whether a blank looks the same in the style of the run before it."""
    return before.ground == blank.ground and "decoration" not in before.rules + blank.rules


def _cell_style(style: Style) -> CellStyle:
    colour, ground = _rgb(style.color, True), _rgb(style.bgcolor, False)
    if style.reverse:
        colour, ground = ground, colour
    if style.dim:
        mixed = blend_rgb(Color.parse(colour).get_truecolor(), Color.parse(ground).get_truecolor(), 0.4)
        colour = mixed.hex
    rules = ";font-weight:bold" if style.bold else ""
    rules += ";font-style:italic" if style.italic else ""
    rules += ";text-decoration:underline" if style.underline else ""
    rules += ";text-decoration:line-through" if style.strike else ""
    return CellStyle(colour, ground, rules)


def _rgb(colour: Color | None, foreground: bool) -> str:
    return (colour or Color.default()).get_truecolor(SVG_EXPORT_THEME, foreground).hex


def _grounds(runs: Sequence[StyledRun], common: str) -> Iterator[str]:
    """Yield background rectangles where the colour differs from most of the picture; equal ones in successive lines are
    joined.
    """
    open_: dict[tuple[int, int, str], tuple[int, int]] = {}
    for run in _one_ground(runs):
        if run.style.ground == common:
            continue
        key = run.x, run.cells, run.style.ground
        first, last = open_.get(key, (run.y, run.y - 1))
        if last < run.y - 1:
            yield _rectangle(key, first, last)
            first = run.y
        open_[key] = first, run.y
    for key, (first, last) in open_.items():
        yield _rectangle(key, first, last)


def _one_ground(runs: Sequence[StyledRun]) -> Iterator[StyledRun]:
    """Yield the runs, with neighbours on the same background joined."""
    for (y, _), joined in groupby(runs, key=lambda run: (run.y, run.style.ground)):
        first, *others = joined
        yield StyledRun(first.x, y, first.cells + sum(run.cells for run in others), "", first.style)


def _rectangle(key: tuple[int, int, str], first: int, last: int) -> str:
    x, cells, colour = key
    place = f'x="{x * WIDE}" y="{first * HIGH}" width="{cells * WIDE}" height="{(last - first + 1) * HIGH}"'
    return f'<rect {place} fill="{colour}" shape-rendering="crispEdges"/>'


def _text(run: StyledRun, name: str) -> str:
    if run.style.rules.endswith(("underline", "line-through")):
        text, x = run.text, run.x
    else:
        text = run.text.strip(" ")
        x = run.x + len(run.text) - len(run.text.lstrip(" "))
    place = f'x="{x * WIDE}" y="{run.y * HIGH + BASE}" textLength="{cell_len(text) * WIDE}"'
    return f'<text class="{name}" {place}>{escape(text, quote=False)}</text>'
