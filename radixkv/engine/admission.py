"""Decide which waiting request fits, how many blocks are promised, and which running request is preempted.

A request is admitted when the blocks that it is sure to take fit. These are the blocks of its prompt and of the tokens
that it has sampled so far, and one block more for each stream. Streams grow beyond that promise, so blocks may run out,
and then a running request is preempted. A preempted request is promised all the blocks that it may take, max_tokens
included, when it comes back.

Paused requests are preempted first (their answers are not being read), then the lowest priority, then requests that
were never preempted, then the one that is cheapest to resume. The third rule matters: a preempted request is admitted
only if all that it may take fits. So another request is always there that was promised less, and no request is
preempted twice, except paused ones and those of a lower priority than others.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from radixkv.cache import Match, Pin, PrefixCache, Sequence
from radixkv.cache.tokens import is_compressed
from radixkv.config import EngineConfig
from radixkv.engine.request import Request, Stream, TokenIds, common_prefix
from radixkv.engine.reuse_policy import ReusePolicy
from radixkv.engine.wait_queue import WaitQueue
from radixkv.errors import InvalidInput, PinBudgetExceeded, PromptTooLong


class Admission:
    """The promises to the running requests of one cache, and the room that they and the pins leave."""

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        reuse: ReusePolicy,
        running: list[Request],
        waiting: WaitQueue,
        closing: list[Stream],
    ) -> None:
        """Read `running`, `waiting` and `closing`, which are the scheduler's."""
        self._cache, self._reuse = cache, reuse
        self._running, self._waiting, self._closing = running, waiting, closing
        self.block_size = cache.block_size
        self._num_blocks, self._max_sequences = cache.num_blocks, config.max_sequences
        self._pins: list[tuple[Pin, TokenIds, Hashable]] = []

    def close(self) -> None:
        """Release the cache; from now on only `check_fits` may be called."""
        del self._cache

    # ---- room for a request

    def check_fits(self, request: Request) -> None:
        """Raise PromptTooLong, with the numbers, if even an empty pool could not hold the request.

        Reads nothing that changes, so any thread may call it.
        """
        need, replies = blocks_needed(request, self.block_size, 0, worst_case=True), request.replies
        width, parameter, kind = replies.width, replies.parameter, replies.kind
        if width > self._max_sequences:
            raise InvalidInput(f"{parameter}={width} {kind} exceed max_sequences={self._max_sequences}")
        if need > self._num_blocks:
            streams = f" in each of {width} {kind}" if width > 1 else ""
            raise PromptTooLong(
                f"a prompt of {len(request.prompt)} tokens and up to {request.max_tokens} new ones{streams} takes "
                f"{need} blocks of {self.block_size} tokens, and the pool has {self._num_blocks}: "
                f"shorten the prompt, lower max_tokens or {parameter}, or load the engine with more kv_memory"
            )

    def streams(self, without: Collection[Request] = ()) -> int:
        """Return how many streams run, will run once their prompts are computed, or have ended and are not closed."""
        return len(self._closing) + sum(each.streams_left for each in self._running if each not in without)

    def fits(self, request: Request, match: Match, without: Collection[Request] = ()) -> bool:
        """Return whether a request that would hit `match` can run with the others, once `without` are preempted.

        It can if a stream is left for it, if the pool has its blocks in addition to the promised ones, and if it could
        finish alone after a preemption, next to the pins on other prefixes. A request that could not return waits until
        no other one runs, and is refused then, before it has produced a token.
        """
        if without and len(without) == len(self._running):
            return True  # it starts alone: see `cut_to_fit`
        room = self._cache.available_blocks - match.idle_blocks
        room += sum(most_blocks_freed(each, self.block_size) for each in without)
        return (
            self.streams(without) + request.streams_left <= self._max_sequences
            and self._promised(without) + self._need(request, match.length) + request.streams_left <= room
            and (not self._pinned_blocks() or self._most_left(request) <= self._room_beside_pins())
        )

    def cut_to_fit(self, request: Request, sequence: Sequence) -> bool:
        """Cut the hit of a request that runs alone until it can finish; returns False if it cannot even so.

        Without room for the headroom, the request publishes late, and is promised all the blocks that it may take.
        """
        if self._pins:
            self._pinned_blocks()  # releases pins that have expired
        if self._most(request, sequence.length) + request.streams_left <= self._cache.available_blocks:
            return True
        request.scheduling.guaranteed = request.scheduling.publish_late = True
        # A hit that ends inside a block costs a copy of that block, and the path to it also holds part-filled blocks.
        whole = self._reuse.aligned(sequence.length - sequence.length % self.block_size)
        for kept in (sequence.length, whole, self._pinned_hit(request)):
            sequence.truncate(min(max(kept, request.parts.slots), sequence.length))
            need = self._most(request, sequence.length)
            if need <= self._cache.available_blocks:
                return True
        # Unpinned leaves may share part-filled blocks with pinned nodes, which have copies: evict them if that helps.
        return need <= self._room_beside_pins() and self._cache.evict(need)

    def refusal(self, request: Request) -> PromptTooLong:
        """Explain why a request that fits the pool is refused: no other request runs, so pins hold the other blocks."""
        own, pinned = self._pinned_hit(request), self._pinned_blocks()
        begun = "the request had begun, and pins have changed since: " if request.scheduling.admitted else ""
        beside = f" beside {own // self.block_size} that are pinned for it" if own >= self.block_size else ""
        return PromptTooLong(
            f"{begun}the request takes {self._most(request, own)} blocks{beside}; the pool has {self._num_blocks}, and "
            f"{pinned} are pinned: release pins, or load the engine with more kv_memory"
        )

    def _need(self, request: Request, start: int | None = None) -> int:
        return blocks_needed(request, self.block_size, start)

    def _most(self, request: Request, start: int | None) -> int:
        return blocks_needed(request, self.block_size, start, worst_case=True)

    def _most_left(self, request: Request) -> int:
        """Return how many blocks a request takes at most if it runs alone, besides those that are pinned for it."""
        return self._most(request, self._reuse.sure_hit(self._pinned_hit(request)))

    def _promised(self, without: Collection[Request] = ()) -> int:
        """Return how many blocks the running requests may still take, except `without`."""
        return sum(self._need(each) + each.streams_left for each in self._running if each not in without)

    def _room_beside_pins(self) -> int:
        """Return how many blocks that are not pinned a request can have if it runs alone."""
        return self._num_blocks - self._pinned_blocks()

    # ---- pins

    def pin(self, tokens: TokenIds, namespace: Hashable = None, ttl: float | None = None) -> Pin:
        """Pin a cached prefix, unless a request that runs, or was preempted, could then not finish.

        Raises PinBudgetExceeded, and then nothing has changed.
        """
        pin = self._cache.pin(tokens, namespace, ttl)
        begun: list[tuple[Request, int | None]] = [(each, None) for each in self._running]
        begun += [(each, 0) for each in self._waiting if each.scheduling.preemptions]
        most = max((self._most(each, at) + each.streams_left for each, at in begun), default=0)
        if max(most, self._promised()) > self._cache.available_blocks:
            pin.release()
            raise PinBudgetExceeded(
                f"the {len(begun)} requests under way may still need the {pin.blocks} blocks of this pin: try again "
                "when fewer run, or load the engine with more kv_memory"
            )
        self._pins = [each for each in self._pins if each[0].active]
        self._pins.append((pin, tokens, namespace))
        return pin

    def unpin(self, tokens: TokenIds, namespace: Hashable, start: int) -> int:
        """Release the pins on any of these tokens from `start` on, or on a continuation; returns how many."""
        found = [
            pin
            for pin, pinned, owner in self._pins
            if pin.active and owner in {namespace} and common_prefix(pinned[: pin.length], tokens) > start
        ]
        for pin in found:
            pin.release()
        return len(found)

    def unpin_compressed(self, namespace: Hashable) -> None:
        """Release the pins on the compressed prefixes of a namespace."""
        for pin, pinned, owner in self._pins:
            if owner in {namespace} and is_compressed(pinned[:1].tobytes()):
                pin.release()

    def _pinned_blocks(self) -> int:
        """Return how many blocks pins hold; releases those that have expired."""
        return self._cache.stats().pinned_blocks if self._pins else 0

    def _pinned_hit(self, request: Request) -> int:
        """Return how many tokens a request is sure to hit, because pins keep them."""
        tokens = request.known
        common = (
            self._cache.pinned_length(pin, common_prefix(pinned[: pin.length], tokens))
            for pin, pinned, owner in self._pins
            if pin.active and owner in {request.namespace}
        )
        return self._reuse.aligned(min(max(common, default=0), self._reuse.limit(tokens, request)))

    # ---- preemption

    def victim(self) -> Request:
        """Return the running request to preempt for a running one; O(running requests * depth of the tree)."""
        return min(self._running, key=_preempted_first)

    def paused(self) -> list[Request]:
        """Return the paused requests, in the order in which they are preempted."""
        paused = [request for request in self._running if request.channel.paused]
        return sorted(paused, key=_preempted_first)


