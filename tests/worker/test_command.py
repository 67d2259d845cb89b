"""`radixkv worker` without Dynamo, and the files that it gives to a frontend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from radixkv import Engine
from radixkv.cli import main
from radixkv.errors import UnsupportedModel
from radixkv.fleet import command
from radixkv.fleet.model_folder import write_files
from radixkv.model_path import BUNDLED


@pytest.mark.parametrize("installed", [None, "1.4.2"])
def test_another_version_of_dynamo_is_refused(installed: str | None, monkeypatch: Any, capsys: Any) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise command.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(command.metadata, "version", version)
    assert main(["worker", "tiny"]) == 1
    said = capsys.readouterr().err
    assert f"ai-dynamo {command.DYNAMO}, and {installed or 'none'} is installed" in said


@pytest.mark.parametrize(("option", "value"), [("--drain", "-1"), ("--drain", "nan"), ("--max-waiting", "-1")])
def test_a_wrong_limit_is_refused(option: str, value: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(command, "check_version", lambda: None)
    assert main(["worker", "tiny", option, value]) == 2
    assert f"{option} must be a number, at least 0" in capsys.readouterr().err


def test_the_component_of_any_name_is_one_that_dynamo_takes() -> None:
    """Dynamo makes a label of it, and refuses one without letters and digits."""
    names = ["Qwen/Qwen3-0.6B", "/models/One_2", "\u6a21\u578b", "\u6570\u636e"]
    first, second, *others = map(command.component_of, names)
    assert (first, second) == ("qwen-qwen3-0-6b", "models-one-2")
    assert len(set(others)) == 2
    assert all(each.isascii() and each.isalnum() for each in others)


def test_dynamo_waits_until_the_engine_has_drained(monkeypatch: Any) -> None:
    """Else it ends the process after 30 seconds, without closing the engine."""
    monkeypatch.setattr(command.os, "environ", environment := {"DYN_EVENT_PLANE_HOST": "10.0.0.1"})
    command.set_environment(45.5)
    assert int(environment["DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"]) > 60
    assert (environment["DYN_TCP_RPC_HOST"], environment["DYN_EVENT_PLANE_HOST"]) == ("127.0.0.1", "10.0.0.1")


def files(name: str, **options: Any) -> dict[str, str]:
    with Engine.load(name) as engine:
        folder = write_files(name, engine.model, **{"own_tokenizer": True, **options})
        again = write_files(name, engine.model, **{"own_tokenizer": True, **options})
    assert folder == again
    return {each.name: each.read_text() for each in folder.iterdir()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_folder_gives_its_own_files_and_the_version_of_its_weights() -> None:
    found, own = files("tiny"), BUNDLED["tiny"]
    assert found["tokenizer.json"] == (own / "tokenizer.json").read_text()
    settings = json.loads(found["config.json"])
    assert len(settings.pop("radixkv_weights")) == 64
    assert settings == json.loads((own / "config.json").read_text())


def test_another_tokenizer_is_written_as_it_is_read() -> None:
    found = files("tiny", own_tokenizer=False)
    assert "chat_template" in found["tokenizer_config.json"] or "chat_template.jinja" in found
    assert json.loads(found["tokenizer.json"])["model"]["vocab"]


def test_a_revision_of_the_hub_gives_its_own_files(tmp_path: Path, monkeypatch: Any) -> None:
    hub = tmp_path / "models--org--one"
    for commit in ("a" * 40, "b" * 40):
        folder = shutil.copytree(BUNDLED["tiny"], hub / "snapshots" / commit)
        (folder / "special_tokens_map.json").write_text(commit)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with Engine.load("tiny") as engine:
        for revision, expected in ((None, "a"), ("b" * 40, "b")):
            folder = write_files("org/one", engine.model, own_tokenizer=True, revision=revision)
            assert (folder / "special_tokens_map.json").read_text() == expected * 40


@pytest.mark.parametrize(
    ("missing", "named"), [("tokenizer*.json", "no tokenizer.json"), ("chat_template.jinja", "no chat template")]
)
def test_a_model_that_a_frontend_cannot_read_is_refused(missing: str, named: str, tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLED["tiny"], tmp_path / "model")
    for file in folder.glob(missing):
        file.unlink()
    with pytest.raises(UnsupportedModel, match=named):
        files(str(folder))
