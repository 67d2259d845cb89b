"""Workloads made up from a seed: chats, tool agents, tree-of-thought search, questions on shared documents.

Sessions arrive as a Poisson process. A prompt is a sequence of segments, each with a name and a length; two prompts
share a block exactly if all their segments agree up to its end. Each session draws from a random generator of its own,
so more sessions leave the first ones unchanged. The same arguments give the same requests.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import textwrap
from array import array
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate, count
from random import Random
from typing import NamedTuple

from radixkv.cli.entry_point import AddCommand
from radixkv.errors import InvalidInput
from radixkv_traces.cli import positive
from radixkv_traces.mooncake import to_line
from radixkv_traces.records import TraceRequest

_CONVENTIONS = """\
The parameters are round numbers of the same magnitude as in published traces. Use a trace of your own traffic if you
have one. Answers are generated at 50 tokens a second. "Log-normal 40 (1.0)" has a median of 40 and a sigma of 1.0;
"geometric 4" has a mean of 4 and begins at 1."""


class Segment(NamedTuple):
    """A piece of text that occurs only as a whole."""

    name: Hashable  # segments with equal names are equal texts
    tokens: int


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a session."""

    at: float  # seconds since the session began; not decreasing
    prompt: tuple[Segment, ...]
    output_length: int
    stop: str = "end_turn"


class Draw(Random):
    """Random numbers for workloads."""

    def tokens(self, median: float, spread: float, most: int) -> int:
        """Draw from a log-normal distribution; `spread` is the sigma of the logarithm. The result is 1 to `most`."""
        return max(1, min(most, round(self.seconds(median, spread))))

    def seconds(self, median: float, spread: float) -> float:
        """Draw from a log-normal distribution."""
        return median * self.lognormvariate(0.0, spread)

    def count(self, mean: float) -> int:
        """Draw from a geometric distribution that begins at 1."""
        number = 1
        while self.random() > 1 / mean:
            number += 1
        return number

    def rank(self, count: int, skew: float = 1.0) -> int:
        """Draw from a Zipf distribution: 0 <= rank < count, rank r being as likely as (r + 1) ** -skew."""
        return self.choices(range(count), cum_weights=_zipf(count, skew))[0]


@cache
def _zipf(count: int, skew: float) -> tuple[float, ...]:
    return tuple(accumulate((rank + 1) ** -skew for rank in range(count)))


Session = Callable[[Draw, int, "Shared"], Iterator[Call]]
"""A function that returns a session's calls in the order of their times, from its generator, its number and the shared
texts.
"""


class Shared:
    """Texts that several sessions share. Their lengths depend on the seed only, not on the order of use."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def segment(self, kind: str, number: int, median: float, spread: float, most: int) -> Segment:
        """Return text `number` of a kind."""
        return Segment((kind, number), Draw(f"{self._seed}/{kind}/{number}").tokens(median, spread, most))


def generate(
    session: Session, sessions: int, seed: int, *, rate: float = 1.0, block_tokens: int = 64
) -> Iterator[TraceRequest]:
    """Return the requests of this number of sessions, in the order of their times; `rate` sessions begin in a second.

    Holds the open sessions, and a number for every distinct block. O(blocks).
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
        """Advance to the next call; return False if there is none."""
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
    """A number for each block of text after each preceding block."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._numbers: dict[tuple[int, tuple[tuple[Hashable, int, int], ...]], int] = {}

    def chain(self, prompt: tuple[Segment, ...]) -> array[int]:
        """Return the prompt's blocks; the last one may be part-filled."""
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


TOKENS_PER_SECOND = 50.0
CHAT_CONTEXT = 4096
AGENT_CONTEXT = 131072


def chat(draw: Draw, number: int, shared: Shared) -> Iterator[Call]:
    """Conversations with one of four assistants.

    Assistant by Zipf; its system prompt log-normal 200 (0.5) tokens. Geometric 4 turns: a message of log-normal 40
    (1.0) tokens, an answer of log-normal 200 (0.8), a pause of log-normal 30 (1.2) seconds. A conversation ends before
    it is longer than 4,096 tokens.
    """
    texts = _Texts(number)
    prompt = [shared.segment("assistant", draw.rank(4), 200, 0.5, 1000)]
    now = 0.0
    for _ in range(draw.count(4)):
        prompt.append(texts.new(draw.tokens(40, 1.0, 2000)))
        answer = draw.tokens(200, 0.8, 1500)
        if _length(prompt) + answer > CHAT_CONTEXT:
            return
        yield Call(now, tuple(prompt), answer)
        prompt.append(texts.new(answer))
        now += answer / TOKENS_PER_SECOND + draw.seconds(30, 1.2)


