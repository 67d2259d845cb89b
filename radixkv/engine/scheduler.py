"""Which tokens the next step computes: decodes first, then chunks of prompts, then newcomers.

Knows: the waiting queue, the running requests and how many blocks each may still take. Knows no tensor and no thread.

A step has a budget of tokens. Every running stream decodes one of them (iteration-level batching: Orca, OSDI 2022);
what is left goes to chunks of prompts (Sarathi-Serve, OSDI 2024), so that a long prompt lengthens a step by a chunk and
never stalls the others; what is still left lets newcomers in.

Who waits holds nothing. A request comes in when what it is sure to take fits the free and evictable blocks, less what
the running ones were promised. Streams grow beyond that; when blocks run out, somebody is preempted (PagedAttention,
SOSP 2023): its sequences are closed, its published prefix stays in the tree until it is evicted, and it waits again, in
front of whoever came later. See `demand` for what is promised, `preemption` for who gives way, `waiting` for who goes
first, `coalescing` for who stays at the door although there is room.
"""

from __future__ import annotations

import logging
from array import array
from bisect import insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from radixkv.cache import Match, Pin, PrefixCache, Sequence, WritePlan
from radixkv.cache.types import Purpose
from radixkv.config import EngineConfig
from radixkv.engine.admission import blocks_needed, headroom_blocks, most_blocks_freed, victim
from radixkv.engine.request import Request, Stream, TokenIds, common_prefix, failure
from radixkv.engine.reuse_policy import ReusePolicy
from radixkv.engine.stats import Counters
from radixkv.engine.wait_queue import Coalescer, WaitQueue
from radixkv.errors import InvalidInput, OutOfBlocks, PinBudgetExceeded, PromptTooLong

_log = logging.getLogger(__name__)
_LOOKED_AT = 64  # requests for which one admission looks, until it is the next step's turn: each is compared to prompts


@dataclass(frozen=True, slots=True)
class Work:
    """What one stream computes in this step: `tokens` from position `start` on, into the slots of `plan`."""

    stream: Stream
    start: int
    tokens: array[int]
    plan: WritePlan
    isolated: bool = False  # in a forward of its own

    @property
    def samples(self) -> bool:
        """Whether the chunk ends at the last known token, so that the next one is sampled from its logits."""
        return self.start + len(self.tokens) == len(self.stream.tokens) and self.stream.request.max_tokens > 0


