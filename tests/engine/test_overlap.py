"""The overlapped core: launches come before the results of the preceding step, and late results hurt no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from radixkv import SamplingParams
from radixkv.cache import PrefixCache
from radixkv.cache.recurrent import Spacing
from radixkv.config import EngineConfig
from radixkv.engine.audit import Auditor
from radixkv.engine.core import Core
from radixkv.engine.input_processor import replies_of
from radixkv.engine.request import Request
from radixkv.errors import DeviceLost, EngineClosed, RequestCancelled, RequestFailed, RequestTimedOut, WeightsChanged
from radixkv.models.loaded import SequenceInput
from tests.simulation.channel import ScriptedChannel
from tests.simulation.constraint import Rule, RuleMatcher
from tests.simulation.late import LateLogits, LatePending, LateSampler, LateSlotModel
from tests.simulation.oracle import replies
from tests.simulation.scenario import Ask
from tests.simulation.stateful import StatefulSlotModel

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = (3, 1, 4, 1, 5)
SETTINGS = EngineConfig(max_sequences=4, max_batch_tokens=32, prefill_chunk=16)


class Recorded(LateSlotModel):
    """Records launches and reads in `events`, and the rows that were read from the device in `relayed`."""

    def __init__(self, cache: PrefixCache) -> None:
        self.events: list[str] = []
        self.relayed: list[list[int]] = []
        self.raises: Callable[[int], bool] = lambda run: False
        super().__init__(cache, seed=0)

    def run(  # type: ignore[override]
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: LatePending | None = None
    ) -> LateLogits:
        self.events.append("launch")
        if self.raises(len(self.events)):
            raise RuntimeError("the launch failed")
        self.relayed.append([chunk.sampled_row for chunk in chunks])
        return super().run(chunks, copies, sampled)


class RecordedPending(LatePending):
    """Notes the first read."""

    def result(self) -> Any:
        self._model.events.append("read")  # type: ignore[attr-defined]
        return super().result()


class World:
    """An overlapped core over a simulated device."""

    def __init__(self, blocks: int = 64, config: EngineConfig = SETTINGS) -> None:
        self.cache = PrefixCache(blocks, 4)
        self.model = Recorded(self.cache)
        sampler: Any = LateSampler(self.model, RecordedPending)
        self.core = Core(self.cache, self.model, config, sampler=sampler, depth=1)  # type: ignore[arg-type]

    def submit(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> Request:
        stop_ids = more.pop("stop_ids", frozenset())
        replies = replies_of(params, params.max_tokens, stop_ids, matcher=more.pop("matcher", None))
        request = Request(np.array(prompt, np.int32), params, params.max_tokens, stop_ids, 0, replies=replies, **more)
        self.core.add(request)
        return request

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step()
            self.cache.check()
            assert self.model.broken is None, self.model.broken

    def finish(self) -> None:
        while self.core.idle_for() is not None:
            self.step()
        assert not self.cache.state.open


def answer(request: Request) -> tuple[int, ...]:
    return request.channel.wait(0).token_ids


def right(request: Request) -> tuple[int, ...]:
    done = replies(tuple(request.prompt.tolist()), request.params, request.max_tokens, request.stop_ids, request.seed)
    return done[0].tokens


def test_each_step_is_launched_before_the_results_of_the_preceding_one_are_read() -> None:
    world = World()
    one = world.submit(PROMPT)
    world.finish()
    assert world.model.events == ["launch", *["launch", "read"] * 7, "read"]
    assert world.model.relayed == [[-1], *[[0]] * 7]
    assert answer(one) == right(one)
    assert world.core.counters.wasted_tokens == 0, "max_tokens is known in advance"


def test_a_stop_token_wastes_one_row() -> None:
    reply = replies(PROMPT, GREEDY, 8, frozenset(), 0)[0].tokens
    at = next(at for at in range(1, 8) if reply[at] not in reply[:at])
    world = World()
    one = world.submit(PROMPT, stop_ids=frozenset({reply[at]}))
    world.finish()
    assert answer(one) == reply[: at + 1]
    assert one.channel.wait(0).finish_reason == "stop"
    assert world.core.counters.wasted_tokens == 1
    cached = [*PROMPT, *reply]
    assert world.cache.match(cached).length == len(PROMPT) + at, "the stop token's own KV is dropped"


def test_streams_of_one_request_fork_at_the_launch_of_their_prompt() -> None:
    world = World()
    params = SamplingParams(max_tokens=5, temperature=1, n=3, repetition_penalty=1.3, ignore_eos=True)
    one = world.submit(PROMPT, params)
    world.step()
    assert len(one.streams) == 3 and world.model.events == ["launch"]
    world.finish()
    assert world.model.relayed[1] == [0, 1, 2]
    done = one.channel.wait(0)
    expected = replies(PROMPT, params, 5, frozenset(), 0)
    assert [each.token_ids for each in (done, *done.alternatives)] == [each.tokens for each in expected]


def test_cancelling_reads_nothing_and_keeps_the_finished_tokens() -> None:
    world = World()
    one, other = world.submit(PROMPT), world.submit((9, 9, 8))
    world.step(4)
    finished = list(one.streams[0].tokens)
    reads = world.model.events.count("read")
    world.core.cancel(one)
    world.cache.check()
    assert world.model.events.count("read") == reads
    assert world.cache.match([*finished, 0]).length == len(finished) - 1
    world.finish()
    with pytest.raises(RequestCancelled):
        one.channel.wait(0)
    assert answer(other) == right(other)
    assert world.core.counters.wasted_tokens == 1


@pytest.mark.parametrize("timeout", [False, True])
def test_forks_that_end_in_flight_publish_nothing_that_was_not_read(timeout: bool) -> None:
    """They hold the last chunk of the prompt, whose KV is wrong."""
    world = World(config=EngineConfig(max_sequences=4, max_batch_tokens=32, prefill_chunk=4))
    world.model.gives_nan = lambda chunk: chunk.start == 8
    prompt = tuple(range(12))
    one = world.submit(prompt, GREEDY.but(n=3), deadline=None)
    world.step(3)
    assert len(one.streams) == 3
    if timeout:
        world.core.deadlines.add(one, 0.0)
        world.step()
    else:
        world.core.cancel(one)
    assert world.cache.match((*prompt, 0)).length == 8
    world.finish()


def test_a_chunk_cannot_be_matched_before_its_step_has_finished() -> None:
    world = World(config=EngineConfig(max_sequences=4, max_batch_tokens=32, prefill_chunk=4))
    prompt = tuple(range(12))
    one = world.submit(prompt)
    for finished in (0, 4, 8):
        world.step()
        assert (one.streams[0].sequence.length, world.cache.match(prompt).length) == (finished + 4, finished)
    world.finish()
    assert world.cache.match(prompt).length == 12


def test_requests_wait_for_a_shared_prefix_until_its_step_has_finished() -> None:
    world = World()
    first, second = world.submit(tuple(range(12))), world.submit((*range(12), 3))
    world.finish()
    assert (answer(first), answer(second)) == (right(first), right(second))
    assert second.channel.wait(0).usage.cached_tokens == 12


def test_kv_of_a_forward_without_numbers_is_never_matchable() -> None:
    world = World(config=EngineConfig(max_sequences=4, max_batch_tokens=32, prefill_chunk=4))
    prompt = tuple(range(12))
    world.model.gives_nan = lambda chunk: chunk.start == 4
    one = world.submit(prompt)
    world.finish()
    with pytest.raises(RequestFailed, match="NaN"):
        one.channel.wait(0)
    assert world.cache.match(prompt).length == 4, "the next chunk was launched on wrong KV"
    assert world.core.counters.wasted_tokens == 8


def test_a_constrained_stream_takes_every_other_step_and_the_others_all() -> None:
    world = World()
    rule = Rule(seed=5)
    bound = world.submit((7, 7), matcher=RuleMatcher(rule))
    free = world.submit(PROMPT, GREEDY.but(max_tokens=14))
    world.finish()
    assert answer(bound) == replies((7, 7), GREEDY, 8, frozenset(), 0, rule)[0].tokens
    assert answer(free) == right(free)
    assert world.core.counters.host_bound_rows > 0
    assert world.model.events[:4] == ["launch", "launch", "read", "launch"], "the others do not wait for it"


def test_a_launch_that_raises_is_tried_again_after_the_preceding_step() -> None:
    world = World()
    one, other = world.submit(PROMPT), world.submit((9, 9, 8))
    world.step(2)
    world.model.events.clear()
    world.model.raises = lambda event: event == 1
    world.step()
    assert world.model.events == ["launch", "read", "launch"]
    world.finish()
    assert (answer(one), answer(other)) == (right(one), right(other))


@pytest.mark.parametrize("event", [6, 7, 8])
def test_a_launch_that_raises_after_a_stream_has_ended_ends_no_other_stream(event: int) -> None:
    """The last step in flight ends one stream of the request, and its row is not launched again."""
    params = SamplingParams(max_tokens=8, temperature=1, n=2, ignore_eos=True)
    stop = frozenset({0})
    world = World()
    world.model.raises = lambda events: events == event
    one = world.submit((1, 1, 1), params, stop_ids=stop)
    world.finish()
    done = one.channel.wait(0)
    expected = replies((1, 1, 1), params, 8, stop, 0)
    assert [each.token_ids for each in (done, *done.alternatives)] == [each.tokens for each in expected]


def test_a_stream_that_raises_alone_ends_its_request_and_no_other() -> None:
    """The first stream of the request was launched again before the second one raised alone."""
    world = World()
    one, other = world.submit(PROMPT, GREEDY.but(n=2)), world.submit((9, 9, 8))
    world.step(2)
    world.model.events.clear()
    world.model.raises = lambda event: event in (1, 3, 5, 6)
    world.step()
    assert world.model.events == ["launch", "read", *["launch"] * 5, "read", "read"]
    world.finish()
    with pytest.raises(RequestFailed, match="the launch failed"):
        one.channel.wait(0)
    assert answer(other) == right(other)


def test_a_draw_that_raises_ends_no_request_whose_prompt_is_not_computed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(config=EngineConfig(max_sequences=4, max_batch_tokens=32, prefill_chunk=4))
    one, other = world.submit((1, 2)), world.submit(tuple(range(12)))
    begin = LateSampler.begin

    def broken(self: LateSampler, logits: Any, rows: Any, *rest: Any) -> LatePending:
        if rows:
            raise ValueError("no draw")
        return begin(self, logits, rows, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LateSampler, "begin", broken)
        world.step()
    world.finish()
    with pytest.raises(RequestFailed, match="no draw"):
        one.channel.wait(0)
    assert answer(other) == right(other)


def test_a_draw_without_rows_that_raises_is_tried_again_after_the_preceding_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No row is drawn from a chunk inside a prompt, but a draw says whether its logits are finite."""
    world = World(config=EngineConfig(max_sequences=4, max_batch_tokens=32, prefill_chunk=4))
    one = world.submit(tuple(range(12)))
    begin = LateSampler.begin
    draws: list[int] = []

    def broken(self: LateSampler, logits: Any, rows: Any, *rest: Any) -> LatePending:
        draws.append(len(rows))
        if len(draws) == 2:
            assert not world.model.events.count("read")
            raise RuntimeError("out of memory")
        return begin(self, logits, rows, *rest)

    monkeypatch.setattr(LateSampler, "begin", broken)
    world.finish()
    assert draws[:3] == [0, 0, 0]
    assert answer(one) == right(one)


