"""Run one life of an engine's core without its thread: a scenario, a virtual clock, a model that only remembers.

`accounting`, `step_checks`, `order_checks` and `final_checks` check the rules.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, ClassVar, cast
from unittest import mock

import numpy as np

from radixkv.cache import Pin, PrefixCache, Sequence
from radixkv.cache.events import Observer
from radixkv.cache.recurrent import Spacing
from radixkv.engine import core as engine_core
from radixkv.engine import draft_length, draws, wait_queue
from radixkv.engine.audit import Auditor
from radixkv.engine.core import Core
from radixkv.engine.input_processor import replies_of
from radixkv.engine.namespaces import NamespaceTable
from radixkv.engine.request import Request, Stream, TokenIds
from radixkv.engine.request_facts import PromptParts, Reported
from radixkv.engine.scheduler import Work
from radixkv.engine.scores import NO_SCORES, PromptScores, Scores
from radixkv.engine.stats import AuditReport
from radixkv.errors import EngineClosed, InvalidInput, PinBudgetExceeded, PrefixHeld
from radixkv.models.loaded import SequenceInput
from radixkv.sampling.params import SampleRow
from radixkv.sampling.sampler import HostSampler, Sampler
from tests.simulation.accounting import Accounting
from tests.simulation.channel import ScriptedChannel
from tests.simulation.compression import Compressions
from tests.simulation.constraint import RuleMatcher
from tests.simulation.disk import SimulatedDisk
from tests.simulation.drafts import Adversary, DraftChecks
from tests.simulation.draw import answers_of
from tests.simulation.faults import Faults, FaultySampler, Listener
from tests.simulation.final_checks import FinalChecks
from tests.simulation.host import HostSlotModel
from tests.simulation.late import LateSampler, LateSlotModel
from tests.simulation.model import SlotModel
from tests.simulation.order_checks import OrderChecks
from tests.simulation.order_model import OrderModel
from tests.simulation.ranks import RankedSlotModel
from tests.simulation.scenario import Ask, Forgetting, Pinning, Sabotage, Scenario
from tests.simulation.stateful import StatefulSlotModel
from tests.simulation.step_checks import StepChecks

ENGINE = [module for name, module in sys.modules.items() if name.startswith("radixkv.engine.")]


class Stuck(BaseException):
    """A step that would never end; not an Exception, which the engine would survive."""


class Clock:
    """Virtual seconds, under the names of the `time` module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = time = perf_counter


@dataclass
class Customer:
    """A request of the scenario after it was submitted."""

    ask: Ask
    request: Request
    channel: ScriptedChannel
    cancelled: bool = False
    ended_at: float | None = None
    gone: bool = False  # whether its compressed prefix was not cached when it was last started
    shaken: bool = False  # preempted because a forward failed that it shared

    @property
    def stage(self) -> str:
        """The stage of the request that a caller could see."""
        if self.channel.ended:
            return "ended"
        if not any(not stream.sequence.closed for stream in self.request.streams):
            return "preempted" if self.request.streams else "waiting"
        if self.channel.in_span:
            return "paused"
        return "decode" if any(stream.output_length for stream in self.request.streams) else "prefill"

    @property
    def end(self) -> str:
        """The end of the request, in a word."""
        if self.channel.completion is not None:
            return "resumed and finished" if self.request.scheduling.preemptions else "finished"
        return type(self.channel.error).__name__


