"""The trace of a recording engine: correct, written at once, readable, and without text."""

from __future__ import annotations

import argparse
import errno
import gc
import io
import json
import logging
import random
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import Engine, SamplingParams
from radixkv.cli.main import main
from radixkv.engine.observers import trace_writer
from radixkv.engine.observers.trace_writer import TraceWriter, block_ids
from radixkv.engine.request_facts import Origin
from radixkv.errors import InvalidInput
from radixkv_traces.cli import add_trace, load
from radixkv_traces.formats import read
from radixkv_traces.live.requests import PromptMaker, plan_requests
from radixkv_traces.simulate import replay
from tests.engine.fakes import make_engine
from tests.engine.worlds import World, tokens

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
KEY = bytes(32)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def conversations(seed: int, count: int, sessions: int, system: int = 12) -> list[list[int]]:
    """Prompts of conversations that grow in turns after one system prompt; some are used more often."""
    rng = random.Random(seed)
    histories = [tokens(system) for _ in range(sessions)]
    prompts = []
    for _ in range(count):
        at = min(int(rng.expovariate(0.3)), sessions - 1)
        if len(histories[at]) > 60:
            histories[at] = tokens(system)
        histories[at] += rng.choices(range(49), k=rng.randint(1, 9))
        prompts.append(list(histories[at]))
    return prompts


# ---- contents


