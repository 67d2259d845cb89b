"""The two themes, dark and light: Okabe and Ito's colours, which people who see few colours can tell apart.

Knows colours. Knows no widget; nothing on screen says by colour alone what it means.
"""

from __future__ import annotations

from textual.theme import Theme


def _scrollbars(bar: str, ground: str, touched: str) -> dict[str, str]:
    """Quiet ones: where one is in a list matters less than the list."""
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
