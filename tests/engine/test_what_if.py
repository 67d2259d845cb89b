"""The curve of pool sizes of an engine: its rate at the pool's size is the engine's, and it never costs a request."""

from __future__ import annotations

import argparse
import gc
import logging
import threading
import time
import weakref
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import pytest

from radixkv import Engine, EngineConfig, PrefixCache
from radixkv.engine.observers import what_if
from radixkv.settings.command_line import add_settings
from radixkv.telemetry.protocol import Delta
from radixkv.telemetry.what_if import SIZES, WhatIfCurve, WhatIfReport
from tests.engine.fakes import make_engine
from tests.engine.test_scheduler import tokens
from tests.engine.test_trace_writer import ONE, conversations
from tests.telemetry.served import Reader, runtime_folder
from tests.telemetry.test_what_if import NOTHING


def curve_of(engine: Engine) -> WhatIfCurve:
    report = engine.what_if()
    assert report is not None and report.recent == report.since_load
    return report.since_load


def test_at_the_pools_own_size_the_curve_has_the_engines_hit_rate() -> None:
    with make_engine(40)[0] as engine:
        for prompt in conversations(2, 300, 12):
            engine.generate([prompt], ONE)
        curve, stats = curve_of(engine), engine.stats()
    assert (curve.requests, curve.prompt_tokens, curve.measured) == (300, stats.prompt_tokens, stats.hit_rate)
    assert curve.hit_rates[SIZES.index(1.0)] == pytest.approx(stats.hit_rate, abs=0.03)
    assert curve.hit_rates[0] < stats.hit_rate - 0.1 and curve.hit_rates[-1] > stats.hit_rate + 0.05


def test_replies_count_namespaces_are_apart_and_failed_requests_are_left_out() -> None:
    engine, runner = make_engine(64, 4, host_blocks=32)
    with engine:
        for namespace in ("ann", "ben", None):
            engine.generate([tokens(16)], ONE, namespace=namespace)
        assert curve_of(engine).hit_tokens == (0,) * 7
        three = ONE.but(max_tokens=9, n=3, temperature=1.0, seed=1)
        (first,) = engine.generate([tokens(16)], three, namespace="ann")
        assert curve_of(engine).hit_tokens[-1] == 15  # the last token of a prompt is computed
        for at, each in enumerate((first, *first.alternatives)):
            engine.generate([tokens(80, 100 * at)], ONE)
            before = curve_of(engine).hit_tokens[-1]
            engine.generate([[*tokens(16), *each.token_ids, 1]], ONE, namespace="ann")
            assert curve_of(engine).hit_tokens[-1] == before + 24  # 8 of 9 tokens of the reply were computed
        engine.generate([tokens(16)], three, namespace="ann")  # its replies were used in another order
        assert curve_of(engine).requests == 11
        runner.fault = lambda chunks: 1 / 0  # type: ignore[assignment,return-value]
        with pytest.raises(Exception, match="division"):
            engine.generate([tokens(9)], ONE)
        report = engine.what_if()
    assert report is not None and (report.recent.requests, report.pool_blocks) == (11, 96)


@pytest.mark.parametrize(
    ("settings", "options", "below", "above"),
    [
        ({"eviction": "lfu", "prefix_cache": False}, {}, ["another policy", "is off"], ["another policy", "inside"]),
        ({"deterministic": True}, {"state_rows": 2}, ["recurrent state", "prefill_chunk", "take room"], ["inside"]),
        ({"disk_cache": "x"}, {"host_blocks": 8}, ["device + host", "take room"], ["a disk", "inside"]),
        ({}, {}, ["pins", "take room"], ["pins", "inside"]),
    ],
)
def test_the_reasons_that_explain_a_gap_are_named_over_three_points(
    settings: Any, options: Any, below: list[str], above: list[str]
) -> None:
    config, cache = EngineConfig(**settings), PrefixCache(16, 4, **options)
    if "pins" in below:
        (sequence := cache.open([1])).extend([1])
        sequence.commit()
        cache.pin([1])
    for cached, named in ((475, []), (525, []), (460, below), (540, above)):
        curve = WhatIfCurve(9, 1000, cached, (500,) * 7)
        for recent in (curve, NOTHING):
            found = what_if.reasons(config, cache, WhatIfReport(16, recent, curve, 0))
            assert len(found) == len(named) and all(map(str.__contains__, found, named))


def test_it_can_be_switched_off_by_the_setting_and_its_option() -> None:
    with make_engine(what_if=False)[0] as engine:
        engine.generate([tokens(9)], ONE)
        assert engine.what_if() is None and not engine.core.end_queues and not engine.client.curve._thread.is_alive()
    command = argparse.ArgumentParser()
    add_settings(command, EngineConfig, "what_if")
    assert command.parse_args([]).what_if and not command.parse_args(["--no-what-if"]).what_if


def test_a_fault_is_logged_once_and_ends_the_curve_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(what_if, "prefix_ids", lambda *_: 1 / 0)
    with make_engine()[0] as engine, caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert engine.generate([tokens(9)], ONE)[0].token_ids and engine.what_if() is None
    assert [each.getMessage() for each in caplog.records] == ["the what-if curve has ended; the engine goes on"]


def test_beyond_the_limit_requests_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "MAX_QUEUED", 5)
    with make_engine()[0] as engine:
        curve, ended = engine.client.curve, SimpleQueue[Any]()
        curve.close()  # so that nothing is taken before all wait
        engine.core.end_queues[:] = [ended]
        engine.generate([tokens(9)] * 20, ONE)
        for item in (*(ended.get() for _ in range(20)), answer := Future[Any](), None):
            curve.inbox.put(item)
        curve._run()
    assert (answer.result().recent.requests, answer.result().dropped) == (4, 16)


@pytest.mark.parametrize("closed", [True, False])
def test_the_thread_keeps_no_request_or_cache_alive_and_ends_with_the_engine(closed: bool) -> None:
    engine, runner = make_engine()
    engine.core.end_queues.insert(0, ended := SimpleQueue[Any]())
    engine.generate([tokens(9)], ONE)
    request, give_up = weakref.ref(ended.get()), time.monotonic() + 60
    while request() is not None and time.monotonic() < give_up:
        gc.collect()
    assert request() is None and engine.what_if() is not None
    cache = weakref.ref(engine.core.cache)
    thread = [each for each in threading.enumerate() if each.name == "radixkv-what-if"][-1]
    if closed:
        engine.close()
    del engine, runner
    gc.collect()
    thread.join(60)
    assert cache() is None and not thread.is_alive()


def test_monitors_get_the_report_only_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.telemetry.publisher._HEARTBEAT_S", 0.02)
    monkeypatch.setattr("radixkv.telemetry.process_figures._INTERVAL_S", 0.0)
    with runtime_folder(), make_engine(monitor=True)[0] as engine:
        assert engine.monitoring is not None
        engine.generate([tokens(9), tokens(20, 1)], ONE)
        reader, report = Reader(engine.monitoring.publisher.path), engine.what_if()
        reader.until(lambda: bool(reader.mirror.what_if))
        assert report is not None and reader.mirror.what_if == report.as_fields()
        sent = len(reader.frames)
        reader.until(lambda: len(reader.frames) > sent)
        assert all(isinstance(each, Delta) and not each.changes.what_if for each in reader.frames[sent:])
        reader.socket.close()
