"""Claude Code edits a file over POST /v1/messages, and its prompts are found in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.clients.agents import claude_code
from tests.clients.conftest import Host, Run
from tests.clients.recorder import Traffic, Turn
from tests.clients.scripted import call
from tests.clients.turns import check_next_session, check_turns
from tests.figures import Figure

FIRST = "Make the file say goodbye."
SECOND = "Read the file again."
END = "The file says goodbye now."
REPLIES: dict[str, str] = {}  # the test adds them, since they contain the path of its project


def test_claude_code(host: Host, traffic: Traffic, project: Path, run_agent: Run, figure: Figure) -> None:
    file = project / "greeting.txt"
    file.write_text("hello world\n")
    read = call("Read", file_path=str(file))
    edit = call("Edit", file_path=str(file), old_string="hello", new_string="goodbye")
    REPLIES.update({FIRST: read, SECOND: read, "hello world": edit, "has been updated": read, "goodbye world": END})

    def session(task: str, *arguments: str, project: Path = project) -> list[Turn]:
        before = len(traffic.turns())
        assert claude_code(run_agent, host.url, project, task, *arguments) == END
        return traffic.turns()[before:]

    first = session(FIRST)
    assert file.read_text() == "goodbye world\n"
    assert len(first) == 4
    check_turns("Claude Code", first, figure)
    second = session(SECOND)
    assert len(second) == 2
    check_next_session("Claude Code", first[0], second[0], figure)
    check_turns("Claude Code, next session", second, figure)
    third = session(SECOND, "--continue")
    assert len(third) == 2
    check_turns("Claude Code, resumed session", [second[-1], *third], figure)
    other = project.parent / "other"
    shutil.copytree(project, other)
    fourth = session(SECOND, project=other)
    figure(f"Claude Code, another project: {fourth[0].cached:,} of {fourth[0].prompt:,} prompt tokens hit")
    figure(f"Claude Code, ignored fields: {traffic.ignored()}")
