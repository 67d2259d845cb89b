from __future__ import annotations

import threading

import pytest

from radixkv.engine.worker import Worker
from radixkv.errors import EngineClosed


def test_calls_run_in_order_between_steps_and_errors_come_back():
    seen: list[str] = []
    stepped = threading.Event()

    def step() -> None:
        seen.append("step")
        if seen.count("step") == 3:
            stepped.set()

    worker = Worker(step, lambda: "go" in seen and not stepped.is_set(), lambda: seen.append("end"))
    worker.post(lambda: seen.append("go"))
    with pytest.raises(ZeroDivisionError):
        worker.ask(lambda: 1 // 0)
    assert stepped.wait(timeout=10)
    worker.close()
    assert seen == ["go", "step", "step", "step", "end"]
    with pytest.raises(EngineClosed):
        worker.ask(lambda: 1)


def test_a_posted_call_that_raises_does_not_take_the_thread(caplog):
    worker = Worker(lambda: None, lambda: False, lambda: None)
    worker.post(lambda: 1 // 0)
    assert worker.ask(lambda: 7) == 7
    assert "posted" in caplog.text
    worker.close()


def test_an_idle_worker_waits_without_stepping():
    steps: list[int] = []
    worker = Worker(lambda: steps.append(1), lambda: False, lambda: None)
    answered = [worker.ask(threading.get_ident) for _ in range(3)]
    worker.close()
    assert steps == []
    assert set(answered) == {worker._thread.ident}
