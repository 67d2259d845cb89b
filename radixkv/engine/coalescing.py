"""Waiting for a neighbour to compute what one would else compute oneself.

Knows prompts, and which running ones are not computed yet. Knows no blocks and no order.

Sixteen agents that start together with one system prompt would compute it sixteen times: none finds it cached, as none
has written it. So a request stays at the door while a running prompt is about to compute a prefix of its own, and hits
it then. The wait is bounded: twice the steps that the shared part takes, and a few.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from radixkv.engine.request import Request, common_prefix

_SLACK = 8  # steps: others may keep a leader from its chunk for a few


@dataclass(frozen=True)
class Parked:
    """Behind whom a request waits, for how many tokens, until which step, and what was cached when it began."""

    leader: Request
    shared: int
    until: int
    cached: int


class Coalescing:
    """Who waits for whom. One comparison of two prompts for each that begins to wait, then O(1) a step."""

    def __init__(self, prefill_chunk: int, worth: int, on_grid: Callable[[int], int]) -> None:
        """Let nobody wait for less than `worth` tokens; a leader computes at most `prefill_chunk` a step.

        Of `n` tokens in common, `on_grid(n)` can be hit.
        """
        self._chunk, self._worth, self._on_grid = prefill_chunk, worth, on_grid
        self._step = 0

    def next_step(self) -> None:
        """Count the steps that bound every wait."""
        self._step += 1

    def over(self, parked: Iterable[Request]) -> list[Request]:
        """Those whose wait is over: the tokens are there, the leader is gone, or it took too long.

        O(parked + leaders).
        """
        positions: dict[Request, int | None] = {}
        done = []
        for request in parked:
            wait = request.parked
            assert wait is not None
            if wait.leader not in positions:
                positions[wait.leader] = _ahead(wait.leader)
            position = positions[wait.leader]
            if position is None or position >= wait.shared:
                done.append(request)
            elif self._step > wait.until:
                request.waited_enough = True
                done.append(request)
        return done

    def begins_to_wait(self, request: Request, running: Iterable[Request], cached: int) -> bool:
        """Park a request, of which `cached` tokens are cached, if a running prompt is about to compute more of it."""
        if request.waited_enough:
            return False
        for leader in running:
            position = _ahead(leader)
            if position is None or not _equal(leader.namespace, request.namespace):
                continue
            shared = self._on_grid(common_prefix(leader.prompt, request.prompt))
            if shared > position and shared - cached >= self._worth:
                steps = -(-(shared - position) // self._chunk)
                before = cached if request.parked is None else request.parked.cached
                request.parked = Parked(leader, shared, self._step + 2 * steps + _SLACK, before)
                return True
        return False


def _equal(one: Hashable, other: Hashable) -> bool:
    """As a dict compares its keys: a caller's `__eq__` is asked only if the hashes are equal."""
    return one is other or (hash(one) == hash(other) and one == other)


def _ahead(leader: Request) -> int | None:
    """How many tokens of its prompt a request has computed; None if it computes, or publishes, none of it now."""
    stream = next((each for each in leader.live if each.awake), None)
    if stream is None or leader.publish_late or leader.outlet.lagging or stream.sequence.length >= len(leader.prompt):
        return None
    return stream.sequence.length
