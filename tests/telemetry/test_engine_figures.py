"""Latencies, rates, reuse and figures of the process: counted in an engine, and sent with its changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.sampling.params import SamplingParams
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.process_figures import ProcessFigures
from radixkv.telemetry.protocol import Delta
from radixkv.telemetry.records import ITL_NAMES, PREEMPTIONS, PROCESS_NAMES, RequestRecord
from tests.engine.fakes import make_engine
from tests.telemetry.served import Reader, runtime_folder, serving, wait_until
from tests.telemetry.test_engine_telemetry import FOUR, FOUR_TIMES_FIVE, ended, let_through, look, watched
from tests.telemetry.wire import node


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with runtime_folder() as path:
        yield path


# ---- inter-token latency


def counted(mirror: Mirror) -> int:
    return int(sum(mirror.stats[name] for name in ITL_NAMES))


def test_each_token_but_the_first_of_a_stream_has_a_latency() -> None:
    engine, _, mirror = watched()
    with engine:
        assert counted(look(engine, mirror)) == 0
        for prompt, params in (([1] * 9, FOUR), ([2] * 5, FOUR.but(n=3)), ([3] * 5, FOUR.but(max_tokens=1))):
            engine.generate([prompt], params)
        records = ended(look(engine, mirror))
        output, streams = (sum(getattr(each, name) for each in records) for name in ("output_tokens", "streams"))
        assert counted(mirror) == output - streams == 4 + 12 + 1 - 5


def test_tokens_of_beams_have_no_latency() -> None:
    engine, _, mirror = watched()
    with engine:
        engine.generate([[1] * 9], SamplingParams(beam_width=3, max_tokens=4))
        assert counted(look(engine, mirror)) == 0


# ---- prefill and decode


def test_computed_tokens_are_of_prompts_or_decoded() -> None:
    engine, _, mirror = watched()
    with engine:
        engine.generate([[1] * 9], FOUR)  # computes 9 and 3: the last token is never computed
        engine.generate([[1] * 9], FOUR.but(n=2))  # hits 8
        look(engine, mirror)
        assert (mirror.stats["prefill_tokens"], mirror.stats["decode_tokens"]) == (9 + 1, 3 + 2 * 3)
        assert engine.stats().decode_tokens == 9


# ---- preemption


def spans(record: RequestRecord) -> list[tuple[int, int]]:
    times = record.preempted_ms
    assert len(times) % 2 == 0, "the last preemption of an ended request has an end"
    return list(zip(times[::2], times[1::2], strict=True))


def test_preemptions_lie_between_admission_and_end() -> None:
    engine, _, mirror = watched(num_blocks=12)
    with engine:
        handles = [engine.submit([start, *range(20, 30)], FOUR_TIMES_FIVE) for start in (1, 2, 3)]
        for handle in handles:
            handle.result()
        records, stats = ended(look(engine, mirror)), engine.stats()
    assert sum(record.preemptions for record in records) == stats.preemptions > 0
    assert sum(record.recomputed_tokens for record in records) == stats.recomputed_tokens
    assert sum(record.cached_tokens for record in records) == stats.cached_tokens
    for record in records:
        assert len(spans(record)) == min(record.preemptions, PREEMPTIONS)
        assert record.admitted is not None and record.ended is not None
        times = [record.submitted + ms / 1e3 for ms in record.preempted_ms]
        assert times == sorted(times)
        assert all(record.admitted - 1e-3 <= at <= record.ended + 1e-3 for at in times)


def test_a_preempted_request_has_no_end_of_its_preemption_yet() -> None:
    engine, runner, mirror = watched(num_blocks=12)
    runner.gate = threading.Semaphore(0)
    with engine, let_through(runner.gate):
        handles = [engine.submit([start, *range(20, 30)], FOUR_TIMES_FIVE) for start in (1, 2)]
        preempted: list[RequestRecord] = []
        while not preempted:
            asked = engine.client.thread.call(lambda: mirror.apply(engine.monitoring.recorder.collect()))  # type: ignore[union-attr]
            while not asked.done():
                runner.gate.release()
                time.sleep(0.001)
            preempted = [each for each in mirror.live.values() if each.phase == "preempted"]
        assert len(preempted[0].preempted_ms) == 1
        handles[preempted[0].number - 1].cancel()
        runner.gate.release(100_000)
        handles[2 - preempted[0].number].result()
        (record,) = (each for each in ended(look(engine, mirror)) if each.number == preempted[0].number)
        assert (record.phase, len(spans(record))) == ("cancelled", 1)


# ---- reuse


def test_each_request_counts_at_the_nodes_that_it_found() -> None:
    engine, _, mirror = watched()
    with engine:
        shared = [*range(30, 42)]
        for tail in range(5):
            engine.generate([[*shared, tail, tail]], FOUR)
        nodes = look(engine, mirror).nodes.values()
        (top,) = (each for each in nodes if (each.start, each.tokens) == (0, len(shared)))
        assert top.reused == 4, "all but the first one"
        assert [each.reused for each in nodes if each.parent == top.id] == [0] * 5
        engine.generate([[*shared, 2, 2, 7]], FOUR)
        look(engine, mirror)
        assert mirror.nodes[top.id].reused == 5
        for parent in mirror.nodes.values():
            below = [each.reused or 0 for each in mirror.nodes.values() if each.parent == parent.id]
            assert parent.parent == 0 or (parent.reused or 0) >= sum(below)


# ---- figures of the process


def test_the_process_is_measured_once_a_second() -> None:
    figures = ProcessFigures()
    found = figures.due(100.0)
    assert set(found) == set(PROCESS_NAMES[:2])
    assert 0 < found["process_cpu_seconds"] <= time.process_time()
    assert 1 << 20 < found["process_rss_bytes"] < 1 << 40
    assert figures.due(100.9) == {}
    assert figures.due(101.0)["process_cpu_seconds"] >= found["process_cpu_seconds"]


def test_an_engine_sends_the_figures_of_its_process() -> None:
    engine, _ = make_engine(100, 4, monitor=True)
    with engine:
        engine.generate([[1] * 9], FOUR)
        reader = Reader(engine.monitoring.publisher.path)  # type: ignore[union-attr]
        reader.until(lambda: "process_rss_bytes" in reader.mirror.stats)
        assert reader.mirror.stats["process_cpu_seconds"] <= time.process_time()
        assert "device_memory_bytes" not in reader.mirror.stats
        reader.close()


# ---- the age of the state


def heartbeats(reader: Reader) -> list[Delta]:
    """Read two more frames of an engine without changes."""
    seen = len(reader.frames)
    reader.until(lambda: len(reader.frames) >= seen + 2)
    frames = [frame for frame in reader.frames[-2:] if isinstance(frame, Delta) and not frame.changes.nodes]
    assert len(frames) == 2
    return frames


def test_a_quiet_engine_has_the_present_time_and_a_long_step_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("radixkv.telemetry.publisher._HEARTBEAT_S", 0.05)
    with serving() as (publisher, engine):
        reader = Reader(publisher.path)
        engine.change(node(1))
        reader.until_current(engine)
        first, second = heartbeats(reader)
        assert first.ts <= second.changes.time <= second.ts
        engine.stuck = True
        engine.change(node(2))
        wait_until(lambda: engine.waiting, "the publisher asked")
        heartbeats(reader)  # those from before the change
        first, second = heartbeats(reader)
        assert second.changes.time == first.changes.time < first.ts < second.ts
        engine.answer()
        reader.close()
