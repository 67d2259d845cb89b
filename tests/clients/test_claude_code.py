"""Claude Code edits a file over POST /v1/messages, and its prompts are found in the cache."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.conftest import MODEL, Host, Run
from tests.clients.install import CLAUDE_CODE
from tests.clients.recorder import Traffic, Turn
from tests.clients.scripted import call
from tests.clients.turns import check_next_session, check_turns
from tests.figures import Figure

FIRST = "Make the file say goodbye."
SECOND = "Read the file again."
END = "The file says goodbye now."
REPLIES: dict[str, str] = {}  # the test adds them, since they contain the path of its project


def test_claude_code(host: Host, traffic: Traffic, tmp_path: Path, run_agent: Run, figure: Figure) -> None:
    project = tmp_path / "project"
    project.mkdir()
    file = project / "greeting.txt"
    file.write_text("hello world\n")
    read = call("Read", file_path=str(file))
    edit = call("Edit", file_path=str(file), old_string="hello", new_string="goodbye")
    REPLIES.update({FIRST: read, SECOND: read, "hello world": edit, "has been updated": END, "goodbye world": END})
    environment = {
        "ANTHROPIC_BASE_URL": host.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }

    def session(task: str) -> list[Turn]:
        before = len(traffic.turns())
        options = ["--model", MODEL, "--allowedTools", "Read Edit", "--output-format", "stream-json", "--verbose"]
        output = run_agent(CLAUDE_CODE, "-p", task, *options, project=project, environment=environment)
        last = json.loads(output.splitlines()[-1])
        assert (last["type"], last["subtype"], last["result"]) == ("result", "success", END), output
        return traffic.turns()[before:]

    first = session(FIRST)
    assert file.read_text() == "goodbye world\n"
    assert len(first) == 3
    check_turns("Claude Code", first, figure)
    second = session(SECOND)
    assert len(second) == 2
    check_next_session("Claude Code", first[0], second[0], figure)
    check_turns("Claude Code, next session", second, figure)
    figure(f"Claude Code, ignored fields: {traffic.ignored()}")
