"""Codex CLI edits a file over POST /v1/responses, and its prompts are found in the cache."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import MODEL, Host, Run
from tests.clients.install import CODEX
from tests.clients.recorder import Traffic, Turn
from tests.clients.scripted import call
from tests.clients.turns import check_next_session, check_turns
from tests.figures import Figure

FIRST = "Make the file say goodbye."
SECOND = "Count the letters again."
END = "The file says goodbye now."
REPLIES = {
    FIRST: call("exec_command", cmd="sed -i s/hello/goodbye/ greeting.txt && cat greeting.txt"),
    SECOND: call("exec_command", cmd="wc -c greeting.txt"),
    "goodbye world": call("exec_command", cmd="wc -c greeting.txt"),
    "14 greeting.txt": END,
}
CONFIG = """\
model = "{model}"
model_provider = "radixkv"
check_for_update_on_startup = false

[model_providers.radixkv]
name = "radixkv"
base_url = "{url}/v1"
env_key = "RADIXKV_KEY"
wire_api = "responses"
"""


def test_codex(host: Host, traffic: Traffic, tmp_path: Path, run_agent: Run, figure: Figure) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "greeting.txt").write_text("hello world\n")
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(CONFIG.format(model=MODEL, url=host.url))

    def session(task: str) -> list[Turn]:
        before = len(traffic.turns())
        options = ["exec", "--skip-git-repo-check", "-C", str(project), "-s", "workspace-write", "--json"]
        output = run_agent(CODEX, *options, task, project=project, environment={"RADIXKV_KEY": "none"})
        items = [json.loads(line).get("item", {}) for line in output.splitlines() if line.startswith("{")]
        assert [item["text"] for item in items if item.get("type") == "agent_message"][-1:] == [END], output
        return traffic.turns()[before:]

    first = session(FIRST)
    assert (project / "greeting.txt").read_text() == "goodbye world\n"
    assert len(first) == 3
    check_turns("Codex", first, figure)
    second = session(SECOND)
    assert len(second) == 2
    check_next_session("Codex", first[0], second[0], figure)
    check_turns("Codex, next session", second, figure)
    figure(f"Codex, ignored fields: {traffic.ignored()}")
