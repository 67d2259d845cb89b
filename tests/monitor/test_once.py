"""Test `--once`: whole, large, cut and damaged recordings, and live engines that work, stop and end."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv.telemetry.protocol import Bye, Delta, Hello, Snapshot, encode
from radixkv.telemetry.recording import MAGIC
from radixkv.telemetry.records import Changes
from radixkv.telemetry.what_if import WhatIfReport
from radixkv_monitor import cli
from radixkv_monitor.live import SocketFeed
from tests.monitor.fake_feed import FACTS
from tests.monitor.frames import Engines, delta, node, send, snapshot, until
from tests.monitor.samples import WHAT_IF


def written(path: Path, *frames: Any, tail: bytes = b"") -> Path:
    path.write_bytes(MAGIC + b"".join(map(encode, (Hello(FACTS), *frames))) + tail)
    return path


def once(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the command; return its status, its JSON, and its standard error."""
    status = cli.main([*arguments, "--once", "--json"])
    printed = capsys.readouterr()
    return status, json.loads(printed.out or "{}"), printed.err


# ---- recordings


def test_the_curve_is_printed_if_it_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = snapshot(1000.0, 1), Delta(Changes(1004.0, what_if=WHAT_IF.as_fields()), seq=2, ts=1004.0)
    for path, printed in ((written(tmp_path / "a.rec", old), False), (written(tmp_path / "b.rec", old, new), True)):
        said = once(capsys, str(path))[1]["what_if"]
        assert said is None or (WhatIfReport.from_fields(said), said["sentence"]) == (WHAT_IF, WHAT_IF.sentence)
        cli.main([str(path), "--once"])
        assert (said is not None) == printed == ("what if     Twice the pool" in capsys.readouterr().out)


def test_a_whole_recording_has_no_end_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "a.rec", snapshot(1000.0, 1), delta(1004.0, 2))
    status, said, errors = once(capsys, str(path))
    assert (status, errors) == (0, "")
    assert (said["damaged_at"], said["ends"], said["recording"]) == (None, None, "a.rec")
    assert (said["time"], said["now"], said["up_seconds"], said["window_seconds"]) == (1004.0, 1004.0, 4.0, 4.0)
    assert cli.main([str(path), "--once"]) == 0
    assert "recording   a.rec, as of 19" in capsys.readouterr().out


def test_the_last_word_of_the_engine_is_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "a.rec", snapshot(1000.0, 1), Bye("the engine was closed"))
    status, said, errors = once(capsys, str(path))
    assert (status, errors) == (0, "")
    assert (said["damaged_at"], said["ends"]) == (None, "the engine was closed")


def test_a_cut_recording_prints_its_whole_part_and_the_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "a.rec", snapshot(1000.0, 1), delta(1004.0, 2))
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes() + encode(delta(1005.0, 3))[:-1])
    status, said, errors = once(capsys, str(path))
    assert status == 4 and said["time"] == 1004.0
    assert (said["damaged_at"], said["ends"]) == (whole, "inside a frame")
    assert f"a.rec is cut after byte {whole}; the summary is of the part before" in errors
    assert said["verdict"]["sentence"].startswith(f"Ended (the recording is cut after byte {whole})")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("kept", [0, 10])
def test_a_recording_without_a_state_is_damaged_too(
    kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.rec").write_bytes(MAGIC + encode(Hello(FACTS))[:kept])
    status, said, errors = once(capsys, str(tmp_path / "a.rec"))
    assert (status, said) == (4, {}) and "holds no frame" in errors


def test_a_large_recording_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its snapshot has more pages than are taken at once."""
    monkeypatch.setattr("radixkv_monitor.replay._BATCH", 2)
    monkeypatch.setattr("radixkv_monitor.replay._TICK", 0.0)
    pages = [
        Snapshot(page, 9, Changes(1000.0, reset=page == 0, nodes=(node(page + 1, 1.0),)), ts=1000.0)
        for page in range(9)
    ]
    status, said, _ = once(capsys, str(written(tmp_path / "a.rec", *pages, *(delta(1000.0 + s) for s in range(50)))))
    assert (status, said["time"]) == (0, 1049.0)


def test_progress_is_shown_on_a_terminal_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    loads = threading.Event()
    monkeypatch.setattr("radixkv_monitor.replay.FileFeed._load", lambda feed: loads.wait(20.0))
    monkeypatch.setattr(sys, "stderr", screen)
    thread = threading.Thread(target=lambda: until(lambda: "reading a.rec, 0%" in screen.getvalue()) or loads.set())
    thread.start()
    assert cli.main([str(written(tmp_path / "a.rec")), "--once"]) == 1, "it has no state"
    thread.join()
    said = screen.getvalue()
    assert said.index("reading a.rec, 0%") < said.rindex("\r\x1b[K") < said.index("the recording holds no state")


# ---- live engines


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr("radixkv_monitor.cli.choose_feed", lambda arguments: SocketFeed("x", made.connect, seed=1))
    return made


def test_a_live_engine_is_watched_until_there_are_rates(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.time()

    def counted(at: int, **more: bool) -> Changes:
        return Changes(began + at, stats={"output_tokens": 50.0 * at, "running": 1.0}, **more)

    with engines.serve() as engine:
        first = Snapshot(0, 1, counted(0, reset=True), ts=began)
        send(engine, Hello(replace(FACTS, started=began - 3600)), first, Delta(counted(1), ts=began + 1))
        status, said, errors = once(capsys, "--for", "1.2")
    assert (status, errors) == (0, "")
    assert said["summary"]["output_per_second"] > 20
    assert 1.0 <= said["window_seconds"] <= 10.0
    assert 3601 < said["up_seconds"] < 3700, "as of now, not of the newest change"


def test_an_engine_that_ends_while_it_is_watched_is_a_failure(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    with engines.serve() as engine:
        send(engine, Hello(FACTS), snapshot(1000.0, 1), Bye("the engine was closed"))
    status, said, errors = once(capsys, "--for", "20")
    assert status == 1 and "the engine was closed" in errors and errors.count("\n") == 1
    assert said["verdict"]["sentence"].startswith("Not connected since")


def test_an_engine_that_stops_while_it_is_watched_is_a_failure(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("radixkv_monitor.live._POLL", 0.01)
    monkeypatch.setattr("radixkv_monitor.live.SILENCE", 0.1)
    with engines.serve() as engine:
        send(engine, Hello(FACTS), snapshot(1000.0, 1))
        status, said, errors = once(capsys, "--for", "0.5")
    assert status == 1 and "stopped or very busy" in errors and said["time"] == 1000.0


def test_a_first_state_is_awaited_while_it_arrives(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "PATIENCE", 0.4)
    pages = [Snapshot(page, 9, Changes(1000.0, reset=page == 0), ts=1000.0) for page in range(9)]
    with engines.serve() as engine:

        def send_slowly() -> None:
            for frame in (Hello(replace(FACTS, control=True)), *pages):
                send(engine, frame)
                time.sleep(0.1)

        thread = threading.Thread(target=send_slowly)
        thread.start()
        status, said, _ = once(capsys, "--for", "0.1")
        thread.join()
    assert (status, said["engine"]["control"]) == (0, True)
