"""Made-up workloads from a seed: sessions that arrive at random and say, without text, what prompts have in common.

Knows sessions, segments of text and blocks. Knows no kind of workload: `generate_kinds` says what a session does.

Sessions arrive as a Poisson process. A prompt is a row of segments, each with a name and a length; two prompts share a
block exactly if all segments agree up to its end. Each session draws from a generator of its own, so that more sessions
change nothing about the first ones; the same arguments give the same requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from typing import NamedTuple

from radixkv.errors import InvalidInput
from radixkv_traces.records import TraceRequest


class Segment(NamedTuple):
    """A piece of text that occurs as a whole."""

    name: Hashable  # equal names are equal texts
    tokens: int


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a session."""

    at: float  # seconds since the session began; never less than the one before
    prompt: tuple[Segment, ...]
    output_length: int
    stop: str = "end_turn"


class Draw(Random):
    """Random numbers as workloads need them."""

    def tokens(self, median: float, spread: float, most: int) -> int:
        """Log-normal: half of them are above the median, and `spread` is the sigma of the logarithm. 1 to `most`."""
        return max(1, min(most, round(self.seconds(median, spread))))

    def seconds(self, median: float, spread: float) -> float:
        """Log-normal, too."""
        return median * self.lognormvariate(0.0, spread)

    def count(self, mean: float) -> int:
        """Geometric from 1 on."""
        number = 1
        while self.random() > 1 / mean:
            number += 1
        return number

    def rank(self, count: int, skew: float = 1.0) -> int:
        """Zipf: 0 <= rank < count, rank r being as likely as (r + 1) ** -skew."""
        return self.choices(range(count), cum_weights=_zipf(count, skew))[0]


@cache
def _zipf(count: int, skew: float) -> tuple[float, ...]:
    return tuple(accumulate((rank + 1) ** -skew for rank in range(count)))


Session = Callable[[Draw, int, "Shared"], Iterator[Call]]
"""A session's calls, in the order of their times: from its own numbers, its number and what all sessions share."""


class Shared:
    """Texts that several sessions have: their lengths come from the seed, whoever asks first."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def segment(self, kind: str, number: int, median: float, spread: float, most: int) -> Segment:
        """Text `number` of a kind."""
        return Segment((kind, number), Draw(f"{self._seed}/{kind}/{number}").tokens(median, spread, most))


def generate(
    session: Session, sessions: int, seed: int, *, rate: float = 1.0, block_tokens: int = 64
) -> Iterator[TraceRequest]:
    """The requests of so many sessions, `rate` of which begin in a second, in the order of their times.

    Holds the sessions that are open, and a number for every different block. O(blocks).
    """
    for name, value in (("sessions", sessions), ("block_tokens", block_tokens)):
        if value < 1:
            raise InvalidInput(f"{name}={value}: allowed is an int of at least 1")
    if not 0 < rate < float("inf"):
        raise InvalidInput(f"rate={rate}: allowed are sessions per second > 0")
    return _merged(session, sessions, f"{seed}/{session.__name__}", rate, _Blocks(block_tokens))


def _merged(session: Session, sessions: int, seed: str, rate: float, blocks: _Blocks) -> Iterator[TraceRequest]:
    shared = Shared(seed)
    begins = _arrivals(Draw(f"{seed}/arrivals"), sessions, rate)
    waiting: list[_Open] = []
    arriving = next(begins, None)
    while waiting or arriving is not None:
        if arriving is not None and (not waiting or arriving[0] <= waiting[0].at):
            begin, number = arriving
            each = _Open(number, begin, session(Draw(f"{seed}/{number}"), number, shared))
            arriving = next(begins, None)
        else:
            each = heappop(waiting)
            yield each.request(blocks)
        if each.advance():
            heappush(waiting, each)


def _arrivals(draw: Draw, sessions: int, rate: float) -> Iterator[tuple[float, int]]:
    begin = 0.0
    for number in range(sessions):
        yield begin, number
        begin += draw.expovariate(rate)


@dataclass(slots=True)
class _Open:
    """A session, and its next call."""

    number: int
    begin: float
    calls: Iterator[Call]
    turn: int = 0
    call: Call | None = None

    @property
    def at(self) -> float:
        return self.begin + (0.0 if self.call is None else self.call.at)

    def __lt__(self, other: _Open) -> bool:
        return (self.at, self.number) < (other.at, other.number)

    def advance(self) -> bool:
        """Go on to the next call, if there is one."""
        self.call = next(self.calls, None)
        self.turn += 1
        return self.call is not None

    def request(self, blocks: _Blocks) -> TraceRequest:
        call = self.call
        assert call is not None
        return TraceRequest(
            timestamp=float(round(self.at * 1000)),
            input_length=sum(segment.tokens for segment in call.prompt),
            output_length=call.output_length,
            blocks=blocks.chain(call.prompt),
            session=str(self.number),
            turn=self.turn,
            stop=call.stop,
            block_tokens=blocks.size,
        )


class _Blocks:
    """A number for each block of text below each block before it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._numbers: dict[tuple[int, tuple[tuple[Hashable, int, int], ...]], int] = {}

    def chain(self, prompt: tuple[Segment, ...]) -> array[int]:
        """The prompt's blocks, the last maybe part-filled."""
        ids, pieces, room = array("q"), [], self.size
        for segment in prompt:
            at = 0
            while at < segment.tokens:
                take = min(room, segment.tokens - at)
                pieces.append((segment.name, at, take))
                at, room = at + take, room - take
                if not room:
                    ids.append(self._number(ids, tuple(pieces)))
                    pieces, room = [], self.size
        if pieces:
            ids.append(self._number(ids, tuple(pieces)))
        return ids

    def _number(self, ids: array[int], text: tuple[tuple[Hashable, int, int], ...]) -> int:
        return self._numbers.setdefault((ids[-1] if ids else -1, text), len(self._numbers))
