"""Codex CLI edits a file over POST /v1/responses, and its prompts are found in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.clients.agents import codex
from tests.clients.conftest import Host, Run
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


def test_codex(host: Host, traffic: Traffic, project: Path, run_agent: Run, figure: Figure) -> None:
    (project / "greeting.txt").write_text("hello world\n")

    def session(task: str, *arguments: str, project: Path = project) -> list[Turn]:
        before = len(traffic.turns())
        assert codex(run_agent, host.url, project, task, *arguments) == END
        return traffic.turns()[before:]

    first = session(FIRST)
    assert (project / "greeting.txt").read_text() == "goodbye world\n"
    assert len(first) == 3
    check_turns("Codex", first, figure)
    second = session(SECOND)
    assert len(second) == 2
    check_next_session("Codex", first[0], second[0], figure)
    check_turns("Codex, next session", second, figure)
    third = session(SECOND, "resume", "--last")
    assert len(third) == 2
    check_turns("Codex, resumed session", [second[-1], *third], figure)
    other = project.parent / "other"
    shutil.copytree(project, other)
    fourth = session(SECOND, project=other)
    figure(f"Codex, another project: {fourth[0].cached:,} of {fourth[0].prompt:,} prompt tokens hit")
    figure(f"Codex, ignored fields: {traffic.ignored()}")
