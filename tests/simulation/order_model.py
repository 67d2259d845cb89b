"""A plain model of the order of admissions: the queue must offer the request that the model chooses.

The model follows the rules in the docstring of `radixkv.engine.wait_queue`. It lists what happened, and computes
counts and waits from the lists for each offer. It reads from the engine only which requests are delayed,
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
from radixkv.engine.scheduler import Plan

if TYPE_CHECKING:
    from tests.simulation.world import World

Call = Callable[..., Any]
WRAPPED = {
    "waiting": ("add", "begin_step", "first"),
    "scheduler": ("preempt", "_go_on", "_plan", "_admit", "_start"),
}


class OrderModel:
    """The order of one world. `wrong` lists broken rules, as an exception would only end a request."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler, self.config = world, world.core.scheduler, world.scenario.config
        self.waiting, self.admission = self.scheduler.waiting, self.scheduler.admission
        self.arrived: list[Request] = []
        self.preempted: list[Request] = []
        self.overtaken_at: dict[Request, float] = {}  # when a later request of its group was first admitted before it
        self.history: list[tuple[str, Hashable, Any]] = []  # of groups: "came" to waiting ones, "admitted", "tokens"
        self.planned: dict[Stream, int] = {}  # tokens of the step that is being planned
        self.cached: dict[Request, int] = {}  # as looked up in this step
        self.offered: Request | None = None  # in this admission
        self.passed: list[Hashable] = []  # groups that run as many streams as they may, in the last offer
        self.admitting = False
        self.rules: list[str] = []  # that decided the last offer
        self.decided = Counter[str]()
        self.starts: dict[Hashable, dict[Hashable, int]] = {}  # of waiting groups: all counts when their waits began
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
        if request not in self.arrived:
            self.arrived.append(request)
            self._note("came", request, waiting)

    def on_preempt(self, preempt: Call, request: Request) -> None:
        preempt(request)
        self.preempted.append(request)

    def on_go_on(self, go_on: Call) -> Plan:
        plan: Plan = go_on()
        if not plan.needs_results:
            for stream, count in self.planned.items():
                self._note("tokens", stream.request, count)
            self.planned = {}
        first = sorted(self.waiting, key=self._rank)[: wait_queue.LOOKED_AT]
        announced, opened = self.waiting._announced, self.world.cache.state.announcements._open
        self._expect({*announced} == {*first} and len(opened) == len(first), "other requests are announced")
        return plan

    def on_plan(self, plan: Call, stream: Stream) -> None:
        plan(stream)
        self._note_plans()

    def on_verify(self, verify: Call, work: Any, draft: Any) -> None:
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
            full = bool(running) and self.admission.streams() >= self.config.max_sequences
            full &= not any(each.channel.paused for each in running)
            self.offered, self.admitting = None, True
            try:
                admitted: Request | None = admit()
            finally:
                self.admitting = False
            last = self.offered
            self._note_plans()
            self._expect(not full or last is None, "a request is offered to a full engine")
            if admitted is None and running and last is not None and last in self._ready():
                self._expect(not self._fits(last), f"{self._name(last)} fits, and was not admitted")
        return admitted

    def on_first(self, first: Call, running: list[Request]) -> Request | None:
        if not self.admitting:
            return first(running)
        self._expect(self.offered not in self._ready(), f"{self._name(self.offered)} is passed over")
        expected, offered = self._next(self._ready()), first(running)
        if offered is not expected:
            counts = self._counts()
            self.wrong.append(f"{self._name(offered)} is offered, not {self._name(expected)}: {self.rules}, {counts}")
        self.offered = offered
        return offered

    def on_start(self, start: Call, request: Request, sequence: Any) -> Request:
        self._expect(request is self.offered, f"{self._name(request)} was admitted, and not offered")
        ready = [each for each in self._ready() if each is not request]
        start(request, sequence)
        self._note("admitted", request)
        if request not in self.preempted:
            overtaken = [each for each in ready if self._is_earlier(each, request)]
            self.overtaken_at = dict.fromkeys(overtaken, self.world.clock.now) | self.overtaken_at
        self._check_bound(request, ready)
        self.decided.update(self.rules)
        return request

    # ---- the rules

    def _next(self, requests: list[Request]) -> Request | None:
        """Return the request that goes next of these: no group gets more than half of the streams if others wait."""
        self.passed = []
        while requests:
            chosen = self._chosen(sorted(requests, key=self.arrived.index))
            if self._allows(chosen):
                self.rules += ["half"] * bool(self.passed)
                return chosen
            self.passed.append(self.group(chosen))
            requests = [each for each in requests if self.group(each) not in self.passed]
        return None

    def _allows(self, request: Request) -> bool:
        running, group = self.scheduler.running, self.group(request)
        streams = sum(each.streams_left for each in running if self.group(each) == group and not each.channel.paused)
        several = len({self.group(each) for each in (*running, *self.waiting)}) > 1
        return not several or not streams or streams + request.streams_left <= max(self.config.max_sequences // 2, 1)

    def _chosen(self, requests: list[Request]) -> Request:
        """Return the request that goes next of these if each group may run more; the oldest one comes first."""
        self.rules = []
        highest = max(each.priority for each in requests)
        best = self._keep("priority", requests, lambda each: each.priority == highest)
        if any(each in self.preempted for each in best):
            return self._keep("preempted", best, lambda each: each in self.preempted)[0]
        counts = self._counts()
        turn = min((self.group(each) for each in best), key=lambda each: counts[each])
        best = self._keep("turn", best, lambda each: self.group(each) == turn)
        if self.config.order == "fcfs":
            return best[0]
        best = best[: wait_queue.LOOKED_AT]
        overdue = [each for each in best if self._is_overdue(each)]
        lengths = {each: self._cached(each) for each in best if each not in overdue}
        if overdue:
            self.rules += ["overdue"] * (max(lengths.values(), default=0) > self._length(overdue[0]))
            return overdue[0]
        longest = max(lengths.values())
        return self._keep("longest prefix", best, lambda each: lengths[each] == longest)[0]

    def _keep(self, rule: str, requests: list[Request], is_kept: Callable[[Request], bool]) -> list[Request]:
        """Return the requests that a rule keeps, and note the rule if the oldest one, the first, is not among them."""
        kept = [each for each in requests if is_kept(each)]
        self.rules += [rule] * (kept[0] is not requests[0])
        return kept

    def _counts(self) -> dict[Hashable, int]:
        """Return the count of each group: the tokens that its requests computed.

        A group that begins to wait starts at the lowest count of the groups that wait, else of the group that was
        admitted last, and at an earlier start at least.
        """
        tokens = Counter[Hashable]()
        start, last = 0, None
        plans = [("tokens", self.group(each.request), count) for each, count in self.planned.items()]
        for what, group, value in [*self.history, *plans]:
            if what == "came" and group not in value:
                start = max(start, min((tokens[each] for each in value), default=tokens[last]))
                tokens[group] = max(tokens[group], start)
            tokens[group] += value if what == "tokens" else 0
            last = group if what == "admitted" else last
        return tokens

    def _is_overdue(self, request: Request) -> bool:
        most = self.config.max_delay
        return most is not None and self.world.clock.now - self.overtaken_at.get(request, inf) >= most

    def _check_bound(self, admitted: Request, ready: list[Request]) -> None:
        """While a group waits and may run more, each other group is admitted until it has made up its lag.

        Preempted requests and lower priorities do not count.
        """
        group, counts = self.group(admitted), self._counts()
        waiting = {self.group(each) for each in ready if each.priority == admitted.priority} - {group, *self.passed}
        self.starts = {each: self.starts.get(each, counts) for each in waiting}
        for each in () if admitted in self.preempted else waiting:
            got, lag = counts[group] - self.starts[each][group], counts[each] - self.starts[each][group]
            self._expect(got <= max(lag, 0), f"{group} got {got} tokens, and {each} waited")

    # ---- facts

    def group(self, request: Request) -> Hashable:
        """Return what names the group of a request: its namespace, or the first item of a tuple."""
        namespace = self.world.customer_of(request).ask.namespace
        return namespace[:1] if isinstance(namespace, tuple) else namespace

    def _is_earlier(self, request: Request, other: Request) -> bool:
        same = self.group(request) == self.group(other) and request.priority == other.priority
        return same and self.arrived.index(request) < self.arrived.index(other)

    def _rank(self, request: Request) -> tuple[int, bool, int]:
        return -request.priority, request not in self.preempted, self.arrived.index(request)

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

    def _expect(self, holds: bool, text: str) -> None:
        self.wrong += [] if holds else [text]

    def _name(self, request: Request | None) -> str:
        return "no request" if request is None else self.world.name_of(request)
