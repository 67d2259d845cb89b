"""Test the command: one summary, the engine it selects, its errors, and the modules that it must not import."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.errors import EngineNotFound
from radixkv.telemetry.discovery import FoundEngine
from radixkv.telemetry.protocol import Delta, Hello, Snapshot, encode
from radixkv.telemetry.records import Changes
from radixkv_monitor import cli, feed_factory
from radixkv_monitor.live import SocketFeed
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.state_builder import StateBuilder
from tests.monitor.fake_feed import FACTS
from tests.telemetry.served import serving

STATS = {"prompt_tokens": 200.0, "cached_tokens": 150.0, "finished": 4.0, "cache.cached_blocks": 16.0}


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    builder = StateBuilder()
    builder.take(Hello(FACTS), Snapshot(0, 1, Changes(time=1000.0, reset=True)))
    path = tmp_path / "a.rec"
    builder.record(path)
    builder.take(Delta(Changes(time=1001.0, stats=STATS)))
    builder.stop_recording()
    return path


def found(number: int, model: str = "tiny") -> FoundEngine:
    return FoundEngine(f"e{number}", number, None, 1000.0 + number, model, "0.1.0", "cpu", f"/nowhere/{number}.sock")


def only(monkeypatch: pytest.MonkeyPatch, *there: FoundEngine) -> None:
    monkeypatch.setattr("radixkv.telemetry.discovery.engines", lambda: list(there))
    monkeypatch.setattr("radixkv_monitor.feed_factory.engines", lambda: list(there))


def test_once_of_a_recording_is_its_end(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(recording), "--once", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"]["sentence"].startswith("Running: 75% of 200 prompt tokens")
    assert said["time"] == 1001.0 and said["stats"] == STATS and said["engine"]["pid"] == FACTS.pid
    assert said["summary"]["pool"] == {"free": 48, "active": 0, "cached": 16, "pinned": 0}
    assert said["summary"]["hit_lifetime"] == {"part": 150, "whole": 200, "share": 0.75}


def test_once_in_words(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--replay", str(recording), "--once"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Running: 75%") and "64 blocks: active 0%, pinned 0%, cached 25%, free 75%" in text


def test_once_of_a_live_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch, found(7))
    ours, theirs = socket.socketpair()
    monkeypatch.setattr("radixkv_monitor.feed_factory.connect", lambda *_, **__: theirs)
    snapshot = Snapshot(0, 1, Changes(time=1000.0, reset=True, stats=STATS))
    with ours:
        ours.sendall(encode(Hello(FACTS)) + encode(snapshot))
        assert cli.main(["--once", "--json", "--for", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"] == STATS


def test_a_missing_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch)
    assert cli.main(["--once"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "no running engine of this user" in said.err and "--demo" in said.err


def test_several_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only(monkeypatch, found(7), found(8, "qwen"))
    assert cli.main(["--once"]) == 1
    said = capsys.readouterr().err
    assert "pid 7  tiny" in said and "pid 8  qwen" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch", "--once"], "is not a process id"),
        (["/", "--once"], "neither a socket nor a recording"),
        (["tcp://nowhere", "--once"], "tcp://"),
        (["--json"], "--json goes with --once"),
        (["--for", "3"], "--for goes with --once"),
        (["--demo", "--replay", "x"], "exclude each other"),
        (["1", "--demo"], "exclude each other"),
        (["--demo"], "no terminal"),
        (["--demo", "--once", "--record", "/"], "there already"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "PATIENCE", 0.2)
    status = cli.main(arguments)
    said = capsys.readouterr()
    assert status == 2, said
    assert said.out == "" and words in said.err and len(said.err.strip().splitlines()) == 1


def test_no_recording_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    path.write_text("not one")
    assert cli.main([str(path), "--once"]) == 1
    assert "is not a telemetry recording" in capsys.readouterr().err


def test_ctrl_c_is_130(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("radixkv_monitor.print_once.first_state", interrupted)
    assert cli.main([str(recording), "--once"]) == 130


def test_what_a_target_is(recording: Path, tmp_path: Path) -> None:
    assert isinstance(feed_factory.feed_of(str(recording)), FileFeed)
    assert isinstance(feed_factory.feed_of("123"), SocketFeed)
    assert isinstance(feed_factory.feed_of("tcp://127.0.0.1:9"), SocketFeed)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s.sock"))
        assert isinstance(feed_factory.feed_of(str(tmp_path / "s.sock")), SocketFeed)


def test_a_younger_engine_of_the_same_model_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other, younger = found(7), found(8, "qwen"), found(9)
    there = [first]
    asked: list[int] = []
    ours, theirs = socket.socketpair()

    def connect(target: FoundEngine, token: str = "", hz: float = 4.0) -> socket.socket:
        asked.append(target.pid)
        if target.pid == 7:
            raise EngineNotFound("gone")
        return theirs

    monkeypatch.setattr(feed_factory, "connect", connect)
    monkeypatch.setattr(feed_factory, "engines", lambda: there)
    attempt = feed_factory._reconnecting(first)
    with pytest.raises(EngineNotFound, match="gone"):
        attempt()
    there[:] = [other]
    with pytest.raises(EngineNotFound, match="gone"):
        attempt()
    there.append(younger)
    assert attempt() is theirs
    attempt()
    assert asked == [7, 7, 7, 9, 9]
    ours.close()
    theirs.close()


def test_a_log_goes_to_a_file(recording: Path, tmp_path: Path) -> None:
    script = (
        "import logging, sys; from radixkv_monitor.cli import main;"
        f"status = main([{str(recording)!r}, '--once', '--log', {str(tmp_path / 'log')!r}]);"
        "logging.getLogger('radixkv_monitor').info('hello'); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=_environment())
    assert done.returncode == 0 and done.stderr == ""
    assert "hello" in (tmp_path / "log").read_text()


def test_neither_torch_nor_transformers_is_imported_nor_textual_for_one_look(recording: Path) -> None:
    script = (
        "import sys; from radixkv_monitor.cli import main;"
        f"main([{str(recording)!r}, '--once']); one = 'textual' in sys.modules;"
        "import radixkv_monitor.app; from radixkv_monitor.views import VIEWS; [each.load() for each in VIEWS];"
        "from radixkv_monitor import dialogs;"
        "print(one, sorted({'torch', 'transformers', 'triton', 'tokenizers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=_environment())
    assert done.stdout.splitlines()[-1] == "False []", done.stderr


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}


def test_whoever_has_read_enough_is_not_shouted_at(recording: Path) -> None:
    command = f"{sys.executable} -c 'import sys; from radixkv_monitor.cli import main; sys.exit(main())' {recording}"
    script = f"set -o pipefail; {command} --once --json | true; echo status $?"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=_environment())
    assert done.stdout == "status 0\n" and done.stderr == ""


def test_an_order_that_no_view_has_is_wrong_usage_and_those_that_are_there_are_named(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(recording), "--once", "--sort", "nonsense"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "nothing can be sorted by 'nonsense'" in said.err
    assert "tree       birth, recency, size, reused" in said.err and "sessions   last-use, length" in said.err
    for name in ("size", "regret", "last-use", "last use"):
        assert cli.main([str(recording), "--once", "--sort", name]) == 0
    assert capsys.readouterr().err == ""


def test_a_wrong_token_is_told_once_and_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with serving("tcp://127.0.0.1:0") as (publisher, _):
        address = f"tcp://{publisher.tcp}"
        assert cli.main([address, "--token", "wrong", "--once"]) == 1
        assert "wrong token: it stands in the json file" in capsys.readouterr().err
        feed = feed_factory.feed_of(address, "wrong")
        feed.start()
        feed._thread.join(20.0)
        assert not feed._thread.is_alive() and feed.status.link == "ended" and "wrong token" in feed.status.sentence
        feed.close()
