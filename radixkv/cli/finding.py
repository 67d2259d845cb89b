"""One line of a diagnosis. Knows its looks, and nothing of what is diagnosed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]
_MARKS = {"ok": "+", "note": "~", "problem": "!"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, whether it is well, and what was seen."""

    status: Status
    about: str
    seen: str

    def line(self, width: int) -> str:
        """One printable line, `about` padded to `width`.

        >>> ok("python", "3.12.1").line(10)
        '+ ok       python      3.12.1'
        """
        seen = "".join(letter if letter.isprintable() else " " for letter in self.seen)
        return f"{_MARKS[self.status]} {self.status:<7}  {self.about:<{width}}  {seen}"


def ok(about: str, seen: str) -> Finding:
    """All is well."""
    return Finding("ok", about, seen)


def note(about: str, seen: str) -> Finding:
    """It works; somebody may want it otherwise."""
    return Finding("note", about, seen)


def problem(about: str, seen: str) -> Finding:
    """It does not work."""
    return Finding("problem", about, seen)
