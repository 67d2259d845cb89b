"""Install the clients of `make clients` into .clients: agents and libraries by npm, and Python SDKs in venvs.

    python -m tests.clients.install

The SDKs need no torch: the server runs from .venv. What npm cannot install is skipped with
the reason, and its tests are skipped too. A second call installs only what is missing.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".clients"
CAPTURED = FOLDER / "captured"  # the requests of the last run, which contain the vendors' prompts
NODE = FOLDER / "node"
REQUIREMENTS = Path(__file__).with_name("requirements")
ENVIRONMENTS = ("openai3", "openai2")  # SDKs that can be installed together
OLDEST_NODE = 20
PLATFORMS = {
    ("Linux", "x86_64"): "linux-x64",
    ("Linux", "aarch64"): "linux-arm64",
    ("Darwin", "x86_64"): "darwin-x64",
    ("Darwin", "arm64"): "darwin-arm64",
}


@dataclass(frozen=True)
class Agent:
    """A coding agent, or another client, that is an npm package. `program` is its path inside the package."""

    name: str
    package: str
    version: str
    program: str

    @property
    def folder(self) -> Path:
        return NODE / "node_modules" / self.package

    @property
    def path(self) -> Path:
        return self.folder / self.program

    @property
    def installed(self) -> bool:
        """Whether this version is installed."""
        facts = self.folder / "package.json"
        return facts.exists() and json.loads(facts.read_text())["version"] == self.version


_PLATFORM = PLATFORMS.get((platform.system(), platform.machine()), "linux-x64")
CODEX = Agent("Codex", "@openai/codex", "0.169.0", "bin/codex.js")
CLAUDE_CODE = Agent("Claude Code", f"@anthropic-ai/claude-code-{_PLATFORM}", "2.1.330", "claude")
JSDOM = Agent("jsdom", "jsdom", "26.1.0", "lib/api.js")  # a web page without a browser, which enforces CORS
OLLAMA = Agent("ollama for Node.js", "ollama", "0.6.4", "dist/index.mjs")
AGENTS = (CODEX, CLAUDE_CODE, JSDOM, OLLAMA)


def main() -> None:
    """Install everything; raise CalledProcessError if pip fails."""
    for environment in ENVIRONMENTS:
        install_sdks(environment)
    for agent in AGENTS:
        install_agent(agent)


def python_of(environment: str) -> Path:
    return FOLDER / environment / "bin" / "python"


def install_sdks(environment: str) -> None:
    """Install one file of requirements into a venv."""
    wanted, stamp = REQUIREMENTS / f"{environment}.txt", FOLDER / environment / "requirements.txt"
    if stamp.exists() and stamp.read_text() == wanted.read_text():
        print(f"SDKs of {environment}: installed", flush=True)
        return
    print(f"SDKs of {environment}: installing into .clients/{environment} (200 to 400 MB, a minute)", flush=True)
    venv.create(FOLDER / environment, with_pip=True, clear=True)
    pip = [str(python_of(environment)), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "--requirement", str(wanted)], check=True)
    shutil.copy(wanted, stamp)


def install_agent(agent: Agent) -> None:
    """Install one agent; print why if that is impossible."""
    if agent.installed:
        print(f"{agent.name}: installed", flush=True)
        return
    if reason := obstacle():
        print(f"{agent.name}: SKIPPED, since {reason}", flush=True)
        return
    print(f"{agent.name}: installing {agent.package}@{agent.version} into .clients/node (at most 400 MB)", flush=True)
    quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
    package = f"{agent.package}@{agent.version}"
    done = subprocess.run(["npm", "install", "--prefix", str(NODE), *quiet, package], check=False)
    if done.returncode:
        print(f"{agent.name}: SKIPPED, since npm failed with status {done.returncode}", flush=True)


def obstacle() -> str | None:
    """Return why npm packages cannot be installed or run, None if they can."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            return f"{program} is missing: install Node.js {OLDEST_NODE} or later, which includes npm"
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < OLDEST_NODE:
        return f"Node.js {version} is too old: install version {OLDEST_NODE} or later"
    return None


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd[:4])} failed with status {error.returncode}")
