"""Fixtures of the tests of real clients. `make clients` installs the clients and runs them; no other run does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from radixkv import Engine
from radixkv.serve import Settings
from tests.clients.install import CAPTURED, Agent, obstacle, python_of
from tests.clients.recorder import Recorder, Traffic
from tests.clients.scripted import POSITIONS, scripted_engine
from tests.engine.fakes import check
from tests.figures import Figure, figure, pytest_terminal_summary
from tests.serve.served import hosted_engine

__all__ = ["Figure", "figure", "pytest_terminal_summary"]

MODEL = "local-model"
SKIPPED = 10  # exit status of a run in which all passed, but not all clients ran
NO_NETWORK = "http://127.0.0.1:9"  # a proxy for all other addresses: nothing listens there
LIMIT = 300  # seconds for one run of a client, which takes about ten
collect_ignore = ["programs"]  # they run in another environment

Run = Callable[..., str]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Exit with a status of its own if all tests passed but some were skipped."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == 0 and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = SKIPPED


class Host:
    """The server: its address, its engine, and the requests that it received."""

    def __init__(self, url: str, engine: Engine, recorder: Recorder) -> None:
        self.url, self.engine, self.recorder = url, engine, recorder


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A server whose model replies by the module's REPLIES; at the end no block may be held, and no KV be wrong."""
    recorders: list[Recorder] = []

    def record(app: object) -> Recorder:
        recorders.append(Recorder(app))  # type: ignore[arg-type]
        return recorders[0]

    engine, runner = scripted_engine(request.module.REPLIES, getattr(request.module, "CONTEXT", POSITIONS))
    settings = Settings(port=0, model_name=MODEL, drain_timeout=5)
    with hosted_engine(engine, runner.histories, settings, record) as hosted:
        yield Host(hosted.url, engine, recorders[0])
        check(engine)
        report = engine.audit(200)
        assert not report.differences, report


@pytest.fixture
def traffic(host: Host, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """The requests of one test, which starts with an empty cache; they are written to .clients/captured at its end."""
    host.engine.clear_cache()
    found = Traffic(host.recorder)
    yield found
    found.save(CAPTURED / request.node.name)


@pytest.fixture
def run_program(tmp_path: Path, host: Host) -> Run:
    """A function that runs a program of `programs/` in an environment of SDKs and returns its output."""

    def run(name: str, environment: str, *arguments: str) -> str:
        python = python_of(environment)
        if not python.exists():
            pytest.skip("the SDKs are not installed; `make clients` installs them")
        program = Path(__file__).parent / "programs" / name
        variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
        return run_client([str(python), str(program), host.url, MODEL, *arguments], tmp_path, tmp_path, variables)

    return run


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """An empty folder inside HOME."""
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def run_agent(tmp_path: Path) -> Run:
    """A function that runs a coding agent in a project and returns its output; HOME is the same for each test."""

    def run(agent: Agent, *arguments: str, project: Path, environment: dict[str, str]) -> str:
        if not agent.installed:
            pytest.skip(f"{agent.name} is not installed: {obstacle() or '`make clients` installs it'}")
        return run_client([str(agent.path), *arguments], project, tmp_path, environment)

    return run


def run_client(command: list[str], folder: Path, home: Path, environment: dict[str, str]) -> str:
    """Run a client with an empty environment, which must end with status 0; return its standard output."""
    paths = dict.fromkeys([*(str(Path(found).parent) for name in ("node", "git") if (found := shutil.which(name)))])
    base = {
        "PATH": os.pathsep.join([*paths, "/usr/bin", "/bin"]),
        "HOME": str(home),
        "HTTP_PROXY": NO_NETWORK,
        "HTTPS_PROXY": NO_NETWORK,
        "NO_PROXY": "127.0.0.1,localhost",
    }
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, cwd=folder, env={**base, **environment}, text=True, start_new_session=True, **pipes
    ) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the program may have started others
    assert process.returncode == 0, f"status {process.returncode}\n{output[-4000:]}\n{errors[-4000:]}"
    return output
