"""A plain model of the order of admissions: the queue must offer the request that the model chooses.

The model follows the rules in the docstring of `radixkv.engine.wait_queue`. It lists what happened, and computes
counts, waits and overtakes from the lists for each offer. It reads from the engine only which requests are delayed,
how long cached prefixes are, and what fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from radixkv.engine import wait_queue
from radixkv.engine.request import Request, Stream
from radixkv.engine.scheduler import Work

if TYPE_CHECKING:
    from tests.simulation.world import World

Call = Callable[..., Any]
WRAPPED = {
    "waiting": ("add", "begin_step", "first", "starved"),
    "admission": ("turn_victims",),
    "scheduler": ("remove", "preempt", "schedule", "_plan", "_admit", "_start"),
}


class OrderModel:
    """The order of one world. `wrong` lists broken rules, as an exception would only end a request."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler, self.config = world, world.core.scheduler, world.scenario.config
        self.waiting, self.admission = self.scheduler.waiting, self.scheduler.admission
        self.ahead = 0 if self.config.order == "fcfs" else self.config.max_batch_tokens
        self.arrived: list[Request] = []
        self.since: dict[Request, float] = {}  # the times at which requests were queued
        self.preempted: list[Request] = []
        self.gave: list[tuple[Request, int]] = []  # requests that were preempted for a turn, and their progress then
        self.overtakes: list[tuple[Request, Request]] = []  # a request that was admitted, and an earlier one
        self.overtaken_at: dict[Request, float] = {}  # the times of the first ones
        self.history: list[tuple[str, Hashable, Any]] = []  # of groups: "came" to waiting ones, "ran" until, "tokens"
        self.planned: dict[Stream, int] = {}  # tokens of the step that is being planned
        self.cached: dict[Request, int] = {}  # as looked up in this step
        self.offered: Request | None = None  # in this admission
        self.passed: list[Hashable] = []  # groups that wait for blocks of their own, in this admission
        self.admitting = self.full = False
        self.rules: list[str] = []  # that decided the last offer
        self.decided = Counter[str]()
        self.starts: dict[Hashable, dict[Hashable, float]] = {}  # of waiting groups: all counts when their waits began
        self.wrong: list[str] = []
        for owner, names in WRAPPED.items():
            for name in names:
                call = getattr(getattr(self, owner), name)
                setattr(getattr(self, owner), name, partial(getattr(self, f"on_{name.strip('_')}"), call))
        if (speculation := world.core.speculation) is not None:
            speculation._verify = partial(self.on_verify, speculation._verify)

    # ---- what happens

    def on_add(self, add: Call, request: Request) -> None:
        waiting = {self.group(each) for each in self.waiting if self.waiting.reason(each) in (None, "slow reader")}
        add(request)
        self.since[request] = self.world.clock.now
        if request not in self.arrived:
            self.arrived.append(request)
            self._note("came", request, waiting)

    def on_remove(self, remove: Call, request: Request) -> None:
        ran = request in self.scheduler.running
        remove(request)
        if ran:
            self._note("ran", request, self.world.clock.now)

    def on_preempt(self, preempt: Call, request: Request, *, turn: bool = False) -> None:
        preempt(request, turn=turn)
        self._note("ran", request, self.world.clock.now)
        self.preempted.append(request)
        if turn:
            self.gave.append((request, request.progress))
            self.decided["a turn was given"] += 1

    def on_schedule(self, schedule: Call) -> list[Work]:
        work: list[Work] = schedule()
        for stream, count in self.planned.items():
            self._note("tokens", stream.request, count)
        self.planned = {}
        first = sorted(self.waiting, key=self._rank)[: wait_queue.LOOKED_AT]
        announced, opened = self.waiting._announced, self.world.cache.state.announcements._open
        self._expect({*announced} == {*first} and len(opened) == len(first), "other requests are announced")
        return work

    def on_plan(self, plan: Call, stream: Stream) -> None:
        plan(stream)
        self._note_plans()

    def on_verify(self, verify: Call, work: Work, draft: Any) -> None:
        verify(work, draft)
        self._note("tokens", work.stream.request, work.stream.sequence.length - work.end)

    def on_begin_step(self, begin_step: Call) -> None:
        begin_step()
        self.cached = {}

    def _note(self, what: str, request: Request, value: Any = 0) -> None:
        self.history.append((what, self.group(request), value))

    def _note_plans(self) -> None:
        plans = self.scheduler._planned.items()
        self.planned = {stream: len(work.tokens) for stream, work in plans if work.sources is None}

    # ---- what the engine decides

    def on_admit(self, admit: Call) -> Request | None:
        running = self.scheduler.running
        with self.world.fixed_readers():
            busy = running or self.scheduler.closing
            self.full = bool(busy) and self.admission.streams() >= self.config.max_sequences
            self.full &= not any(each.channel.paused for each in running)
            self.offered, self.passed, self.admitting = None, [], True
            admitted: Request | None = admit()
            self.admitting, last = False, self.offered
            self._note_plans()
            if admitted is None and running and last is not None and last in self._ready():
                self._expect(not self._fits(last), f"{self._name(last)} fits, and was not admitted")
                self._expect(self.full or not self._waits_for_own(last), f"{self._name(last)} delays other groups")
        return admitted

    def on_first(self, first: Call, blocked: Any = ()) -> Request | None:
        if not self.admitting or self.full:
            return first(blocked)
        if (last := self.offered) is not None and last in self._ready():
            own = not self._fits(last) and self._waits_for_own(last)
            self._expect(own, f"{self._name(last)} is passed over, and waits for no blocks of its own")
            self.passed.append(self.group(last))
        expected = self._next([each for each in self._ready() if self.group(each) not in self.passed])
        return self._compare(first(blocked), expected)

    def on_starved(self, starved: Call, running: list[Request], blocked: Any = ()) -> Request | None:
        if (last := self.offered) is not None and last in self._ready():
            self._expect(not self._fits(last), f"{self._name(last)} is passed over, and fits")
            self.passed.append(self.group(last))
        ready, served = self._ready(), [*map(self.group, running), *self.passed]
        expected = self._next([each for each in ready if self.group(each) not in served and self._is_starved(each)])
        if expected is not None and any(each.priority > expected.priority for each in ready):
            expected = None
        return self._compare(starved(running, blocked), expected)

    def on_turn_victims(self, turn_victims: Call, request: Request) -> list[Request]:
        victims: list[Request] = turn_victims(request)
        running = list(self.scheduler.running)
        left = [each for each in running if each.priority <= request.priority]
        left = [each for each in left if each.progress > dict(self.gave).get(each, 0)]
        missing = self.admission.streams() + request.streams_left - self.config.max_sequences
        enough = missing <= sum(each.streams_left for each in left)
        for victim in victims:
            streams = Counter[Hashable]()
            for each in running:
                streams[self.group(each)] += each.streams_left / self._share(self.group(each))
            own, newest = self.group(victim), victim.scheduling.admitted
            fair = all(streams[self.group(each)] <= streams[own] for each in left)
            fair &= not any(self.group(each) == own and each.scheduling.admitted > newest for each in left)
            self._expect(victim in left and missing > 0 and fair, f"{self._name(victim)} must not give its turn")
            left, running = [[each for each in some if each is not victim] for some in (left, running)]
            missing -= victim.streams_left
        self._expect(missing <= 0 if enough else not victims, "too few or too many streams give their turn")
        return victims

    def on_start(self, start: Call, request: Request, sequence: Any) -> Request:
        self._expect(request is self.offered, f"{self._name(request)} was admitted, and not offered")
        ready = [each for each in self._ready() if each is not request]
        start(request, sequence)
        if request not in self.preempted:
            overtaken = [each for each in ready if self._is_earlier(each, request)]
            self.overtakes += [(request, each) for each in overtaken]
            self.overtaken_at = dict.fromkeys(overtaken, self.world.clock.now) | self.overtaken_at
        self._check_bound(request, ready)
        self.decided.update(self.rules)
        self.decided["a group was passed over"] += bool(self.passed)
        return request

    def _compare(self, offered: Request | None, expected: Request | None) -> Request | None:
        if offered is not expected:
            counts = self._counts()
            self.wrong.append(f"{self._name(offered)} is offered, not {self._name(expected)}: {self.rules}, {counts}")
        self.offered = offered
        return offered

    # ---- the rules

    def _next(self, requests: list[Request]) -> Request | None:
        """Return the request that goes next of these."""
        self.rules = []
        if not requests:
            return None
        requests = sorted(requests, key=self.arrived.index)
        highest = max(each.priority for each in requests)
        best = self._keep("priority", requests, lambda each: each.priority == highest)
        if any(each in self.preempted for each in best):
            best = self._keep("preempted", best, lambda each: each in self.preempted)
        else:
            groups = self._in_turn(best)
            best = self._keep("turn", best, lambda each: self.group(each) in groups)
        if self.config.order == "fcfs":
            return best[0]
        best = best[: wait_queue.LOOKED_AT]
        overdue = [each for each in best if self._is_overdue(each)]
        lengths = {each: self._cached(each) for each in best if each not in overdue}
        if overdue:
            self.rules += ["overdue"] * (max(lengths.values(), default=0) > self._length(overdue[0]))
            return overdue[0]
        longest = max(lengths.values())
        chosen = self._keep("longest prefix", best, lambda each: lengths[each] == longest)[0]
        self.rules += ["ahead"] * (chosen not in self.preempted and self.group(chosen) != groups[0])
        return chosen

    def _keep(self, rule: str, requests: list[Request], is_kept: Callable[[Request], bool]) -> list[Request]:
        """Return the requests that a rule keeps, and note the rule if the oldest one, the first, is not among them."""
        kept = [each for each in requests if is_kept(each)]
        self.rules += [rule] * (kept[0] is not requests[0])
        return kept

    def _in_turn(self, requests: list[Request]) -> list[Hashable]:
        """Return the group with the lowest count, and those that are not too far ahead of it."""
        counts = self._counts()
        lowest = min((self.group(each) for each in requests), key=lambda each: counts[each])
        near = [each for each in counts if (counts[each] - counts[lowest]) * self._share(each) <= self.ahead]
        return [lowest, *near] if self.ahead else [lowest]

    def _counts(self) -> dict[Hashable, float]:
        """Return the count of each group: the tokens that its requests computed, divided by its share.

        A group that begins to wait starts at the lowest count of the groups that wait, else of the group that ran last,
        and at an earlier start at least.
        """
        tokens: dict[Hashable, float] = {None: 0.0}
        ran: dict[Hashable, float] = {None: 0.0}
        start = 0.0
        plans = [("tokens", self.group(each.request), count) for each, count in self.planned.items()]
        for what, group, value in [*self.history, *plans]:
            if what == "came" and group not in value:
                others = value or [max(tokens, key=lambda each: ran[each])]
                start = max(start, min(tokens[each] / self._share(each) for each in others))
                tokens[group] = max(tokens.get(group, 0.0), start * self._share(group))
                ran.setdefault(group, 0.0)
            tokens[group] += value if what == "tokens" else 0
            ran[group] = value if what == "ran" else ran[group]
        return {group: count / self._share(group) for group, count in tokens.items()}

    def _is_overdue(self, request: Request) -> bool:
        waited = self.world.clock.now - self.overtaken_at.get(request, inf)
        most = self.config.max_delay
        return (most is not None and waited >= most) or self.overtaken(request) >= self.config.max_overtakes

    def _is_starved(self, request: Request) -> bool:
        """Return whether the group of a request has waited long, since it ran or its first request was queued."""
        group = self.group(request)
        first = min((each for each in self._ready() if self.group(each) == group), key=self._rank)
        ran = [time for what, each, time in self.history if what == "ran" and each == group]
        return self.world.clock.now - max(*ran, 0.0, self.since[first]) >= wait_queue.PATIENCE

    def _check_bound(self, admitted: Request, ready: list[Request]) -> None:
        """While a group waits, each other group is admitted until it has made up its lag, and `ahead` more tokens.

        Preempted requests, turns that preempt, and lower priorities do not count.
        """
        group, counts = self.group(admitted), self._counts()
        waiting = {self.group(each) for each in ready if each.priority == admitted.priority} - {group, *self.passed}
        self.starts = {each: self.starts.get(each, counts) for each in waiting}
        for each in () if admitted in self.preempted or self.full else waiting:
            start = self.starts[each].get(group, 0.0)
            got, lag = (counts[group] - start) * self._share(group), (counts[each] - start) * self._share(group)
            self._expect(got <= max(lag, 0) + self.ahead, f"{group} got {got} tokens, and {each} waited")

    # ---- facts

    def group(self, request: Request) -> Hashable:
        """Return what names the group of a request: the beginning of a tuple, as far as it has a share."""
        namespace = self.world.customer_of(request).ask.namespace
        if not isinstance(namespace, tuple):
            return namespace
        shares = [each for each, _ in self.world.scenario.limits if isinstance(each, tuple)]
        return max((each for each in shares if namespace[: len(each)] == each), key=len, default=namespace[:1])

    def overtaken(self, request: Request) -> int:
        """Return how many later requests of its group were admitted before it, though it could run."""
        return sum(each is request for _, each in self.overtakes)

    def preempted_for_blocks(self, request: Request) -> int:
        """Return how often a request was preempted, except for turns."""
        return self.preempted.count(request) - sum(each is request for each, _ in self.gave)

    def _is_earlier(self, request: Request, other: Request) -> bool:
        same = self.group(request) == self.group(other) and request.priority == other.priority
        return same and self.arrived.index(request) < self.arrived.index(other)

    def _rank(self, request: Request) -> tuple[int, bool, int]:
        return -request.priority, request not in self.preempted, self.arrived.index(request)

    def _share(self, group: Hashable) -> float:
        shares = dict(self.world.scenario.limits)
        return shares.get(group) or min(shares.values(), default=1.0)

    def _ready(self) -> list[Request]:
        return [each for each in self.waiting if self.waiting.reason(each) is None]

    def _cached(self, request: Request) -> int:
        if request not in self.cached:
            self.cached[request] = self._length(request)
        return self.cached[request]

    def _length(self, request: Request) -> int:
        return self.world.core._reuse.match(request).length

    def _fits(self, request: Request) -> bool:
        return self.admission.fits(request, self.world.core._reuse.match(request))

    def _waits_for_own(self, request: Request) -> bool:
        return self.admission.waits_for_own_blocks(request, self.world.core._reuse.match(request))

    def _expect(self, holds: bool, text: str) -> None:
        self.wrong += [] if holds else [text]

    def _name(self, request: Request | None) -> str:
        return "no request" if request is None else self.world.name_of(request)
