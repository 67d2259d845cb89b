"""Send requests when they are due, and record the outcome that each client sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from radixkv.errors import InvalidInput, PromptTooLong
from radixkv_traces.live.requests import TOO_LONG, Moment, Outcome, PlannedRequest, PromptMaker, Target

_MOMENT_INTERVAL = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Pace:
    """The times at which requests are sent.

    "open": each at its recorded time, whether the engine keeps up or not. "closed": a session's next request also waits
    for the answer to the one before; a request without a session is a session of its own. `speedup` divides recorded
    times; `asap` ignores them. At most `concurrency` requests (closed: sessions) run at once; the others are sent late.
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

    def due(self, request: PlannedRequest) -> float:
        """Seconds after the start at which a request is to be sent."""
        return 0.0 if self.asap else request.due / self.speedup


@dataclass
class ReplayRun:
    """The outcomes of a replay so far, also if it was stopped early."""

    target: str
    asap: bool = False  # recorded times were ignored
    outcomes: list[Outcome] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    seconds: float = 0.0
    whole: bool = False


class Player:
    """Replay requests against a target. `result` grows as it runs, so that Ctrl-C loses no measurement."""

    def __init__(
        self,
        target: Target,
        prompt_maker: PromptMaker,
        pace: Pace,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        """`on_outcome` is called at the end of each request."""
        self._target = target
        self._prompt_maker = prompt_maker
        self._pace = pace
        self._on_outcome = on_outcome
        self.result = ReplayRun(target.name, pace.asap)
        self._began = 0.0

    async def warm(self, requests: Sequence[PlannedRequest]) -> None:
        """Send these requests first, one after the other, without pauses. Their outcomes are marked and count nowhere.

        The engine's cache keeps their prompts.
        """
        self._began = time.perf_counter()
        for request in requests:
            await self._play(request, 0.0, warmup=True)

    async def play(self, requests: Iterable[PlannedRequest]) -> ReplayRun:
        """Send all requests; returns at the last answer. Cancelling it cancels the running requests."""
        self._began = time.perf_counter()
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as tasks:
                await (self._open(requests, tasks) if self._pace.loop == "open" else self._closed(requests, tasks))
            self.result.whole = True
        finally:
            self.result.seconds = self._now()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return self.result

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _open(self, requests: Iterable[PlannedRequest], tasks: asyncio.TaskGroup) -> None:
        free = self._room()
        for request in requests:
            due = self._pace.due(request)
            await self._sleep_until(due)
            await free.acquire()
            tasks.create_task(self._play(request, due)).add_done_callback(lambda _: free.release())

    async def _closed(self, requests: Iterable[PlannedRequest], tasks: asyncio.TaskGroup) -> None:
        free = self._room()
        for turns in _sessions(requests):
            await self._sleep_until(self._pace.due(turns[0]))
            await free.acquire()
            tasks.create_task(self._session(turns)).add_done_callback(lambda _: free.release())

    async def _session(self, turns: Sequence[PlannedRequest]) -> None:
        for request in turns:
            due = self._pace.due(request) if request is turns[0] else max(self._pace.due(request), self._now())
            await self._sleep_until(due)
            await self._play(request, due)

    async def _play(self, request: PlannedRequest, due: float, *, warmup: bool = False) -> None:
        prompt = await asyncio.to_thread(self._prompt_maker.prompt, request.recorded)
        outcome = Outcome(request.number, request.session, due, self._now(), warmup)
        self.result.outcomes.append(outcome)
        try:
            outcome.answer = await self._target.send(request, prompt, lambda: outcome.arrivals.append(self._now()))
        except PromptTooLong:
            outcome.error = TOO_LONG
        except Exception as error:  # any error fails only its own request
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended = self._now()
        self._on_outcome(outcome)

    async def _sleep_until(self, due: float) -> None:
        await asyncio.sleep(max(0.0, due - self._now()))

    async def _watch(self) -> None:
        while (moment := await self._target.moment(self._now())) is not None:
            self.result.moments.append(moment)
            await asyncio.sleep(_MOMENT_INTERVAL)

    def _room(self) -> asyncio.Semaphore | _NoLimit:
        return _NoLimit() if self._pace.concurrency is None else asyncio.Semaphore(self._pace.concurrency)


class _NoLimit:
    async def acquire(self) -> None:
        """Return at once."""

    def release(self) -> None:
        """Do nothing."""


def _sessions(requests: Iterable[PlannedRequest]) -> list[list[PlannedRequest]]:
    """Return each session's requests in order; sessions in the order of their first request."""
    sessions: dict[str | int, list[PlannedRequest]] = {}
    for request in requests:
        sessions.setdefault(request.number if request.session is None else request.session, []).append(request)
    return list(sessions.values())
