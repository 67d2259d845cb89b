"""What became of one request, as its client saw it. Knows numbers only.

All times are seconds on one clock; an outcome's are counted from the beginning of the replay.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from radixkv_traces.live.asks import Ask, Messages, TokenIds

TOO_LONG = "too long"
"""The error of a request that no engine of this size can serve: skipped, and counted apart from failures."""

Seen = Callable[[], None]


@dataclass(slots=True)
class Answer:
    """What a target says of a request that it answered; None for what it does not tell."""

    output_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None


@dataclass(slots=True)
class Outcome:
    """One request from being due to its end; `error` says why it has no answer."""

    number: int
    session: str | None
    due: float
    sent: float
    warmup: bool = False
    arrivals: array[float] = field(default_factory=lambda: array("d"))  # of each token, or piece of the stream
    ended: float | None = None
    answer: Answer | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from being sent to the first token."""
        return self.arrivals[0] - self.sent if self.arrivals and self.answer is not None else None

    @property
    def total(self) -> float | None:
        """Seconds from being sent to the last token."""
        return self.arrivals[-1] - self.sent if self.arrivals and self.answer is not None else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token behind the first; None for answers of one token."""
        if self.answer is None or self.answer.output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.answer.output_tokens - 1)

    @property
    def late(self) -> float:
        """Seconds between being due and being sent: what the replay itself, or its `concurrency`, made it wait."""
        return self.sent - self.due


@dataclass(frozen=True, slots=True)
class Moment:
    """An engine at one moment of a replay."""

    at: float
    used_blocks: int
    cached_blocks: int
    num_blocks: int
    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int


class Target(Protocol):
    """An engine that can be asked. Its methods run in one event loop."""

    @property
    def name(self) -> str:
        """What the figures call it."""

    async def ask(self, ask: Ask, prompt: TokenIds | Messages, seen: Seen) -> Answer:
        """Send a request, call `seen` at each piece of the answer, and return at its end.

        What it raises becomes the outcome's error; PromptTooLong is for what cannot be served.
        """

    async def moment(self, at: float) -> Moment | None:
        """The engine now, `at` seconds into the replay; None from one that does not tell."""
