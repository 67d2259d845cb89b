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

from collections import Counter
from collections.abc import Callable, Collection, Hashable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from radixkv.cache import Match, Pin, PrefixCache, Sequence
from radixkv.cache.tokens import is_compressed
from radixkv.config import EngineConfig
from radixkv.engine.request import Request, Stream, TokenIds, common_prefix
from radixkv.engine.reuse_policy import ReusePolicy
from radixkv.engine.shares import Promise, Shares
from radixkv.engine.wait_queue import WaitQueue
from radixkv.errors import InvalidInput, PinBudgetExceeded, PromptTooLong
from radixkv.turns import Group

Key = tuple[int, int]


class Accounts(Protocol):
    """The blocks that requests of a namespace may take."""

    def close(self) -> None:
        """Release the cache; from now on only `most_blocks` and `described` may be called."""

    def most_blocks(self, namespace: Hashable) -> int:
        """Return how many blocks a request that runs alone can have, whatever is cached and not pinned.

        Reads nothing that changes, so any thread may call it.
        """

    def described(self, most: int) -> str:
        """Return a clause about `most_blocks` for error messages."""

    def most_beside_pins(self, namespace: Hashable, pinned: int) -> int:
        """Return how many blocks that are not pinned a request can have if it runs alone; `pinned` blocks are."""

    def allows(self, request: Request, need: Callable[[Request], int]) -> bool:
        """Return whether a request that takes `need` unpinned blocks counts on no free blocks of other shares.

        Their namespaces may take these blocks later. If the request was preempted then, it could not return.
        """

    def available(self, namespace: Hashable) -> int:
        """Return how many blocks are free or can be evicted for a request."""

    def cover(self, promises: SequenceOf[Promise], *, idle: int = 0, freed: int = 0) -> bool:
        """Return whether all promises can be kept, in any order of taking, once `freed` blocks more are free.

        The last request would lock `idle` evictable blocks first.
        """

    def victims(self, request: Request, running: list[Request]) -> list[Request]:
        """Return the running requests whose preemption gives blocks to a running request."""

    def waits_for_own(self, promises: SequenceOf[Promise]) -> bool:
        """Return whether the last request, which does not fit, and running ones of its share exceed the share.

        Then it waits for these, and requests of other shares need not wait for it.
        """


