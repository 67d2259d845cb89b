"""Decide which waiting request fits, how many blocks are promised, and which running request is preempted.

A request is admitted when the blocks that it is sure to take fit. These are the blocks of its prompt and of the tokens
that it has sampled so far, and one block more for each stream. Streams grow beyond that promise, so blocks may run out,
and then a running request is preempted. A preempted request is promised all the blocks that it may take, max_tokens
included, when it comes back.

Every victim policy takes paused requests first (their answers are not being read), then the lowest priority, then
requests that were never preempted. The last rule matters: a preempted request is admitted only if all that it may take
fits. So another request is always there that was promised less, and no request is preempted twice, except paused ones
and those of a lower priority than others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

from radixkv.cache import Match, Pin, PrefixCache, Sequence
from radixkv.config import EngineConfig
from radixkv.engine.request import Request, TokenIds, common_prefix
from radixkv.engine.reuse_policy import ReusePolicy
from radixkv.engine.wait_queue import WaitQueue
from radixkv.errors import InvalidInput, PinBudgetExceeded, PromptTooLong

Key = tuple[int, int]


class Admission:
    """The promises to the running requests of one cache, and the room that they and the pins leave."""

    def __init__(
        self, cache: PrefixCache, config: EngineConfig, reuse: ReusePolicy, running: list[Request], waiting: WaitQueue
    ) -> None:
        """Read `running` and `waiting`, which are the scheduler's."""
        self._cache, self._reuse = cache, reuse
        self._running, self._waiting = running, waiting
        self._num_blocks, self._block_size = cache.num_blocks, cache.block_size
        self._max_sequences = config.max_sequences
        self._victim_key = VICTIMS[config.victim]
        self._pins: list[tuple[Pin, TokenIds, Hashable]] = []

    def close(self) -> None:
        """Release the cache; from now on only `check_fits` may be called."""
        del self._cache

    # ---- room for a request

    def check_fits(self, request: Request) -> None:
        """Raise PromptTooLong, with the numbers, if even an empty pool could not hold the request.

        Reads nothing that changes, so any thread may call it.
        """
        need, most, width = self._worst_case(request), self._most_blocks(request), request.width
        parameter, kind = ("beam_width", "beams") if request.candidates else ("n", "streams")
        if width > self._max_sequences:
            raise InvalidInput(f"{parameter}={width} {kind} exceed max_sequences={self._max_sequences}")
        if need > most:
            streams = f" in each of {width} {kind}" if width > 1 else ""
            raise PromptTooLong(
                f"a prompt of {len(request.prompt)} tokens and up to {request.max_tokens} new ones{streams} takes "
                f"{need} blocks of {self._block_size} tokens, and {self._holds(most)}: shorten the prompt, "
                f"lower max_tokens or {parameter}, or load the engine with more kv_memory"
            )

    def most_tokens(self, namespace: Hashable) -> int:
        """Return how many tokens a request of a namespace can have at most. Any thread may call this."""
        return self._num_blocks * self._block_size

    def streams(self) -> int:
        """Return how many streams run, or will run once their prompts are computed."""
        return sum(each.streams_left for each in self._running)

    def fits(self, request: Request, match: Match) -> bool:
        """Return whether a request that would hit `match` can run with the others."""
        if self.streams() + request.streams_left > self._max_sequences:
            return False
        return self._is_covered(request, match) and self._can_return(request)

    def fits_without_paused(self, request: Request, match: Match) -> bool:
        """Return whether the request could fit if every paused request was preempted."""
        paused = [each for each in self._running if each.channel.paused]
        if len(paused) == len(self._running):
            return True
        streams = self.streams() - sum(each.streams_left for each in paused) + request.streams_left
        room = streams <= self._max_sequences and self._is_covered(request, match, paused)
        return bool(paused) and room and self._can_return(request)

    def cut_to_fit(self, request: Request, sequence: Sequence) -> bool:
        """Cut the hit of a request that runs alone until it can finish; returns False if it cannot even so.

        Without room for the headroom, the request publishes late, and is promised all the blocks that it may take.
        """
        self._pinned_blocks()  # releases pins that have expired
        if self._can_finish(request, sequence, headroom_blocks(request)):
            return True
        request.guaranteed = request.publish_late = True
        if not self._can_finish(request, sequence):
            # A hit that ends inside a block costs a copy of that block: compute its tokens instead.
            sequence.truncate(self._reuse.aligned(sequence.length - sequence.length % self._block_size))
        if not self._can_finish(request, sequence):
            # The path to the hit also holds part-filled blocks: keep only the part that pins hold anyway.
            sequence.truncate(min(self._pinned_hit(request), sequence.length))
        if self._can_finish(request, sequence):
            return True
        # Unpinned leaves may share part-filled blocks with pinned nodes, which have copies: evict them if that helps.
        need = blocks_needed(request, self._block_size, sequence.length, worst_case=True)
        return need <= self._most_beside_pins(request) and self._cache.evict(need, request.namespace)

    def refusal(self, request: Request) -> PromptTooLong:
        """Explain why a request that fits the pool is refused: no other request runs, so pins hold the other blocks."""
        own, pinned = self._pinned_hit(request), self._pinned_blocks()
        begun = "the request had begun, and pins have changed since: " if request.admitted else ""
        beside = f" beside {own // self._block_size} that are pinned for it" if own >= self._block_size else ""
        need = blocks_needed(request, self._block_size, own, worst_case=True)
        return PromptTooLong(
            f"{begun}the request takes {need} blocks{beside}; {self._holds(self._most_blocks(request))}, and "
            f"{pinned} are pinned: release pins, or load the engine with more kv_memory"
        )

    def _most_blocks(self, request: Request) -> int:
        """Return how many blocks a request that runs alone can have, whatever is cached and not pinned."""
        return self._num_blocks

    def _holds(self, most: int) -> str:
        return f"the pool has {most}"

    def _worst_case(self, request: Request) -> int:
        return blocks_needed(request, self._block_size, 0, worst_case=True)

    def _is_covered(self, request: Request, match: Match, without: Collection[Request] = ()) -> bool:
        """Return whether the request can take its blocks and the running ones the blocks that are promised to them.

        `without` are running requests that would be preempted first.
        """
        freed = sum(self._promise(each) + most_blocks_freed(each, self._block_size) for each in without)
        return self._available(request) - self._promised() + freed >= self._takes(request, match)

    def _available(self, request: Request) -> int:
        """Return how many blocks are free or can be evicted for a request."""
        return self._cache.free_blocks + self._cache.evictable_blocks

    def _promised(self) -> int:
        """Return how many blocks the running requests may still take."""
        return sum(map(self._promise, self._running))

    def _promise(self, request: Request) -> int:
        return blocks_needed(request, self._block_size) + headroom_blocks(request)

    def _takes(self, request: Request, match: Match) -> int:
        """Return the blocks that a request is sure to take: unlocked blocks of its hit, and new ones."""
        new = blocks_needed(request, self._block_size, match.length)
        return match.idle_blocks + new + headroom_blocks(request)

    def _can_finish(self, request: Request, sequence: Sequence, headroom: int = 0) -> bool:
        need = blocks_needed(request, self._block_size, sequence.length, worst_case=True)
        return self._available(request) >= need + headroom

    # ---- pins

    def pin(self, tokens: TokenIds, namespace: Hashable = None, ttl: float | None = None) -> Pin:
        """Pin a cached prefix, unless a request that runs, or was preempted, could then not finish.

        Raises PinBudgetExceeded, and then nothing has changed.
        """
        pin = self._cache.pin(tokens, namespace, ttl)
        begun = [(each, None) for each in self._running] + [(each, 0) for each in self._waiting if each.preemptions]
        most = [
            (each, blocks_needed(each, self._block_size, at, worst_case=True) + headroom_blocks(each))
            for each, at in begun
        ]
        if not self._leaves_room(most):
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

    def _can_return(self, request: Request) -> bool:
        """Return whether a request could finish alone after a preemption, next to the pins on other prefixes.

        A request that could not waits until no other one runs, and is refused then, before it has produced a token.
        """
        if not self._pinned_blocks():
            return True
        own = self._reuse.sure_hit(self._pinned_hit(request))
        return blocks_needed(request, self._block_size, own, worst_case=True) <= self._most_beside_pins(request)

    def _most_beside_pins(self, request: Request) -> int:
        """Return how many blocks that are not pinned a request can have if it runs alone."""
        return self._num_blocks - self._pinned_blocks()

    def _leaves_room(self, most: list[tuple[Request, int]]) -> bool:
        """Return whether each of these requests can take its blocks alone, and the running ones the promised ones."""
        return all(self._available(each) >= max(self._promised(), blocks) for each, blocks in most)

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

    def victim(self, request: Request) -> Request:
        """Return the running request to preempt for a running one; O(running requests * depth of the tree)."""
        return self._first_to_go(self._running)

    def paused_victim(self) -> Request | None:
        """Return the paused request to preempt, if there is one."""
        paused = [request for request in self._running if request.channel.paused]
        return self._first_to_go(paused) if paused else None

    def _first_to_go(self, requests: list[Request]) -> Request:
        key = self._victim_key
        return min(requests, key=lambda each: (not each.channel.paused, each.priority, each.guaranteed, key(each)))


