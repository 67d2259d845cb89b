"""Which tokens the next step computes: decodes first, then chunks of prompts, then newcomers in order of arrival.

Knows: the waiting queue, the running requests and how many blocks each may still take. Knows no tensor and no thread.

Admission promises that a running request never runs out of blocks. A request is admitted when the free and evictable
blocks, less what the running ones may still take, cover all that it may take: its prompt and max_tokens. The request
at the head of the queue opens its sequence first (its hit is counted once, and is held from then on, so that what
was evictable there is no longer counted) and then waits at the door until the rest fits.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from radixkv.cache import Pin, PrefixCache, Sequence, WritePlan
from radixkv.engine.prompts import TokenIds, common_prefix
from radixkv.engine.request import Request, Stream, failure
from radixkv.errors import InvalidInput, PinBudgetExceeded, PromptTooLong
from radixkv.models.sampling_params import is_int

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """How much runs at once: streams, tokens a step, and tokens of one prompt a step."""

    max_sequences: int = 64
    max_batch_tokens: int = 2048
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        """Refuse what could never run."""
        for name in ("max_sequences", "max_batch_tokens", "prefill_chunk"):
            if not is_int(getattr(self, name)) or getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be an int, at least 1, got {getattr(self, name)!r}")
        if self.max_batch_tokens < self.max_sequences:
            raise InvalidInput(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_sequences ({self.max_sequences}): "
                "every running sequence decodes one token a step"
            )


@dataclass(frozen=True)
class Work:
    """What one stream computes in this step: `tokens` from position `start` on, into the slots of `plan`."""

    stream: Stream
    start: int
    tokens: array[int]
    plan: WritePlan

    @property
    def samples(self) -> bool:
        """Whether the chunk ends at the last known token, so that the next one is sampled from its logits."""
        return self.start + len(self.tokens) == len(self.stream.tokens) and self.stream.request.max_tokens > 0


class Scheduler:
    """The queue at the door and the requests inside."""

    def __init__(
        self, cache: PrefixCache, limits: Limits, refuse: Callable[[Request, Exception], None], *, reuse: bool = True
    ) -> None:
        """Schedule onto `cache`; without `reuse` no request looks for a cached prefix.

        `refuse` ends a request that waits but can never be admitted; it must `remove` it.
        """
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._cache = cache
        self._num_blocks, self._block_size = cache.num_blocks, cache.block_size
        self._refuse = refuse
        self._reuse = reuse
        self._door: Sequence | None = None  # the sequence of waiting[0], once it is open

    def check_fits(self, request: Request) -> None:
        """Raise PromptTooLong, with the numbers, if even an empty pool could not hold the request.

        Reads nothing that changes, so any thread may ask.
        """
        need, blocks, width = self._need(request, 0), self._num_blocks, request.width
        if width > self.limits.max_sequences:
            raise InvalidInput(f"n={width} streams exceed max_sequences={self.limits.max_sequences}")
        if need > blocks:
            streams = f" in each of {width} streams" if width > 1 else ""
            raise PromptTooLong(
                f"a prompt of {len(request.prompt)} tokens and up to {request.max_tokens} new ones{streams} takes "
                f"{need} blocks of {self._block_size} tokens, and the pool has {blocks}: shorten the prompt, "
                "lower max_tokens or n, or load the engine with more kv_memory"
            )

    def remove(self, request: Request) -> None:
        """Take a request out, waiting or running, and free what it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            if request is self.waiting[0]:
                self._close_door()
            self.waiting.remove(request)
        for stream in request.streams:
            stream.close()

    def close(self) -> None:
        """Let go of the cache; from now on only `check_fits` may be called."""
        del self._cache

    def pin(self, tokens: TokenIds, namespace: Hashable = None, ttl: float | None = None) -> Pin:
        """Pin a cached prefix, unless that takes blocks which the running requests were promised.

        Raises PinBudgetExceeded, and then nothing has changed.
        """
        pin = self._cache.pin(tokens, namespace, ttl)
        if self._available() < self._reserved():
            pin.release()
            raise PinBudgetExceeded(
                f"the {len(self.running)} running requests may still need the {pin.blocks} blocks of this pin: try "
                "again when fewer run, or load the engine with more kv_memory"
            )
        return pin

    # ---- schedule

    def schedule(self) -> list[Work]:
        """Plan the next step: at most max_batch_tokens tokens, one chunk a stream. Raises nothing that is expected."""
        budget = self.limits.max_batch_tokens
        work = []
        for stream in self._in_order():
            if budget:
                work.append(self._plan(stream, budget))
                budget -= len(work[-1].tokens)
        while budget and (request := self._admit()) is not None:
            work.append(self._plan(request.streams[0], budget))
            budget -= len(work[-1].tokens)
        return work

    def _in_order(self) -> Iterator[Stream]:
        live = [stream for request in self.running for stream in request.live]
        yield from (stream for stream in live if not stream.prefilling)
        yield from (stream for stream in live if stream.prefilling)

    def _plan(self, stream: Stream, budget: int) -> Work:
        start = stream.sequence.length
        length = min(stream.pending, self.limits.prefill_chunk, budget)
        tokens = stream.tokens[start : start + length]
        return Work(stream, start, tokens, stream.sequence.extend(tokens))

    # ---- admit

    def _admit(self) -> Request | None:
        """The head of the queue, now running; None if there is none or it must wait."""
        while self.waiting:
            request = self.waiting[0]
            try:
                if not self._at_door(request):
                    return None
                if self._enters(request):
                    return request
                if self.running:
                    return None
                self._refuse(request, self._pinned_out(request))
            except Exception as error:  # whatever it is about this one, the others go on
                _log.exception("a request could not be admitted")
                self._refuse(request, failure(error))
        return None

    def _at_door(self, request: Request) -> bool:
        """Whether the head of the queue has its sequence open, or may open it now."""
        if sum(map(_streams, self.running)) + request.width > self.limits.max_sequences:
            return False
        if self._door is None:
            if self._worth_waiting(request) or not self._may_open(request):
                return False
            self._door = self._open(request)
        return True

    def _open(self, request: Request) -> Sequence:
        # A full repeat computes one token again: its logits are needed, and a step has no empty chunks.
        limit = len(request.prompt) - 1 if self._reuse else 0
        return self._cache.open(request.prompt, request.namespace, limit=limit, priority=request.priority)

    def _worth_waiting(self, request: Request) -> bool:
        """Whether a running prompt is about to compute a prefix of this one, which is then a hit instead."""
        ahead = [each for each in self.running if each.namespace == request.namespace and each.streams[0].prefilling]
        if not ahead or not self._reuse:
            return False
        cached = self._cache.match(request.prompt, request.namespace).length
        for each in ahead:
            shared = common_prefix(each.prompt, request.prompt)
            if shared > each.streams[0].sequence.length and shared - cached >= 2 * self._block_size:
                return True
        return False

    def _may_open(self, request: Request) -> bool:
        """Whether the running requests keep what was promised to them if the hit is held too."""
        if not self.running:
            return True
        spare = self._available() - self._reserved()
        blocks = self._cache.match(request.prompt, request.namespace).blocks
        if spare >= len(blocks):
            return True
        held = np.concatenate([stream.sequence.block_table for each in self.running for stream in each.live])
        return spare >= int(np.isin(blocks, held, invert=True).sum())

    def _room_for(self, request: Request, sequence: Sequence) -> bool:
        if self._available() - self._reserved() >= self._need(request, sequence.length) + request.width:
            return True
        return not self.running and self._room_alone(request, sequence)

    def _room_alone(self, request: Request, sequence: Sequence) -> bool:
        """Whether a request that is alone, and fills the pool nearly or quite, can do without blocks to spare."""
        request.publish_late = True
        if self._available() < self._need(request, sequence.length):
            # A hit that ends inside a block costs a copy of that block: give the tokens in it up.
            sequence.truncate(sequence.length - sequence.length % self._block_size)
        if self._available() < self._need(request, sequence.length):
            # Part-filled blocks on the way to the hit are held beside it: give all of it up.
            sequence.truncate(0)
        return self._available() >= self._need(request, sequence.length)

    def _enters(self, request: Request) -> bool:
        """Let the head of the queue in if there is room. Until it runs, the door holds its sequence."""
        assert self._door is not None
        if not self._room_for(request, self._door):
            return False
        request.start(self._door)
        self._door = None
        self.running.append(self.waiting.popleft())
        return True

    def _pinned_out(self, request: Request) -> PromptTooLong:
        """Why a request that fits the pool must be refused all the same: nothing runs, so pins hold the rest."""
        return PromptTooLong(
            f"the request takes {self._need(request, 0)} blocks; of the pool's {self._num_blocks}, "
            f"{self._cache.stats().pinned_blocks} are pinned: release pins, or load the engine with more kv_memory"
        )

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    # ---- blocks

    def _available(self) -> int:
        return self._cache.free_blocks + self._cache.evictable_blocks

    def _reserved(self) -> int:
        """What the running requests may still take, with one spare block a stream.

        Publishing tokens that the tree has by then holds the tree's copy of the part-filled last block as well.
        """
        return sum(self._outstanding(request) + len(request.live) for request in self.running)

    def _outstanding(self, request: Request) -> int:
        if not request.forked:
            return self._need(request, request.streams[0].sequence.length)
        size = self._block_size
        return sum(_blocks(request.computed_length, size) - s.sequence.length // size for s in request.live)

    def _need(self, request: Request, length: int) -> int:
        """Blocks that a request may still take when `length` tokens of its prompt are there.

        A part-filled last block counts: whoever writes behind somebody else's tokens takes a copy. So does each fork.
        """
        size = self._block_size
        total = _blocks(request.computed_length, size)
        return total - length // size + (request.width - 1) * (total - len(request.prompt) // size)


def _streams(request: Request) -> int:
    return len(request.live) if request.forked else request.width


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