def test_a_replay_at_the_pools_size_hits_as_the_engine_did(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine, _ = make_engine(40, 4, record=path)
    with engine:
        for prompt in conversations(2, 400, 12):
            engine.generate([prompt], ONE)
        cache = engine.stats().cache
    mine = cache.hit_tokens / cache.query_tokens  # of tokens; a replay has whole blocks
    half, same, infinite = (
        replay(read(path), blocks, "lru", block_tokens=4).token_hit_rate for blocks in (20, 40, 2000)
    )
    assert same == pytest.approx(mine, abs=0.04)
    assert half < mine - 0.1
    assert infinite > mine + 0.1


def test_a_trace_has_no_text_and_no_token_id(tmp_path: Path) -> None:
    """The same prompts have other ids in the next file: the key is not written."""
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path in paths:
        engine, _ = make_engine(64, 4, record=path)
        with engine:
            engine.generate([tokens(30), [7] * 9], ONE, namespace="secret tenant")
            engine.generate([tokens(30)], ONE)
    one, two = (lines(path) for path in paths)
    fields = ["timestamp", "input_length", "output_length", "hash_ids", "stop", "block_size", "namespace"]
    assert [list(line) for line in one] == [fields, fields, fields[:-1]]
    assert "secret" not in paths[0].read_text()
    ids = [{block for line in each for block in line["hash_ids"]} for each in (one, two)]
    assert len(ids[0]) == 8 + 3 + 8
    assert not ids[0] & ids[1]
    assert all(block > 2**32 for block in ids[0]), "no token id is so large"
    assert stat.S_IMODE(paths[0].stat().st_mode) == 0o600


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@given(prompts, prompts, st.integers(1, 5))
def test_ids_are_equal_exactly_as_long_as_all_tokens_so_far_are(one: list[int], two: list[int], size: int) -> None:
    ids = [block_ids(np.array(each, np.int32), size, KEY) for each in (one, two)]
    assert [len(each) for each in ids] == [-(-len(each) // size) for each in (one, two)]
    for at, (mine, other) in enumerate(zip(*ids, strict=False), 1):
        assert (mine == other) == (one[: at * size] == two[: at * size])
        assert 0 <= mine < 2**63
    assert not set(ids[0]) & set(block_ids(np.array(one, np.int32), size, bytes([1] * 32)))


def test_a_trace_has_the_ends_of_requests_and_no_request_that_was_never_admitted(tmp_path: Path) -> None:
    world = World(64)
    recording = TraceWriter(tmp_path / "t", 4)
    world.core.observers.append(recording)
    stopped = world.submit(tokens(5), ONE.but(stop_token_ids=range(50), ignore_eos=False, max_tokens=9))
    many = world.submit(tokens(6, 1), ONE.but(max_tokens=3, n=2, temperature=1.0))
    cancelled = world.submit(tokens(7, 2), ONE.but(max_tokens=30), origin=Origin(session=4))
    only = world.submit(tokens(8, 3), ONE, origin=Origin(session=12))
    only.max_tokens = 0  # like a request of `warm`
    world.step()
    world.step()
    late = world.submit(tokens(9, 4), ONE)
    world.core.cancel(late)
    world.core.cancel(cancelled)
    world.finish()
    recording.close()
    assert stopped.scheduling.number == 1
    recorded = sorted((r.input_length, r.output_length, r.stop, r.session) for r in read(tmp_path / "t"))
    expected = [(5, 1, "stop", None), (6, 6, "length", None), (7, 2, "cancelled", "4"), (8, 0, "length", "12")]
    assert recorded == expected
    assert many.replies.width == 2
    assert only.channel.ended


# ---- time


def test_a_request_is_written_when_it_ends_although_others_run(tmp_path: Path) -> None:
    """As after a kill: the writer is not closed, and the first request has not ended."""
    path, world = tmp_path / "t", World(64)
    recording = TraceWriter(path, 4)
    world.core.observers.append(recording)
    story = world.submit(tokens(20), ONE.but(max_tokens=60))
    for seed in range(1, 4):
        world.submit(tokens(10 + seed, seed), ONE)
    for _ in range(10):
        world.step()
    until(lambda: len(lines(path)) == 3)
    assert not story.channel.ended
    assert sorted(line["input_length"] for line in lines(path)) == [11, 12, 13]
    world.finish()
    recording.close()
    assert [line["input_length"] for line in lines(path)][3:] == [20]


def test_requests_are_replayed_in_order_of_arrival_not_of_lines(tmp_path: Path) -> None:
    path, world = tmp_path / "t", World(64)
    recording = TraceWriter(path, 4)
    world.core.observers.append(recording)
    world.submit(tokens(20), ONE.but(max_tokens=12), origin=Origin(session=1))
    begun = time.perf_counter()
    until(lambda: time.perf_counter() > begun + 0.002)
    world.submit(tokens(20), ONE, origin=Origin(session=2))
    world.finish()
    recording.close()
    assert [request.session for request in read(path)] == ["2", "1"]
    arguments = argparse.ArgumentParser()
    add_trace(arguments)
    workload = load(arguments.parse_args([str(path)]))
    assert [request.session for request in workload.requests] == ["1", "2"]
    assert list(workload.known) == [0, 5]
    played = plan_requests(read(path), PromptMaker(100, 4))
    assert [request.session for request in played] == ["1", "2"]
    assert played[1].due >= 0.001


def until(there: Callable[[], bool]) -> None:
    """Wait for another thread, within a limit."""
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


# ---- errors


class SmallDisk:
    """A file on a disk with room for a few bytes."""

    def __init__(self, raw: Any, room: int) -> None:
        self.raw, self.room = raw, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(len(data), self.room)
        self.room -= taken
        return int(self.raw.write(data[:taken]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def test_a_full_disk_ends_the_recording_with_one_warning_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    engine, _ = make_engine(64, 4, record=path)
    recording = next(each for each in engine.core.observers if isinstance(each, TraceWriter))
    recording._file._raw = SmallDisk(recording._file._raw, 700)  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING), engine:
        for seed in range(40):
            assert len(engine.generate([tokens(9, seed)], ONE)[0].token_ids) == 1
        recording._thread.join(10)
        engine.generate([tokens(9)], ONE)
    warnings = [record.message for record in caplog.records if record.name == trace_writer.__name__]
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert 0 < len(lines(path)) < 40
    assert path.read_bytes().endswith(b"}\n")


def test_a_disk_that_hangs_costs_bounded_memory_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_writer, "MAX_QUEUED", 5)
    monkeypatch.setattr(trace_writer, "CLOSE_TIMEOUT", 0.01)
    go_on = threading.Event()
    engine, _ = make_engine(64, 4, record=tmp_path / "trace.jsonl")
    recording = next(each for each in engine.core.observers if isinstance(each, TraceWriter))
    monkeypatch.setattr(recording._file, "write", lambda data: go_on.wait(60))
    try:
        with caplog.at_level(logging.WARNING), engine:
            for seed in range(20):
                engine.generate([tokens(9, seed)], ONE)
            assert recording._inbox.qsize() <= 6
        assert [record.message for record in caplog.records if "does not keep up" in record.message]
    finally:
        go_on.set()
        recording._thread.join(60)
    assert not recording._thread.is_alive()


def test_an_engine_that_is_never_closed_leaves_whole_lines(tmp_path: Path) -> None:
    engine, _ = make_engine(64, 4, record=tmp_path / "trace.jsonl")
    engine.generate([tokens(9)], ONE)
    finalizer = engine._finalizer
    del engine
    gc.collect()
    assert not finalizer.alive
    assert len(lines(tmp_path / "trace.jsonl")) == 1


def test_the_keys_of_many_namespaces_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_writer, "MAX_NAMESPACES", 2)
    engine, _ = make_engine(64, 4, record=tmp_path / "t")
    with engine:
        for owner in ("a", "b", "a", "c", "a", "b"):
            engine.generate([tokens(4)], ONE, namespace=owner)
    ids = [line["hash_ids"][0] for line in lines(tmp_path / "t")]
    assert ids[0] == ids[2] == ids[4]
    assert len(set(ids)) == 4, "b has a new key"


# ---- the file


@pytest.mark.parametrize(("record", "message"), [("there", "exists"), ("no/where", "no folder"), (7, "names a file")])
def test_a_file_that_cannot_be_created_is_refused_before_the_model_is_loaded(
    tmp_path: Path, record: Any, message: str
) -> None:
    (tmp_path / "there").write_text("precious\n")
    with pytest.raises(InvalidInput, match=message):
        Engine.load("no such model", record=tmp_path / record if isinstance(record, str) else record)
    assert (tmp_path / "there").read_text() == "precious\n"


def test_a_conversation_in_the_terminal_can_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\nWho are you?\n"))
    assert main(["chat", "tiny", "--record", str(path), "--max-tokens", "4", "--kv-memory", "8MB"]) == 0
    first, second = read(path)
    assert (first.session, second.session) == ("1", "1")
    assert first.block_tokens == 16
    assert second.input_length > first.input_length + first.output_length
    assert main(["chat", "tiny", "--record", str(path)]) == 2
