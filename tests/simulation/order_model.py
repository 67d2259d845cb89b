"""A plain model of the order of admissions, beside the engine: the queue must offer the request that the model chooses.

The model follows the rules in the docstring of `radixkv.engine.wait_queue`. It only lists what happened, and computes
counts, waits and overtakes from these lists for each offer. Which requests are delayed, and what fits, it reads from
the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

from radixkv.engine.admission import blocks_needed
from radixkv.engine.request import Request, Stream
from radixkv.engine.scheduler import Work
from radixkv.engine.wait_queue import PATIENCE

if TYPE_CHECKING:
    from radixkv.cache.sequence import Sequence
    from tests.simulation.world import World

Call = Callable[..., Any]


class OrderModel:
    """The order of one world; `wrong` lists the offers and admissions that break a rule."""

    def __init__(self, world: World) -> None:
        """Observe the scheduler of a world."""
        self.world, self.scheduler, self.config = world, world.core.scheduler, world.scenario.config
        self.waiting, self.admission = self.scheduler.waiting, self.scheduler.admission
        self.arrived: list[Request] = []
        self.since: dict[Request, float] = {}  # the times at which requests were queued
        self.preempted: list[Request] = []
        self.gave: list[tuple[Request, int]] = []  # requests that were preempted for a turn, and their progress then
        self.overtakes: list[tuple[Request, Request]] = []  # a request that was admitted, and an earlier one
        self.history: list[tuple[str, Hashable, float]] = []  # of groups: "came", "left", "ran" until, "tokens"
        self.planned: dict[Stream, int] = {}  # tokens of the step that is being planned
        self.cached: dict[Request, int] = {}  # as looked up in this step
        self.offered: Request | None = None  # in this admission
        self.passed: list[Request] = []  # that wait for blocks of their own groups, in this admission
        self.admitting = self.full = False
        self.rules: list[str] = []  # that decided the last offer
        self.decided = Counter[str]()
        self.wrong: list[str] = []  # an exception would only end a request
        self.lags: dict[Hashable, dict[Hashable, float]] = {}  # of waiting groups: all counts when their waits began
        for owner, name in (
            (self.waiting, "add"),
            (self.waiting, "begin_step"),
            (self.waiting, "first"),
            (self.waiting, "starved"),
            (self.admission, "turn_victims"),
            (self.scheduler, "remove"),
            (self.scheduler, "preempt"),
            (self.scheduler, "schedule"),
            (self.scheduler, "_plan"),
            (self.scheduler, "_admit"),
            (self.scheduler, "_start"),
        ):
            setattr(owner, name, partial(getattr(self, f"on_{name.strip('_')}"), getattr(owner, name)))
        if (speculation := world.core.speculation) is not None:
            setattr(speculation, "_verify", partial(self.on_verify, speculation._verify))  # noqa: B010  # mypy

    # ---- what happens

    def on_add(self, add: Call, request: Request) -> None:
        add(request)
        self.since[request] = self.world.clock.now
        if request not in self.arrived:
            self.arrived.append(request)
            self.history.append(("came", self.group(request), 0))

    def on_remove(self, remove: Call, request: Request) -> None:
        ran, known = request in self.scheduler.running, request in self.waiting
        remove(request)
        if ran:
            self.history.append(("ran", self.group(request), self.world.clock.now))
        if ran or known:
            self.history.append(("left", self.group(request), 0))

    def on_preempt(self, preempt: Call, request: Request, *, turn: bool = False) -> None:
        preempt(request, turn=turn)
        if request not in self.scheduler.running and not request.channel.ended:
            self.history.append(("ran", self.group(request), self.world.clock.now))
            self.preempted.append(request)
            if turn:
                self.gave.append((request, request.progress))
                self.decided["a turn was given"] += 1

    def on_schedule(self, schedule: Call) -> list[Work]:
        work: list[Work] = schedule()
        self.history += [("tokens", self.group(each.request), count) for each, count in self.planned.items()]
        self.planned = {}
        return work

    def on_plan(self, plan: Call, stream: Stream) -> None:
        plan(stream)
        self._note_plans()

    def on_verify(self, verify: Call, work: Work, draft: Any) -> None:
        verify(work, draft)
        accepted = work.stream.sequence.length - work.end
        self.history.append(("tokens", self.group(work.stream.request), accepted))

    def on_begin_step(self, begin_step: Call) -> None:
        begin_step()
        self.cached = {}

    def _note_plans(self) -> None:
        plans = self.scheduler._planned.items()
        self.planned = {stream: len(work.tokens) for stream, work in plans if work.sources is None}

    # ---- what the engine decides

    def on_admit(self, admit: Call) -> Request | None:
        channels = [customer.channel for customer in self.world.customers.values()]
        for channel in channels:
            channel.fix()
        running, closing = self.scheduler.running, self.scheduler.closing
        self.full = bool(running or closing) and self.admission.streams() >= self.config.max_sequences
        self.full &= not any(each.channel.paused for each in running)
        self.offered, self.passed, self.admitting = None, [], True
        admitted: Request | None = admit()
        self.admitting = False
        for channel in channels:
            channel.unfix()
        self._note_plans()
        last = self.offered
        if admitted is None and last in self._ready() and running:
            assert last is not None
            self._expect(not self._fits(last), f"{self._name(last)} fits, and was not admitted")
            self._expect(self.full or not self._waits_for_own(last), f"{self._name(last)} delays other groups")
        return admitted

    def on_first(self, first: Call, blocked: Any = ()) -> Request | None:
        if not self.admitting or self.full:
            return first(blocked)  # type: ignore[no-any-return]
        if self.offered in self._ready():
            assert self.offered is not None
            own = not self._fits(self.offered) and self._waits_for_own(self.offered)
            self._expect(own, f"{self._name(self.offered)} is passed over, and waits for no blocks of its own")
            self.passed.append(self.offered)
        passed = [self.group(each) for each in self.passed]
        expected = self._next([each for each in self._ready() if self.group(each) not in passed])
        return self._compare(first(blocked), expected)

    def on_starved(self, starved: Call, running: list[Request]) -> Request | None:
        self._expect(self.full, "a turn is asked for, though the engine has room")
        ready, running_groups = self._ready(), [self.group(each) for each in running]
        starved_groups = [
            group
            for group in {self.group(each) for each in ready}
            if group not in running_groups and self.world.clock.now - self._waits_since(group) >= PATIENCE
        ]
        expected = self._next([each for each in ready if self.group(each) in starved_groups])
        if expected is not None and any(each.priority > expected.priority for each in ready):
            expected = None
        return self._compare(starved(running), expected)

    def on_turn_victims(self, turn_victims: Call, request: Request) -> list[Request]:
        victims: list[Request] = turn_victims(request)
        missing = self.admission.streams() + request.streams_left - self.config.max_sequences
        left = [each for each in self.scheduler.running if each.priority <= request.priority]
        left = [each for each in left if each.progress > dict(self.gave).get(each, -1)]
        if missing > sum(each.streams_left for each in left):
            self._expect(not victims, "streams are preempted in vain")
            return victims
        running = list(self.scheduler.running)
        for victim in victims:
            self._expect(victim in left and missing > 0, f"{self._name(victim)} must not give its turn")
            streams = {
                self.group(each): sum(other.streams_left for other in running if self.group(other) == self.group(each))
                for each in left
            }
            most = max(count / self._share(group) for group, count in streams.items())
            same = [each for each in left if self.group(each) == self.group(victim)]
            first = streams.get(self.group(victim), 0) / self._share(self.group(victim)) == most
            newest = victim.scheduling.admitted == max((each.scheduling.admitted for each in same), default=0)
            self._expect(first and newest, f"another stream must give its turn before {self._name(victim)}")
            left = [each for each in left if each is not victim]
            running.remove(victim)
            missing -= victim.streams_left
        self._expect(missing <= 0, "too few streams give their turn")
        return victims

    def on_start(self, start: Call, request: Request, sequence: Sequence) -> Request:
        self._expect(request is self.offered, f"{self._name(request)} was admitted, and not offered")
        ready = [each for each in self._ready() if each is not request]
        overtaken = [each for each in ready if self._is_later(request, each)]
        turn = request not in self.preempted and not self.full
        start(request, sequence)
        self._check_bound(request, ready, turn=turn)
        if turn or request not in self.preempted:
            self.overtakes += [(request, each) for each in overtaken]
        self.decided.update(self.rules)
        self.decided["a group was passed over"] += bool(self.passed)
        return request

    def _compare(self, offered: Request | None, expected: Request | None) -> Request | None:
        text = f"{self._name(offered)} is offered, not {self._name(expected)}; counts {self._counts()}, {self.rules}"
        self._expect(offered is expected, text)
        self.offered = offered
        return offered

    # ---- the rules

    def _next(self, requests: list[Request]) -> Request | None:
        """Return the request that goes next of these."""
        self.rules = []
        if not requests:
            return None
        best = self._keep("priority", requests, lambda each: each.priority == max(r.priority for r in requests))
        if any(each in self.preempted for each in best):
            best = self._keep("preempted", best, lambda each: each in self.preempted)
        else:
            best = self._in_turn(best)
        if self.config.order == "fcfs":
            return min(best, key=self.arrived.index)
        overdue = [each for each in best if self._is_overdue(each)]
        lengths = {each: self._cached(each) for each in best if each not in overdue}
        if overdue:
            oldest = min(overdue, key=self.arrived.index)
            if max(lengths.values(), default=0) > self._length(oldest):
                self.rules.append("overdue")
            return oldest
        longest = self._keep("longest prefix", best, lambda each: lengths[each] == max(lengths.values()))
        return min(longest, key=self.arrived.index)

    def _keep(self, rule: str, requests: list[Request], is_kept: Callable[[Request], bool]) -> list[Request]:
        """Return the requests that a rule keeps, and note the rule if the oldest one is not among them."""
        kept = [each for each in requests if is_kept(each)]
        if min(requests, key=self.arrived.index) not in kept:
            self.rules.append(rule)
        return kept

    def _in_turn(self, requests: list[Request]) -> list[Request]:
        """Return the requests of the group with the lowest count, and of those that are not too far ahead of it."""
        counts, ahead = self._counts(), 0 if self.config.order == "fcfs" else self.config.max_batch_tokens
        oldest = sorted(requests, key=self.arrived.index)
        lowest = self.group(min(oldest, key=lambda each: counts[self.group(each)]))
        groups = [lowest]
        if ahead:
            groups += [each for each in counts if (counts[each] - counts[lowest]) * self._share(each) <= ahead]
        return self._keep("turn", requests, lambda each: self.group(each) in groups)

    def _counts(self) -> dict[Hashable, float]:
        """Return the count of each group: the tokens that its requests computed for its share, and what it was raised.

        A group that comes back is raised to the lowest count of the groups that have requests, else to the group that
        ran last, and at least to an earlier start.
        """
        tokens: dict[Hashable, float] = {None: 0.0}
        ran: dict[Hashable, float] = {None: 0.0}
        requests, start = Counter[Hashable](), 0.0
        plans = [("tokens", self.group(each.request), float(count)) for each, count in self.planned.items()]
        for what, group, value in [*self.history, *plans]:
            if what == "came" and not requests[group]:
                active = [each for each in tokens if requests[each]]
                others = active or [max(tokens, key=lambda each: ran[each])]
                start = max(start, min(tokens[each] / self._share(each) for each in others))
                tokens[group] = max(tokens.get(group, 0.0), start * self._share(group))
                ran.setdefault(group, 0.0)
            requests[group] += (what == "came") - (what == "left")
            tokens[group] += value if what == "tokens" else 0
            ran[group] = value if what == "ran" else ran[group]
        return {group: count / self._share(group) for group, count in tokens.items()}

    def _is_overdue(self, request: Request) -> bool:
        overtaken, most = self.overtaken(request), self.config.max_delay
        delayed = most is not None and self.world.clock.now - self.since[request] >= most
        return delayed or overtaken >= self.config.max_overtakes

    def overtaken(self, request: Request) -> int:
        """Return how many later requests of its group were admitted before it, though it could run."""
        return sum(each is request for _, each in self.overtakes)

    def preempted_for_blocks(self, request: Request) -> int:
        """Return how often a request was preempted, except for turns."""
        return self.preempted.count(request) - sum(each is request for each, _ in self.gave)

    def _is_later(self, later: Request, earlier: Request) -> bool:
        same = self.group(later) == self.group(earlier) and later.priority == earlier.priority
        return same and self.arrived.index(later) > self.arrived.index(earlier)

    def _check_bound(self, admitted: Request, ready: list[Request], *, turn: bool) -> None:
        """Until the last admission that goes before a waiting group, each other group makes up its lag, and a step.

        Preempted requests, higher priorities, and requests that are no longer blocked are not counted.
        """
        group, counts = self.group(admitted), self._counts()
        passed = [self.group(each) for each in self.passed]
        waiting = {self.group(each) for each in ready if each.priority == admitted.priority} - {group, *passed}
        self.lags = {each: self.lags.get(each, counts) for each in waiting}
        ahead = 0 if self.config.order == "fcfs" else self.config.max_batch_tokens
        for each in waiting if turn else ():
            lag = max(0.0, counts[each] - self.lags[each].get(group, 0.0)) * self._share(group)
            got = (counts[group] - self.lags[each].get(group, 0.0)) * self._share(group)
            self._expect(got <= lag + ahead, f"{group} got {got} tokens, not {lag} + {ahead}, while {each} waited")

    # ---- facts

    def group(self, request: Request) -> Hashable:
        """Return what names the group of a request: the beginning of a tuple, as far as it has a share."""
        namespace = self.world.customer_of(request).ask.namespace
        if not isinstance(namespace, tuple):
            return namespace
        shares = [each for each, _ in self.world.scenario.limits if isinstance(each, tuple)]
        return max((each for each in shares if namespace[: len(each)] == each), key=len, default=namespace[:1])

    def _share(self, group: Hashable) -> float:
        shares = dict(self.world.scenario.limits)
        return shares.get(group) or min((each for each in shares.values() if each), default=1.0)

    def _ready(self) -> list[Request]:
        offered = [each for each in self.waiting if self.waiting.reason(each) is None]
        return [each for each in offered if not each.channel.paused]

    def _waits_since(self, group: Hashable) -> float:
        """Return since when a group without a running request waits: since it ran, or its first request was queued."""
        ran = [time for what, each, time in self.history if what == "ran" and each == group]
        ready = [each for each in self._ready() if self.group(each) == group]
        first = min(ready, key=lambda each: (-each.priority, each not in self.preempted, self.arrived.index(each)))
        return max(*ran, 0.0, self.since[first])

    def _cached(self, request: Request) -> int:
        if request not in self.cached:
            self.cached[request] = self._length(request)
        return self.cached[request]

    def _length(self, request: Request) -> int:
        return self.world.core._reuse.match(request).length

    def _fits(self, request: Request) -> bool:
        return self.admission.fits(request, self.world.core._reuse.match(request))

    def _waits_for_own(self, request: Request) -> bool:
        """Return whether a request exceeds the share of its namespaces together with running ones."""
        quotas = self.world.cache.quotas
        if quotas is None or self.admission.streams() + request.streams_left > self.config.max_sequences:
            return False
        own = quotas.limits.group(request.namespace)
        running = [each for each in self.scheduler.running if quotas.limits.group(each.namespace) == own]
        size, hit = self.world.scenario.block_size, self._length(request)
        blocks = sum(blocks_needed(each, size) + each.streams_left for each in running)
        blocks += blocks_needed(request, size, hit) + request.streams_left
        held = quotas.shares.used[own] - quotas.shares.evictable_in[own]
        return bool(running) and blocks + held > quotas.shares.guaranteed[own]

    def _expect(self, holds: bool, text: str) -> None:
        if not holds:
            self.wrong.append(text)

    def _name(self, request: Request | None) -> str:
        return "no request" if request is None else self.world.name_of(request)
