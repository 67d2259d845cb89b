"""Texts that others chose, made fit to be drawn in a terminal. Knows characters only."""

from __future__ import annotations


def drawable(text: str) -> str:
    r"""The text with what moves a cursor, rings, or turns the writing round escaped as Python writes it. O(text).

    >>> drawable("naïve \x1b[2J\n")
    'naïve \\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
