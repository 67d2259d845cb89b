"""Start the processes that are measured, ours and llama.cpp's, and send them commands; install the peer.

Both read commands as JSON objects, one a line, and answer each with a JSON object on one line, `{"error": TEXT}` where
it failed:

    load      model, threads, streams, context, settings -> versions
              room for `streams` sequences of `context` tokens
    tokenize  texts -> ids                       control tokens in a text count as such; no token is added
    render    questions -> texts                 ours only: the text that each turn of a chat adds
    generate  prompts, tokens -> replies, first, total, computed
              `tokens` greedy tokens after each prompt, all prompts at once, and on after the end of a text;
              `first` (of each prompt) and `total` are {cpu_ms, wall_ms} since the command came;
              `computed` counts the tokens that ran through the model
    usage     -> cpu_s, peak_mb                  of the process since its start
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

OURS, PEER = "radixkv", "llama.cpp"
SETTINGS: dict[str, dict[str, Any]] = {
    f"{kv} KV, flash attention {'on' if flash else 'off'}": {"kv": kv, "flash": flash}
    for kv in ("F16", "F32")
    for flash in (False, True)
}
"""The settings of the peer that are tried."""
PACKAGE, VERSION = "node-llama-cpp", "3.22.1"
BUILDS = {
    ("Linux", "x86_64"): "linux-x64",
    ("Linux", "aarch64"): "linux-arm64",
    ("Darwin", "arm64"): "mac-arm64-metal",
    ("Darwin", "x86_64"): "mac-x64",
}
"""The package's own CPU build for each machine."""
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class WorkerError(Exception):
    """A process ended, or answered a command with an error."""


class Worker:
    """One process; `started` is the wall clock at its start, `versions` come from its `load`."""

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        """Start the process. Raises WorkerError if there is no such program."""
        self.name = name
        self.versions: dict[str, str] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        paths = [ROOT, ROOT / "kernels", ROOT / "monitor", ROOT / "traces", os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
        }
        self.started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                text=True,
            )
        except OSError as error:
            raise WorkerError(f"{name} did not start: {error}") from error

    def ask(self, command: str, **options: Any) -> dict[str, Any]:
        """Send a command and wait for its reply; raises WorkerError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **options}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"{self.name} ended during {command}: {self._tail_of_log()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{self.name}, {command}: {reply['error']}")
        return reply

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Self:
        """Use the process in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self.close()

    def _tail_of_log(self) -> str:
        self._process.wait()
        self._log.seek(0)
        return self._log.read()[-1000:].decode(errors="replace").strip() or f"exit code {self._process.returncode}"


@dataclass(frozen=True)
class Side:
    """One of the two engines: how to start it, and the settings that `load` gets."""

    name: str
    command: tuple[str, ...]
    settings: dict[str, Any]

    def start(self, model: str, *, threads: int, streams: int, context: int) -> Worker:
        """Start a process and load the model; raises WorkerError."""
        worker = Worker(self.name, self.command, threads)
        try:
            sizes = {"threads": threads, "streams": streams, "context": context}
            worker.versions = worker.ask("load", model=model, settings=self.settings, **sizes)["versions"]
        except BaseException:
            worker.close()
            raise
        return worker


def ours(weights: str = "auto") -> Side:
    """The process of radixkv, under this Python, with this form of weights."""
    return Side(OURS, (sys.executable, str(HERE / "ours.py")), {"weights": weights})


# ---- the peer


def peer(folder: Path, model: str) -> Side:
    """The process of llama.cpp, from the package in `folder`. Raises WorkerError if it cannot load the model here."""
    node = shutil.which("node")
    if node is None:
        raise WorkerError("node is not installed, and llama.cpp is run through the npm package node-llama-cpp")
    if not (folder / "node_modules" / PACKAGE / "package.json").is_file():
        raise WorkerError(f"{PACKAGE} is not in {folder}; --install-peer installs it there")
    command = (node, str(HERE / "peer.mjs"), str(folder.resolve()))
    side = Side(PEER, command, next(iter(SETTINGS.values())))
    side.start(model, threads=1, streams=1, context=256).close()
    return side


def default_folder() -> Path:
    """The folder of the peer in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "radixkv" / f"{PACKAGE}-{VERSION}"


def install(folder: Path) -> None:
    """Install the package and its CPU build into `folder` with npm: 85 MB. Raises WorkerError."""
    npm, machine = shutil.which("npm"), (platform.system(), platform.machine())
    if npm is None:
        raise WorkerError("npm is not installed")
    if machine not in BUILDS:
        raise WorkerError(f"{PACKAGE} has no build for {' '.join(machine)}")
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{PACKAGE}@{VERSION}", f"@{PACKAGE}/{BUILDS[machine]}@{VERSION}"]
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--omit=optional", "--prefix", str(folder)]
    if subprocess.run([npm, "install", *options, *names], cwd=folder).returncode:
        raise WorkerError(f"npm could not install {' and '.join(names)}")
