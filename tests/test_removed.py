"""Each way in refuses a removed name, with the sentence that says what to use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv import Engine, EngineConfig, SamplingParams
from radixkv.cli import main
from radixkv.errors import InvalidInput
from radixkv.removed import REMOVED
from radixkv.serve.models.specs import specs_of
from radixkv_monitor import cli as monitor
from radixkv_monitor.alert_settings import parse_settings
from radixkv_traces import cli as replay

SENTENCE = "gone_away was removed: leave it out"


@pytest.fixture(autouse=True)
def removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "gone_away", SENTENCE)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Engine.load("tiny", gone_away=1),  # type: ignore[call-arg]
        lambda: EngineConfig(gone_away=1),  # type: ignore[call-arg]
        lambda: SamplingParams(gone_away=1),  # type: ignore[call-arg]
        lambda: parse_settings("[thresholds]\ngone_away = 1"),
    ],
)
def test_an_argument_or_a_key_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput, match=f"^{SENTENCE}$"):
        call()


def test_a_field_of_a_models_file_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "models.toml").write_text('[[model]]\npath = "tiny"\ngone_away = 1\n')
    with pytest.raises(InvalidInput, match=SENTENCE):
        specs_of([], str(file), EngineConfig(), None)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (main, ["serve", "tiny", "--gone-away", "1"]),
        (main, ["ps", "--gone-away=1"]),
        (replay.main, ["generate", "agent", "--gone-away"]),
        (monitor.main, ["--once", "--gone-away"]),
    ],
)
def test_a_flag_is_refused(
    command: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 2
    assert SENTENCE in capsys.readouterr().err


def test_a_name_is_removed_or_declared_but_not_both() -> None:
    names = {name for call in (EngineConfig, SamplingParams) for name in inspect.signature(call).parameters}
    assert not names & set(REMOVED)