class CommonPool:
    """All blocks are for all requests."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache, self._num_blocks = cache, cache.num_blocks

    def close(self) -> None:
        """See Accounts."""
        del self._cache

    def most_blocks(self, namespace: Hashable) -> int:
        """See Accounts."""
        return self._num_blocks

    def described(self, most: int) -> str:
        """See Accounts."""
        return f"the pool has {most}"

    def most_beside_pins(self, namespace: Hashable, pinned: int) -> int:
        """See Accounts."""
        return self._num_blocks - pinned

    def allows(self, request: Request, need: Callable[[Request], int]) -> bool:
        """Return True: there are no shares."""
        return True

    def available(self, namespace: Hashable) -> int:
        """See Accounts."""
        return self._cache.available_blocks

    def cover(self, promises: SequenceOf[Promise], *, idle: int = 0, freed: int = 0) -> bool:
        """See Accounts."""
        return self.available(None) - idle + freed >= sum(blocks for _, blocks in promises)

    def victims(self, request: Request, running: list[Request]) -> list[Request]:
        """Return all of them."""
        return running

    def waits_for_own(self, promises: SequenceOf[Promise]) -> bool:
        """Return False: all blocks are for all."""
        return False


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
        self.accounts: Accounts = CommonPool(cache) if cache.quotas is None else Shares(cache)
        self._max_sequences = config.max_sequences
        self._victim_key = VICTIMS[config.victim]
        self._pins: list[tuple[Pin, TokenIds, Hashable]] = []

    def close(self) -> None:
        """Release the cache; from now on only `check_fits` may be called."""
        self.accounts.close()
        del self._cache

    # ---- room for a request

    def check_fits(self, request: Request) -> None:
        """Raise PromptTooLong, with the numbers, if even an empty pool could not hold the request.

        Reads nothing that changes, so any thread may call it.
        """
        need, replies = blocks_needed(request, self.block_size, 0, worst_case=True), request.replies
        most = self.accounts.most_blocks(request.namespace)
        width, parameter, kind = replies.width, replies.parameter, replies.kind
        if width > self._max_sequences:
            raise InvalidInput(f"{parameter}={width} {kind} exceed max_sequences={self._max_sequences}")
        if need > most:
            streams = f" in each of {width} {kind}" if width > 1 else ""
            raise PromptTooLong(
                f"a prompt of {len(request.prompt)} tokens and up to {request.max_tokens} new ones{streams} takes "
                f"{need} blocks of {self.block_size} tokens, and {self.accounts.described(most)}: "
                f"shorten the prompt, lower max_tokens or {parameter}, or load the engine with more kv_memory"
            )

    def streams(self) -> int:
        """Return how many streams run, will run once their prompts are computed, or have ended and are not closed."""
        return len(self._closing) + sum(each.streams_left for each in self._running)

    def fits(self, request: Request, match: Match) -> bool:
        """Return whether a request that would hit `match` can run with the others."""
        if self.streams() + request.streams_left > self._max_sequences:
            return False
        return self._is_covered(request, match) and self._can_return(request)

    def fits_without(self, victims: SequenceOf[Request], request: Request, match: Match) -> bool:
        """Return whether the request could fit if these running requests were preempted."""
        if len(victims) == len(self._running):
            return True
        streams = self.streams() - sum(each.streams_left for each in victims) + request.streams_left
        room = streams <= self._max_sequences and self._is_covered(request, match, victims)
        return bool(victims) and room and self._can_return(request)

    def waits_for_own_blocks(self, request: Request, match: Match) -> bool:
        """Return whether a request that does not fit waits for blocks of running requests of its own share."""
        if self.streams() + request.streams_left > self._max_sequences:
            return False
        return self.accounts.waits_for_own([*self._promises(), (request, self._new_blocks(request, match))])

    def cut_to_fit(self, request: Request, sequence: Sequence) -> bool:
        """Cut the hit of a request that runs alone until it can finish; returns False if it cannot even so.

        Without room for the headroom, the request publishes late, and is promised all the blocks that it may take.
        """
        if not self.accounts.allows(request, self._most_beside_its_pins):
            return False
        if self._pins:
            self._pinned_blocks()  # releases pins that have expired
        if self._can_finish(request, sequence, request.streams_left):
            return True
        request.scheduling.guaranteed = request.scheduling.publish_late = True
        if not self._can_finish(request, sequence):
            # A hit that ends inside a block costs a copy of that block: compute its tokens instead.
            whole = self._reuse.aligned(sequence.length - sequence.length % self.block_size)
            sequence.truncate(min(max(whole, request.parts.slots), sequence.length))
        if not self._can_finish(request, sequence):
            # The path to the hit also holds part-filled blocks: keep only the part that pins hold anyway.
            sequence.truncate(min(max(self._pinned_hit(request), request.parts.slots), sequence.length))
        if self._can_finish(request, sequence):
            return True
        # Unpinned leaves may share part-filled blocks with pinned nodes, which have copies: evict them if that helps.
        need = blocks_needed(request, self.block_size, sequence.length, worst_case=True)
        return need <= self._room_beside_pins(request) and self._cache.evict(need, request.namespace)

    def refusal(self, request: Request) -> PromptTooLong:
        """Explain why a request that fits the pool is refused: no other request runs, so pins hold the other blocks."""
        own, pinned = self._pinned_hit(request), self._pinned_blocks()
        begun = "the request had begun, and pins have changed since: " if request.scheduling.admitted else ""
        beside = f" beside {own // self.block_size} that are pinned for it" if own >= self.block_size else ""
        need = blocks_needed(request, self.block_size, own, worst_case=True)
        limit = self.accounts.described(self.accounts.most_blocks(request.namespace))
        return PromptTooLong(
            f"{begun}the request takes {need} blocks{beside}; {limit}, and "
            f"{pinned} are pinned: release pins, or load the engine with more kv_memory"
        )

    def _is_covered(self, request: Request, match: Match, without: Collection[Request] = ()) -> bool:
        """Return whether the request can take its blocks and the running ones the blocks that are promised to them.

        `without` are running requests that would be preempted first.
        """
        freed = sum(most_blocks_freed(each, self.block_size) for each in without)
        promises = [*self._promises(without), (request, self._new_blocks(request, match))]
        return self.accounts.cover(promises, idle=match.idle_blocks, freed=freed)

    def _new_blocks(self, request: Request, match: Match) -> int:
        """Return how many blocks a waiting request is sure to take, with its headroom."""
        return blocks_needed(request, self.block_size, match.length) + request.streams_left

    def _promises(self, without: Collection[Request] = ()) -> list[Promise]:
        """Return how many blocks the running requests may still take, except `without`."""
        return [
            (each, blocks_needed(each, self.block_size) + each.streams_left)
            for each in self._running
            if each not in without
        ]

    def _can_finish(self, request: Request, sequence: Sequence, headroom: int = 0) -> bool:
        need = blocks_needed(request, self.block_size, sequence.length, worst_case=True)
        return self.accounts.available(request.namespace) >= need + headroom

    # ---- pins

    def pin(self, tokens: TokenIds, namespace: Hashable = None, ttl: float | None = None) -> Pin:
        """Pin a cached prefix, unless a request that runs, or was preempted, could then not finish.

        Raises PinBudgetExceeded, and then nothing has changed.
        """
        pin = self._cache.pin(tokens, namespace, ttl)
        begun = [(each, None) for each in self._running] + [
            (each, 0) for each in self._waiting if each.scheduling.preemptions
        ]
        most = [
            (each, blocks_needed(each, self.block_size, at, worst_case=True) + each.streams_left) for each, at in begun
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

    def unpin_compressed(self, namespace: Hashable) -> None:
        """Release the pins on the compressed prefixes of a namespace."""
        for pin, pinned, owner in self._pins:
            if owner in {namespace} and is_compressed(pinned[:1].tobytes()):
                pin.release()

    def _can_return(self, request: Request) -> bool:
        """Return whether a request could finish alone after a preemption, next to the pins on other prefixes.

        A request that could not waits until no other one runs, and is refused then, before it has produced a token.
        """
        if not self._pinned_blocks():
            return True
        own = self._reuse.sure_hit(self._pinned_hit(request))
        return blocks_needed(request, self.block_size, own, worst_case=True) <= self._room_beside_pins(request)

    def _room_beside_pins(self, request: Request) -> int:
        """Return how many blocks that are not pinned a request can have if it runs alone."""
        return self.accounts.most_beside_pins(request.namespace, self._pinned_blocks())

    def _most_beside_its_pins(self, request: Request) -> int:
        """Return how many blocks a request takes at most, besides those that are pinned for it."""
        return blocks_needed(request, self.block_size, self._pinned_hit(request), worst_case=True)

    def _leaves_room(self, most: list[Promise]) -> bool:
        """Return whether each of these requests can take its blocks alone, and the running ones the promised ones."""
        accounts = self.accounts
        alone = all(
            accounts.available(each.namespace) >= blocks and accounts.allows(each, self._most_beside_its_pins)
            for each, blocks in most
        )
        return alone and accounts.cover(self._promises())

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
        return min(self.accounts.victims(request, self._running), key=self._preempted_first)

    def paused(self) -> list[Request]:
        """Return the paused requests, in the order in which they are preempted."""
        paused = [request for request in self._running if request.channel.paused]
        return sorted(paused, key=self._preempted_first)

    def turn_victims(self, request: Request) -> list[Request]:
        """Return the requests to preempt so that a request of a group without a running one gets its streams.

        These are the newest ones of the groups with the most streams for their share. None gives its turn to a lower
        priority, nor again before it has computed more new tokens than tokens that eviction made it compute again: so
        each turn brings it forward.
        """
        streams = Counter[Group]()
        for each in self._running:
            streams[each.scheduling.group] += each.streams_left
        left = [
            each
            for each in self._running
            if each.priority <= request.priority and each.progress > each.scheduling.gave_turn_at
        ]
        victims: list[Request] = []
        missing = self.streams() + request.streams_left - self._max_sequences
        while missing > 0 and left:
            group = max((each.scheduling.group for each in left), key=lambda group: streams[group] / group.share)
            victim = max(
                (each for each in left if each.scheduling.group is group), key=lambda each: each.scheduling.admitted
            )
            left.remove(victim)
            victims.append(victim)
            streams[group] -= victim.streams_left
            missing -= victim.streams_left
        return victims if missing <= 0 else []

    def _preempted_first(self, request: Request) -> tuple[bool, int, bool, Key]:
        scheduling = request.scheduling
        return not request.channel.paused, request.priority, scheduling.guaranteed, self._victim_key(request)


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


def _cheapest(request: Request) -> Key:
    """Order by tokens to compute again if all that only this request holds is evicted; then the latest goes."""
    active = [stream for stream in request.live if stream.active]
    tokens = sum(stream.sequence.unshared_length for stream in active)
    if len(active) > 1:  # its streams share the prompt with each other
        tokens += max(len(request.prompt) - request.streams[0].counts.cached_tokens, 0)
    return tokens, -request.scheduling.number


def _last(request: Request) -> Key:
    """Order by admission, the latest first (vLLM)."""
    return -request.scheduling.admitted, -request.scheduling.number


VICTIMS: dict[str, Callable[[Request], Key]] = {"cheapest": _cheapest, "last": _last}
