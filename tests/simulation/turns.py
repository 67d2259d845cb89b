"""Who goes first, who waits for a neighbour, who gives way.

Knows: what was promised about order, priorities, overtaking, coalescing and preemption. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from radixkv.engine.request import PrefixWait, Request
from tests.simulation.scenario import Ids

if TYPE_CHECKING:
    from tests.simulation.steps import Before
    from tests.simulation.world import World


class Turns:
    """Of one world; each method raises AssertionError if what it looks at is broken."""

    def __init__(self, world: World) -> None:
        self.world, self.core, self.cache = world, world.core, world.cache
        self.overtaken = 0
        self.waited: Counter[tuple[str, PrefixWait]] = Counter()  # steps of each wait
        self.first: dict[str, PrefixWait] = {}  # the first wait of each

    def after(self, before: Before) -> None:
        """What a step must not have done to anybody's place."""
        self._order(before)
        self._preemptions(before)
        self._parking()

    def _order(self, before: Before) -> None:
        """Nobody is passed by lower priorities, or by more later ones of its own than the order allows."""
        config, scheduler = self.world.scenario.config, self.core.scheduler
        waiting = [request for request in scheduler.waiting if request.number]
        entered = {id(each.stream.request): each.stream.request for each in self.world.work}
        entered |= {id(request): request for request in scheduler.running}
        for request in before.running:
            entered.pop(id(request), None)
        for newcomer in sorted(entered.values(), key=lambda request: request.admitted):
            for other in waiting:
                customer = self.world.customer_of(other)
                if customer.channel.in_span or self._waits_for_prefix(other, before):
                    continue
                assert newcomer.priority >= other.priority, (
                    f"{self.world.name_of(newcomer)} went before {self.world.name_of(other)}"
                )
                if newcomer.priority == other.priority and other.number < newcomer.number and not newcomer.preemptions:
                    customer.overtaken += 1
                    self.overtaken += 1
                    most = config.max_overtakes if config.order == "longest-prefix" else 0
                    assert customer.overtaken <= most, (
                        f"{self.world.name_of(other)} was overtaken {customer.overtaken} times"
                    )

    def _preemptions(self, before: Before) -> None:
        """Who gives way is paused, or of the lowest priority, or was never preempted; with one priority: once."""
        running = self.core.scheduler.running
        stayed = [request for request in before.running if request in running]
        for request, preemptions in zip(before.running, before.preemptions, strict=True):
            customer = self.world.customer_of(request)
            if request.preemptions == preemptions or customer.channel.in_span:
                continue
            for other in stayed:
                away = self.world.customer_of(other).channel.is_away
                better = not away and (other.priority, other.preemptions) >= (request.priority, preemptions)
                assert better or other.guaranteed, (
                    f"{self.world.name_of(request)} gave way, not {self.world.name_of(other)}"
                )
        if len({ask.priority for ask in self.world.scenario.asks}) == 1:
            for customer in self.world.customers.values():
                assert customer.request.preemptions <= 1 or customer.ask.lags, f"{customer.ask.number} twice preempted"

    def before_preemption(self, request: Request) -> list[Ids]:
        """What each stream of a request that gives way has computed, but for what it kept and cannot publish now."""
        if not self.world.scenario.reuse or self.world.scenario.config.deterministic:
            return []
        streams = [stream for stream in request.live if stream.active]
        return [
            tuple(stream.sequence.tokens)
            for stream in streams
            if not (request.publish_late and stream.sequence.has_plan)
        ]

    def after_preemption(self, request: Request, kept: list[Ids]) -> None:
        """All of that is cached, until somebody takes its blocks; the request holds nothing."""
        assert not any(stream.active for stream in request.streams)
        for tokens in kept:
            cached = self.cache.match(list(tokens), request.namespace).length
            assert cached == len(tokens), (
                f"{self.world.name_of(request)} computed {len(tokens)} tokens, {cached} are cached"
            )

    def _parking(self) -> None:
        """Who waits for a neighbour waits for a good part of its own prompt."""
        for request in self.core.scheduler.waiting:
            prefix_wait = request.prefix_wait
            if prefix_wait is None or request.waited_enough:
                continue
            name = self.world.name_of(request)
            self.waited[name, prefix_wait] += 1
            first = self.first.setdefault(
                name, prefix_wait
            )  # a later one may begin with less: what was cached may be gone
            if prefix_wait.leader in self.core.scheduler.running:
                same = prefix_wait.leader.prompt[: prefix_wait.shared], request.prompt[: prefix_wait.shared]
                assert prefix_wait.leader.namespace == request.namespace and (same[0] == same[1]).all()
                assert (
                    prefix_wait is not first
                    or prefix_wait.shared - prefix_wait.cached >= 2 * self.world.scenario.block_size
                )

    def _waits_for_prefix(self, request: Request, before: Before) -> bool:
        """Whether a neighbour was about to compute its prefix in this step, and it has not waited for that too long."""
        prefix_wait = request.prefix_wait
        if prefix_wait is None or request.waited_enough:
            return False
        steps = -(-len(request.prompt) // self.world.scenario.config.prefill_chunk)
        leader, computed = prefix_wait.leader, before.computed.get(id(prefix_wait.leader))
        waited = self.waited[self.world.name_of(request), prefix_wait]
        if computed is None:  # it came in, or came back, in this very step (and gave way again), or waits itself
            here = leader in self.core.scheduler.running or leader.channel.ended or not waited
            computed = 0 if here else prefix_wait.shared
        return computed < prefix_wait.shared and waited <= 2 * steps + 10