def test_results_that_cannot_be_read_end_the_requests_of_their_step() -> None:
    world = World()
    one = world.submit(PROMPT)
    world.step()
    later = world.submit((9, 9, 8))
    ((_, pending),) = world.core.flight.draws  # type: ignore[union-attr]

    def broken() -> Any:
        raise ValueError("the copy was lost")

    pending.result = broken  # type: ignore[method-assign]
    world.finish()
    with pytest.raises(RequestFailed, match="the copy was lost"):
        one.channel.wait(0)
    assert answer(later) == right(later)


def test_blocks_that_run_out_are_first_looked_for_in_the_step_in_flight() -> None:
    """The first request ends with the step in flight, so the second one needs no preemption."""
    reply = replies(PROMPT, GREEDY, 8, frozenset(), 0)[0].tokens
    world = World(blocks=6)
    one = world.submit(PROMPT, GREEDY.but(max_tokens=4))
    other = world.submit((9, 9, 8), GREEDY.but(max_tokens=14))
    world.finish()
    assert (answer(one), answer(other)) == (reply[:4], right(other))
    assert world.core.counters.preemptions == 0


@pytest.mark.parametrize("blocks", [7, 8, 9, 10])
def test_preempted_requests_repeat_no_token(blocks: int) -> None:
    world = World(blocks)
    asks = [world.submit((number, number, 8), GREEDY.but(max_tokens=14)) for number in range(3)]
    world.finish()
    assert [answer(each) for each in asks] == [right(each) for each in asks]
    assert world.core.counters.preemptions


