"""What there is to tell of one thing: a title, facts beside their names, sentences. Knows text only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Account:
    """What there is to tell of one thing."""

    title: str
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
