"""Test the settings of alerts: every key, refused keys and values, the user's own file, and broken files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import InvalidInput
from radixkv_monitor.alert_settings import (
    DEFAULTS,
    UNCONDITIONAL,
    AlertSettings,
    Thresholds,
    default_path,
    find_settings,
    parse_settings,
    read_settings,
)
from radixkv_monitor.summary import summarise, verdict
from tests.monitor.samples import request
from tests.monitor.test_summary import NAMES, state_of

WHOLE = """
[thresholds]
held = 0.9
regret = 1
longest_wait = 30
preemptions = 5
failed = 2
timed_out = false
hit_rate = 0.25
ttft_p50 = 0.5
ttft_p90 = 1.5
ttft_p99 = 3
queue_time_p90 = 2.0
itl_p50 = 0.05
itl_p90 = 0.1
itl_p99 = false
telemetry_share = 0.02

[notify]
bell = true
after = 30
ignore = ["preemptions", "stale"]
"""


def test_every_key_is_read(tmp_path: Path) -> None:
    path = tmp_path / "monitor.toml"
    path.write_text(WHOLE)
    found = read_settings(path)
    expected = {"held": 0.9, "regret": 1.0, "longest_wait": 30.0, "preemptions": 5, "failed": 2, "timed_out": None}
    expected |= {"hit_rate": 0.25, "ttft_p50": 0.5, "ttft_p90": 1.5, "ttft_p99": 3.0, "queue_time_p90": 2.0}
    expected |= {"itl_p50": 0.05, "itl_p90": 0.1, "itl_p99": None, "telemetry_share": 0.02}
    assert asdict(found.thresholds) == expected, "a new threshold needs an example here"
    notify = AlertSettings(found.thresholds, True, 30.0)
    assert found == replace(notify, ignore=frozenset({"preemptions", "stale"}))


def test_keys_that_are_absent_keep_their_defaults() -> None:
    assert parse_settings("") == AlertSettings()
    assert parse_settings("[thresholds]\nheld = 0.5").thresholds == replace(DEFAULTS, held=0.5)
    assert parse_settings("[notify]\nbell = true").thresholds == DEFAULTS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[threshold]\nheld = 1", ("the key threshold is unknown", "allowed are thresholds, notify")),
        ("held = 1", ("the key held is unknown",)),
        ("thresholds = 3", ("thresholds = 3 is not a table",)),
        ("[thresholds]\nttft_p95 = 1", ("the key thresholds.ttft_p95 is unknown", "ttft_p90, ttft_p99")),
        ("[thresholds]\nheld = 95", ("thresholds.held = 95 is not a share above 0.0 and up to 1.0, or false",)),
        ("[thresholds]\nregret = 0", ("thresholds.regret = 0 is not a share above 0.0",)),
        ("[thresholds]\nttft_p90 = 0.0", ("thresholds.ttft_p90 = 0.0 is not a time above 0 seconds",)),
        ("[thresholds]\nheld = true", ("thresholds.held = true is not a share",)),
        ("[thresholds]\nheld = '95%'", ("thresholds.held = '95%' is not a share",)),
        ("[thresholds]\nfailed = 1.5", ("thresholds.failed = 1.5 is not a whole number",)),
        ("[thresholds]\nfailed = -1", ("thresholds.failed = -1 is not a whole number",)),
        ("[thresholds]\nlongest_wait = -1", ("longest_wait = -1 is not a time above 0 seconds, or false",)),
        ("[thresholds]\nttft_p50 = nan", ("ttft_p50 = nan is not a time",)),
        ("[thresholds]\nttft_p50 = inf", ("ttft_p50 = inf is not a time",)),
        ("[thresholds]\nttft_p50 = 1979-05-27", ("is not a time",)),
        ("[notify]\nbell = 1", ("notify.bell = 1 is not true or false",)),
        ("[notify]\nafter = false", ("notify.after = false is not a time of at least 0 seconds",)),
        ("[notify]\nlog = 'a'", ("append the lines of --watch --json",)),
        ("[notify]\nignore = 'held'", ("notify.ignore = 'held' is not a list of these names: held, regret",)),
        (
            "[notify]\nignore = ['held', 'x']",
            ("is not a list of these names", "crashed, differing, disk, host, silent, stale"),
        ),
        ("[notify]\nignore = [[1]]", ("is not a list of these names",)),
        ("[notify]\nsound = true", ("the key notify.sound is unknown; allowed are bell, after, ignore",)),
        ("[thresholds\nheld = 1", ("is not TOML", "line 1")),
        ("x = " + "[" * 100_000, ("is not TOML",)),
    ],
)
def test_unknown_keys_and_wrong_values_are_refused_by_name(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "monitor.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput) as refused:
        read_settings(path)
    said = str(refused.value)
    assert said.startswith(str(path)) and "\n" not in said and len(said) < 500
    assert all(word in said for word in words), said


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path, words in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "bytes", "not TOML"),
        (Path("/dev/zero"), "has more than 1 MiB"),
    ):
        with pytest.raises(InvalidInput, match=words):
            read_settings(path)


def test_the_settings_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert find_settings(None) == AlertSettings()
    path = tmp_path / "radixkv" / "monitor.toml"
    path.parent.mkdir()
    path.write_text("[notify]\nbell = true")
    assert default_path() == path and find_settings(None).bell
    assert not find_settings(Path(os.devnull)).bell, "a named file stands in its place"
    path.write_text("bell = true")
    with pytest.raises(InvalidInput, match=r"monitor\.toml: the key bell"):
        find_settings(None)
    monkeypatch.setenv("HOME", "/home/me")
    for useless in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", useless)
        assert default_path() == Path("/home/me/.config/radixkv/monitor.toml")


@given(
    st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1e9)),
    st.booleans(),
    st.sampled_from([0.0, 7.0]),
    st.sampled_from(["", "crashed: out of memory", "the engine was closed"]),
)
def test_every_reason_of_a_verdict_can_be_ignored(
    stats: Mapping[str, float], stale: bool, silence: float, end: str
) -> None:
    live = {1: request(number=1, phase="waiting", submitted=1.0, first_token=None)}
    state = state_of(dict(stats), stale=stale, silence=silence, end_reason=end, live=live)
    strict = Thresholds(**dict.fromkeys(asdict(DEFAULTS), 0))
    for reason in verdict(state, summarise(state), strict).reasons:
        assert reason.name in {*asdict(DEFAULTS), *UNCONDITIONAL}
        assert parse_settings(f'[notify]\nignore = ["{reason.name}"]').ignore == {reason.name}
