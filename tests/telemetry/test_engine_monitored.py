"""A real engine is found and watched by its socket, and saves its last minutes when its thread fails."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.chat import Engine
from radixkv.engine import RequestEngine
from radixkv.errors import EngineClosed, InvalidInput
from radixkv.sampling.params import SamplingParams
from radixkv.telemetry.discovery import engines
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import Bye, Delta, Hello, Snapshot
from radixkv.telemetry.recording import read_recording
from tests.engine.fakes import make_engine
from tests.telemetry.served import Reader, room, runtime_folder

FOUR = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with runtime_folder() as path:
        yield path


def test_an_engine_is_found_watched_and_says_goodbye(tmp_path: Path) -> None:
    engine, _ = make_engine(100, 4, monitor=True)
    (found,) = engines()
    assert (found.pid, found.model) == (os.getpid(), "fake")
    engine.generate([list(range(20))], FOUR)
    engine.flight_recording(tmp_path / "flight.rec")
    assert "radixkv-publisher" in {thread.name for thread in threading.enumerate()}
    stats = engine.stats()
    engine.close()
    assert engines() == []
    mirror = Mirror()
    frames = list(read_recording(tmp_path / "flight.rec"))
    assert isinstance(frames[0], Hello) and frames[0].facts.num_blocks == 100
    for frame in frames:
        if isinstance(frame, Snapshot | Delta):
            mirror.apply(frame.changes)
    assert mirror.stats["computed_tokens"] == stats.computed_tokens
    assert len(mirror.ended) == 1 and sum(node.tokens for node in mirror.nodes.values()) == 23


def test_an_engine_that_cannot_be_watched_serves_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_place(self: Any) -> None:
        raise PermissionError("no folder")

    monkeypatch.setattr("radixkv.telemetry.publisher.Publisher.start", no_place)
    engine, _ = make_engine(100, 4, monitor=True)
    with engine:
        assert len(engine.generate([[1, 2, 3]], FOUR)[0].token_ids) == 4
        (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert "cannot be watched" in record.message and "no folder" in record.message
        with pytest.raises(InvalidInput, match="records nothing"):
            engine.flight_recording(tmp_path / "x")


def test_a_wrong_address_is_refused_and_leaves_no_thread() -> None:
    before = threading.active_count()
    for monitor in ("tcp://0.0.0.0:7777", "tcp://nonsense"):
        with pytest.raises(InvalidInput):
            make_engine(10, 4, monitor=monitor)
    assert threading.active_count() == before
    with pytest.raises(InvalidInput, match="monitor must be"):
        Engine.load("tiny", num_blocks=4, monitor="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="expose_text"):
        Engine.load("tiny", num_blocks=4, expose_text=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "on"), [("0", False), ("1", True)])
def test_the_environment_switches_the_default_off(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_MONITOR", value)
    with Engine.load("tiny", num_blocks=16) as engine:
        assert len(engines()) == on
        assert (engine.monitoring is not None) == on


def test_a_crash_keeps_the_last_minutes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = []
    for _ in range(2):
        engine, _ = make_engine(100, 4, monitor=True)
        engine.generate([[1, 2, 3]], FOUR)
        engine.client.thread._step = lambda: 1 // 0  # type: ignore[assignment, return-value]
        with pytest.raises(EngineClosed):
            engine.submit([1], FOUR).result()
        engine.close()
        (line,) = [record.message for record in caplog.records if "the last minutes" in record.message]
        paths = sorted(folder.glob("crash-*.rec"))
        assert str(paths[-1]) in line
        caplog.clear()
    frames = list(read_recording(paths[-1]))
    mirror = Mirror()
    for frame in frames:
        if isinstance(frame, Snapshot | Delta):
            mirror.apply(frame.changes)
    assert mirror.stats["finished"] == 1 and len(mirror.nodes) == 2
    assert isinstance(frames[-1], Bye) and "ZeroDivisionError" in frames[-1].reason


def breaking() -> RequestEngine:
    """An engine that has served requests, and then fails in its thread."""
    engine, _ = make_engine(100, 4, monitor=True)
    engine.generate([[1, 2, 3]], FOUR)
    engine.client.thread._step = lambda: 1 // 0  # type: ignore[assignment, return-value]
    return engine


@pytest.mark.parametrize("trouble", ["full", "unsafe"])
def test_a_crash_that_cannot_be_written_down_is_one_warning(
    trouble: str, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = breaking()
    (found,) = engines()
    reader = Reader(found.socket)
    reader.read()  # it was accepted before the folder is unsafe
    if trouble == "unsafe":
        folder.chmod(0o755)
        monkeypatch.setattr("radixkv.telemetry.socket_paths.folders", lambda: [folder])
    with room(100 if trouble == "full" else 2**30), pytest.raises(EngineClosed):
        engine.submit([1], FOUR).result()
    assert "the engine's thread stopped" in (reader.until_the_end() or "")
    reader.close()
    engine.close()
    assert len([record for record in caplog.records if "could not be written" in record.message]) == 1
    assert not [record for record in caplog.records if "--replay" in record.message]
    assert not list(folder.glob("*.rec"))