def agent(draw: Draw, number: int, shared: Shared) -> Iterator[Call]:
    """Agents that call tools until a task is done. Later, the user sends the next task.

    Three agents by Zipf; system prompt and tools log-normal 8,000 (0.4) tokens. Geometric 2.5 tasks of log-normal 150
    (1.0) tokens, each with geometric 12 calls. A call's answer has log-normal 120 (0.8) tokens, its tool result
    log-normal 400 (1.3) after log-normal 2 (1.2) seconds. One call in twenty is repeated from the same prompt. The next
    task follows after log-normal 120 (1.5) seconds. Above 131,072 tokens the history becomes a summary of log-normal
    1,500 (0.4).
    """
    texts = _Texts(number)
    system = shared.segment("agent", draw.rank(3), 8000, 0.4, 30000)
    prompt, now = [system], 0.0
    for _ in range(draw.count(2.5)):
        prompt.append(texts.new(draw.tokens(150, 1.0, 8000)))
        calls = draw.count(12)
        while calls:
            if _length(prompt) > AGENT_CONTEXT:
                prompt = [system, texts.new(draw.tokens(1500, 0.4, 8000))]
            answer = draw.tokens(120, 0.8, 4000)
            yield Call(now, tuple(prompt), answer, "end_turn" if calls == 1 else "tool_use")
            now += answer / TOKENS_PER_SECOND
            if draw.random() < 0.05:
                continue  # a repeated call: the same prompt again
            calls -= 1
            prompt.append(texts.new(answer))
            if calls:
                prompt.append(texts.new(draw.tokens(400, 1.3, 20000)))
                now += draw.seconds(2, 1.2)
        now += draw.seconds(120, 1.5)


def tot(draw: Draw, number: int, shared: Shared) -> Iterator[Call]:
    """Tree-of-thought search: continue each thought in several ways, judge all of them, and keep the best.

    One instruction of about 1,000 tokens to propose and one of about 500 to judge; a problem of log-normal 200 (0.6).
    Three levels: five thoughts of log-normal 60 (0.5) tokens below each of the kept ones, a verdict of 5 tokens on
    each, and the two best (at random) are kept. The calls of a level run at once, one level after the other.
    """
    texts = _Texts(number)
    propose, judge = (shared.segment(each, 0, size, 0.0, size) for each, size in (("propose", 1000), ("judge", 500)))
    problem = texts.new(draw.tokens(200, 0.6, 2000))
    kept: list[tuple[Segment, ...]] = [()]
    now = 0.0
    for _ in range(3):
        grown = [(*path, texts.new(draw.tokens(60, 0.5, 500))) for path in kept for _ in range(5)]
        for path in grown:
            yield Call(now, (propose, problem, *path[:-1]), path[-1].tokens)
        now += max(path[-1].tokens for path in grown) / TOKENS_PER_SECOND
        for path in grown:
            yield Call(now, (judge, problem, *path), 5)
        now += 5 / TOKENS_PER_SECOND
        kept = draw.sample(grown, 2)


def rag(draw: Draw, number: int, shared: Shared) -> Iterator[Call]:
    """Questions on documents of one collection, with the documents in the prompt.

    An instruction of about 300 tokens, then four of 2,000 documents by Zipf (1.0), the most popular first, each
    log-normal 600 (0.7) tokens. Geometric 1.5 questions on the same documents: log-normal 30 (0.6) tokens, an answer of
    log-normal 150 (0.7), a pause of log-normal 20 (1.0) seconds.
    """
    texts = _Texts(number)
    documents: set[int] = set()
    while len(documents) < 4:
        documents.add(draw.rank(2000))
    prompt = [shared.segment("instruction", 0, 300, 0.0, 300)]
    prompt += [shared.segment("document", each, 600, 0.7, 8000) for each in sorted(documents)]
    now = 0.0
    for _ in range(draw.count(1.5)):
        prompt.append(texts.new(draw.tokens(30, 0.6, 500)))
        answer = draw.tokens(150, 0.7, 1500)
        yield Call(now, tuple(prompt), answer)
        prompt.append(texts.new(answer))
        now += answer / TOKENS_PER_SECOND + draw.seconds(20, 1.0)


KINDS: dict[str, Session] = {"chat": chat, "agent": agent, "tot": tot, "rag": rag}


class _Texts:
    """Texts of one session."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._numbers = count()

    def new(self, tokens: int) -> Segment:
        """Return a new text."""
        return Segment((self._session, next(self._numbers)), tokens)


def _length(prompt: list[Segment]) -> int:
    return sum(segment.tokens for segment in prompt)


def add(add_command: AddCommand) -> None:
    """Add the command to the parser."""
    about = "print a workload made up from a seed; the same arguments give the same bytes"
    raw = argparse.RawDescriptionHelpFormatter
    described = textwrap.fill(about.capitalize() + ".", _width())
    parser = add_command("generate", about, __name__, description=described, epilog=_epilog(), formatter_class=raw)
    parser.add_argument("kind", choices=KINDS, help="kind of the sessions; see below")
    parser.add_argument("--sessions", type=positive, default=100, metavar="N", help="number of sessions; default 100")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed; default 0")
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="R", help="sessions that begin per second; default 1"
    )
    parser.add_argument("--block-tokens", type=positive, default=64, metavar="N", help="tokens of a block; default 64")


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each request."""
    session = KINDS[arguments.kind]
    for request in generate(
        session, arguments.sessions, arguments.seed, rate=arguments.rate, block_tokens=arguments.block_tokens
    ):
        print(to_line(request))
    return 0


def _epilog() -> str:
    kinds = [f"{name}: {inspect.getdoc(session)}" for name, session in KINDS.items()]
    return "\n\n".join(textwrap.fill(" ".join(each.split()), _width()) for each in [*kinds, _CONVENTIONS])


def _width() -> int:
    return shutil.get_terminal_size().columns - 2  # as argparse wraps