def blocks_needed(request: Request, block_size: int, start: int | None = None, *, worst_case: bool = False) -> int:
    """Return how many blocks all streams of a request may still take together, without their headroom.

    `start` is where its first stream begins if it does not run yet. `worst_case` counts up to max_tokens in any case.
    A part-filled last block counts, because a sequence copies a shared block before it writes; so does each fork.
    """
    prompt, most, live = len(request.prompt), request.computed_length, request.live
    blocks = 0
    for index in range(request.streams_left):
        stream = live[index] if index < len(live) else None
        begin, end = prompt, prompt  # a stream that is not forked yet begins after the prompt
        if stream is not None:
            begin, end = stream.sequence.length if stream.active else prompt, len(stream.tokens)
        if index == 0 and (start is not None or stream is None):
            begin = start or 0
        if worst_case or request.guaranteed or end > most:
            end = most
        blocks += -(-end // block_size) - begin // block_size
    return blocks


def headroom_blocks(request: Request) -> int:
    """Return one block per stream, for the case that another request has cached the tokens that it publishes."""
    return request.streams_left


def most_blocks_freed(request: Request, block_size: int) -> int:
    """Return at most how many blocks a running request would free if it was preempted."""
    active = [stream.sequence for stream in request.live if stream.active]
    shared = len(request.prompt) if len(active) > 1 else 0  # its streams hold their prompt together
    return sum(-(-(each.unshared_length + shared) // block_size) + 1 for each in active)


def _cheapest(request: Request) -> Key:
    """Order by tokens to compute again if all that only this request holds is evicted; then the latest goes."""
    active = [stream for stream in request.live if stream.active]
    tokens = sum(stream.sequence.unshared_length for stream in active)
    if len(active) > 1:  # its streams share the prompt with each other
        tokens += max(len(request.prompt) - request.streams[0].cached_tokens, 0)
    return tokens, -request.number


def _last(request: Request) -> Key:
    """Order by admission, the latest first (vLLM)."""
    return -request.admitted, -request.number


VICTIMS: dict[str, Callable[[Request], Key]] = {"cheapest": _cheapest, "last": _last}