def _preempted_first(request: Request) -> tuple[bool, int, bool, int, int]:
    """Order paused requests first, then by priority, then requests that were never preempted, then by cost."""
    return not request.channel.paused, request.priority, request.scheduling.guaranteed, *_cheapest(request)


def blocks_needed(request: Request, block_size: int, start: int | None = None, *, worst_case: bool = False) -> int:
    """Return how many blocks all streams of a request may still take together, without their headroom.

    The headroom is one block per stream, for the case that another request has cached the tokens that it publishes.

    `start` is where its first stream begins if it does not run yet. `worst_case` counts up to max_tokens in any case.
    A part-filled last block counts, because a sequence copies a shared block before it writes; so does each fork.
    """
    prompt, live = len(request.prompt), request.live
    most = prompt + max(request.max_tokens - 1, 0)  # the last sampled token is never computed
    blocks = 0
    for index in range(request.streams_left):
        stream = live[index] if index < len(live) else None
        begin, end = prompt, prompt  # a stream that is not forked yet begins after the prompt
        if stream is not None:
            end = len(stream.tokens)
            begin = min(stream.sequence.length, end) if stream.active else prompt  # a draft ends after its tokens
        if index == 0 and (start is not None or stream is None):
            begin = start or 0
        if worst_case or request.scheduling.guaranteed or end > most:
            end = most
        blocks += -(-end // block_size) - begin // block_size
    return blocks


def most_blocks_freed(request: Request, block_size: int) -> int:
    """Return at most how many blocks a running request would free if it was preempted."""
    active = [stream.sequence for stream in request.live if stream.active]
    shared = len(request.prompt) if len(active) > 1 else 0  # its streams hold their prompt together
    return sum(-(-(each.unshared_length + shared) // block_size) + 1 for each in active)


def _cheapest(request: Request) -> tuple[int, int]:
    """Order by tokens to compute again if all that only this request holds is evicted; then the latest goes."""
    active = [stream for stream in request.live if stream.active]
    tokens = sum(stream.sequence.unshared_length for stream in active)
    if len(active) > 1:  # its streams share the prompt with each other
        tokens += max(len(request.prompt) - request.streams[0].counts.cached_tokens, 0)
    return tokens, -request.scheduling.number
