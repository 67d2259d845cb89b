"""The dark and the light theme, and the colours and signs of states, ages and sessions.

The colours are Okabe and Ito's, and steps of viridis, which are distinct with colour blindness too. Each meaning
also has a sign of one cell, so nothing on screen is said by colour alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from textual.app import App
from textual.theme import Theme


def _scrollbars(bar: str, ground: str, touched: str) -> dict[str, str]:
    """Return muted colours: the position in a list matters less than the list."""
    grounds = {f"scrollbar-background{state}": ground for state in ("", "-hover", "-active")}
    bars = {"scrollbar": bar, "scrollbar-hover": touched, "scrollbar-active": touched}
    return {**grounds, **bars, "scrollbar-corner-color": ground}


DARK = Theme(
    name="radixkv-dark",
    primary="#56b4e9",
    secondary="#cc79a7",
    accent="#e69f00",
    success="#12b886",
    warning="#e69f00",
    error="#f0743e",
    foreground="#d8dee9",
    background="#14171d",
    surface="#1a1e26",
    panel="#232833",
    dark=True,
    variables=_scrollbars("#3d4554", "#14171d", "#56b4e9"),
)

LIGHT = Theme(
    name="radixkv-light",
    primary="#0b62a3",
    secondary="#a8437d",
    accent="#9c5f00",
    success="#007a5a",
    warning="#9c5f00",
    error="#b03a00",
    foreground="#1d2430",
    background="#fbfcfe",
    surface="#f1f4f8",
    panel="#e2e8f0",
    dark=False,
    variables=_scrollbars("#b4becc", "#fbfcfe", "#0b62a3"),
)

THEMES = (DARK, LIGHT)


@dataclass(frozen=True, slots=True)
class Shade:
    """A colour for dark screens, one for light screens, and a sign that means the same without colour."""

    dark: str
    light: str
    sign: str

    def on(self, dark: bool) -> str:
        """Return the colour for a dark or a light screen."""
        return self.dark if dark else self.light

    def highlighted(self) -> Shade:
        """Return the shade of a highlighted cell: closer to white on dark screens, to black on light ones."""
        return _moved(self, 0.6, 255, 0)

    def ground(self) -> Shade:
        """Return a background for the shade's own sign: a little darker on dark screens, lighter on light ones."""
        return _moved(self, 0.25, 0, 255)


@lru_cache
def _moved(shade: Shade, by: float, dark: int, light: int) -> Shade:
    return Shade(_mixed(shade.dark, by, dark), _mixed(shade.light, by, light), shade.sign)


def _mixed(colour: str, by: float, other: int) -> str:
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round((1 - by) * part + by * other):02x}" for part in parts)


def has_colours(app: App[Any]) -> bool:
    """Return whether the reader sees colours: not with NO_COLOR, nor on a terminal whose terminfo entry has none.

    A terminal without an entry is assumed to have colours, and so is a browser.
    """
    return not app.no_color and (app.is_headless or app.is_web or _terminal_has_colours())


@lru_cache
def _terminal_has_colours() -> bool:
    try:
        import curses
    except ImportError:  # some builds of Python lack it
        return True
    try:
        curses.setupterm(os.environ.get("TERM", ""), 1)
    except curses.error:
        return True
    return curses.tigetnum("colors") > 0


FREE = Shade("#3a4250", "#ccd3dd", "·")
CACHED = Shade("#3f8fc9", "#5aa9de", "░")
ACTIVE = Shade("#e69f00", "#d98a00", "▓")
PRIVATE = Shade("#f0e442", "#8a7d00", "▒")
PINNED = Shade("#cc79a7", "#a8437d", "█")
HOST = Shade("#a58bdb", "#6b4fb3", "□")
DEMOTED = Shade("#7d8590", "#6a717c", "▽")
SELECTED = Shade("#ffffff", "#000000", "◆")
PATH = Shade("#12b886", "#007a5a", "▸")
UNKNOWN = Shade("#4a5568", "#aab2bf", "░")
SHARED = Shade("#c9ced6", "#59606b", "*")

AGES = (
    Shade("#fde725", "#8a7d00", "█"),
    Shade("#7ad151", "#4d9e22", "▆"),
    Shade("#22a884", "#128a6b", "▄"),
    Shade("#2f86a0", "#2a788e", "▂"),
    Shade("#5a5fb0", "#414487", "▁"),
)
"""Youngest first; the younger, the higher the sign."""
AGE_LIMITS = (10.0, 60.0, 600.0, 3600.0)
"""The seconds from which each age but the youngest counts."""

SESSIONS = (
    Shade("#56b4e9", "#1f78b4", "A"),
    Shade("#e69f00", "#d98a00", "B"),
    Shade("#12b886", "#007a5a", "C"),
    Shade("#cc79a7", "#a8437d", "D"),
    Shade("#f0e442", "#8a7d00", "E"),
    Shade("#d55e00", "#b04a00", "F"),
)
OTHERS = Shade("#7d8590", "#8a919c", "+")
