"""Every snippet in the documentation runs, every command in it exists, and every link in it leads somewhere."""

import importlib.util
import re
import runpy
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

import radixkv.cli
import radixkv_monitor.cli
import radixkv_traces.cli
from radixkv import AsyncEngine, Engine
from radixkv.serve import Settings
from radixkv.serve.server import Server, address, bind
from tests.disk.stored import let_any_disk_do

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def snippets(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


PROGRAMS = {
    "radixkv": radixkv.cli.main,
    "radixkv-monitor": radixkv_monitor.cli.main,
    "radixkv-replay": radixkv_traces.cli.main,
}
MODULES = ("docs_site.py", "kernel_cases.py", "machine_code.py")  # imported; no commands
SCRIPTS = [
    *(path for folder in ("benchmarks", "scripts") for path in sorted((ROOT / folder).glob("*.py"))),
    ROOT / "benchmarks" / "gpu",
    ROOT / "examples" / "agent_http.py",  # tests/cli/test_examples.py runs the others
]
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


@contextmanager
def tutorial_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the server that docs/tutorials/server.md starts, on a port that is free."""
    ready = threading.Event()
    with Engine.load("tiny", kv_memory="64MB") as engine, bind("127.0.0.1", 0) as sock:
        server = Server(AsyncEngine(engine), Settings(api_keys={"nora": "correct-horse-1"}), ready.set)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        assert ready.wait(60)
        monkeypatch.setenv("OPENAI_BASE_URL", f"{address(sock)}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "correct-horse-1")
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.mark.parametrize("page", WITH_PYTHON, ids=names(WITH_PYTHON))
def test_python_snippets_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All snippets of a page in one namespace, in order, in a folder that they may write to; `output` follows them.

    They run in this process, so that torch and transformers are imported once for all pages.
    """
    monkeypatch.chdir(tmp_path)
    let_any_disk_do(monkeypatch)
    code = "\n".join(snippets(page, "python"))
    with tutorial_server(monkeypatch) if page.name == "server.md" else nullcontext():
        exec(compile(code, str(page), "exec"), {"__name__": "__main__"})
    shown, outputs = capsys.readouterr().out, snippets(page, "output")
    assert "".join(outputs) == shown[: sum(map(len, outputs))]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_exist(page: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in line.split("#")[0].split("&&"):
        first, *rest = shlex.split(command)
        program = first.removeprefix(".venv/bin/")
        if program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {target for target in rest if "=" not in target} <= set(targets), line
        elif program == "python" and rest[0] == "-m":
            assert rest[1] == "dynamo.frontend" or importlib.util.find_spec(rest[1]), line  # make fleet runs that
        elif program == "python":
            assert (ROOT / rest[0]).exists() or "/" not in rest[0], line  # a program of the reader
        elif program in PROGRAMS:
            with pytest.raises(SystemExit) as end:
                PROGRAMS[program]([*(rest[:1] if program != "radixkv-monitor" else ()), "--help"])
            assert end.value.code == 0
            shown = capsys.readouterr().out
            for option in (word for word in rest if word.startswith("--")):
                assert option.split("=")[0] in shown, line
        else:
            assert program in ("git", "cd", "pip", "unzip", "export"), f"nobody checks this command: {line}"


@pytest.mark.long
@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.name not in MODULES], ids=lambda path: path.name)
def test_every_script_and_benchmark_starts(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert not end.value.code
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), link


def lines(*folders: str, endings: tuple[str, ...] = (".py",)) -> int:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in endings]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_readme_states_about_as_many_lines_of_code_as_there_are() -> None:
    stated = [int(each.replace(",", "")) for each in re.findall(r"([\d,]+) (?:lines|of C)", paragraph("**Small.**"))]
    all_that_ships = ("radixkv", "kernels", "monitor", "traces")
    engine = ("radixkv/cache", "radixkv/attention", "kernels", "radixkv/models", "radixkv/engine")
    native = lines("radixkv", endings=(".cpp", ".h"))
    assert stated == pytest.approx([lines(*all_that_ships), native, lines(*engine), lines("radixkv/cache")], rel=0.05)


def test_the_pages_keep_their_budgets_of_words() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert words[ROOT / "README.md"] <= 1_500
    assert sum(words.values()) <= 60_000


def paragraph(beginning: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text[text.index(beginning) :].split("\n- ")[0].split("\n\n")[0]
