"""`make clients` states why coding agents cannot be installed on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients import install


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def add(folder: Path, name: str, output: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\necho {output}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({}, "node is missing: install Node.js 20 or later, which includes npm"),
        ({"node": "v22.1.0"}, "npm is missing: install Node.js 20 or later, which includes npm"),
        ({"node": "v18.19.1", "npm": "9.2.0"}, "Node.js v18.19.1 is too old: install version 20 or later"),
        ({"node": "v20.20.2", "npm": "10.8.2"}, None),
    ],
)
def test_the_obstacle_to_agents(versions: dict[str, str], reason: str | None, programs: Path) -> None:
    for name, version in versions.items():
        add(programs, name, version)
    assert install.obstacle() == reason


def test_an_agent_that_cannot_be_installed_is_skipped_with_the_reason(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "NODE", programs / "node_packages")
    install.install_agent(install.CODEX)
    assert capsys.readouterr().out.startswith("Codex: SKIPPED, since node is missing")
    add(programs, "node", "v20.20.2")
    (programs / "npm").write_text("#!/bin/sh\nexit 3\n")
    (programs / "npm").chmod(0o755)
    install.install_agent(install.CODEX)
    assert capsys.readouterr().out.endswith("Codex: SKIPPED, since npm failed with status 3\n")
    assert not install.CODEX.installed
