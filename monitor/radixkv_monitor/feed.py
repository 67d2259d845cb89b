"""Where states come from: the interface that the app sees.

Knows states and how a source is doing. Knows no screen; a feed reads on a thread of its own, and what it hands out is
frozen, so that the app may take it at any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from radixkv_monitor.state import State

Link = Literal["connecting", "live", "stale", "ended"]


@dataclass(frozen=True, slots=True)
class Status:
    """How the source is doing, and since when; `sentence` is for the person, empty while all is well."""

    link: Link
    since: float
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has come in so far."""

    frames: int = 0
    bytes: int = 0


class Feed(ABC):
    """A source of states. Start it once, close it once; everything else may be asked at any time, from any thread."""

    title: str
    """What it reads, for the top line."""

    @abstractmethod
    def start(self) -> None:
        """Begin to read. Returns at once."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading and let go of everything. May be called twice."""

    @property
    @abstractmethod
    def latest(self) -> State | None:
        """The newest state; None before the first."""

    @property
    @abstractmethod
    def status(self) -> Status:
        """How the source is doing."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """What has come in so far."""
