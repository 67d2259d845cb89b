"""An output channel without threads: it records chunks, and pauses its request in the spans of its scenario."""

from __future__ import annotations

import random
from collections.abc import Callable

from radixkv.engine.output import Chunk, Completion
from tests.simulation.scenario import Ask, Sabotage


class ScriptedChannel:
    """Stands in for `OutputChannel`. `now` returns the step. The request's flaw says which errors it raises."""

    def __init__(self, ask: Ask, now: Callable[[], int]) -> None:
        self.ask, self._now = ask, now
        self.on_drained: Callable[[], None] | None = None
        self.chunks: list[Chunk] = []
        self.completion: Completion | None = None
        self.error: Exception | None = None
        self.ends = 0
        self.raised: Sabotage | None = None
        self._backpressure_disabled = False
        self.fixed: bool | None = None  # what `paused` is now
        self._rng = random.Random(ask.number)

    # ---- the engine's side

    def put(self, chunk: Chunk) -> None:
        assert not self.ended, "a chunk after the end"
        self._sabotage("put", len(self.chunks))
        self.chunks.append(chunk)

    def notify(self) -> None:
        """Wake no reader: the world looks at the chunks itself."""

    def finish(self, completion: Completion) -> None:
        self._sabotage("finish", 0)
        self.ends += 1
        self.completion = completion

    def fail(self, error: Exception) -> None:
        self.ends += 1
        self.error = error

    def disable_backpressure(self) -> None:
        self._backpressure_disabled = True

    @property
    def ended(self) -> bool:
        return self.ends > 0

    @property
    def paused(self) -> bool:
        """Whether the reader is away. It may come and go while the engine looks, so this may flicker within a span."""
        if self.fixed is not None:
            return self.fixed
        return self.in_span and not self.ended and not (self.ask.flickers and self._rng.random() < 0.5)

    def wait(self, timeout: float | None) -> None:
        if self.error is not None:
            raise self.error

    # ---- the world's side

    @property
    def in_span(self) -> bool:
        """Whether this step is in a span, and backpressure is enabled."""
        return not self._backpressure_disabled and any(begin <= self._now() < end for begin, end in self.ask.lags)

    @property
    def is_away(self) -> bool:
        """Whether the reader is away for the whole step, so that `paused` was always true."""
        return self.in_span and not self.ask.flickers

    def tokens(self, index: int) -> tuple[int, ...]:
        """Return the tokens of one stream so far."""
        return tuple(token for chunk in self.chunks if chunk.index == index for token in chunk.token_ids)

    def _sabotage(self, kind: str, at: int) -> None:
        flaw = self.ask.flaw
        if flaw is not None and flaw.kind == kind and (kind == "finish" or flaw.at <= at):
            self.raised = Sabotage(f"request {self.ask.number} cannot take this ({kind})")
            raise self.raised
