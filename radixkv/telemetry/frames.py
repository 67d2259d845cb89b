"""The frames that a publisher, a monitor and a recording exchange, as frozen dataclasses.

Knows what each frame says. Knows no bytes (`protocol`) and no socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.telemetry.records import Changes, EngineFacts

WRONG_TOKEN = "wrong token"
"""How the reason of a Bye begins that no further attempt will change."""

CRASHED = "the engine's thread stopped"
"""How it begins where an engine did not end as it should."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What all frames have: `seq` is the number of the latest delta that it includes, `ts` when it was made.

    Deltas are numbered 1, 2, 3, ...; the delta behind a snapshot with seq n is n + 1.
    """

    seq: int = field(default=0, kw_only=True)
    ts: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Attach(Frame):
    """The one frame that a client sends, first: `hz` is how often it wants deltas; TCP also asks for the token."""

    token: str = ""
    hz: float = 4.0


@dataclass(frozen=True, slots=True)
class Hello(Frame):
    """The first frame of every connection and recording: whose engine this is."""

    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class Snapshot(Frame):
    """Page `page` (from 0) of `pages` of everything; page 0 resets what was known, the state is whole behind the last.

    Deltas come behind the last page, never between two.
    """

    page: int
    pages: int
    changes: Changes

    @property
    def last(self) -> bool:
        """Whether the state is whole behind this page."""
        return self.page == self.pages - 1


@dataclass(frozen=True, slots=True)
class Delta(Frame):
    """What changed since the frame before. One that says nothing new is a sign of life."""

    changes: Changes


@dataclass(frozen=True, slots=True)
class Gap(Frame):
    """This reader was too slow: `dropped` deltas are missing, and a snapshot follows."""

    dropped: int


@dataclass(frozen=True, slots=True)
class Bye(Frame):
    """The last frame, and why it is the last."""

    reason: str
