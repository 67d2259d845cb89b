"""Both coding agents summarise a conversation that fills the context, and go on with the summary."""

from __future__ import annotations

from pathlib import Path

from tests.clients.agents import claude_code, codex
from tests.clients.conftest import Host, Run
from tests.clients.recorder import Traffic, Turn, turn_of
from tests.clients.scripted import call
from tests.figures import Figure

TASK = "Read all parts."
END = "All parts are read."
SUMMARY = "Parts were read before this point."
REPLIES: dict[str, str] = {}
CONTEXT = 49_152  # Claude Code keeps and repeats much of the conversation after a summary


def write_parts(project: Path, parts: int, lines: int) -> list[Path]:
    """Write files that do not fit into the context together."""
    files = [project / f"part{number}.txt" for number in range(1, parts + 1)]
    for number, file in enumerate(files, 1):
        text = f"a line of part {number} that fills the context\n" * lines
        file.write_text(f"{text}end of part {number}.\n")
    return files


def script(reads: list[str], asks_for_summary: str) -> None:
    """Read one part after another, and end after a summary."""
    REPLIES.clear()
    REPLIES[asks_for_summary] = f"<summary>{SUMMARY}</summary>"
    REPLIES[SUMMARY] = END
    REPLIES.update({f"end of part {number}.": read for number, read in enumerate(reads[1:], 1)})
    REPLIES[TASK] = reads[0]


def test_codex_compacts(host: Host, traffic: Traffic, project: Path, run_agent: Run, figure: Figure) -> None:
    """It follows the counts of the server before the context is full."""
    parts = write_parts(project, 9, 100)
    script([call("exec_command", cmd=f"cat {part.name}") for part in parts], "CONTEXT CHECKPOINT")
    settings = "model_context_window = 32768"
    assert codex(run_agent, host.url, project, TASK, settings=settings) == END
    turns = traffic.turns()
    figure(f"Codex, compaction: {', '.join(map(hit, turns))}")
    assert turns[-1].prompt < max(turn.prompt for turn in turns)


def test_claude_code_compacts(host: Host, traffic: Traffic, project: Path, run_agent: Run, figure: Figure) -> None:
    """It does so when the server refuses a prompt."""
    parts = write_parts(project, 20, 70)
    script([call("Read", file_path=str(part)) for part in parts], "Respond with plain text only")
    REPLIES["You are powered by the model"] = END  # the last message after the summary: a list of tools and facts
    assert claude_code(run_agent, host.url, project, TASK) == END
    exchanges = [each for each in traffic.exchanges() if not each.path.endswith("count_tokens")]
    refused = [each.status for each in exchanges if each.status != 200]
    assert refused and {*refused} == {400}
    hits = [hit(turn_of(each)) if each.status == 200 else "too long" for each in exchanges]
    figure(f"Claude Code, compaction: {', '.join(hits)}")


def hit(turn: Turn) -> str:
    return f"{turn.cached:,} of {turn.prompt:,}"
