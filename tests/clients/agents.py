"""Run the coding agents in a project, each configured for one server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import MODEL, Run
from tests.clients.install import CLAUDE_CODE, CODEX

_CODEX_CONFIG = """\
model = "{model}"
model_provider = "radixkv"
check_for_update_on_startup = false
{settings}

[model_providers.radixkv]
name = "radixkv"
base_url = "{url}/v1"
env_key = "RADIXKV_KEY"
wire_api = "responses"
"""
_CLAUDE_CODE_ENVIRONMENT = {
    "ANTHROPIC_AUTH_TOKEN": "none",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


def codex(run: Run, url: str, project: Path, task: str, *arguments: str, settings: str = "") -> str:
    """Run `codex exec` with more arguments and lines of config.toml; return the agent's last message."""
    config = project.parent / ".codex" / "config.toml"
    config.parent.mkdir(exist_ok=True)
    config.write_text(_CODEX_CONFIG.format(model=MODEL, url=url, settings=settings))
    options = ["exec", "--skip-git-repo-check", "-C", str(project), "-s", "workspace-write", "--json", *arguments]
    output = run(CODEX, *options, task, project=project, environment={"RADIXKV_KEY": "none"})
    items = [json.loads(line).get("item", {}) for line in output.splitlines() if line.startswith("{")]
    return [item["text"] for item in items if item.get("type") == "agent_message"][-1]


def claude_code(run: Run, url: str, project: Path, task: str, *arguments: str) -> str:
    """Run `claude -p` with more arguments; return the agent's last message."""
    options = ["--model", MODEL, "--allowedTools", "Read Edit", "--output-format", "stream-json", "--verbose"]
    environment = {**_CLAUDE_CODE_ENVIRONMENT, "ANTHROPIC_BASE_URL": url}
    output = run(CLAUDE_CODE, "-p", task, *arguments, *options, project=project, environment=environment)
    last = json.loads(output.splitlines()[-1])
    assert (last["type"], last["subtype"]) == ("result", "success"), output
    return str(last["result"])
