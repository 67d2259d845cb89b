"""Requests and engines end by cancel, timeout, unread output, drain or interrupt, at every stage of a life."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from radixkv import Engine, Handle, SamplingParams
from radixkv.engine.output import WAIT_TURN, Chunk, OutputChannel
from radixkv.errors import EngineClosed, InvalidInput, RequestCancelled, RequestTimedOut
from tests.engine.fakes import check, greedy_reply, make_engine
from tests.engine.test_engine import prompt_of

GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
STAGES = ["waiting", "prefill", "decode", "preempted", "paused"]
AGES = 1e6  # seconds


def eventually(condition: Callable[[], object]) -> None:
    for _ in range(10_000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it never came to this")


class Clock:
    """A clock of the core that can jump."""

    ahead = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead


@dataclass
class Asked:
    prompt: list[int]
    count: int
    handle: Handle
    reader: Iterator[Chunk] = field(init=False)

    def __post_init__(self) -> None:
        self.reader = iter(self.handle)

    def is_answered(self) -> bool:
        return list(self.handle.result(timeout=10).token_ids) == greedy_reply(self.prompt, self.count)


class World:
    """An engine whose steps wait for the test."""

    def __init__(self, num_blocks: int = 120, **limits: int) -> None:
        self.engine, self.runner = make_engine(num_blocks, **limits)
        self.runner.gate = threading.Semaphore(0)

    def ask(self, length: int, seed: int, count: int = 30, **options: Any) -> Asked:
        prompt = prompt_of(length, seed)
        return Asked(prompt, count, self.engine.submit(prompt, GREEDY.but(max_tokens=count), **options))

    def step(self, steps: int = 1) -> None:
        """Let steps run; returns when the next one has begun."""
        for _ in range(steps):
            self.runner.gate.release()
            assert self.runner.began.acquire(timeout=10)

    def go(self) -> None:
        self.runner.gate.release(10_000)

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            self.step()
        raise AssertionError("it never came to this")


def world_at(stage: str, **options: Any) -> tuple[World, Asked, Asked]:
    """Return a world, a request in that stage, and another one."""
    if stage == "preempted":
        world = World(12)
        other, one = world.ask(8, 1), world.ask(8, 2, **options)
        assert world.runner.began.acquire(timeout=10)
        world.until(lambda: len(world.engine.core.scheduler.waiting) == 1 and world.engine.core.counters.preemptions)
        return world, one, other
    world = World(max_sequences=1 if stage == "waiting" else 4, max_batch_tokens=10, prefill_chunk=4)
    other = world.ask(5, 1, 120 if stage == "paused" else 30)
    assert world.runner.began.acquire(timeout=10)
    one = world.ask(100 if stage == "prefill" else 4, 2, 100 if stage == "paused" else 30, **options)
    world.step(6)
    if stage == "paused":
        next(one.reader)
        world.until(lambda: one.handle.channel.paused)
        world.step(2)
    return world, one, other


def stage_of(world: World, one: Asked) -> str:
    scheduler = world.engine.core.scheduler
    if one.handle.channel.paused:
        return "paused"
    request = next(each for each in [*scheduler.running, *scheduler.waiting] if each.channel is one.handle.channel)
    if request in scheduler.waiting:
        return "preempted" if request.scheduling.preemptions else "waiting"
    return "prefill" if request.streams[0].prefilling else "decode"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("end", ["cancel", "timeout"])
def test_a_request_may_end_at_every_stage_and_its_neighbour_does_not_notice(stage, end, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("radixkv.engine.core.time", clock)
    world, one, other = world_at(stage, timeout=AGES / 2)
    with world.engine:
        assert stage_of(world, one) == stage
        if end == "cancel":
            one.handle.cancel()
        else:
            clock.ahead = AGES
        world.go()
        assert other.is_answered()
        expected = RequestCancelled if end == "cancel" else RequestTimedOut
        with pytest.raises(expected):
            one.handle.result(timeout=10)
        check(world.engine)
        stats = world.engine.stats()
        assert (stats.finished, stats.cancelled, stats.timed_out) == (1, end == "cancel", end == "timeout")
        world.ask(*((8, 2) if stage == "preempted" else (4, 2))).is_answered()


def test_a_paused_request_times_out_alone():
    world = World()
    with world.engine:
        one = world.ask(5, 1, 400, timeout=0.2)
        world.go()
        next(one.reader)
        waits = threading.Event()
        one.handle.channel.listen(waits.set, end=True)
        assert waits.wait(timeout=10)  # no call wakes the engine, and no caller waits for a result
        with pytest.raises(RequestTimedOut):
            list(one.reader)
        check(world.engine)


def test_a_paused_request_goes_on_when_it_is_read_and_loses_no_token():
    world, one, other = world_at("paused")
    with world.engine:
        world.go()
        assert other.is_answered()
        steps = len(world.runner.steps)
        assert world.engine.stats().running == 1
        assert len(world.runner.steps) == steps  # there is nothing to compute
        rest = [token for chunk in one.reader for token in chunk.token_ids]
        assert rest == greedy_reply(one.prompt, one.count)[1:]
        check(world.engine)


def test_a_reader_of_many_streams_may_be_behind_by_as_many_tokens_of_each():
    world = World()
    with world.engine:
        many = world.engine.submit(prompt_of(5), GREEDY.but(n=4))
        reader, ended = iter(many), threading.Event()
        many.channel.listen(ended.set, end=True)
        world.go()
        next(reader)
        assert ended.wait(timeout=10)
        assert len(list(reader)) == 4 * 30 - 1


def test_a_paused_request_is_preempted_and_its_answer_is_the_same():
    world = World(40)
    with world.engine:
        one = world.ask(5, 1, 140)
        world.go()
        next(one.reader)
        eventually(lambda: one.handle.channel.paused)
        for seed in range(3):
            assert world.ask(60, 10 + seed, 40).is_answered()
        assert world.engine.stats().preemptions >= 1
        assert len(list(one.reader)) == 139
        assert one.is_answered()
        check(world.engine)


# ---- the engine's end


@pytest.mark.parametrize("stage", STAGES)
def test_draining_finishes_all_requests_at_every_stage(stage):
    world, one, other = world_at(stage)
    closing = threading.Thread(target=lambda: world.engine.close(drain=True))
    closing.start()
    eventually(lambda: world.engine.client.thread._draining)
    with pytest.raises(EngineClosed):
        world.ask(3, 3)
    world.go()
    closing.join(timeout=10)  # the drain does not wait for a paused request's reader
    assert not closing.is_alive()
    assert one.is_answered() and other.is_answered()
    assert len(list(one.reader)) == one.count - (stage == "paused")


def close_while_it_runs(world, **options):
    closing = threading.Thread(target=lambda: world.engine.close(**options))
    closing.start()
    eventually(lambda: world.engine.client.thread.closed)
    world.go()
    closing.join(timeout=10)
    assert not closing.is_alive()


def test_draining_ends_with_its_time():
    world, one, other = world_at("decode")
    close_while_it_runs(world, drain=True, timeout=0.01)
    for each in (one, other):
        with pytest.raises(EngineClosed):
            each.handle.result()
        with pytest.raises(EngineClosed):
            list(each.reader)


@pytest.mark.parametrize("stage", STAGES)
def test_closing_ends_all_requests_at_every_stage(stage):
    world, one, other = world_at(stage)
    close_while_it_runs(world)
    for each in (one, other):
        with pytest.raises(EngineClosed):
            each.handle.result()


def test_a_block_that_is_left_by_an_exception_closes_at_once():
    world, one, other = world_at("decode")
    world.go()
    with pytest.raises(ZeroDivisionError), world.engine:
        raise ZeroDivisionError
    for each in (one, other):
        assert each.handle.done


# ---- Ctrl-C


def interrupted(call: Callable[[], object], when: Callable[[], object], then: Callable[[], object]) -> None:
    """Send a real Ctrl-C in the middle of `call`, which must pass it on."""
    main, handler = threading.get_ident(), signal.signal(signal.SIGINT, signal.default_int_handler)

    def press() -> None:
        eventually(when)
        signal.pthread_kill(main, signal.SIGINT)
        then()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        thread.join(timeout=20)
        signal.signal(signal.SIGINT, handler)


needs_signals = pytest.mark.skipif(os.name == "nt", reason="signals to threads are POSIX")


def test_a_request_whose_handle_nobody_holds_is_cancelled() -> None:
    engine, _ = make_engine()
    params = SamplingParams(max_tokens=5000, temperature=0, ignore_eos=True)
    with engine:
        kept = engine.submit(prompt_of(20), params)
        for number in range(4):
            engine.submit(prompt_of(20 + number), params)
        reader = iter(engine.submit(prompt_of(8), GREEDY))  # an iterator holds its handle
        assert len(list(reader)) == 30
        eventually(lambda: engine.stats().cancelled == 4)
        assert kept.result().token_ids, "a handle that is held loses nothing"


@needs_signals
def test_interrupting_generate_cancels_all_of_it_and_passes_on():
    world = World(400)
    with world.engine:
        other = world.ask(3, 7)
        assert world.runner.began.acquire(timeout=10)
        interrupted(
            lambda: world.engine.generate([prompt_of(5), prompt_of(6)], GREEDY.but(max_tokens=500)),
            when=lambda: world.engine.client.thread._inbox.qsize() == 2,
            then=lambda: None,
        )
        world.go()
        assert other.is_answered()
        check(world.engine)
        stats = world.engine.stats()
        assert (stats.finished, stats.cancelled, stats.running, stats.waiting) == (1, 2, 0, 0)


def test_a_caller_that_waits_wakes_up_for_a_signal_that_came_before(monkeypatch: pytest.MonkeyPatch):
    """Python notes a signal before it blocks, and handles it when it runs again: here, in the third turn."""
    channel, turns = OutputChannel(), []

    def wait(timeout: float | None = None) -> bool:
        turns.append(timeout)
        if len(turns) == 3:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(channel._end_event, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        channel.wait()
    assert turns == [WAIT_TURN] * 3
    with pytest.raises(TimeoutError):
        OutputChannel().wait(0.01)


@needs_signals
def test_interrupting_a_draining_ends_it_at_once_and_passes_on():
    world = World(400)
    one = world.ask(5, 1, 500)
    assert world.runner.began.acquire(timeout=10)
    engine_thread = world.engine.client.thread

    def step() -> None:
        eventually(lambda: engine_thread.closed)
        world.runner.gate.release()

    interrupted(lambda: world.engine.close(drain=True), when=lambda: engine_thread._draining, then=step)
    with pytest.raises(EngineClosed):
        one.handle.result(timeout=10)
    assert len(world.runner.steps) == 1


# ---- refused requests


def test_bad_timeouts_and_limits_are_refused_by_name():
    engine, _ = make_engine()
    with engine:
        for bad in (0, -1.0, float("nan"), float("inf"), "3", True, [1]):
            for call in (
                lambda bad=bad: engine.submit([1], timeout=bad),
                lambda bad=bad: engine.generate([[1]], timeout=bad),
                lambda bad=bad: engine.warm([1], timeout=bad),
                lambda bad=bad: engine.close(drain=True, timeout=bad),
            ):
                with pytest.raises(InvalidInput, match=r"timeout must be a number of seconds above 0"):
                    call()
        with pytest.raises(InvalidInput, match="drain=True"):
            engine.close(timeout=1.0)
        assert engine.generate([[1, 2]], GREEDY, timeout=1e300)[0].finish_reason == "length"
    for options, match in (
        ({"order": "lifo"}, "'fcfs', 'longest-prefix'"),
        ({"max_delay": 0}, "above 0, or None"),
    ):
        with pytest.raises(InvalidInput, match=match):
            Engine.load("tiny", **options)  # type: ignore[arg-type]