@pytest.mark.parametrize(("length", "blocks", "stop"), [(3, 14, 6), (3, 15, 6), (4, 12, 0)])
def test_a_stream_that_ends_while_the_next_step_is_planned_leaves_that_step(
    length: int, blocks: int, stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks run out after it was planned, and the step in flight ends it, but not its whole request."""
    params = SamplingParams(max_tokens=14, temperature=1, n=2, ignore_eos=True)
    world, prompts = World(blocks), [(number,) * length for number in range(2)]
    asks = [world.submit(each, params, stop_ids=frozenset({stop})) for each in prompts]
    world.finish()
    for prompt, each in zip(prompts, asks, strict=True):
        done = each.channel.wait(0)
        expected = replies(prompt, params, 14, frozenset({stop}), 0)
        assert [one.token_ids for one in (done, *done.alternatives)] == [one.tokens for one in expected]
    assert not caplog.records, "the launch of its plan raised"


def test_a_request_that_pauses_while_its_step_is_in_flight_loses_no_token() -> None:
    """Its reader leaves after a launch, and the next step needs its blocks: the launched step is finished first."""
    world, steps = World(blocks=6), 0
    ask = Ask(0, 0, PROMPT, GREEDY, 8, lags=((3, 30),))
    one = world.submit(PROMPT, channel=ScriptedChannel(ask, lambda: steps))
    world.step(3)
    other = world.submit((9,) * 18, GREEDY.but(max_tokens=3))
    steps, known = 3, len(one.streams[0].tokens)
    world.step()
    assert (one.scheduling.preemptions, len(one.streams[0].tokens)) == (1, known + 1)
    while not other.channel.ended:
        world.step()
    steps = 30
    world.finish()
    assert one.channel.completion.token_ids == right(one)
    assert answer(other) == right(other)


def test_a_paused_request_that_ends_with_the_step_in_flight_is_not_preempted() -> None:
    world, steps = World(config=EngineConfig(max_sequences=1, max_batch_tokens=32, prefill_chunk=16)), 0
    ask = Ask(0, 0, PROMPT, GREEDY, 2, lags=((2, 30),))
    one = world.submit(PROMPT, GREEDY.but(max_tokens=2), channel=ScriptedChannel(ask, lambda: steps))
    world.step(2)
    steps = 2
    other = world.submit((9, 9, 8))
    world.step()
    assert (one.channel.ended, one.scheduling.preemptions) == (True, 0)
    world.finish()
    assert answer(other) == right(other)


def test_a_fault_of_planning_ends_no_request_whose_last_step_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    one, other = world.submit(PROMPT, GREEDY.but(max_tokens=1)), world.submit((9, 9, 8))
    world.step()
    monkeypatch.setattr(world.core.scheduler.waiting, "begin_step", lambda: 1 // 0)
    world.step()
    assert answer(one) == right(one)
    with pytest.raises(RequestFailed, match="ZeroDivisionError"):
        other.channel.wait(0)


def test_forgetting_the_cache_finishes_the_step_in_flight() -> None:
    world = World()
    one = world.submit(PROMPT)
    world.step(2)
    world.core.forget(WeightsChanged("other weights"))
    assert world.model.events == ["launch", "launch", "read", "read"]
    with pytest.raises(WeightsChanged):
        one.channel.wait(0)
    assert world.cache.free_blocks == world.cache.num_blocks
    assert world.core.idle_for() is None


def test_an_audit_waits_for_the_step_in_flight() -> None:
    world = World()
    one = world.submit(PROMPT * 4, GREEDY.but(max_tokens=20))
    world.step(3)
    report: Future[Any] = Future()
    Auditor(world.core).begin(3, report)
    world.finish()
    assert (report.result(0).blocks >= 3, report.result(0).differ) == (True, 0)
    assert answer(one) == right(one)


def test_deadlines_drop_late_results() -> None:
    world = World()
    one = world.submit(PROMPT, deadline=0.0)
    one.deadline = None
    world.step(2)
    world.core.deadlines.add(one, 0.0)
    world.finish()
    with pytest.raises(RequestTimedOut):
        one.channel.wait(0)


def test_closing_finishes_the_step_in_flight_and_frees_all() -> None:
    world = World()
    one = world.submit(PROMPT)
    world.step(2)
    world.core.close(EngineClosed("closed"))
    assert world.model.events == ["launch", "launch", "read", "read"]
    with pytest.raises(EngineClosed):
        one.channel.wait(0)
    assert not world.cache.state.open


def test_a_stream_has_at_most_one_token_that_is_not_known() -> None:
    """Each relayed row was sampled by the preceding step, whose results are not read yet."""
    world = World()
    world.submit(PROMPT)
    world.submit((2, 7))
    while world.core.idle_for() is not None:
        world.step()
        for request in world.core.scheduler.running:
            for stream in request.streams:
                assert stream.in_flight <= 1 or stream.output_length == 0
                assert not stream.sequence.has_unknown, "unknown only while a step is launched"


LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("where", ["launch", "draw", "read"])
def test_a_lost_device_ends_the_step_and_nothing_is_tried_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    asked = [world.submit(PROMPT), world.submit((9, 9, 8))]
    world.step(2)
    world.model.events.clear()

    def lost(*_: Any) -> Any:
        world.model.events.append(where)
        raise LOST

    broken: Any = {"launch": world.model, "draw": world.core._draws.sampler, "read": RecordedPending}[where]
    monkeypatch.setattr(broken, {"launch": "run", "draw": "begin", "read": "result"}[where], lost)
    with pytest.raises(DeviceLost) as raised:
        world.core.step()
    assert world.model.events == {"launch": ["launch"], "draw": ["launch", "draw"], "read": ["launch", "read"]}[where]
    monkeypatch.setattr(RecordedPending, "result", lost)
    world.core.close(raised.value)
    for each in asked:
        with pytest.raises(DeviceLost, match="restart the process"):
            each.channel.wait(0)
    assert not world.cache.state.open


class LateStates(StatefulSlotModel, LateSlotModel):
    """A model with recurrent state whose forwards are launched."""


def stateful_core(depth: int) -> Core:
    """A core over recurrent state, which keeps no state inside a prompt."""
    spacing = Spacing(prompt=1000, long=100_000, least=1)
    cache = PrefixCache(64, 4, state_rows=2, state_snapshots=16, state_spacing=spacing)
    model = LateStates(cache, 0) if depth else StatefulSlotModel(cache, 0)
    sampler: Any = LateSampler(model) if isinstance(model, LateStates) else None
    return Core(cache, model, SETTINGS, sampler=sampler, depth=depth)  # type: ignore[arg-type]


def ask(core: Core, text: Sequence[int], stop_ids: frozenset[int] = frozenset()) -> Request:
    replies = replies_of(GREEDY, 8, stop_ids)
    request = Request(np.array(text, np.int32), GREEDY, 8, stop_ids, 0, replies=replies)
    core.add(request)
    return request


def conversation(depth: int) -> tuple[list[int], list[int]]:
    """Serve four turns, each ended by a stop token or by max_tokens; returns the text, and the hit of each turn."""
    core, text, hits = stateful_core(depth), list(PROMPT), list[int]()
    for _ in range(4):
        request = ask(core, text, frozenset({0, 1, 2, 3}))
        while core.idle_for() is not None:
            core.step()
            core.cache.check()
        done = request.channel.wait(0)
        hits.append(done.usage.cached_tokens)
        text += [*done.token_ids, 7, 8]
    return text, hits


def test_turns_of_conversations_over_states_hit_no_less_when_steps_overlap() -> None:
    """A row that has passed the last token cannot go back: the token is kept with its state."""
    (text, before), (same, overlapped) = conversation(0), conversation(1)
    assert same == text
    assert all(before[1:]) and all(late >= early for early, late in zip(before, overlapped, strict=True))


def test_cancelling_over_states_publishes_the_finished_tokens() -> None:
    core = stateful_core(1)
    one = ask(core, PROMPT)
    one.scheduling.publish_late = True
    for _ in range(4):
        core.step()
    assert not core.cache.match(PROMPT).matched
    finished = list(one.streams[0].tokens)
    core.cancel(one)
    core.cache.check()
    assert core.cache.match([*finished, 0]).matched == len(finished) - 1
