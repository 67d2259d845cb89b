"""The thread alone: the order of calls, waiting, closing and draining."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from radixkv.engine.engine_thread import EngineThread
from radixkv.errors import EngineClosed


def idle_thread(finish: Callable[[EngineClosed], None] = lambda why: None) -> EngineThread:
    return EngineThread(lambda: None, lambda: None, lambda: False, finish)


class Countdown:
    """Work of `steps` steps, each of which waits for the gate."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.gate, self.began = threading.Semaphore(0), threading.Semaphore(0)
        self.ended_with: int | None = None
        self.engine_thread = EngineThread(
            self.step, lambda: 0.0 if self.left else None, lambda: self.left > 0, self.finish
        )

    def step(self) -> None:
        self.began.release()
        self.gate.acquire()
        self.left -= 1

    def finish(self, why: EngineClosed) -> None:
        self.ended_with = self.left


def closing(engine_thread: EngineThread, **how: float | bool | None) -> threading.Thread:
    thread = threading.Thread(target=lambda: engine_thread.close(**how))  # type: ignore[arg-type]
    thread.start()
    return thread


def joined(thread: threading.Thread) -> bool:
    thread.join(timeout=10)
    return not thread.is_alive()


def test_calls_run_in_order_between_steps_and_errors_come_back():
    seen: list[str] = []
    stepped = threading.Event()

    def step() -> None:
        seen.append("step")
        if seen.count("step") == 3:
            stepped.set()

    def busy() -> bool:
        return "go" in seen and not stepped.is_set()

    engine_thread = EngineThread(step, lambda: 0.0 if busy() else None, busy, lambda why: seen.append("end"))
    engine_thread.post(lambda: seen.append("go"))
    with pytest.raises(ZeroDivisionError):
        engine_thread.ask(lambda: 1 // 0)
    assert stepped.wait(timeout=10)
    engine_thread.close()
    assert seen == ["go", "step", "step", "step", "end"]
    with pytest.raises(EngineClosed):
        engine_thread.ask(lambda: 1)


def test_calls_that_post_calls_leave_room_for_steps():
    calls, called_at_step = [0], list[int]()

    def again() -> None:
        calls[0] += 1
        if calls[0] < 100:
            engine_thread.post(again)

    def idle_for() -> float | None:
        return 0.0 if calls[0] and len(called_at_step) < 3 else None

    engine_thread = EngineThread(lambda: called_at_step.append(calls[0]), idle_for, lambda: False, lambda why: None)
    engine_thread.post(again)
    while calls[0] < 100:
        engine_thread.ask(lambda: None)
    engine_thread.close()
    assert called_at_step == [1, 2, 3]


def test_a_posted_call_that_raises_does_not_end_the_thread(caplog):
    engine_thread = idle_thread()
    engine_thread.post(lambda: 1 // 0)
    assert engine_thread.ask(lambda: 7) == 7
    assert "posted" in caplog.text
    engine_thread.close()


def test_an_idle_thread_waits_without_stepping():
    steps: list[int] = []
    engine_thread = EngineThread(lambda: steps.append(1), lambda: None, lambda: False, lambda why: None)
    answered = [engine_thread.ask(threading.get_ident) for _ in range(3)]
    engine_thread.close()
    assert steps == []
    assert set(answered) == {engine_thread._thread.ident}


def test_a_thread_with_a_deadline_runs_calls_before_it_and_a_step_after_it():
    left = [3600.0, 0.001, 0.0]  # a posted call runs although an hour is left
    stepped = threading.Event()

    def idle_for() -> float | None:
        return left[0] if left else None

    def step() -> None:
        left.pop(0)
        stepped.set()

    engine_thread = EngineThread(step, idle_for, lambda: bool(left), lambda why: None)
    assert engine_thread.ask(lambda: left.pop(0)) == 3600.0  # then a millisecond passes, and a step runs
    assert stepped.wait(timeout=10)
    engine_thread.close()
    assert len(left) <= 1


def test_a_cancelled_call_is_skipped():
    task, ran = Countdown(1), []
    assert task.began.acquire(timeout=10)
    given_up = task.engine_thread.call(lambda: ran.append("given up"))
    kept = task.engine_thread.call(lambda: ran.append("kept"))
    assert given_up.cancel()
    task.gate.release()
    kept.result(timeout=10)
    task.engine_thread.close()
    assert ran == ["kept"]


def test_closing_ends_after_the_current_step():
    task = Countdown(3)
    assert task.began.acquire(timeout=10)
    thread = closing(task.engine_thread)
    while not task.engine_thread.closed:
        assert thread.is_alive()
    task.gate.release(3)
    assert joined(thread)
    assert task.ended_with == 2


def test_draining_finishes_requests_begins_none_and_runs_calls():
    task = Countdown(3)
    assert task.began.acquire(timeout=10)
    thread = closing(task.engine_thread, drain=True)
    while not task.engine_thread._draining:
        assert thread.is_alive()
    with pytest.raises(EngineClosed):
        task.engine_thread.post(lambda: None, begins=True)
    answer = task.engine_thread.call(lambda: task.left)
    task.gate.release(3)
    assert joined(thread)
    assert answer.result(timeout=10) == 2
    assert task.ended_with == 0


def test_a_request_that_began_before_the_draining_is_finished():
    task = Countdown(1)
    assert task.began.acquire(timeout=10)
    task.engine_thread.post(lambda: setattr(task, "left", 2), begins=True)  # still in the inbox when the step ends
    thread = closing(task.engine_thread, drain=True)
    while not task.engine_thread._draining:
        assert thread.is_alive()
    task.gate.release(1)
    assert task.began.acquire(timeout=10)
    assert not task.engine_thread._drained.is_set()  # although for a moment no work was left
    task.gate.release(10)
    assert joined(thread)
    assert task.ended_with == 0


def test_draining_an_idle_thread_just_ends_it():
    ended: list[int] = []
    engine_thread = idle_thread(lambda why: ended.append(1))
    assert joined(closing(engine_thread, drain=True))
    engine_thread.close(drain=True)
    assert ended == [1]


def test_draining_stops_when_its_time_is_over():
    left = [True]
    engine_thread = EngineThread(
        lambda: None, lambda: None, lambda: left[0], lambda why: None
    )  # busy, with nothing to do: paused
    assert joined(closing(engine_thread, drain=True, timeout=0.01))
    assert engine_thread.closed


def test_an_immediate_end_ends_the_draining_of_another_thread():
    engine_thread = EngineThread(lambda: None, lambda: None, lambda: True, lambda why: None)
    draining = closing(engine_thread, drain=True)
    engine_thread.close()
    assert joined(draining)


def test_an_exception_during_the_draining_makes_it_an_immediate_end(monkeypatch):
    task = Countdown(3)
    assert task.began.acquire(timeout=10)

    def interrupted(timeout: float | None = None) -> bool:
        task.gate.release(3)
        raise KeyboardInterrupt

    monkeypatch.setattr(task.engine_thread._drained, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        task.engine_thread.close(drain=True)
    assert not task.engine_thread._thread.is_alive()
    assert task.ended_with is not None


def test_draining_from_the_engines_thread_does_not_wait_for_itself():
    engine_thread = idle_thread()
    engine_thread.post(lambda: engine_thread.close(drain=True))
    assert joined(engine_thread._thread)


def test_a_step_that_raises_closes_the_thread_and_ends_a_draining():
    def step() -> None:
        raise RuntimeError("it must not")

    started = threading.Event()
    engine_thread = EngineThread(step, lambda: 0.0 if started.is_set() else None, lambda: True, lambda why: None)
    draining = closing(engine_thread, drain=True)
    engine_thread.post(started.set)
    assert joined(draining)
    with pytest.raises(EngineClosed):
        engine_thread.post(lambda: None)


def test_a_waiting_thread_keeps_no_object_of_its_last_call_alive():
    class Engine:
        def stats(self) -> int:
            return 1

    engine_thread, engine = idle_thread(), Engine()
    gone = threading.Event()
    weakref.finalize(engine, gone.set)
    engine_thread.ask(engine.stats)
    del engine
    assert gone.wait(timeout=10)
    engine_thread.close()


FORKED = """
import os, sys, threading
from radixkv import SamplingParams
from tests.engine.fakes import make_engine

engine, _ = make_engine()
params = SamplingParams(max_tokens=2)
engine.generate([[1, 2, 3]], params)
held, done = threading.Event(), threading.Event()

def hold():
    with engine.client.thread._gate:
        held.set()
        done.wait()

threading.Thread(target=hold).start()  # another thread is about to post
held.wait()
child = os.fork()
if child == 0:
    ends = []
    for verb in (
        lambda: engine.generate([[1, 2, 3]], params),
        lambda: engine.submit([1, 2, 3], params),
        engine.stats,
        engine.tree,
        lambda: engine.warm([1, 2, 3]),
    ):
        try:
            verb()
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")
    engine.close(drain=True)
    engine.close()
    said = f"EngineClosed: this engine belongs to process {os.getppid()}: load another one after the fork"
    fresh, _ = make_engine()
    fresh.generate([[1, 2, 3]], params)
    fresh.close()
    print(ends, flush=True)
    os._exit(0 if ends == [said] * 5 else 1)
done.set()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
engine.generate([[1, 2, 3]], params)
engine.close()
sys.exit(status)
"""


@pytest.mark.long
def test_in_a_forked_child_calls_are_refused_and_the_parents_engine_goes_on():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
