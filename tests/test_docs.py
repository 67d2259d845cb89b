"""Every snippet in the documentation runs, every command in it exists, and every link in it leads somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def snippets(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def python(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=300, check=False)


WITH_PYTHON = [page for page in PAGES if snippets(page, "python")]
COMMANDS = [
    (page.name, line.removeprefix("$ "))
    for page in PAGES
    for body in snippets(page, "sh", "bash", "console")
    for line in body.splitlines()
    if line.strip() and not line.startswith("#") and ("$ " in line[:2] or body.count("$ ") == 0)
]


def test_the_readme_has_snippets_of_both_kinds() -> None:
    assert ROOT / "README.md" in WITH_PYTHON
    assert {"README.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize("page", WITH_PYTHON, ids=names(WITH_PYTHON))
def test_python_snippets_run(page: Path, tmp_path: Path) -> None:
    """All of a page's snippets in one fresh interpreter, in order, offline, in a folder that they may write to."""
    code = "\n".join(snippets(page, "python"))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = python("-c", code, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_exist(page: str, line: str) -> None:
    for command in line.split("#")[0].split("&&"):
        first, *rest = shlex.split(command)
        if first == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(rest) <= set(targets), line
        elif first in ("python", ".venv/bin/python"):
            assert (ROOT / rest[0]).is_file(), line
        elif first in ("radixkv", ".venv/bin/radixkv"):
            done = python("-m", "radixkv", *rest[:1], "--help")
            assert done.returncode == 0, done.stderr[-2000:]
        elif first == "radixkv-monitor":
            done = python("-c", "from radixkv_monitor.cli import main; main(['--help'])")
            assert done.returncode == 0, done.stderr[-2000:]
            for option in (word for word in rest if word.startswith("--")):
                assert option in done.stdout, line
        elif first == "radixkv-replay":
            code = "import sys; from radixkv_traces.cli import main; main(sys.argv[1:])"
            done = python("-c", code, *rest[:1], "--help")
            assert done.returncode == 0, done.stderr[-2000:]
            for option in (word for word in rest if word.startswith("--")):
                assert option in done.stdout, line
        else:
            assert first in ("git", "cd", "pip", ".venv/bin/pip", "unzip"), f"nobody checks this command: {line}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), link
