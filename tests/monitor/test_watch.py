"""Test alerts without a screen: `--watch`, `--fail-on`, and the thresholds of a file in a summary."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from radixkv.telemetry.protocol import Snapshot
from radixkv.telemetry.records import Changes
from radixkv_monitor import alerts, cli
from radixkv_monitor.alert_settings import DEFAULTS, parse_settings
from radixkv_monitor.feed import Status
from tests.monitor.fake_feed import FakeFeed
from tests.monitor.frames import snapshot
from tests.monitor.test_alerts import held
from tests.monitor.test_once import written
from tests.telemetry.served import many, serving

MANUAL = Path(__file__).parents[2] / "docs" / "monitor.md"


@pytest.fixture
def settings(tmp_path: Path) -> str:
    path = tmp_path / "monitor.toml"
    path.write_text("[notify]\nafter = 0")
    return str(path)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the user's settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def play(monkeypatch: pytest.MonkeyPatch, feed: FakeFeed, *events: Changes | Status | type[BaseException]) -> None:
    """Let the command watch this feed; one event happens per look."""
    there: Iterator[Changes | Status | type[BaseException]] = iter(events)

    def sleep(seconds: float) -> None:
        event = next(there)
        if isinstance(event, Changes):
            feed.apply(event)
        elif isinstance(event, Status):
            feed.link = event
        else:
            raise event

    monkeypatch.setattr(alerts, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(cli, "choose_feed", lambda arguments: feed)


def test_a_line_per_change_until_ctrl_c(
    settings: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = FakeFeed(held(1000.0, 1))
    play(monkeypatch, feed, held(1001.0, 2), held(1002.0, 64), Status("stale", 1002.0), KeyboardInterrupt)
    assert cli.main(["--watch", "--alerts", settings]) == 130
    printed = capsys.readouterr()
    good, warn, bad = printed.out.splitlines()
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.match(f"{when}  good  ", good) and re.match(f"{when}  warn  100% of the pool is held", warn)
    assert re.match(f"{when}  bad   Not connected since ", bad)
    assert printed.err == "" and feed.closed


def test_it_ends_once_the_level_is_reached(
    settings: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = FakeFeed(held(1000.0, 1))
    play(monkeypatch, feed, held(1001.0, 64), held(1002.0, 1), Status("stale", 1002.0))
    assert cli.main(["--watch", "--alerts", settings, "--fail-on", "bad", "--json"]) == 3
    printed = capsys.readouterr()
    changes = [json.loads(line) for line in printed.out.splitlines()]
    assert [(each["from"], each["to"]) for each in changes] == [
        (None, "good"),
        ("good", "warn"),
        ("warn", "good"),
        ("good", "bad"),
    ]
    assert re.fullmatch(r"radixkv-monitor: bad \(stale\): not connected since [\d:]+\n", printed.err)
    assert feed.closed


def test_a_source_that_ends_is_a_failure(
    settings: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = FakeFeed()
    feed.link = Status("connecting", 0.0, "Looking for an engine at 7: none is there")
    play(monkeypatch, feed, feed.link, feed.link, Status("ended", 0.0, "7: wrong token"))
    assert cli.main(["--watch", "--alerts", settings]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (
        printed.err == "radixkv-monitor: Looking for an engine at 7: none is there\nradixkv-monitor: 7: wrong token\n"
    )


def test_a_recording_is_not_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "a.rec", snapshot(1000.0, 1))
    assert cli.main(["--watch", str(path)]) == 2
    assert "a.rec is a recording" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_after_every_change(number: signal.Signals, settings: str) -> None:
    script = "import sys; from radixkv_monitor.cli import main; sys.exit(main())"
    with serving() as (publisher, engine):
        engine.change(*many(20))
        options = ["--watch", "--json", "--alerts", settings]
        command = [sys.executable, "-c", script, str(publisher.path), *options]
        paths = os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=paths) as child:
            assert child.stdout is not None and child.stderr is not None
            first = child.stdout.readline()
            publisher.close("the engine was closed")
            second = child.stdout.readline()
            child.send_signal(number)
            assert child.wait(30.0) == 128 + number
            assert child.stderr.read() == ""
    assert [json.loads(line)["to"] for line in (first, second)] == ["idle", "bad"]


# ---- --once


@pytest.mark.parametrize(
    ("level", "status", "errors"),
    [("warn", 3, "radixkv-monitor: warn (held): 100% of the pool is held\n"), ("bad", 0, "")],
)
def test_a_summary_fails_on_a_level(
    level: str, status: int, errors: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.rec", Snapshot(0, 1, held(1000.0, 64), ts=1000.0))
    assert cli.main(["--once", "--json", "--fail-on", level, str(path)]) == status
    printed = capsys.readouterr()
    assert printed.err == errors
    found = json.loads(printed.out)["verdict"]
    assert found["level"] == "warn"
    assert found["reasons"] == [{"name": "held", "level": "warn", "sentence": "100% of the pool is held"}]


def test_a_summary_has_the_thresholds_of_the_user(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "a.rec", Snapshot(0, 1, held(1000.0, 64), ts=1000.0))
    (home / "radixkv").mkdir(parents=True)
    user = home / "radixkv" / "monitor.toml"
    user.write_text("[thresholds]\nheld = false")
    assert cli.main(["--once", "--fail-on", "warn", str(path)]) == 0
    assert "is held" not in capsys.readouterr().out
    assert cli.main(["--once", "--fail-on", "warn", "--alerts", os.devnull, str(path)]) == 3
    capsys.readouterr()
    user.write_text("[notify]\nignore = ['held']")
    assert cli.main(["--once", "--fail-on", "warn", str(path)]) == 0
    assert "100% of the pool is held" in capsys.readouterr().out, "it is still shown"
    user.write_text("[thresholds]\nhold = 1")
    assert cli.main(["--once", str(path)]) == 2
    assert "the key thresholds.hold is unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fail-on", "bad"], "--fail-on goes with --once or --watch"),
        (["--once", "--watch"], "exclude each other"),
        (["--once", "--bell"], "goes with the screen or --watch"),
        (["--watch", "--replay", "x"], "--watch goes with a running engine"),
        (["--watch", "--record", "x"], "not with --watch"),
        (["--watch", "--alerts", "/none"], "/none cannot be read: No such file"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and words in printed.err and printed.err.count("\n") == 1


def test_the_file_in_the_manual_can_be_read() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", MANUAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    found = parse_settings(text)
    assert found.thresholds.held == 0.98 and found.thresholds.telemetry_share is None and found.bell
    for name, default in asdict(DEFAULTS).items():
        (line,) = re.findall(rf"^{name} = .*$", text, re.MULTILINE)
        if default is not None:
            assert line.endswith(f"; {default:g} by default")