@dataclass
class World:
    """Runs one scenario; an AssertionError names the broken rule and the step."""

    scenario: Scenario
    verbose: bool = False
    sampler: Sampler | None = None  # of a life without overlap; by default HostSampler
    step: int = 0
    clock: Clock = field(default_factory=Clock)
    customers: dict[int, Customer] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    pins: list[tuple[Pinning, Pin]] = field(default_factory=list)
    audits: list[Future[AuditReport]] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)  # of this step
    known_tokens: dict[int, int] = field(default_factory=dict)  # of each work's stream before the step, by id
    trace: list[tuple[int, ...]] = field(default_factory=list)  # (step, request, stream, start, tokens) of all work
    preempted: int = 0  # preemptions in this step
    stages: Counter[str] = field(default_factory=Counter)  # the stages in which requests were cancelled

    device_class: ClassVar[type[LateSlotModel]] = LateSlotModel  # of lives with overlap

    def __post_init__(self) -> None:
        scenario = self.scenario
        raises = scenario.observer_raises
        self.listener = None if raises is None else Listener(raises)
        self.namespaces = NamespaceTable(lambda: ())
        self.cache: PrefixCache = self._cache_class()(
            scenario.num_blocks,
            scenario.block_size,
            scenario.policy,
            clock=self.clock.perf_counter,
            observer=cast("Observer | None", self.listener),
            pin_budget=scenario.pin_budget,
        )
        self.model = self._model_class()(self.cache, scenario.seed)
        self.faults = Faults(scenario, lambda: self.step, self.ask_of, self._ask_of_row)
        self.model.fault, self.model.gives_nan = self.faults.in_forward, self.faults.gives_nan
        self.model.garbles = lambda: self.faults.garbles(self.work_of())
        if isinstance(self.model, HostSlotModel):
            self.model.host.fault = self.faults.in_transfer
        config = replace(scenario.config, prefix_cache=scenario.reuse)
        sampler = FaultySampler(self._sampler(), self.faults.in_sampler)
        with mock.patch.object(engine_core, "source_of", return_value=Adversary(self._answer, scenario.seed)):
            self.core = Core(self.cache, self.model, config, sampler=sampler, depth=int(scenario.overlap))
        self.auditor = Auditor(self.core)
        self.compressions = Compressions(self)
        self.disk = SimulatedDisk(self) if scenario.disk else None
        self.order_model = OrderModel(self)
        self._wrap_scheduler()
        self.draft_checks = DraftChecks(self)
        self.accounting, self.final_checks = Accounting(self), FinalChecks(self)
        self.step_checks, self.order_checks = StepChecks(self), OrderChecks(self)

    def _cache_class(self) -> Any:
        """Return the class of the cache, with the arguments of the scenario's options."""
        states, host, config = self.scenario.states, self.scenario.host, self.scenario.config
        options: dict[str, Any] = {} if host is None else {"host_blocks": host.blocks}
        if states is not None:
            grid = config.prefill_chunk if config.deterministic else 1
            options |= {"state_rows": config.max_sequences, "state_snapshots": states.snapshots}
            options["host_snapshots"] = states.on_host
            options["state_spacing"] = Spacing(grid, states.prompt, states.long, states.least)
        return partial(PrefixCache, **options)

    def _model_class(self) -> type[SlotModel]:
        """Return the class of the model: a device, and a part for each option of the scenario."""
        states, host = self.scenario.states, self.scenario.host
        parts: list[Any] = [StatefulSlotModel] * (states is not None) + [HostSlotModel] * (host is not None)
        parts = [RankedSlotModel] * self.scenario.ranks + parts
        device = self.device_class if self.scenario.overlap else SlotModel
        speed = {} if host is None else {"speed": host.speed}
        return type("Model", (*parts, device), speed)

    def _sampler(self) -> Sampler:
        if isinstance(self.model, LateSlotModel):
            return LateSampler(self.model)
        return HostSampler() if self.sampler is None else self.sampler

    # ---- the whole life

    def run(self) -> World:
        """Live from the first event to the end of the last request."""
        with self._virtual(), self.disk.patched() if self.disk else nullcontext():
            while not self._is_over():
                if self.step == self.scenario.close:
                    self.core.close(EngineClosed("the engine was closed"))
                    self._note_ends()
                    break
                self._events()
                if self.disk:
                    self.disk.deliver()
                self._perhaps_step()
                self.step += 1
                self.clock.now += self.scenario.tick
            if self.disk:
                self.disk.end()
            self.final_checks.check()
        return self

    def _is_over(self) -> bool:
        return self.step > self.scenario.last and self.core.idle_for() is None

    def _perhaps_step(self) -> None:
        idle = self.core.idle_for()
        self.step_checks.idle(idle)
        if idle != 0:
            return
        self.work, self.preempted = [], 0
        self.model.runs = 0
        before = self.step_checks.before()
        self.core.step()
        self._record()
        self._note_ends()
        self.step_checks.after(before)

    def sights(self) -> Counter[str]:
        """Count the events of this life, so that tests can check that they tested something."""
        counters, stats = self.core.counters, self.cache.stats()
        names = (
            "audited_blocks",
            "finished",
            "cancelled",
            "timed_out",
            "preemptions",
            "recomputed_tokens",
            "coalesced_tokens",
            "forced_tokens",
            "host_tokens",
            "failed_loads",
            "failed_offloads",
            "disk_tokens",
        )
        names += ("wasted_tokens", "host_bound_rows", "scored_tokens", "reused_scores")
        names += ("accepted_from_tree", "drafted_from_own", "drafting_steps")
        seen = Counter({name: getattr(counters, name) for name in names})
        seen |= Counter(evicted=stats.evicted_blocks, copied=stats.copied_blocks, hits=stats.hit_tokens)
        seen |= Counter(closed=sum(isinstance(c.channel.error, EngineClosed) for c in self.customers.values()))
        seen |= Counter(refused=len(self.refused), pinned=len(self.pins))
        seen |= Counter({f"order: {rule}": count for rule, count in self.order_model.decided.items()})
        seen |= Counter(self.stages)
        if self.disk:
            disk = self.disk.store.stats()
            seen |= Counter(abandoned_reads=disk.abandoned_reads, failed_writes=disk.failed_writes)
        seen.update(c.ask.flaw.kind for c in self.customers.values() if c.ask.flaw and c.channel.error)
        seen |= Counter(evicted_states=stats.evicted_states)
        seen.update(bad_words=sum(bool(c.ask.bad_words and c.channel.completion) for c in self.customers.values()))
        seen.update(f"beams: {c.end}" for c in self.customers.values() if c.ask.params.beam_width > 1)
        seen.update(shaken=sum(customer.shaken for customer in self.customers.values()))
        seen.update(self.compressions.end())
        seen.update(f"after a prefix: {c.end}" for c in self.customers.values() if c.ask.prefix)
        seen.update(f"a fault: {fault.kind}" for fault in (*self.faults.fired, *self.faults.began))
        return +seen

    # ---- events

    def _events(self) -> None:
        scenario, now = self.scenario, self.step
        for fault in scenario.faults:
            if fault.kind == "clock" and fault.at == now:
                self.clock.now += fault.size
        for ask in scenario.asks:
            if ask.at == now:
                self._submit(ask)
        self.compressions.events()
        doomed = [c for c in self.customers.values() if now == c.ask.cancel or c.stage == c.ask.cancel_in]
        for customer in doomed:
            if not customer.channel.ended:
                self._cancel(customer)
        pinned = self._change_pins()
        forgettings = [forgetting for forgetting in scenario.forgettings if forgetting.at == now]
        for forgetting in forgettings:
            self._forget(forgetting)
        for auditing in scenario.audits:
            if auditing.at == now:
                self.audits.append(Future())
                self.auditor.begin(auditing.blocks, self.audits[-1])
        if now == scenario.disable_backpressure:
            self.core.disable_backpressure()
        if doomed or pinned or forgettings:
            self.accounting.check()

    def _submit(self, ask: Ask) -> None:
        channel = ScriptedChannel(ask, lambda: self.step)
        matcher = None if ask.constraint is None else RuleMatcher(ask.constraint)
        request = Request(
            prompt=np.array(ask.prompt, np.int32),
            params=ask.params,
            max_tokens=ask.max_tokens,
            stop_ids=ask.stop_ids,
            seed=ask.seed,
            namespace=self.namespace(ask.namespace),
            priority=ask.priority,
            deadline=None if ask.timeout is None else self.clock.now + ask.timeout,
            channel=channel,  # type: ignore[arg-type]
            reported=Reported(self.clock.now),
            parts=self._parts(ask),
            replies=replies_of(
                ask.params,
                ask.max_tokens,
                ask.stop_ids,
                ask.bad_words,
                matcher,
                prediction=() if self.drafts(ask) else None,
            ),
            scores=self._scores(ask),
        )
        try:
            self.core.admission.check_fits(request)
        except InvalidInput:
            self.refused.append(ask.number)
            return
        self.customers[ask.number] = Customer(ask, request, channel)
        self.core.add(request)

    def _answer(self, stream: Stream) -> tuple[int, ...]:
        return answers_of(self.customer_of(stream.request).ask)[stream.index].tokens

    def drafts(self, ask: Ask) -> bool:
        """Return whether the streams of a request speculate: most of those that may."""
        return self.scenario.drafts and not ask.score_from and ask.number % 8 > 0

    def _parts(self, ask: Ask) -> PromptParts:
        if ask.prefix is None:
            return PromptParts(ask.reply_start)
        prefix = ask.prefix.handle
        return PromptParts(0, prefix.slots, prefix.offset, prefix.gone)

    def _scores(self, ask: Ask) -> Scores:
        if not ask.score_from:
            return NO_SCORES
        top, prompt = ask.params.prompt_logprobs, np.array(ask.prompt, np.int32)
        last: dict[str, Any] = {"most_rows": ask.most_rows, "last_targets": ask.last_targets}
        return PromptScores(prompt, ask.score_from, 1 if top is None else top, **last)

    def _cancel(self, customer: Customer) -> None:
        customer.cancelled = True
        self.stages[f"cancelled: {customer.stage}"] += 1
        self._print(f"cancel {customer.ask.number} ({customer.stage})")
        self.core.cancel(customer.request)
        customer.ended_at = self.clock.now

    def _change_pins(self) -> bool:
        for pinning in self.scenario.pinnings:
            if pinning.at == self.step:
                namespace = self.namespace(pinning.namespace)
                try:
                    pin = self.core.admission.pin(np.array(pinning.tokens, np.int32), namespace, pinning.ttl)
                    self.pins.append((pinning, pin))
                except PinBudgetExceeded:
                    self._print("a pin was refused")
        for pinning, pin in self.pins:
            if pinning.until == self.step:
                pin.release()
        return any(self.step in (pinning.at, pinning.until) for pinning in self.scenario.pinnings)

    def _forget(self, forgetting: Forgetting) -> None:
        tokens, namespace = np.array(forgetting.tokens, np.int32), self.namespace(forgetting.namespace)
        if forgetting.verb == "clear":
            self.cache.clear()
        elif forgetting.verb == "clear_namespace":
            self.core.clear_namespace(namespace)
            assert not self.compressions.there(forgetting.namespace)
        elif forgetting.verb == "demote":
            self.core.demote(tokens, forgetting.start, namespace)
        else:
            try:
                self.cache.discard(tokens, namespace, forgetting.start)
            except PrefixHeld:
                self._print("a prefix to be discarded is held")

    def _note_ends(self) -> None:
        for customer in self.customers.values():
            if customer.channel.ended and customer.ended_at is None:
                customer.ended_at = self.clock.now

    @contextmanager
    def fixed_readers(self) -> Iterator[None]:
        """Let no reader come or go."""
        for customer in self.customers.values():
            customer.channel.fixed = customer.channel.paused
        yield
        for customer in self.customers.values():
            customer.channel.fixed = None

    # ---- owners

    def namespace(self, namespace: Hashable) -> Hashable:
        """Return the number of a namespace, as callers of the engine pass it on."""
        return self.namespaces.number(namespace)

    def customer_of(self, request: Request) -> Customer:
        """Return the customer of a request."""
        return self.customers[request.channel.ask.number]  # type: ignore[attr-defined]

    def is_held(self, request: Request) -> bool:
        """Return whether a request waits for a read of the disk."""
        waiting = self.core.scheduler.waiting
        return request in waiting and request not in list(waiting.unheld())

    def name_of(self, request: Request) -> str:
        """Return the name of a request for messages."""
        return f"request {self.customer_of(request).ask.number}"

    def ask_of(self, chunk: SequenceInput) -> Ask:
        """Return the request of a chunk."""
        for work in self.work:
            if work.plan.slots is chunk.slots:
                return self.customer_of(work.stream.request).ask
        raise AssertionError("a chunk that was not scheduled")

    def _ask_of_row(self, row: SampleRow) -> Ask:
        for request in self.core.scheduler.running:
            if row.stream == (request.scheduling.number, row.stream[1]):
                return self.customer_of(request).ask
        raise AssertionError("a row to sample of no running request")

    def work_of(self) -> list[Ask]:
        """Return the requests of this step's chunks."""
        return [self.customer_of(each.stream.request).ask for each in self.work]

    def _first_requests(self) -> list[Ask]:
        """Return the running requests; if there are none, or if they may end with the step in flight, a waiting one."""
        scheduler = self.core.scheduler
        first = [] if self.scenario.overlap else scheduler.running
        first = first or [*scheduler.running, *list(scheduler.waiting)[:1]]
        return [self.customer_of(request).ask for request in first]

    # ---- around the engine

    def _wrap_scheduler(self) -> None:
        schedule = self.core._schedule

        def scheduling() -> list[Work]:
            self.faults.in_schedule(0, self._first_requests())
            self.work = schedule()
            self.known_tokens = {id(each): len(each.stream.tokens) for each in self.work}
            self.faults.in_schedule(1, self._first_requests())
            return self.work

        self.core._schedule = scheduling  # type: ignore[method-assign]
        preempt = self.core.scheduler.preempt

        def preempting(request: Request) -> None:
            self.preempted += 1
            if self.preempted > 10 * len(self.customers):
                raise Stuck(f"step {self.step}: they preempt each other forever")
            if request not in self.core.scheduler.running:
                self.preempted -= 1
                return
            kept = self.order_checks.before_preemption(request)
            preempt(request)
            self.customer_of(request).shaken |= self.model.runs > 0
            self._print(f"{self.customer_of(request).ask.number} is preempted")
            self.order_checks.after_preemption(request, kept)

        self.core.scheduler.preempt = preempting  # type: ignore[method-assign]
        open = self.core.scheduler._open

        def opening(request: Request, *tokens: TokenIds) -> Sequence:
            if (flaw := self.customer_of(request).ask.flaw) is not None and flaw.kind == "open":
                raise Sabotage("no sequence for this request")
            self.compressions.note(self.customer_of(request))
            return open(request, *tokens)

        self.core.scheduler._open = opening  # type: ignore[method-assign]

    @contextmanager
    def _virtual(self) -> Iterator[None]:
        """Give the engine a virtual clock."""
        with ExitStack() as stack:
            for module in ENGINE:
                if getattr(module, "time", None) is time:
                    stack.enter_context(mock.patch.object(module, "time", self.clock))
            if self.scenario.seed % 4 == 2:
                stack.enter_context(mock.patch.object(wait_queue, "LOOKED_AT", 3))
            stack.enter_context(mock.patch.object(draws, "begin_scores", self.model.begin_scores))
            ticks = map(float, count(1))  # a step takes a second, whatever its rows
            stack.enter_context(mock.patch.object(draft_length, "perf_counter", partial(next, ticks)))
            yield

    def _record(self) -> None:
        names = [(self.customer_of(each.stream.request).ask.number, each.stream.index) for each in self.work]
        for (number, index), each in zip(names, self.work, strict=True):
            self.trace.append((self.step, number, index, each.start, len(each.tokens)))
        if self.verbose:
            work = " ".join(f"{n}.{i}@{start}+{count}" for step, n, i, start, count in self.trace if step == self.step)
            runs = f" in {self.model.runs} runs" if self.model.runs > 1 else ""
            waiting = [self.customer_of(request).ask.number for request in self.core.scheduler.waiting]
            free, idle = self.cache.free_blocks, self.cache.evictable_blocks
            self._print(f"{work}{runs}; waiting {waiting}, {free} blocks free, {idle} evictable")

    def _print(self, text: str) -> None:
        if self.verbose:
            print(f"step {self.step}: {text}")
