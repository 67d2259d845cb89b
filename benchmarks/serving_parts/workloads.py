"""Generate the serving workloads from a seed: conversations and agents, as sessions whose turns grow one history.

The prompt of a session is its whole history, the engine's own replies included. Each turn appends new tokens: a
question, or the result of a tool. `branches` continue the history at the end of their parent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Turn:
    """One request: tokens that are new since the last reply, and tokens to reply."""

    new: tuple[int, ...]
    reply: int


@dataclass(frozen=True)
class Session:
    """Turns that follow each other, then branches that each go on from where these end."""

    name: str
    turns: tuple[Turn, ...]
    branches: tuple[Session, ...] = ()

    @property
    def requests(self) -> int:
        """Requests of this session and of all its branches."""
        return len(self.turns) + sum(branch.requests for branch in self.branches)

    def longest(self) -> int:
        """Tokens of its longest history, the last reply included."""
        return sum(len(turn.new) + turn.reply for turn in self.turns) + max(
            (branch.longest() for branch in self.branches), default=0
        )


@dataclass(frozen=True)
class Shape:
    """Ranges (low, high) of the random numbers of a workload."""

    opening: int
    sessions: int
    turns: int
    new: tuple[int, int]
    reply: tuple[int, int]
    branch_every: int = 0
    branches: int = 2
    branch_turns: int = 2


SHAPES = {
    # A system prompt, and several turns of users.
    "chat": Shape(opening=256, sessions=8, turns=4, new=(24, 96), reply=(24, 48)),
    # System prompt and tools in front, short steps with tool results, every second agent tries two ways at its end.
    "agent": Shape(opening=2048, sessions=8, turns=3, new=(32, 128), reply=(12, 24), branch_every=2, branch_turns=1),
}


def build(shape: Shape, vocab: int, seed: int = 0) -> list[Session]:
    """The sessions of a workload; all begin with the same opening. The same seed gives the same sessions."""
    draw = np.random.default_rng(seed)
    opening = tuple(_ids(draw, vocab, shape.opening))
    sessions = []
    for number in range(shape.sessions):
        branching = shape.branch_every and number % shape.branch_every == 0
        branches = tuple(
            Session(f"{number}.{branch}", tuple(_turns(draw, shape, vocab, shape.branch_turns)))
            for branch in range(shape.branches if branching else 0)
        )
        first, *others = _turns(draw, shape, vocab, shape.turns)
        begun = Turn(opening + first.new, first.reply)
        sessions.append(Session(str(number), (begun, *others), branches))
    return sessions


def _turns(draw: np.random.Generator, shape: Shape, vocab: int, count: int) -> Iterator[Turn]:
    for _ in range(count):
        new = tuple(_ids(draw, vocab, int(draw.integers(*shape.new, endpoint=True))))
        yield Turn(new, int(draw.integers(*shape.reply, endpoint=True)))


def _ids(draw: np.random.Generator, vocab: int, count: int) -> list[int]:
    return [int(token) for token in draw.integers(3, vocab, count)]
