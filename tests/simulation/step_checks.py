"""Check the budget, the streams, the tokens and the progress of each step of a simulated engine.

The checks compare the world before and after the step, and change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from radixkv.engine.beams import Beam
from radixkv.engine.request import Request, Stream
from radixkv.engine.scheduler import Work

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(frozen=True)
class Before:
    """The state of the requests before a step."""

    running: tuple[Request, ...]
    active: tuple[tuple[Any, Any], ...]  # streams with their sequences, unless their readers are away
    decoding: tuple[tuple[Any, Any], ...]  # the streams that must decode a token
    preemptions: tuple[int, ...]  # of running requests, except for turns
    computed: dict[int, int]  # tokens that requests had computed which ran or had ended, by id
    progress: tuple[int, ...]
    in_flight: bool  # whether a step was launched and not finished


class StepChecks:
    """The checks of one world; each raises AssertionError."""

    def __init__(self, world: World) -> None:
        self.world, self.core = world, world.core
        self.config = world.scenario.config
        self.count = 0
        # An upper bound: one token a step, everything computed twice, and some waiting.
        tokens = sum(ask.streams * (len(ask.prompt) + ask.max_tokens) for ask in world.scenario.asks)
        self.most = world.scenario.last + 4 * tokens + 20 * len(world.scenario.asks)
        self.most *= 1 + world.scenario.overlap
        self.most += 1000 * world.scenario.disk  # pieces that an idle engine writes
        self.most += sum(audit.blocks + 1 for audit in world.scenario.audits)

    def before(self) -> Before:
        """Record the state before a step."""
        running = tuple(self.core.scheduler.running)
        read = [request for request in running if not self.world.customer_of(request).channel.in_span]
        active = [stream for request in read for stream in request.live if stream.active and self._can_run(stream)]
        return Before(
            running,
            tuple((stream, stream.sequence) for stream in active),
            tuple((stream, stream.sequence) for stream in active if _decodes(stream)),
            tuple(self.world.order_model.preempted.count(request) for request in running),
            self._computed(),
            self._progress(),
            self.in_flight,
        )

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched and is not finished."""
        return self.world.scenario.overlap and self.world.model.unread > 0

    def _can_run(self, stream: Stream) -> bool:
        """Return whether a stream has a token to compute: one that the host has, or one that is being sampled."""
        if isinstance(stream.continuation, Beam) and not stream.pending:
            return False  # a beam of a resumed group: the search waits for the others
        if not self.in_flight:
            return True
        if stream.request.suspended and stream.sequence.length >= len(stream.request.prompt):
            return False  # the other streams begin at the end of the prompt, once its step has finished
        if stream.pending > 0:  # less than none while a draft is verified
            return True
        return not stream.continuation.host_bound and stream.output_length + 1 < stream.request.max_tokens

    def _computed(self) -> dict[int, int]:
        computed = {}
        for customer in self.world.customers.values():
            active = [stream.computed_length for stream in customer.request.live if stream.active]
            if active or customer.channel.ended:
                computed[id(customer.request)] = active[0] if active else len(customer.ask.prompt)
        return computed

    def _progress(self) -> tuple[int, ...]:
        ended = sum(customer.channel.ended for customer in self.world.customers.values())
        counters = self.core.counters
        audited = counters.audited_blocks, self.world.auditor.pending
        shaken = sum(c.shaken * c.request.scheduling.preemptions for c in self.world.customers.values())
        loads = counters.host_tokens, counters.failed_loads
        computed = counters.computed_tokens, counters.recomputed_tokens, counters.wasted_tokens
        return (ended, *computed, *audited, shaken, *loads)

    def after(self, before: Before) -> None:
        """Check a step."""
        self.count += 1
        if self.world.model.broken is not None:
            raise self.world.model.broken
        self.world.accounting.check()
        self._budget(self.world.work)
        self._loads(self.world.work)
        self._rows_of_logits(self.world.work)
        self._planned_streams(before, self.world.work)
        self._shared_prefixes(self.world.work)
        self._bits_repeat(self.world.work)
        self.world.order_checks.after(before)
        self._deadlines()
        if self._progress() == before.progress:
            left = [customer for customer in self.world.customers.values() if not customer.channel.ended]
            left = [customer for customer in left if not self.world.is_held(customer.request)]
            away = [customer.channel.in_span for customer in left]
            undecided = any(customer.channel.in_span and customer.ask.flickers for customer in left)
            begins = self.in_flight and not before.in_flight  # its results come with the next step
            waited = self.world.disk is not None and self.world.disk.gave_up()
            assert all(away) or undecided or begins or waited, "a step without progress"
        assert self.count <= self.most, "too many steps"

    def _budget(self, work: list[Work]) -> None:
        running = self.core.scheduler.running
        computed = [len(each.tokens) for each in work if each.sources is None]
        assert sum(computed) + sum(len(each.draft or ()) for each in work) <= self.config.max_batch_tokens
        assert all(0 < count <= self.config.prefill_chunk for count in computed)
        assert len({id(each.stream) for each in work}) == len(work), "two chunks of one stream"
        assert sum(len(request.live) for request in running) <= self.config.max_sequences

    def _planned_streams(self, before: Before, work: list[Work]) -> None:
        planned, running = {id(each.stream) for each in work}, self.core.scheduler.running
        for stream, sequence in before.decoding:
            gone = stream.request.channel.ended or stream.request not in running
            gone |= sequence.closed  # it was preempted, and maybe admitted again at once
            assert gone or id(stream) in planned, (
                f"{self.world.name_of(stream.request)} decodes, but was left out of a step"
            )
        left = self.config.max_batch_tokens - sum(len(each.tokens) for each in work if each.sources is None)
        # A deterministic engine does not cut a chunk to fit. A stream may wait until the next step for its load.
        if left >= (self.config.prefill_chunk if self.config.deterministic else 1) and not self._loads_are_full(work):
            idle = [s for s, sequence in before.active if s.sequence is sequence and s.active and id(s) not in planned]
            idle = [s for s in idle if not s.request.scores.wanted]  # it may wait for rows of logits
            assert not idle, f"{idle} could have run in the rest of the budget"
            cut = [each for each in work if self._is_cut(each)]
            assert not cut, f"{cut} could have been longer by the rest of the budget"
        if not self._loads_are_full(work):
            self._higher_ranks_first(before, planned)
        away = [each for each in work if self.world.customer_of(each.stream.request).channel.is_away]
        assert not away, f"computed, though its reader is away: {away}"

    def _additional_rows(self, work: list[Work]) -> int:
        return sum(each.rows - 1 for each in work if each.draft is None)

    def _rows_of_logits(self, work: list[Work]) -> None:
        """The additional rows of a step are within bounds, unless one chunk alone must not be cut."""
        scored = [each for each in work if each.rows > 1 and each.draft is None]
        most = max((self.world.customer_of(each.stream.request).ask.most_rows for each in scored), default=0)
        alone = self.config.deterministic and len(scored) == 1
        assert self._additional_rows(work) <= most or alone, f"{scored} have too many rows of logits"

    def _loads(self, work: list[Work]) -> None:
        """Loads have two blocks or more, leave a token to compute, and together take as long as a chunk.

        A load that ends at a recurrent state cannot be cut: it may take longer if it is the only one.
        """
        loads = [each for each in work if each.sources is not None]
        host, size = self.world.scenario.host, self.world.scenario.block_size
        assert not loads or (host is not None and host.speed > 1)
        alone = len(loads) == 1 and self.world.scenario.states is not None
        assert alone or self._loaded(work) <= self._most_loaded()
        for each in loads:
            end = each.start + len(each.tokens)
            assert len(each.tokens) >= 2 * size and end < self.world.known_tokens[id(each)]
            assert end == self._reusable(end), f"{each} ends inside a chunk"

    def _loaded(self, work: list[Work]) -> int:
        return sum(len(each.tokens) for each in work if each.sources is not None)

    def _most_loaded(self) -> int:
        host, chunk = self.world.scenario.host, self.config.prefill_chunk
        return 0 if host is None else max(int(chunk * host.speed), chunk + 2 * self.world.scenario.block_size)

    def _loads_are_full(self, work: list[Work]) -> bool:
        """Return whether this step's loads leave too little room for another one."""
        loaded, chunk = self._loaded(work), self.config.prefill_chunk if self.config.deterministic else 1
        return loaded > 0 and self._most_loaded() - loaded < chunk + 2 * self.world.scenario.block_size

    def _is_cut(self, work: Work) -> bool:
        """Return whether a chunk ends before its prompt, its stream's tokens, and the limits of a chunk."""
        if work.sources is not None or work.rows > 1 or self._additional_rows(self.world.work):
            return False
        end, stream = work.start + len(work.tokens), work.stream
        whole = end == len(stream.request.prompt) or end >= self.world.known_tokens[id(work)]
        return not whole and len(work.tokens) < self.config.prefill_chunk

    def _higher_ranks_first(self, before: Before, planned: set[int]) -> None:
        """Of the running prompts, a higher priority gets its chunk before a lower one."""
        decoding = [s for s, _ in before.decoding]
        prompts = [(s, s.request.priority) for s, sequence in before.active if s.sequence is sequence]
        prompts = [(s, p) for s, p in prompts if s not in decoding and s.active and not s.request.scores.wanted]
        lowest = min((priority for s, priority in prompts if id(s) in planned), default=None)
        if lowest is not None and not self.config.deterministic:
            passed = [s for s, priority in prompts if id(s) not in planned and priority > lowest]
            assert not passed, f"{passed} got no chunk, and a lower priority did"

    def _shared_prefixes(self, work: list[Work]) -> None:
        """Prompts that share a prefix of at least two blocks do not compute it at the same time.

        Exceptions are requests that were preempted, that have waited long enough, or whose readers come and go.
        """
        if not self.world.scenario.reuse or self.world.scenario.states is not None:
            return  # a state may have found no slot
        worth = 2 * self.world.scenario.block_size
        prompts = [each for each in work if each.start < len(each.stream.request.prompt) and self._coalesces(each)]
        for one, other in combinations(prompts, 2):
            if one.stream.request.namespace == other.stream.request.namespace:
                end = min(self._end_in_prompt(one), self._end_in_prompt(other))
                start = max(one.start, other.start)
                mine, theirs = one.stream.request.prompt[:end], other.stream.request.prompt[:end]
                same = self._reusable(end if (mine == theirs).all() else int((mine != theirs).argmax()))
                assert same - start < worth, f"{one} and {other} compute the same {same - start} tokens"

    def _reusable(self, length: int) -> int:
        """Return how much of a common prefix may be a hit."""
        return length - length % self.config.prefill_chunk if self.config.deterministic else length

    def _coalesces(self, work: Work) -> bool:
        request = work.stream.request
        return not (
            request.scores.wanted
            or request.scheduling.preemptions
            or request.scheduling.queued.waited_enough
            or self.world.customer_of(request).ask.lags
        )

    def _end_in_prompt(self, work: Work) -> int:
        return min(work.start + len(work.tokens), len(work.stream.request.prompt))

    def _bits_repeat(self, work: list[Work]) -> None:
        """In a deterministic engine the KV of a prompt is that of an empty cache and no other requests.

        That does not hold for preempted requests: their sampled tokens are computed again in chunks.
        """
        self.world.model.flush()
        for each in work if self.config.deterministic else []:
            stream, request = each.stream, each.stream.request
            if stream.active and not request.scheduling.preemptions:
                length = min(stream.sequence.length, len(request.prompt))
                own = self.world.accounting.is_canonical(stream.sequence.block_table, length, len(request.prompt))
                assert own, f"{self.world.name_of(request)} reads KV of other chunks than its own"

    def _deadlines(self) -> None:
        for customer in self.world.customers.values():
            deadline = customer.request.deadline
            late = (
                deadline is not None
                and not customer.channel.ended
                and deadline <= self.world.clock.now - self.world.scenario.tick
            )
            assert not late, f"{customer.ask.number} lives beyond its deadline"

    def idle(self, idle: float | None) -> None:
        """`idle_for` returns the time to the next deadline if the readers of all requests are away."""
        left = [customer for customer in self.world.customers.values() if not customer.channel.ended]
        if idle == 0:
            resting = left and all(customer.channel.is_away for customer in left)
            due = any(c.ask.timeout is not None for c in self.world.customers.values())
            busy = self.world.auditor.pending or self.in_flight or self.world.scenario.disk
            assert not resting or due or busy, "a step is due, though all readers are away"
            return
        assert not self.in_flight, "idle, though a step is in flight"
        unheld = [customer for customer in left if not self.world.is_held(customer.request)]
        assert all(customer.channel.in_span for customer in unheld), "idle, though a request could run"
        deadlines = [c.request.deadline for c in left if c.request.deadline is not None]
        if deadlines:  # it may be earlier: the deadline of a request that has ended
            assert idle is not None and idle <= min(deadlines) - self.world.clock.now, f"idle for {idle}: {deadlines}"


def _decodes(stream: Stream) -> bool:
    """Return whether a stream must compute its last token, which may still be sampled."""
    return not stream.pending or (stream.pending == 1 and stream.output_length > 0)
