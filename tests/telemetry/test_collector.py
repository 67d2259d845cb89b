"""The collector requests one collection at a time, at the requested rate; waiting callers get a fresh one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from threading import Event
from unittest import mock

import pytest

from radixkv.telemetry.publisher import Collector
from radixkv.telemetry.records import Changes

HZ = 4.0
RARELY = 0.001


class Engine:
    """Answers when a test says so. Its clock stands still; `stirred` acts as the woken publisher's thread."""

    def __init__(self) -> None:
        self.is_pending = True
        self.fault: Exception | None = None
        self.asked: list[Future[Changes]] = []
        self.told: list[float] = []
        self.waiting: list[Event] = []  # callers that wait for the answer
        self.wakes = 0
        self.stirred: Callable[[], object] = lambda: None
        self.collector = Collector(self.collect, self.pending, self.tell, self.post, max_hz=100.0)

    def pending(self) -> bool:
        if self.fault is not None:
            raise self.fault
        return self.is_pending

    def collect(self) -> Future[Changes]:
        self.asked.append(Future())
        self.waiting = list(self.collector._waiting_now)
        return self.asked[-1]

    def tell(self, changes: Changes) -> None:
        assert not any(event.is_set() for event in self.waiting), "let go before it was told"
        self.told.append(changes.time)

    def post(self, call: Callable[[], object]) -> None:
        self.wakes += 1
        self.stirred()

    def turn(self, now: float = 1000.0, hz: float = RARELY) -> None:
        self.collector.deliver()
        if now >= self.collector.next_request(hz):
            with mock.patch("time.monotonic", return_value=now):
                self.collector.request()

    def answer(self) -> None:
        """Answer the open request with its number."""
        self.asked[-1].set_result(Changes(float(len(self.asked))))


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.turn(hz=HZ)
    engine.answer()
    engine.turn(hz=HZ)
    assert (len(engine.asked), engine.told) == (1, [1.0])
    return engine


# ---- how often


def test_it_is_asked_once_at_a_time_as_often_as_wanted(engine: Engine) -> None:
    assert engine.collector.next_request(HZ) == 1000.25
    engine.turn(1000.2, HZ)
    assert len(engine.asked) == 1
    engine.turn(1000.25, HZ)
    assert len(engine.asked) == 2
    assert engine.collector.next_request(HZ) == inf
    engine.turn(1009.0, HZ)
    assert (len(engine.asked), engine.told) == (2, [1.0])
    before = engine.wakes
    engine.answer()
    assert engine.wakes == before + 1, "an answer wakes"
    engine.turn(1009.0, HZ)
    assert (len(engine.asked), engine.told) == (3, [1.0, 2.0])


def test_a_hurry_counts_for_the_next_question_only(engine: Engine) -> None:
    engine.collector.request_soon()
    assert engine.collector.next_request(RARELY) == 1000.01
    engine.turn(1000.01)
    engine.answer()
    engine.turn(1000.02)
    assert (len(engine.asked), engine.told) == (2, [1.0, 2.0])
    assert engine.collector.next_request(RARELY) == 2000.01


# ---- waiting for a fresh answer


@pytest.mark.parametrize("where", ["pending", "collect", "answer", "publish"])
def test_a_fault_frees_waiting_callers_and_the_next_question_is_asked(
    engine: Engine, where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = RuntimeError("no idea")

    def fails(*_: object) -> None:
        raise fault

    def publisher() -> None:
        engine.turn()
        if not engine.asked[-1].done():
            engine.answer()
            engine.turn()

    engine.stirred = publisher
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        if where == "answer":
            broken.setattr(engine, "answer", lambda: engine.asked[-1].set_exception(fault))
        else:
            broken.setattr(engine.collector, f"_{where}", fails)
        assert engine.collector.wait(0.0, fresh=True)
        assert engine.collector.wait(0.0, fresh=True)
    assert caplog.text.count("telemetry could not be collected: RuntimeError('no idea')") == 1
    assert engine.told == [1.0]
    assert engine.collector.wait(0.0, fresh=True)
    assert len(engine.told) == 2
