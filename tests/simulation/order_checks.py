"""Check order, priorities, overtaking, waits for a shared prefix, and preemption after each step of a simulated engine.

The checks change nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from radixkv.engine.request import PrefixWait, Request
from tests.simulation.scenario import Ids

if TYPE_CHECKING:
    from tests.simulation.step_checks import Before
    from tests.simulation.world import World


class OrderChecks:
    """The checks of one world; each raises AssertionError."""

    def __init__(self, world: World) -> None:
        self.world, self.core, self.cache = world, world.core, world.cache
        self.overtaken = 0
        self.waited: Counter[tuple[str, PrefixWait]] = Counter()  # steps of each wait
        self.first: dict[str, PrefixWait] = {}  # the first wait of each

    def after(self, before: Before) -> None:
        """Check the order of requests after a step."""
        self._order(before)
        self._preemptions(before)
        self._prefix_waits()

    def _order(self, before: Before) -> None:
        """No lower priority overtakes a request, and no more later ones of its own priority than the order allows."""
        config, scheduler = self.world.scenario.config, self.core.scheduler
        waiting = [request for request in scheduler.waiting if request.scheduling.number]
        entered = {id(each.stream.request): each.stream.request for each in self.world.work}
        entered |= {id(request): request for request in scheduler.running}
        for request in before.running:
            entered.pop(id(request), None)
        for admitted in sorted(entered.values(), key=lambda request: request.scheduling.admitted):
            for other in waiting:
                customer = self.world.customer_of(other)
                if customer.channel.in_span or customer.shaken or self._waits_for_prefix(other, before):
                    continue
                if self.world.is_held(other) or other.scheduling.disk_reads:
                    continue  # it waits for the disk, or did
                assert admitted.priority >= other.priority, (
                    f"{self.world.name_of(admitted)} went before {self.world.name_of(other)}"
                )
                if (
                    admitted.priority == other.priority
                    and other.scheduling.number < admitted.scheduling.number
                    and not admitted.scheduling.preemptions
                ):
                    customer.overtaken += 1
                    self.overtaken += 1
                    most = config.max_overtakes if config.order == "longest-prefix" else 0
                    assert customer.overtaken <= most, (
                        f"{self.world.name_of(other)} was overtaken {customer.overtaken} times"
                    )

    def _preemptions(self, before: Before) -> None:
        """A victim is paused, of the lowest priority, or new to preemption; with one priority it is preempted once."""
        # With limits, preempting requests of other namespaces may free no block.
        running = [] if self.world.scenario.limits else self.core.scheduler.running
        stayed = [request for request in before.running if request in running]
        for request, preemptions in zip(before.running, before.preemptions, strict=True):
            customer = self.world.customer_of(request)
            if request.scheduling.preemptions == preemptions or customer.channel.in_span or customer.shaken:
                continue
            for other in stayed:
                away = self.world.customer_of(other).channel.is_away
                better = not away and (other.priority, other.scheduling.preemptions) >= (request.priority, preemptions)
                assert better or other.scheduling.guaranteed, (
                    f"{self.world.name_of(request)} was preempted, not {self.world.name_of(other)}"
                )
        if len({ask.priority for ask in self.world.scenario.asks}) == 1:
            for customer in self.world.customers.values():
                often = customer.ask.lags or customer.shaken
                assert customer.request.scheduling.preemptions <= 1 or often, f"{customer.ask.number} twice preempted"

    def before_preemption(self, request: Request) -> list[Ids]:
        """Return the tokens that each stream of a victim has computed and can publish now."""
        if not self.world.scenario.reuse or self.world.scenario.config.deterministic:
            return []
        streams = [stream for stream in request.live if stream.active]
        return [
            tuple(stream.sequence.tokens)
            for stream in streams
            if not (request.scheduling.publish_late and stream.sequence.has_plan)
        ]

    def after_preemption(self, request: Request, kept: list[Ids]) -> None:
        """All these tokens are cached until they are evicted, and the request holds no blocks."""
        assert not any(stream.active for stream in request.streams)
        for tokens in kept:
            cached = self.cache.match(list(tokens), request.namespace).matched
            assert cached == len(tokens), (
                f"{self.world.name_of(request)} computed {len(tokens)} tokens, {cached} are cached"
            )

    def _prefix_waits(self) -> None:
        """A request waits for a shared prefix of at least two blocks, which a running request has."""
        for request in self.core.scheduler.waiting:
            prefix_wait = request.scheduling.prefix_wait
            if prefix_wait is None or request.scheduling.waited_enough:
                continue
            name = self.world.name_of(request)
            self.waited[name, prefix_wait] += 1
            # A later wait may begin with less: cached tokens may have been evicted.
            first = self.first.setdefault(name, prefix_wait)
            if prefix_wait.leader in self.core.scheduler.running:
                same = prefix_wait.leader.prompt[: prefix_wait.shared], request.prompt[: prefix_wait.shared]
                assert prefix_wait.leader.namespace == request.namespace and (same[0] == same[1]).all()
                assert (
                    prefix_wait is not first
                    or prefix_wait.shared - prefix_wait.cached >= 2 * self.world.scenario.block_size
                )

    def _waits_for_prefix(self, request: Request, before: Before) -> bool:
        """Return whether a running request was about to compute its prefix, and its wait is not too long."""
        prefix_wait = request.scheduling.prefix_wait
        if prefix_wait is None or request.scheduling.waited_enough:
            return False
        steps = -(-len(request.prompt) // self.world.scenario.config.prefill_chunk)
        leader, computed = prefix_wait.leader, before.computed.get(id(prefix_wait.leader))
        waited = self.waited[self.world.name_of(request), prefix_wait]
        if computed is None:  # the leader was admitted in this step (and preempted again), or waits itself
            here = leader in self.core.scheduler.running or leader.channel.ended or not waited
            computed = 0 if here else prefix_wait.shared
        return computed < prefix_wait.shared and waited <= 2 * steps + 10
