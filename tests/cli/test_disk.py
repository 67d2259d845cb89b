"""`radixkv disk`: the list, and the deletion of a model's text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv import Engine, SamplingParams
from radixkv.cli.main import main
from radixkv.disk.folder import DiskFolder
from tests.disk.stored import let_any_disk_do


def test_the_models_of_a_folder_are_listed_and_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_any_disk_do(monkeypatch)
    folder = tmp_path / "disk"
    with Engine.load("tiny", num_blocks=32, disk_cache=folder, host_memory="2MiB", monitor=False) as engine:
        engine.generate([list(range(100))], SamplingParams(max_tokens=1))
    assert main(["disk", str(folder), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["model"] == "tiny" and found["blocks"] == 6 and found["nbytes"] > 6 * 16 * 1024
    assert main(["disk", str(folder)]) == 0
    assert found["name"] in capsys.readouterr().out
    assert main(["disk", str(folder), "--delete", "other"]) != 0
    lock = DiskFolder(folder)
    assert main(["disk", str(folder), "--delete", found["name"]]) != 0
    assert "is used by process" in capsys.readouterr().err
    lock.close()
    assert main(["disk", str(folder), "--delete", found["name"]]) == 0
    assert not (folder / found["name"]).exists()
    capsys.readouterr()
    assert main(["disk", str(folder)]) == 0
    assert "No model has text here" in capsys.readouterr().out
    assert main(["disk", str(tmp_path / "missing")]) != 0
