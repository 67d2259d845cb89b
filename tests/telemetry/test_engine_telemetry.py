"""An engine's telemetry: requests, sessions, counters and reasons of misses; a fault in it harms no request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from radixkv.chat import AsyncEngine, Engine
from radixkv.engine import RequestEngine
from radixkv.errors import InvalidInput, RequestFailed, RequestTimedOut
from radixkv.sampling.params import SamplingParams
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.records import RequestRecord
from tests.chat.worlds import chat_engine
from tests.engine.fakes import FakeRunner, make_engine
from tests.telemetry.expected import assert_matches_cache
from tests.telemetry.served import runtime_folder

FOUR = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
FOUR_TIMES_FIVE = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with runtime_folder() as path:
        yield path


def look(engine: RequestEngine, mirror: Mirror) -> Mirror:
    """Collect, check against the cache, and return the mirror."""

    def collect() -> None:
        mirror.apply(engine.monitoring.recorder.collect())  # type: ignore[union-attr]
        offset = engine.monitoring.recorder.cache_recorder._offset  # type: ignore[union-attr]
        assert_matches_cache(mirror, engine.core.cache, offset)

    engine.client.thread.ask(collect)
    return mirror


def watched(num_blocks: int = 100, block_size: int = 4, **options: Any) -> tuple[Engine, FakeRunner, Mirror]:
    """An engine that only the test collects from: its publisher is closed before its first collection."""
    options = {"monitor": True, **options}
    engine, runner = make_engine(num_blocks, block_size, **options)
    engine.monitoring.publisher.close()  # type: ignore[union-attr]
    engine.monitoring.recorder.cache_recorder._fresh = True  # type: ignore[union-attr]
    engine.client.thread.ask(lambda: engine.monitoring.recorder.cache_recorder.attach(engine.core.cache))  # type: ignore[union-attr]
    return engine, runner, Mirror()


@contextmanager
def let_through(gate: threading.Semaphore) -> Iterator[None]:
    """Let the steps go on at the end, also of a failed test, so that the engine can close."""
    try:
        yield
    finally:
        gate.release(100_000)


def ended(mirror: Mirror) -> list[RequestRecord]:
    return sorted(mirror.ended.values(), key=lambda record: record.number)


def test_requests_tell_what_their_usage_and_the_stats_say() -> None:
    engine, _, mirror = watched()
    with engine:
        prompts = [list(range(length)) for length in (9, 9, 17, 30)]
        usages = [engine.generate([prompt], FOUR)[0].usage for prompt in prompts]
        wide = engine.submit([7] * 10, SamplingParams(max_tokens=3, n=3, ignore_eos=True)).result()
        look(engine, mirror)
        stats = engine.stats()
        records = ended(mirror)
        assert not mirror.live and [record.phase for record in records] == ["finished"] * 5
        for record, usage in zip(records, [*usages, wide.usage], strict=True):
            assert (record.prompt_tokens, record.cached_tokens) == (usage.prompt_tokens, usage.cached_tokens)
            assert record.ttft == pytest.approx(usage.ttft_s, abs=1e-3)
            assert record.ended is not None and record.admitted is not None and record.finish == "length"
            assert record.submitted <= record.admitted <= (record.first_token or 0) <= record.ended
        for name in ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "recomputed_tokens"):
            told = sum(getattr(record, name) for record in records)
            assert told == getattr(stats, name) == mirror.stats[name], name
        assert (records[-1].streams, records[-1].output_tokens) == (3, 9)
        assert mirror.stats["step_tokens"] == stats.computed_tokens
        assert mirror.stats["steps"] == stats.steps and 0 < mirror.stats["step_seconds"] < stats.uptime_s
        assert mirror.stats["monitor_ns"] > 0 and mirror.stats["finished"] == 5


def test_tokens_from_the_host_are_cached_tokens_of_their_own_kind() -> None:
    engine, _, mirror = watched(num_blocks=16, host_blocks=64)
    with engine:
        one, other = [*range(40)], [30] * 40
        for prompt in (one, other):
            engine.generate([prompt], SamplingParams(max_tokens=1))
        usage = engine.generate([[*one, 41, 42, 43]], SamplingParams(max_tokens=1))[0].usage
        record = ended(look(engine, mirror))[-1]
        assert any(node.residence == "host" for node in mirror.nodes.values())
        assert record.cached_tokens == usage.cached_tokens == 40 > record.host_tokens == usage.host_tokens > 8
        assert (record.miss_reason, record.miss_at, record.computed_tokens) == ("never_seen", 40, 3)
        assert mirror.stats["host_tokens"] == mirror.stats["cache.loaded_tokens"] == record.host_tokens
        assert engine.monitoring.publisher.facts.host_blocks == 64  # type: ignore[union-attr]
        assert (mirror.stats["load_seconds_per_token"], mirror.stats["prefill_seconds_per_token"]) == (1.0, 10.0)


def test_a_miss_has_a_reason() -> None:
    engine, _, mirror = watched(num_blocks=16)
    with engine:
        a, b = [*range(20)], [30] * 40
        for prompt in (a, a, [*range(10), 45, 46], b, [*b, 2, 3, 4, 5, 6, 7], a):
            engine.generate([prompt], SamplingParams(max_tokens=1))
        records = ended(look(engine, mirror))
        assert [record.miss_reason for record in records] == [
            "never_seen", "full", "diverged", "never_seen", "never_seen", "evicted",
        ]  # fmt: skip
        assert [record.cached_tokens for record in records[:4]] == [0, 19, 10, 0]
        assert (records[1].miss_at, records[2].miss_at) == (None, 10)
        gone = records[-1]
        assert gone.miss_at == gone.cached_tokens < 19 and gone.miss_evicted_tokens > 0
        assert gone.miss_evicted_ago is not None and "to make room for" in str(gone.miss_pressure)
        wanted = [record for record in mirror.evictions.values() if record.wanted_again is not None]
        assert wanted and all(record.tokens and record.idle_s >= 0 for record in mirror.evictions.values())


def test_tokens_whose_recurrent_state_is_gone_are_counted_and_the_old_reason_stays() -> None:
    engine, _, mirror = watched(snapshots=2)
    with engine:
        shared, one = [*range(40)], SamplingParams(max_tokens=1)
        for number in range(3):
            engine.generate([[*shared, 41 + number, *range(number + 1, 20)]], one)
        assert engine.probe([*shared, 45]).length == 40
        engine.generate([shared[:30]], one)
        *records, whole = ended(look(engine, mirror))
        assert (whole.miss_without_state, whole.computed_tokens) == (29, 30), "the last token is always computed"
        assert [record.miss_reason for record in records] == ["never_seen", "diverged", "diverged"]
        assert [record.miss_without_state for record in records] == [0, 40, 0]
        assert [record.miss_at for record in records] == [0, 40, 40]
        assert [record.cached_tokens for record in records] == [0, 0, 40]
        assert (mirror.stats["cache.state_rows"], mirror.stats["cache.state_slots"]) == (64, 2)
        assert mirror.stats["cache.state_slots_used"] == 2


def test_phases_are_told_while_they_last_and_sequences_say_whose_they_are() -> None:
    engine, runner, mirror = watched(max_sequences=1, max_batch_tokens=4, prefill_chunk=4)
    runner.gate = threading.Semaphore(0)
    with engine, let_through(runner.gate):
        first, second = engine.submit([1] * 10, FOUR), engine.submit([2] * 5, FOUR)
        phases = []
        for _ in range(4):
            runner.began.acquire()
            asked = engine.client.thread.call(lambda: mirror.apply(engine.monitoring.recorder.collect()))  # type: ignore[union-attr]
            runner.gate.release()
            asked.result()
            phases.append([record.phase for _, record in sorted(mirror.live.items())])
            owners = [(record.request, record.index) for record in mirror.sequences.values()]
            assert owners == [(1, 0)]
        assert phases == [["prefill", "waiting"]] * 2 + [["decode", "waiting"]] * 2
        runner.gate.release(1000)
        first.result(), second.result()
        look(engine, mirror)
        assert not mirror.live and not mirror.sequences and len(mirror.ended) == 2


def test_only_the_first_waiting_request_has_the_reason_of_its_wait() -> None:
    engine, runner, mirror = watched(max_sequences=1)
    runner.gate = threading.Semaphore(0)

    def reasons() -> list[str | None]:
        asked = engine.client.thread.call(lambda: mirror.apply(engine.monitoring.recorder.collect()))  # type: ignore[union-attr]
        runner.gate.release()
        asked.result()
        return [record.waits_for for _, record in sorted(mirror.live.items())]

    with engine, let_through(runner.gate):
        first, second, third = (engine.submit([token] * 5, FOUR_TIMES_FIVE) for token in range(3))
        runner.began.acquire()
        assert reasons() == [None, "running streams", None]
        second.cancel()
        assert reasons() == [None, "running streams"]
        runner.gate.release(1000)
        first.result(), third.result()
        assert {record.waits_for for record in ended(look(engine, mirror))} == {None}


def test_ends_have_names() -> None:
    engine, runner, mirror = watched()
    runner.fault = _raise_for_nine
    with engine:
        with pytest.raises(RequestFailed):
            engine.submit([9], FOUR).result()
        runner.gate = threading.Semaphore(0)
        cancelled, late = engine.submit([1, 2], FOUR), engine.submit([3], FOUR, timeout=0.05)
        cancelled.cancel()
        time.sleep(0.06)  # its timeout passes before the first step
        runner.gate.release(1000)
        with pytest.raises(RequestTimedOut):
            late.result()
        ends = {record.finish: record.phase for record in ended(look(engine, mirror))}
    assert ends == {"RequestFailed": "failed", "RequestCancelled": "cancelled", "RequestTimedOut": "failed"}


def _raise_for_nine(chunks: Any) -> None:
    if any(9 in chunk.tokens for chunk in chunks):
        raise ZeroDivisionError


def test_sessions_count_what_their_requests_found_and_forks_are_sessions_of_their_own() -> None:
    engine = chat_engine(monitor=True)
    mirror = Mirror()
    with engine:
        engine.monitoring.publisher.close()  # type: ignore[union-attr]
        engine.client.thread.ask(lambda: engine.monitoring.recorder.cache_recorder.attach(engine.core.cache))  # type: ignore[union-attr]
        talk = engine.chat("Be brief.", namespace="a")
        usages = [talk.send(text).usage for text in ("one", "two")]
        (twin,) = talk.fork()
        usages.append(twin.send("three").usage)
        twin.close()
        engine.generate([[1, 2, 3]], FOUR)
        look(engine, mirror)
        first, second = (mirror.sessions[number] for number in sorted(mirror.sessions))
        assert (first.requests, first.live, first.closed, first.namespace) == (2, 0, False, "a")
        assert first.cached_tokens == usages[0].cached_tokens + usages[1].cached_tokens > 0
        assert first.prompt_tokens == usages[0].prompt_tokens + usages[1].prompt_tokens
        assert first.tokens == len(talk.token_ids)
        assert first.output_tokens == usages[0].output_tokens + usages[1].output_tokens
        assert (second.requests, second.closed, second.cached_tokens) == (1, True, usages[2].cached_tokens)
        assert sorted(str(record.session) for record in mirror.ended.values()) == ["1", "1", "2", "None"]
    talk.close()  # after the engine's end


def test_a_fault_of_telemetry_costs_no_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = watched()
    with engine:
        monkeypatch.setattr(engine.monitoring.recorder, "_sessions", None)
        done = engine.generate([[1, 2, 3], [1, 2, 4]], FOUR)
        assert [len(each.token_ids) for each in done] == [4, 4]
        assert [record.message for record in caplog.records] == ["telemetry failed: requests are no longer recorded"]
        engine.client.thread.ask(engine.core.cache.check)


def test_the_tree_is_the_same_from_both_engines_and_is_frozen() -> None:
    engine, _ = make_engine(100, 4)

    async def main() -> None:
        async with AsyncEngine(engine) as twin:
            engine.generate([[1, 2, 3, 4, 5], [1, 2, 9]], SamplingParams(max_tokens=1), namespace="a")
            engine.generate([[7, 8]], SamplingParams(max_tokens=1))
            whole, part = engine.tree(), engine.tree("a")
            assert str(await twin.tree()) == str(whole) and str(await twin.tree("a")) == str(part)
            assert [root.namespace for root in whole.roots] == ["a", None]
            assert (len(whole), whole.tokens, len(part), part.tokens) == (4, 8, 3, 6)
            assert len(engine.tree(None)) == 1 and len(engine.tree("b")) == 0
            before = str(whole)
            engine.clear_cache()
            assert str(whole) == before and len(engine.tree()) == 0
            with pytest.raises(InvalidInput):
                engine.tree([])  # type: ignore[arg-type]
            with pytest.raises(InvalidInput, match="records nothing"):
                await twin.flight_recording("nowhere")

    asyncio.run(main())
