"""Requests of a replay: what is sent, what came back, and the interface of a target that answers them.

A recorded chat is sent as its messages; for a recorded prompt of block ids, token ids are made up. All times are
seconds on one clock; those of an outcome count from the start of the replay.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.errors import InvalidInput
from radixkv_traces.chats import ChatRequest
from radixkv_traces.records import TraceRequest
from radixkv_traces.text_blocks import estimate, spoken

TokenIds: TypeAlias = npt.NDArray[np.int32]
Messages: TypeAlias = list[Mapping[str, Any]]

TOO_LONG = "too long"
"""The error of a request that no engine of this size can serve: skipped, and counted apart from failures."""

Seen = Callable[[], None]

_KEPT_BLOCKS = 4096  # synthesised blocks that are kept: the prefixes that many prompts begin with


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to be sent: `due` seconds after the replay began, in the recording's own time.

    `request` is what was recorded; its prompt is made when it is sent, so that a long trace is never in memory whole.
    """

    number: int
    session: str | None
    due: float
    output_tokens: int
    request: TraceRequest | ChatRequest


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


class Synthesis:
    """Makes prompts: equal block ids give equal tokens, in this run and in any other with the same seed (and numpy).

    `block_tokens` is what a recorded block stands for; `shrink` makes everything that many times shorter, so that a
    trace of a large model's users can be played to a small one; text stays as it is.

    Block ids stand for all that came before them, so that two prompts have as many tokens in common as their recorded
    ones had, but for chance: one in `vocab_size` blocks begins like another.
    """

    def __init__(self, vocab_size: int, block_tokens: int, *, shrink: int = 1, seed: int = 0) -> None:
        if shrink < 1 or block_tokens < shrink:
            raise InvalidInput(f"shrink={shrink}: allowed is 1 to the tokens of a recorded block, {block_tokens}")
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._shrink = shrink
        self._seed = seed
        self._block = lru_cache(_KEPT_BLOCKS)(self._made_block)

    def prompt(self, request: TraceRequest | ChatRequest) -> TokenIds | Messages:
        """Token ids int32[n] of a recorded prompt, or its messages. O(tokens)."""
        if isinstance(request, ChatRequest):
            return list(request.messages)
        block_tokens = request.block_tokens or self._block_tokens
        length = max(1, -(-request.input_length // self._shrink))
        size = max(1, block_tokens // self._shrink)
        parts = [self._block(block, size) for block in request.blocks[: -(-length // size)]]
        missing = length - size * len(parts)
        if missing > 0:  # a recorder that names only whole blocks leaves the prompt's end without an id
            parts.append(self._end(request, missing))
        return np.concatenate(parts)[:length]

    def output_tokens(self, request: TraceRequest | ChatRequest, limit: int | None = None) -> int:
        """How many tokens to ask for: as many as were recorded, or estimated of a text; 1 to `limit`. O(text)."""
        if isinstance(request, ChatRequest):
            recorded = request.output_length
            tokens = len(estimate(spoken(request.reply or {}))) if recorded is None else recorded
        else:
            tokens = -(-request.output_length // self._shrink)
        tokens = max(1, tokens)
        return tokens if limit is None else min(tokens, limit)

    def _made_block(self, block: int, size: int) -> TokenIds:
        return self._draw((self._seed, 0, block), size)

    def _end(self, request: TraceRequest, length: int) -> TokenIds:
        last = request.blocks[-1] if request.blocks else 0
        return self._draw((self._seed, 1, last, request.input_length, int(request.timestamp)), length)

    def _draw(self, key: tuple[int, ...], length: int) -> TokenIds:
        return np.random.default_rng(key).integers(0, self._vocab_size, length, dtype=np.int32)


def asks(
    requests: Iterable[TraceRequest | ChatRequest],
    synthesis: Synthesis,
    max_output: int | None = None,
) -> list[Ask]:
    """What to send, by time; requests of one time in file order. Times are counted from the first. O(n log n)."""
    ordered = sorted(requests, key=lambda request: request.timestamp)
    return [
        Ask(
            number,
            request.session,
            (request.timestamp - ordered[0].timestamp) / 1e3,
            synthesis.output_tokens(request, max_output),
            request,
        )
        for number, request in enumerate(ordered)
    ]
