"""`scripts/dist.py` finds a wheel with other files than the packages, and a command that does something else."""

from __future__ import annotations

import importlib
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))
dist: Any = importlib.import_module("dist")


def wheel(folder: Path, *names: str) -> Path:
    """Write a wheel of these files and metadata, and packages in `folder` that have one file each."""
    for package in dist.PACKAGES:
        (folder / package / "__pycache__").mkdir(parents=True)
        (folder / package / "py.typed").touch()
        (folder / package / "__pycache__/it.pyc").touch()
    with zipfile.ZipFile(folder / "it.whl", "w") as archive:
        for name in (*names, "radixkv-0.1.0.dist-info/METADATA"):
            archive.writestr(name, "")
    return folder / "it.whl"


WHOLE = [f"{name}/py.typed" for name in ("radixkv", "radixkv_kernels", "radixkv_monitor", "radixkv_traces")]


def test_a_wheel_with_all_files_passes(tmp_path: Path) -> None:
    dist.check_files(wheel(tmp_path, *WHOLE), tmp_path)


@pytest.mark.parametrize(
    ("names", "named"),
    [(WHOLE[1:], "lacks ['radixkv/py.typed']"), ([*WHOLE, "tests/test_it.py"], "has ['tests/test_it.py']")],
)
def test_another_file_fails_and_is_named(names: list[str], named: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        dist.check_files(wheel(tmp_path, *names), tmp_path)
    assert named in str(end.value)


def test_each_extra_for_users_is_installed_and_tried() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"", *extras} == {*dist.COMMANDS, "dev", "docs"}


@pytest.mark.parametrize("command", ["python -c pass", "python -c 'print(\"ready\"); raise SystemExit(1)'"])
def test_a_command_without_its_output_or_status_fails(command: str) -> None:
    env = dist.Environment.__new__(dist.Environment)
    env._how = {"text": True, "stdout": dist.PIPE, "stderr": dist.STDOUT}
    assert env.run("python -c 'print(\"ready\")'", "ready") == "ready\n"
    with pytest.raises(SystemExit, match="not 0 and 'ready'"):
        env.run(command, "ready")
