"""Sends requests when they are due, waits for the answers, and notes what each client saw.

Knows clocks, tasks and how many requests may run at once. Knows neither engines nor figures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from radixkv.errors import InvalidInput, PromptTooLong
from radixkv_traces.live.requests import TOO_LONG, Ask, Moment, Outcome, Synthesis, Target

_BETWEEN_MOMENTS = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests are sent.

    "open": each at its recorded time, whether the engine keeps up or not. "closed": a session's next request also waits
    until the one before was answered; requests without a session are sessions of their own. `speedup` divides recorded
    times; `asap` ignores them. At most `concurrency` requests (closed: sessions) run at once; the rest is sent late.
    """

    loop: str = "open"
    speedup: float = 1.0
    asap: bool = False
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.loop not in ("open", "closed"):
            raise InvalidInput(f"loop={self.loop!r}: there are 'open' and 'closed'")
        if not 0 < self.speedup < float("inf"):
            raise InvalidInput(f"speedup={self.speedup!r}: allowed is a number above 0")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidInput(f"concurrency={self.concurrency!r}: allowed is at least 1")

    def due(self, ask: Ask) -> float:
        """Seconds after the beginning at which a request is to be sent."""
        return 0.0 if self.asap else ask.due / self.speedup


@dataclass
class Played:
    """What a replay left: every outcome so far, also if it was stopped in the middle."""

    target: str
    asap: bool = False  # nothing was due at any time
    outcomes: list[Outcome] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    seconds: float = 0.0
    whole: bool = False


class Player:
    """Plays asks to a target; `played` grows as it goes, so that Ctrl-C loses nothing that was measured."""

    def __init__(
        self, target: Target, synthesis: Synthesis, pace: Pace, told: Callable[[Outcome], None] = lambda _: None
    ) -> None:
        """`told` hears of each outcome at its end."""
        self._target = target
        self._synthesis = synthesis
        self._pace = pace
        self._told = told
        self.played = Played(target.name, pace.asap)
        self._began = 0.0

    async def warm(self, asks: Sequence[Ask]) -> None:
        """Send these first, one behind the other and as soon as possible; their outcomes are marked and count nowhere.

        What they leave in the engine's cache stays there.
        """
        self._began = time.perf_counter()
        for ask in asks:
            await self._play(ask, 0.0, warmup=True)

    async def play(self, asks: Iterable[Ask]) -> Played:
        """Send everything; returns at the last answer. Cancelled, it cancels what still runs."""
        self._began = time.perf_counter()
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as tasks:
                await (self._open(asks, tasks) if self._pace.loop == "open" else self._closed(asks, tasks))
            self.played.whole = True
        finally:
            self.played.seconds = self._now()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return self.played

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _open(self, asks: Iterable[Ask], tasks: asyncio.TaskGroup) -> None:
        free = self._room()
        for ask in asks:
            due = self._pace.due(ask)
            await self._sleep_until(due)
            await free.acquire()
            tasks.create_task(self._play(ask, due)).add_done_callback(lambda _: free.release())

    async def _closed(self, asks: Iterable[Ask], tasks: asyncio.TaskGroup) -> None:
        free = self._room()
        for turns in _sessions(asks):
            await self._sleep_until(self._pace.due(turns[0]))
            await free.acquire()
            tasks.create_task(self._session(turns)).add_done_callback(lambda _: free.release())

    async def _session(self, turns: Sequence[Ask]) -> None:
        for ask in turns:
            due = self._pace.due(ask) if ask is turns[0] else max(self._pace.due(ask), self._now())
            await self._sleep_until(due)
            await self._play(ask, due)

    async def _play(self, ask: Ask, due: float, *, warmup: bool = False) -> None:
        prompt = await asyncio.to_thread(self._synthesis.prompt, ask.request)
        outcome = Outcome(ask.number, ask.session, due, self._now(), warmup)
        self.played.outcomes.append(outcome)
        try:
            outcome.answer = await self._target.ask(ask, prompt, lambda: outcome.arrivals.append(self._now()))
        except PromptTooLong:
            outcome.error = TOO_LONG
        except Exception as error:  # its own request's fault, whatever it is: the others go on
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = self._now()
        self._told(outcome)

    async def _sleep_until(self, due: float) -> None:
        await asyncio.sleep(max(0.0, due - self._now()))

    async def _watch(self) -> None:
        while (moment := await self._target.moment(self._now())) is not None:
            self.played.moments.append(moment)
            await asyncio.sleep(_BETWEEN_MOMENTS)

    def _room(self) -> asyncio.Semaphore | _NoLimit:
        return _NoLimit() if self._pace.concurrency is None else asyncio.Semaphore(self._pace.concurrency)


class _NoLimit:
    async def acquire(self) -> None:
        """Go on at once."""

    def release(self) -> None:
        """Nobody waits."""


def _sessions(asks: Iterable[Ask]) -> list[list[Ask]]:
    """Each session's requests in order; sessions in the order of their first."""
    sessions: dict[str | int, list[Ask]] = {}
    for ask in asks:
        sessions.setdefault(ask.number if ask.session is None else ask.session, []).append(ask)
    return list(sessions.values())
