"""What must hold after every step of a simulated engine, and at its end.

Knows: the world, the cache's books and what was promised about order, budget, sharing and answers. Changes nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv.engine.request import Request
from radixkv.engine.scheduler import Work
from radixkv.errors import InvalidInput, PromptTooLong, RequestCancelled, RequestFailed, RequestTimedOut
from tests.simulation.draw import answers_of
from tests.simulation.oracle import Reply
from tests.simulation.scenario import Ids, Sabotage

if TYPE_CHECKING:
    from tests.simulation.world import Customer, World

READ_ALL = 0.1  # of the steps, after which everything that is cached is read back


@dataclass(frozen=True)
class Before:
    """What a step began with."""

    running: tuple[Request, ...]
    awake: tuple[tuple[Any, Any], ...]  # streams with their sequences, whose readers are there
    decoding: tuple[Any, ...]  # those of them that must get their token
    preemptions: tuple[int, ...]  # of those that run
    computed: dict[int, int]  # tokens that requests which ran, or ended, had computed, by id
    progress: tuple[int, ...]


class Watch:
    """Watches one world; each method raises AssertionError if what it looks at is broken."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.core, self.cache = world.core, world.cache
        self.steps = 0
        self.most_steps = 0
        self.overtaken = 0
        self.waited: Counter[tuple[str, str, int]] = Counter()  # steps, by who waits and behind whom
        self._rng = random.Random(world.scenario.seed)

    # ---- at any time between two steps

    def books(self) -> None:
        """The cache's own invariants; only streams under way and pins hold blocks; nothing is planned."""
        cache = self.cache
        cache.check()
        streams = [s for request in self.core.scheduler.running for s in request.streams if not s.sequence.closed]
        opened = cache._open.values()
        assert {id(s.sequence) for s in streams} == {id(s) for s in opened}, f"open: {opened}, running: {streams}"
        assert all(sequence._planned is None for sequence in opened), "a plan is left over"
        used = {block for sequence in opened for block in sequence._table} | self._locked()
        held = cache.num_blocks - cache.free_blocks - cache.evictable_blocks
        assert used.isdisjoint(cache._pool.free), "blocks are free and held"
        assert len(used) == held, f"{held} blocks are held, {len(used)} by somebody we know"
        if self._rng.random() < READ_ALL:
            self.contents()

    def _locked(self) -> set[int]:
        """The blocks of the nodes on the way to what sequences and pins hold."""
        cache = self.cache
        held = [*(sequence._node for sequence in cache._open.values()), *cache._pins.nodes()]
        return {block for end in held for node in cache._tree.path(end) for block in node.blocks}

    def contents(self) -> None:
        """Everything that is cached, read back along the tree: the very tokens, and nobody else's in that namespace."""
        model, tree = self.world.model, self.cache._tree
        owner: dict[int, Any] = {}
        for namespace, root in tree.roots.items():
            nodes = list(root.children.values())
            while nodes:
                node = nodes.pop()
                nodes.extend(node.children.values())
                table = np.array(tree.table(node), np.int32)
                keys = b"".join(bytes(each.key) for each in tree.path(node))
                assert model.holds(table, node.end), f"node {node.id} holds a broken history"
                assert (model.tokens_along(table, node.end) == np.frombuffer(keys, np.int32)).all(), "other tokens"
                assert self._is_common(table, node.end, 1 << 30), f"node {node.id} was not computed on the grid"
                for block in table.tolist():
                    assert owner.setdefault(block, namespace) == namespace, f"block {block} is in two namespaces"

    def _is_common(self, table: Any, length: int, prompt_length: int) -> bool:
        """Whether the first tokens were computed as by anybody who has this prompt, if that is promised."""
        limits = self.world.scenario.limits
        if not limits.deterministic:
            return True
        begins = np.arange(length) // limits.prefill_chunk * limits.prefill_chunk
        counts = np.minimum(limits.prefill_chunk, prompt_length - begins)
        expected = np.stack([begins, counts, np.ones_like(begins)], axis=1)
        return bool((self.world.model.came_from(table, length) == expected).all())

    def idle(self, idle: float | None) -> None:
        """`idle_for` says when the next deadline is, if all that is left are those whose readers are away."""
        left = [customer for customer in self.world.customers.values() if not customer.outlet.ended]
        if idle == 0:
            resting = left and all(customer.outlet.is_away for customer in left)
            due = any(c.ask.timeout is not None for c in self.world.customers.values())
            assert not resting or due, "a step is wanted, though nobody reads"
            return
        assert all(customer.outlet.in_span for customer in left), "idle, though somebody could run"
        deadlines = [c.request.deadline for c in left if c.request.deadline is not None]
        if deadlines:  # it may wake up earlier, for the deadline of one that ended
            assert idle is not None and idle <= min(deadlines) - self.world.clock.now, f"idle for {idle}: {deadlines}"

    # ---- around a step

    def before(self) -> Before:
        running = tuple(self.core.scheduler.running)
        read = [request for request in running if not self.world.customer_of(request).outlet.in_span]
        awake = [stream for request in read for stream in request.live if stream.awake]
        return Before(
            running,
            tuple((stream, stream.sequence) for stream in awake),
            tuple(stream for stream in awake if stream.pending == 1 and stream.output_length),
            tuple(request.preemptions for request in running),
            self._computed(),
            self._progress(),
        )

    def _computed(self) -> dict[int, int]:
        requests = [customer.request for customer in self.world.customers.values() if customer.request.streams]
        return {
            id(request): next((s.sequence.length for s in request.live if s.awake), len(request.prompt))
            for request in requests
        }

    def _progress(self) -> tuple[int, ...]:
        ended = sum(customer.outlet.ended for customer in self.world.customers.values())
        counters = self.core.counters
        return (ended, counters.computed_tokens, counters.recomputed_tokens)

    def after(self, before: Before) -> None:
        """All that one step promises."""
        self.steps += 1
        if self.world.model.broken is not None:
            raise self.world.model.broken
        self.books()
        self._budget(self.world.work)
        self._who_is_in(before, self.world.work)
        self._nothing_is_computed_twice(self.world.work)
        self._bits_repeat(self.world.work)
        self._order(before)
        self._preemptions(before)
        self._parking()
        self._deadlines()
        if self._progress() == before.progress:
            left = [customer for customer in self.world.customers.values() if not customer.outlet.ended]
            away = [customer.outlet.in_span for customer in left]
            undecided = any(customer.outlet.in_span and customer.ask.flickers for customer in left)
            assert all(away) or undecided, "a step without progress"
        assert self.steps <= self._most_steps(), "too many steps: they get nowhere"

    def _budget(self, work: list[Work]) -> None:
        limits, running = self.world.scenario.limits, self.core.scheduler.running
        assert sum(len(each.tokens) for each in work) <= limits.max_batch_tokens
        assert all(0 < len(each.tokens) <= limits.prefill_chunk for each in work)
        assert len({id(each.stream) for each in work}) == len(work), "two chunks of one stream"
        assert sum(len(request.live) for request in running) <= limits.max_sequences

    def _who_is_in(self, before: Before, work: list[Work]) -> None:
        planned, running = {id(each.stream) for each in work}, self.core.scheduler.running
        for stream in before.decoding:
            gone = stream.request.outlet.ended or stream.request not in running
            assert gone or id(stream) in planned, f"{self._name(stream.request)} decodes, and was left out of a step"
        limits = self.world.scenario.limits
        left = limits.max_batch_tokens - sum(len(each.tokens) for each in work)
        if left >= (limits.prefill_chunk if limits.deterministic else 1):  # there, no chunk is cut to fit
            idle = [s for s, sequence in before.awake if s.sequence is sequence and s.awake and id(s) not in planned]
            assert not idle, f"{idle} could have run in what is left of the budget"
        self._higher_ranks_first(before, planned)
        away = [each for each in work if self.world.customer_of(each.stream.request).outlet.is_away]
        assert not away, f"computed, though nobody reads: {away}"

    def _higher_ranks_first(self, before: Before, planned: set[int]) -> None:
        """Of the prompts that are under way, a higher priority gets its chunk before a lower one."""
        prompts = [(s, s.request.priority) for s, sequence in before.awake if s.sequence is sequence]
        prompts = [(s, priority) for s, priority in prompts if s not in before.decoding and s.awake]
        lowest = min((priority for s, priority in prompts if id(s) in planned), default=None)
        if lowest is not None and not self.world.scenario.limits.deterministic:
            passed = [s for s, priority in prompts if id(s) not in planned and priority > lowest]
            assert not passed, f"{passed} got no chunk, and a lower priority did"

    def _nothing_is_computed_twice(self, work: list[Work]) -> None:
        """Prompts that share a prefix do not compute it side by side, but for less than is worth waiting for.

        Unless one was preempted, waited as long as anybody must, or has a reader who comes and goes.
        """
        if not self.world.scenario.reuse:
            return
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
        """How much of a common prefix may be a hit."""
        limits = self.world.scenario.limits
        return length - length % limits.prefill_chunk if limits.deterministic else length

    def _coalesces(self, work: Work) -> bool:
        request = work.stream.request
        return not (request.preemptions or request.waited_enough or self.world.customer_of(request).ask.lags)

    def _end_in_prompt(self, work: Work) -> int:
        return min(work.start + len(work.tokens), len(work.stream.request.prompt))

    def _bits_repeat(self, work: list[Work]) -> None:
        """Deterministic: the prompt that a stream reads was computed as if nothing had been cached, nobody else there.

        Who was preempted has its own tokens computed again in chunks, so that is not said of it.
        """
        for each in work:
            stream, request = each.stream, each.stream.request
            if stream.awake and not request.preemptions:
                length = min(stream.sequence.length, len(request.prompt))
                own = self._is_common(stream.sequence.block_table, length, len(request.prompt))
                assert own, f"{self._name(request)} reads KV of other chunks than its own"

    def _order(self, before: Before) -> None:
        """Nobody is passed by lower priorities, or by more later ones of its own than the order allows."""
        limits, scheduler = self.world.scenario.limits, self.core.scheduler
        waiting = [request for request in scheduler.waiting if request.number]
        entered = {id(each.stream.request): each.stream.request for each in self.world.work}
        entered |= {id(request): request for request in scheduler.running}
        for request in before.running:
            entered.pop(id(request), None)
        for newcomer in sorted(entered.values(), key=lambda request: request.admitted):
            for other in waiting:
                customer = self.world.customer_of(other)
                if customer.outlet.in_span or self._is_parked(other, before):
                    continue
                assert newcomer.priority >= other.priority, f"{self._name(newcomer)} went before {self._name(other)}"
                if newcomer.priority == other.priority and other.number < newcomer.number and not newcomer.preemptions:
                    customer.overtaken += 1
                    self.overtaken += 1
                    most = limits.max_overtakes if limits.order == "longest-prefix" else 0
                    assert customer.overtaken <= most, f"{self._name(other)} was overtaken {customer.overtaken} times"

    def _preemptions(self, before: Before) -> None:
        """Who gives way is paused, or of the lowest priority, or was never preempted; with one priority: once."""
        running = self.core.scheduler.running
        stayed = [request for request in before.running if request in running]
        for request, preemptions in zip(before.running, before.preemptions, strict=True):
            customer = self.world.customer_of(request)
            if request.preemptions == preemptions or customer.outlet.in_span:
                continue
            for other in stayed:
                away = self.world.customer_of(other).outlet.is_away
                better = not away and (other.priority, other.preemptions) >= (request.priority, preemptions)
                assert better or other.guaranteed, f"{self._name(request)} gave way, not {self._name(other)}"
        if len({ask.priority for ask in self.world.scenario.asks}) == 1:
            for customer in self.world.customers.values():
                assert customer.request.preemptions <= 1 or customer.ask.lags, f"{customer.ask.number} twice preempted"

    def before_preemption(self, request: Request) -> list[Ids]:
        """What each stream of a request that gives way has computed, but for what it kept and cannot publish now."""
        if not self.world.scenario.reuse or self.world.scenario.limits.deterministic:
            return []
        streams = [stream for stream in request.live if stream.awake]
        return [
            tuple(stream.sequence.tokens)
            for stream in streams
            if not (request.publish_late and stream.sequence._planned is not None)
        ]

    def after_preemption(self, request: Request, kept: list[Ids]) -> None:
        """All of that is cached, until somebody takes its blocks; the request holds nothing."""
        assert not any(stream.awake for stream in request.streams)
        for tokens in kept:
            cached = self.cache.match(list(tokens), request.namespace).length
            assert cached == len(tokens), f"{self._name(request)} computed {len(tokens)} tokens, {cached} are cached"

    def _parking(self) -> None:
        """Who waits for a neighbour waits for a good part of its own prompt."""
        for request in self.core.scheduler.waiting:
            parked = request.parked
            if parked is None or request.waited_enough:
                continue
            self.waited[self._pair(request)] += 1
            if parked.leader in self.core.scheduler.running:
                same = parked.leader.prompt[: parked.shared], request.prompt[: parked.shared]
                assert parked.leader.namespace == request.namespace and (same[0] == same[1]).all()
                assert parked.shared - parked.cached >= 2 * self.world.scenario.block_size

    def _is_parked(self, request: Request, before: Before) -> bool:
        """Whether a neighbour was about to compute its prefix in this step, and it has not waited for that too long."""
        parked = request.parked
        if parked is None or request.waited_enough:
            return False
        steps = -(-len(request.prompt) // self.world.scenario.limits.prefill_chunk)
        computing = before.computed.get(id(parked.leader), 0 if parked.leader.admitted else parked.shared)
        return computing < parked.shared and self.waited[self._pair(request)] <= 2 * steps + 10

    def _pair(self, request: Request) -> tuple[str, str, int]:
        leader = request.parked.leader if request.parked is not None else request
        return self._name(request), self._name(leader), leader.preemptions

    def _deadlines(self) -> None:
        for customer in self.world.customers.values():
            deadline = customer.request.deadline
            late = deadline is not None and not customer.outlet.ended and deadline <= self.world.clock.now - 1
            assert not late, f"{customer.ask.number} lives beyond its deadline"

    def _most_steps(self) -> int:
        """No schedule that gets anywhere takes more: a token a step, every request computed twice over, and parked."""
        if not self.most_steps:
            tokens = sum(ask.params.n * (len(ask.prompt) + ask.max_tokens) for ask in self.world.scenario.asks)
            self.most_steps = self.world.scenario.last + 4 * tokens + 20 * len(self.world.scenario.asks)
        return self.most_steps

    # ---- at the end

    def at_the_end(self) -> None:
        """Everybody has exactly its answer or exactly what befell it; nothing is held; counters add up."""
        self.books()
        self.contents()
        for customer in self.world.customers.values():
            self._outcome(customer)
        self._counters()
        self._nothing_is_held()

    def _outcome(self, customer: Customer) -> None:
        ask, outlet = customer.ask, customer.outlet
        assert outlet.ends == 1, f"request {ask.number} ended {outlet.ends} times"
        answers = answers_of(ask)
        for index, answer in enumerate(answers):
            said = outlet.tokens(index)
            assert said == answer.tokens[: len(said)], f"request {ask.number}.{index} said {said}, not {answer.tokens}"
        assert all(chunk.index < len(answers) for chunk in outlet.chunks)
        if outlet.completion is not None:
            self._completion(customer, answers)
        else:
            assert self._deserved(customer), f"request {ask.number} must not end with {outlet.error!r}"

    def _completion(self, customer: Customer, answers: tuple[Reply, ...]) -> None:
        ask, done = customer.ask, customer.outlet.completion
        assert done is not None and not customer.cancelled
        streams = [done, *done.alternatives]
        assert [(each.token_ids, each.finish_reason) for each in streams] == [
            (answer.tokens, answer.finish_reason) for answer in answers
        ], f"request {ask.number} answered {streams}, not {answers}"
        for index, each in enumerate(streams):
            assert customer.outlet.tokens(index) == each.token_ids, f"request {ask.number}: chunks are not the answer"
            usage = each.usage
            held = len(ask.prompt) + max(len(each.token_ids) - 1, 0)
            assert usage.cached_tokens + usage.computed_tokens == held, f"request {ask.number}: {usage}, {held} tokens"
            assert usage.preemptions == customer.request.preemptions
            assert 0 <= usage.ttft_s <= usage.total_s
        if ask.timeout is not None:
            assert done.usage.total_s <= ask.timeout + 1, f"request {ask.number} finished behind its deadline"

    def _deserved(self, customer: Customer) -> bool:
        """Whether an error is what befell this request."""
        ask, error, faults = customer.ask, customer.outlet.error, self.world.faults
        if isinstance(error, RequestCancelled):
            return customer.cancelled
        if isinstance(error, RequestTimedOut):
            return (
                ask.timeout is not None and customer.ended_at is not None and customer.ended_at >= _deadline(customer)
            )
        if isinstance(error, PromptTooLong):
            return bool(self.world.pins) and not customer.request.admitted
        assert isinstance(error, RequestFailed), f"request {ask.number}: {error!r}"
        cause, flaw = error.__cause__, ask.flaw
        if flaw is not None and flaw.kind == "nan" and isinstance(cause, InvalidInput):
            return True
        if flaw is not None and flaw.kind == "namespace" and isinstance(cause, Sabotage):
            return True
        return cause is customer.outlet.raised is not None or faults.explains(cause, ask)

    def _counters(self) -> None:
        counters, customers = self.core.counters, list(self.world.customers.values())
        ends = Counter(type(c.outlet.error) for c in customers)
        assert counters.finished == ends[type(None)]
        assert counters.cancelled == ends[RequestCancelled]
        assert counters.failed == sum(ends.values()) - ends[type(None)] - ends[RequestCancelled]
        assert counters.timed_out == ends[RequestTimedOut]
        assert counters.preemptions == sum(c.request.preemptions for c in customers)
        put = sum(len(c.outlet.chunks) for c in customers)
        assert put <= counters.output_tokens <= put + sum(c.outlet.raised is not None for c in customers)
        if ends[type(None)] == len(customers):
            self._sums(counters)
        stats = self.cache.stats()
        assert counters.computed_tokens + counters.recomputed_tokens == stats.committed_tokens, f"{counters}, {stats}"
        asked = sum(len(c.ask.prompt) for c in customers if c.request.admitted)
        refused = sum(len(c.ask.prompt) for c in customers if isinstance(c.outlet.error, PromptTooLong))
        assert asked <= stats.query_tokens <= asked + refused, f"{asked} tokens were asked for: {stats}"

    def _sums(self, counters: Any) -> None:
        """Everybody finished: what each was told adds up to what the engine counted."""
        done = [c.outlet.completion for c in self.world.customers.values() if c.outlet.completion is not None]
        streams = [each for first in done for each in (first, *first.alternatives)]
        assert counters.prompt_tokens == sum(each.usage.prompt_tokens for each in done)
        assert counters.computed_tokens == sum(each.usage.computed_tokens for each in streams)
        assert counters.recomputed_tokens == sum(each.usage.recomputed_tokens for each in streams)
        forked = sum(len(first.alternatives) * first.usage.prompt_tokens for first in done)  # no hits, but shared
        assert counters.cached_tokens == sum(each.usage.cached_tokens for each in streams) - forked
        assert all(each.usage.preemptions or not each.usage.recomputed_tokens for each in streams)

    def _nothing_is_held(self) -> None:
        cache, scheduler = self.cache, self.core.scheduler
        assert not cache._open and not len(scheduler.waiting) and not scheduler.running and not self.core.busy
        for _, pin in self.world.pins:
            pin.release()
        assert cache.free_blocks + cache.evictable_blocks == cache.num_blocks, "something is held"
        if not self.world.scenario.reuse:
            assert cache.free_blocks == cache.num_blocks, "something was published"
        cache.clear()
        cache.check()
        assert cache.free_blocks == cache.num_blocks, "something leaked"

    def _name(self, request: Request) -> str:
        return f"request {self.world.customer_of(request).ask.number}"


def _deadline(customer: Customer) -> float:
    deadline = customer.request.deadline
    assert deadline is not None
    return deadline
