"""Requests of a replay: the planned ones, their outcomes, and the interface of a target that answers them.

A recorded chat is sent as its messages; for a recorded prompt of block ids, token ids are made up. All times are
seconds on one clock; the times of an outcome count from the start of the replay.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from radixkv.errors import InvalidInput
from radixkv_traces.chats import ChatRequest
from radixkv_traces.records import TraceRequest
from radixkv_traces.text_blocks import estimate, spoken

TokenIds: TypeAlias = npt.NDArray[np.int32]
Messages: TypeAlias = list[Mapping[str, Any]]

TOO_LONG = "too long"
"""The error of a request that is longer than the model's context: it is not sent, and counts apart from failures."""

OnPiece = Callable[[], None]

_KEPT_BLOCKS = 4096  # made-up blocks that are kept, for prefixes that many prompts share


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to be sent: `due` seconds after the replay began, in recorded time.

    `recorded` is the recorded request. Its prompt is made when it is sent, so that a long trace is never in memory as a
    whole.
    """

    number: int
    session: str | None
    due: float
    output_tokens: int
    recorded: TraceRequest | ChatRequest


@dataclass(slots=True)
class Answer:
    """A target's report of an answered request; None for figures that it does not report."""

    output_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None


@dataclass(slots=True)
class Outcome:
    """One request from its due time to its end; `error` is the reason if it has no answer."""

    number: int
    session: str | None
    due: float
    sent: float
    warmup: bool = False
    arrivals: array[float] = field(default_factory=lambda: array("d"))  # times of each token, or piece of the stream
    ended: float | None = None
    answer: Answer | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.arrivals[0] - self.sent if self.arrivals and self.answer is not None else None

    @property
    def total(self) -> float | None:
        """Seconds from sending to the last token."""
        return self.arrivals[-1] - self.sent if self.arrivals and self.answer is not None else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None for answers of one token."""
        if self.answer is None or self.answer.output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.answer.output_tokens - 1)

    @property
    def late(self) -> float:
        """Seconds between due and sent, caused by the replay itself or its `concurrency`."""
        return self.sent - self.due


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of an engine at one moment of a replay."""

    at: float
    used_blocks: int
    cached_blocks: int
    num_blocks: int
    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int


class Target(Protocol):
    """An engine that requests are sent to. Its methods run in one event loop."""

    @property
    def name(self) -> str:
        """The target's name in the figures."""

    async def send(self, request: PlannedRequest, prompt: TokenIds | Messages, on_piece: OnPiece) -> Answer:
        """Send a request, call `on_piece` at each piece of the answer, and return at its end.

        An error becomes the outcome's error; PromptTooLong means that the model's context is too short.
        """

    async def moment(self, at: float) -> Moment | None:
        """Return the engine's state, `at` seconds into the replay; None if the target does not report it."""


class PromptMaker:
    """Make prompts of recorded ones: equal block ids give equal tokens, in every run with the same seed (and numpy).

    `block_tokens` is the size of a recorded block. `shrink` makes prompts that many times shorter, so that a large
    model's traffic can be replayed against a small one; text is not shortened.

    A block id stands for all text up to it, so two prompts share as many tokens as the recorded ones did. By chance one
    in `vocab_size` blocks begins like another.
    """

    def __init__(self, vocab_size: int, block_tokens: int, *, shrink: int = 1, seed: int = 0) -> None:
        if shrink < 1 or block_tokens < shrink:
            raise InvalidInput(f"shrink={shrink}: allowed is 1 to the tokens of a recorded block, {block_tokens}")
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._shrink = shrink
        self._seed = seed
        self._block = lru_cache(_KEPT_BLOCKS)(lambda block, size: self._draw((seed, 0, block), size))

    def prompt(self, request: TraceRequest | ChatRequest) -> TokenIds | Messages:
        """Return the token ids int32[n] of a recorded prompt, or its messages. O(tokens)."""
        if isinstance(request, ChatRequest):
            return list(request.messages)
        block_tokens = request.block_tokens or self._block_tokens
        length = max(1, -(-request.input_length // self._shrink))
        size = max(1, block_tokens // self._shrink)
        parts = [self._block(block, size) for block in request.blocks[: -(-length // size)]]
        missing = length - size * len(parts)
        if missing > 0:  # recorders that name only whole blocks leave the prompt's end without an id
            parts.append(self._end(request, missing))
        return np.concatenate(parts)[:length]

    def output_tokens(self, request: TraceRequest | ChatRequest, limit: int | None = None) -> int:
        """Return the number of tokens to generate: as recorded, or estimated from a text; 1 to `limit`. O(text)."""
        if isinstance(request, ChatRequest):
            recorded = request.output_length
            tokens = len(estimate(spoken(request.reply or {}))) if recorded is None else recorded
        else:
            tokens = -(-request.output_length // self._shrink)
        tokens = max(1, tokens)
        return tokens if limit is None else min(tokens, limit)

    def _end(self, request: TraceRequest, length: int) -> TokenIds:
        if not request.blocks and request.session is not None:  # lengths only: no two prompts are alike
            return self._draw((self._seed, 2, crc32(request.session.encode()), int(abs(request.timestamp))), length)
        last = request.blocks[-1] if request.blocks else 0
        return self._draw((self._seed, 1, last, request.input_length, int(request.timestamp)), length)

    def _draw(self, key: tuple[int, ...], length: int) -> TokenIds:
        return np.random.default_rng(key).integers(0, self._vocab_size, length, dtype=np.int32)


def plan_requests(
    requests: Iterable[TraceRequest | ChatRequest], prompt_maker: PromptMaker, max_output: int | None = None
) -> list[PlannedRequest]:
    """Return the requests to send, sorted by time and then by file order; times count from the first. O(n log n)."""
    ordered = sorted(requests, key=lambda request: request.timestamp)
    return [
        PlannedRequest(
            number,
            request.session,
            (request.timestamp - ordered[0].timestamp) / 1e3,
            prompt_maker.output_tokens(request, max_output),
            request,
        )
        for number, request in enumerate(ordered)
    ]
