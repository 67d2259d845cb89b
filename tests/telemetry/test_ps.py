"""`radixkv ps` lists running engines, reports those that do not answer, and handles an empty list."""

from __future__ import annotations

import json
import os
import time

import pytest

from radixkv.cli import main
from radixkv.cli import ps as module
from radixkv.telemetry.discovery import advertise
from radixkv.telemetry.publisher import Publisher
from radixkv.telemetry.records import Changes, SessionRecord
from radixkv.telemetry.socket_paths import claim, release
from tests.telemetry.served import Engine, runtime_folder
from tests.telemetry.wire import FACTS


class Busy(Engine):
    """An engine with some stats."""

    def collect(self):
        future = super().collect()
        changes = future.result()
        stats = {
            "cache.held_blocks": 10.0,
            "cache.cached_blocks": 22.0,
            "cache.free_blocks": 32.0,
            "prompt_tokens": 1000.0,
            "cached_tokens": 939.0,
            "running": 3.0,
            "waiting": 1.0,
            "finished": 40.0,
        }
        sessions = tuple(SessionRecord(at, None, 1, 0, 10, 10, 5, 2, 1.0, 2.0, closed=at == 0) for at in range(3))
        future._result = Changes(changes.time, stats={**changes.stats, **stats}, sessions=sessions)
        return future


@pytest.fixture
def folder():
    with runtime_folder() as there:
        yield there


@pytest.fixture
def running(folder):
    engine = Busy()
    engine.change()
    publisher = Publisher(FACTS, engine.collect, engine.pending)
    publisher.start()
    yield publisher
    publisher.close()


def test_nothing_runs(folder, capsys):
    assert main(["ps"]) == 0
    assert capsys.readouterr().out.startswith("No engine is running.")
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_line_for_each_engine(running, capsys, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: FACTS.started + 7300)
    assert main(["ps"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "PID",
        "MODEL",
        "DEVICE",
        "POOL",
        "HIT",
        "RATE",
        "RUNNING",
        "WAITING",
        "SESSIONS",
        "UP",
        "SOCKET",
    ]
    assert line.split() == [str(os.getpid()), "tiny", "cpu", "50%", "93%", "3", "1", "2", "2", "h", str(running.path)]
    assert head.index("SOCKET") == line.index(str(running.path))


def test_for_scripts(running, capsys):
    assert main(["ps", "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert said.pop("uptime_s") > 0
    assert said == {
        "pid": os.getpid(),
        "engine": "e-1",
        "model": "tiny",
        "version": "0.1.0",
        "device": "cpu",
        "socket": str(running.path),
        "tcp": None,
        "num_blocks": 64,
        "held_blocks": 10,
        "cached_blocks": 22,
        "free_blocks": 32,
        "prompt_tokens": 1000,
        "cached_tokens": 939,
        "running": 3,
        "waiting": 1,
        "finished": 40,
        "sessions": 2,
        "problem": None,
    }


def test_an_engine_that_hangs_is_listed_as_such_with_the_others(running, capsys, monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT", 0.3)
    path, listener = claim()  # listens, and never answers
    advertise(FACTS, path)
    assert main(["ps"]) == 0
    _, one, other = sorted(capsys.readouterr().out.splitlines(), key=lambda line: "-2.sock" in line)
    assert "93%" in one
    assert other.endswith(f"{path} (does not answer)")
    assert "%" not in other
    listener.close()
    release(path)