class Scheduler:
    """The queue at the door and the requests inside."""

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        counters: Counters,
        end: Callable[[Request, Exception], None],
        reuse: ReusePolicy,
    ) -> None:
        """Schedule onto `cache`; `reuse` says what of it a request takes, and where its chunks end.

        `end` ends a request that can never be admitted, or raised while it was looked at; it must `remove` it.
        """
        self.config = config
        self.waiting = WaitQueue(config, self._cached)
        self.running: list[Request] = []  # by rank
        self._cache = cache
        self._num_blocks, self._block_size = cache.num_blocks, cache.block_size
        self._counters = counters
        self._end = end
        self._reuse_policy = reuse
        self._coalescer = Coalescer(config.prefill_chunk, 2 * cache.block_size, reuse.aligned)
        self._planned: dict[Stream, Work] = {}  # of the step that is being scheduled
        self._budget = 0
        self._arrivals = 0
        self._admissions = 0
        self._pins: list[tuple[Pin, TokenIds, Hashable]] = []
        # Told of each sequence that a request was given, with what it asked for and how much it may have had of that.
        self.on_opened: Callable[[Request, TokenIds, int, Sequence], None] | None = None

    # ---- who is here

    def add(self, request: Request) -> None:
        """Queue a request that `check_fits`."""
        self._arrivals += 1
        request.number = self._arrivals
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, waiting or running, and free what it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        for stream in request.streams:
            self._unplan(stream)
            stream.close()

    def check_fits(self, request: Request) -> None:
        """Raise PromptTooLong, with the numbers, if even an empty pool could not hold the request.

        Reads nothing that changes, so any thread may ask.
        """
        need, width = blocks_needed(request, self._block_size, 0, most=True), request.width
        if width > self.config.max_sequences:
            raise InvalidInput(f"n={width} streams exceed max_sequences={self.config.max_sequences}")
        if need > self._num_blocks:
            streams = f" in each of {width} streams" if width > 1 else ""
            raise PromptTooLong(
                f"a prompt of {len(request.prompt)} tokens and up to {request.max_tokens} new ones{streams} takes "
                f"{need} blocks of {self._block_size} tokens, and the pool has {self._num_blocks}: shorten the prompt, "
                "lower max_tokens or n, or load the engine with more kv_memory"
            )

    def pin(self, tokens: TokenIds, namespace: Hashable = None, ttl: float | None = None) -> Pin:
        """Pin a cached prefix, unless a request that runs, or was preempted, could then not finish.

        Raises PinBudgetExceeded, and then nothing has changed.
        """
        pin = self._cache.pin(tokens, namespace, ttl)
        begun = [(each, None) for each in self.running] + [(each, 0) for each in self.waiting if each.preemptions]
        most = [blocks_needed(each, self._block_size, at, most=True) + headroom_blocks(each) for each, at in begun]
        if self._available() < max([self._promised(), *most]):
            pin.release()
            raise PinBudgetExceeded(
                f"the {len(begun)} requests under way may still need the {pin.blocks} blocks of this pin: try again "
                "when fewer run, or load the engine with more kv_memory"
            )
        self._pins = [each for each in self._pins if each[0].active]
        self._pins.append((pin, tokens, namespace))
        return pin

    def unpin(self, tokens: TokenIds, namespace: Hashable, start: int) -> int:
        """Release the pins that hold any of these tokens from `start` on, or what is cached behind them; how many."""
        found = [
            pin
            for pin, pinned, owner in self._pins
            if pin.active and owner in {namespace} and common_prefix(pinned[: pin.length], tokens) > start
        ]
        for pin in found:
            pin.release()
        return len(found)

    def close(self) -> None:
        """Let go of the cache; from now on only `check_fits` may be called."""
        del self._cache

    # ---- schedule

    def schedule(self) -> list[Work]:
        """Plan the next step: at most max_batch_tokens tokens, one chunk a stream. Raises nothing that is expected."""
        self._planned = {}
        self._budget = self.config.max_batch_tokens
        self._coalescer.next_step()
        for each in list(self.running):
            if each.preemptions and each.suspended:
                self._guarded(each, self._wake_others)
        for stream in self._in_order():
            self._plan(stream)
        self.waiting.release(self._coalescer.over)
        while self._budget and (request := self._admit()) is not None:
            newcomer = request.live[0]
            self._plan(newcomer)
            if newcomer not in self._planned:
                break  # it had to give way at once, or its chunk does not fit this step
        work, self._planned = list(self._planned.values()), {}
        return work

    def _in_order(self) -> list[Stream]:
        decoding: list[Stream] = []
        prefilling: list[Stream] = []
        for request in self.running:
            if not request.channel.paused:
                for stream in request.live:
                    if stream.active:
                        (prefilling if stream.prefilling else decoding).append(stream)
        return decoding + prefilling

    def _plan(self, stream: Stream) -> None:
        """Plan a stream's chunk, unless there is no budget left or the stream must give way itself."""
        while self._budget and stream.active:
            try:
                start, count = stream.sequence.length, self._chunk(stream)
                if count:
                    tokens, isolated = stream.tokens[start : start + count], self._reuse_policy.runs_alone(stream)
                    self._planned[stream] = Work(stream, start, tokens, stream.sequence.extend(tokens), isolated)
                    self._budget -= count
                return
            except OutOfBlocks:
                self.preempt(victim(self.running, self.config.victim))
            except Exception as error:  # whatever it is about this one, the others go on
                self._fail(stream.request, error)

    def _chunk(self, stream: Stream) -> int:
        count = stream.pending
        if count == 1:
            return 1
        if stream.request.suspended:  # the others begin where the prompt ends
            count = len(stream.request.prompt) - stream.sequence.length
        return self._reuse_policy.chunk(count, self._budget)

    def _unplan(self, stream: Stream) -> None:
        work = self._planned.pop(stream, None)
        if work is not None:
            self._budget += len(work.tokens)

    # ---- preempt

    def preempt(self, request: Request) -> None:
        """Free all that a running request holds; it waits for its return, in front of who came later."""
        for stream in request.live:
            if stream.active:
                if stream not in self._planned:
                    self._reuse_policy.leave(stream)
                self._unplan(stream)
                stream.sequence.close()
        self.running.remove(request)
        request.preemptions += 1
        request.guaranteed, request.publish_late = True, False
        self._counters.preemptions += 1
        self.waiting.add(request)

    def _wake_others(self, request: Request) -> None:
        """The prompt is back: the other streams of a preempted request go on from what is left of theirs."""
        lead = next(stream for stream in request.live if stream.active)
        if lead.sequence.length < len(request.prompt):
            return
        for stream in request.suspended:
            if self._reuse_policy.on and self._reuse_policy.chunk_alignment is None and not request.publish_late:
                stream.resume(self._open(request, np.array(stream.tokens, np.int32)))
            else:
                twin = lead.sequence.fork()
                twin.truncate(len(request.prompt))
                stream.resume(twin, common_length=self._reuse_policy.aligned(min(lead.common_length, twin.length)))

    # ---- admit

    def _admit(self) -> Request | None:
        """The first that may come in, now running; None if there is none, or the first that could must wait."""
        if not len(self.waiting) or (self._streams() >= self.config.max_sequences and self._paused() is None):
            return None  # before anything is looked up for those that wait
        for _ in range(_LOOKED_AT):
            request = next((each for each in self.waiting.ranked() if not each.channel.paused), None)
            if request is None:
                return None
            try:
                match = self._reuse_policy.match(request)
                if not (self._reuse_policy.on and self._coalescer.starts_wait(request, self.running, match.length)):
                    return self._let_in(request, match)
                self.waiting.delay(request)
            except Exception as error:  # whatever it is about this one, the others go on
                self._fail(request, error)
                return None
        return None

    def _let_in(self, request: Request, match: Match) -> Request | None:
        fits = self._fits(request, match)
        if not fits and self._would_fit(request, match):
            while not fits and (paused := self._paused()) is not None:
                self.preempt(paused)
                fits = self._fits(request, match)
        if self.running:
            return self._enter(request, self._open(request, request.known)) if fits else None
        return self._let_in_alone(request)

    def _would_fit(self, request: Request, match: Match) -> bool:
        """Whether there could be room if all paused requests gave way: for less, none of them is bothered."""
        paused = [each for each in self.running if each.channel.paused]
        if len(paused) == len(self.running):
            return True
        streams = self._streams() - sum(each.streams_left for each in paused) + request.streams_left
        freed = sum(self._promise(each) + most_blocks_freed(each, self._block_size) for each in paused)
        spare = self._available() - self._promised() + freed
        room = streams <= self.config.max_sequences and spare >= self._takes(request, match)
        return bool(paused) and room and self._could_return(request)

    def _fits(self, request: Request, match: Match) -> bool:
        if self._streams() + request.streams_left > self.config.max_sequences:
            return False
        return self._available() - self._promised() >= self._takes(request, match) and self._could_return(request)

    def _could_return(self, request: Request) -> bool:
        """Whether it could finish alone if it gave way: what is pinned of other texts is no room for it.

        Who cannot be sure of that waits until nobody runs, and is refused then, before it has said a word.
        """
        pinned = self._pinned_blocks()
        if not pinned:
            return True
        own = self._reuse_policy.sure(self._pinned(request))
        return blocks_needed(request, self._block_size, own, most=True) <= self._num_blocks - pinned

    def _pinned_blocks(self) -> int:
        """How many blocks pins hold, those whose time is over not included."""
        return self._cache.stats().pinned_blocks if self._pins else 0

    def _pinned(self, request: Request) -> int:
        """How many tokens a request is sure to hit, because pins keep them."""
        tokens = request.known
        common = (
            common_prefix(pinned[: pin.length], tokens)
            for pin, pinned, owner in self._pins
            if pin.active and owner in {request.namespace}
        )
        return self._reuse_policy.aligned(
            min(max(common, default=0), self._reuse_policy.limit(tokens, request.namespace))
        )

    def _takes(self, request: Request, match: Match) -> int:
        """Blocks that a request is sure to take if it comes in now: those of its hit that nobody holds, and new."""
        return match.idle_blocks + blocks_needed(request, self._block_size, match.length) + headroom_blocks(request)

    def _streams(self) -> int:
        return sum(each.streams_left for each in self.running)

    def _paused(self) -> Request | None:
        """A running request that nobody reads: it gives way to whoever is wanted now."""
        paused = [request for request in self.running if request.channel.paused]
        return victim(paused, self.config.victim) if paused else None

    def _let_in_alone(self, request: Request) -> Request | None:
        """Nobody runs: whoever comes now must be able to finish, if need be without a block to spare."""
        sequence = self._open(request, request.known)
        if self._lacks(request, sequence, headroom_blocks(request)):
            request.guaranteed = request.publish_late = True
            self._pinned_blocks()  # lets go of those whose time is over
            if self._lacks(request, sequence):
                # A hit that ends inside a block costs a copy of that block: give the tokens in it up.
                sequence.truncate(self._reuse_policy.aligned(sequence.length - sequence.length % self._block_size))
            if self._lacks(request, sequence):
                # Part-filled blocks on the way to the hit are held beside it: give up all that is not held anyway.
                sequence.truncate(min(self._pinned(request), sequence.length))
            if self._lacks(request, sequence):
                sequence.close()
                self._end(request, self._pinned_out(request))
                return None
        return self._enter(request, sequence)

    def _lacks(self, request: Request, sequence: Sequence, spare: int = 0) -> bool:
        need = blocks_needed(request, self._block_size, sequence.length, most=True)
        return self._available() < need + spare

    def _enter(self, request: Request, sequence: Sequence) -> Request:
        try:
            request.start(sequence)
        except BaseException:
            sequence.close()
            raise
        self.waiting.remove(request)
        insort(self.running, request, key=lambda each: each.rank)
        self._admissions += 1
        request.admitted = self._admissions
        self.waiting.overtaken_by(request)
        if request.prefix_wait is not None:
            gained = sequence.length - request.prefix_wait.cached
            request.coalesced |= gained > 0
            self._counters.coalesced_requests += gained > 0
            self._counters.coalesced_tokens += max(gained, 0)
            request.prefix_wait = None
        self._wake_others(request)
        return request

    def _open(self, request: Request, tokens: TokenIds) -> Sequence:
        limit = self._reuse_policy.limit(tokens, request.namespace)
        purpose: Purpose = "resume" if request.streams else "request"
        sequence = self._cache.open(tokens, request.namespace, limit, request.priority, purpose=purpose)
        if self.on_opened is not None:
            self.on_opened(request, tokens, limit, sequence)
        return sequence

    def _cached(self, request: Request) -> int:
        """Tokens that a request would hit, for its rank; whoever cannot be looked up fails alone, at the door."""
        try:
            return self._reuse_policy.match(request).length
        except Exception:
            return 0

    def _pinned_out(self, request: Request) -> PromptTooLong:
        """Why a request that fits the pool must be refused all the same: nothing runs, so pins hold the rest."""
        own, pinned = self._pinned(request), self._pinned_blocks()
        begun = "the request had begun, and pins have changed since: " if request.admitted else ""
        beside = f" beside {own // self._block_size} that are pinned for it" if own >= self._block_size else ""
        return PromptTooLong(
            f"{begun}the request takes {blocks_needed(request, self._block_size, own, most=True)} blocks{beside}; of "
            f"the pool's {self._num_blocks}, {pinned} are pinned: release pins, or load the engine with more kv_memory"
        )

    # ---- blocks

    def _available(self) -> int:
        return self._cache.free_blocks + self._cache.evictable_blocks

    def _promised(self) -> int:
        """What the running requests were told that they may still take."""
        return sum(map(self._promise, self.running))

    def _promise(self, request: Request) -> int:
        return blocks_needed(request, self._block_size) + headroom_blocks(request)

    # ---- faults

    def _guarded(self, request: Request, call: Callable[[Request], None]) -> None:
        try:
            call(request)
        except Exception as error:
            self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        _log.exception("a request could not be scheduled")
        self._end(request, failure(error))
