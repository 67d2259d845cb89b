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
        self.waited: Counter[tuple[str, PrefixWait]] = Counter()  # steps of each wait
        self.first: dict[str, PrefixWait] = {}  # the first wait of each

    def after(self, before: Before) -> None:
        """Check the order of requests after a step."""
        wrong = self.world.order_model.wrong
        assert not wrong, wrong[0]
        self._preemptions(before)
        self._prefix_waits()

    def _preemptions(self, before: Before) -> None:
        """A victim is paused, of the lowest priority, or new to preemption; with one priority it is preempted once."""
        often = self.world.order_model.preempted.count
        stayed = [request for request in before.running if request in self.core.scheduler.running]
        for request, preemptions in zip(before.running, before.preemptions, strict=True):
            customer = self.world.customer_of(request)
            if often(request) == preemptions or customer.channel.in_span or customer.shaken:
                continue
            for other in stayed:
                away = self.world.customer_of(other).channel.is_away
                better = not away and (other.priority, often(other)) >= (request.priority, preemptions)
                assert better or other.scheduling.guaranteed, (
                    f"{self.world.name_of(request)} was preempted, not {self.world.name_of(other)}"
                )
        if len({ask.priority for ask in self.world.scenario.asks}) == 1:
            for customer in self.world.customers.values():
                excused = customer.ask.lags or customer.shaken
                assert often(customer.request) <= 1 or excused, f"{customer.ask.number} twice preempted"

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
            prefix_wait = request.scheduling.queued.prefix_wait
            if prefix_wait is None or request.scheduling.queued.waited_enough:
                continue
            name = self.world.name_of(request)
            self.waited[name, prefix_wait] += self.core.scheduler.waiting.reason(request) == "shared prefix"
            steps = -(-len(request.prompt) // self.world.scenario.config.prefill_chunk)
            assert self.waited[name, prefix_wait] <= 2 * steps + 10, f"{name} waits too long for a shared prefix"
            # A later wait may begin with less: cached tokens may have been evicted.
            first = self.first.setdefault(name, prefix_wait)
            if prefix_wait.leader in self.core.scheduler.running:
                same = prefix_wait.leader.prompt[: prefix_wait.shared], request.prompt[: prefix_wait.shared]
                assert prefix_wait.leader.namespace == request.namespace and (same[0] == same[1]).all()
                assert (
                    prefix_wait is not first
                    or prefix_wait.shared - prefix_wait.cached >= 2 * self.world.scenario.block_size
                )
