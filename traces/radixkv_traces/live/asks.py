"""From recorded requests to what is asked of an engine: token ids made up from block ids, or chat messages as they are.

Knows recorded requests and random numbers. Knows no engine and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.errors import InvalidInput
from radixkv_traces.chats import ChatRequest
from radixkv_traces.records import TraceRequest
from radixkv_traces.text_blocks import estimate, spoken

TokenIds: TypeAlias = npt.NDArray[np.int32]
Messages: TypeAlias = list[Mapping[str, Any]]

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
