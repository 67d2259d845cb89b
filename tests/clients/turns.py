"""The bars for the turns of a coding agent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tests.clients.recorder import Turn
from tests.figures import Figure

NEXT_TURN = 0.99  # of the previous prompt and its reply
NEXT_SESSION = 0.95  # of the first prompt of another session in the same project


def check_turns(name: str, turns: Sequence[Turn], figure: Figure) -> None:
    """Check that each turn after the first hits the previous prompt and its reply."""
    for number, (before, turn) in enumerate(pairwise(turns), 2):
        check_share(f"{name}, turn {number}", turn, before.total, NEXT_TURN, figure)


def check_next_session(name: str, before: Turn, first: Turn, figure: Figure) -> None:
    """Check that the first turn of a session hits the first prompt of the session before it."""
    check_share(f"{name}, next session, turn 1", first, before.prompt, NEXT_SESSION, figure)


def check_share(name: str, turn: Turn, known: int, bar: float, figure: Figure) -> None:
    """Check that a turn hits this share of `known` tokens, which were computed before."""
    share = turn.cached / known
    figure(f"{name}: {turn.cached:,} of {turn.prompt:,} prompt tokens hit; {known:,} were known ({share:.2%})")
    assert share >= bar
