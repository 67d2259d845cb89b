"""Lint: its findings on small logs, and the command."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from radixkv_traces import cli
from radixkv_traces.chats import ChatRequest
from radixkv_traces.formats import TEXT_FORMATS
from radixkv_traces.lint import lint
from tests.traces.format_samples import SAMPLES

SYSTEM = {"role": "system", "content": "You are brief. " * 20}
Said = dict[str, Any]
Captured = pytest.CaptureFixture[str]


def talk(*texts: str) -> tuple[Said, ...]:
    """Return questions and answers in turn, 100 characters each."""
    roles = "user", "assistant"
    return tuple({"role": roles[at % 2], "content": text.ljust(100, ".")} for at, text in enumerate(texts))


def clock(hours: int, texts: str, tools: tuple[Said, ...] = ()) -> ChatRequest:
    """Return a request with the time in its system prompt, sent at that time."""
    system = {**SYSTEM, "content": f"It is {hours:02}:00. {SYSTEM['content']}"}
    return ChatRequest(hours * 3_600_000.0, (system, *talk(*texts)), "s", 1, tools=tools)


def test_two_breaks_of_one_request_are_two_findings() -> None:
    tools = {"name": "read" * 20}, {"name": "grep" * 20}
    before = clock(9, "abc", tools)
    now = clock(10, "abcde", tools[::-1])
    report = lint([before, now])
    assert [each.rule for each in report.findings] == ["volatile-text", "tools-order"]
    assert report.cost == report.prompt_tokens - lint([now]).prompt_tokens - 2  # a rendered role is shared


def test_the_instructions_after_a_document_are_private_text_first() -> None:
    asked = ({"role": "user", "content": f"Text {name}. {'Sum it up. ' * 90}"} for name in "ab")
    (found,) = lint(ChatRequest(0.0, (SYSTEM, each), each["content"][:6], 1) for each in asked).findings
    assert (found.rule, found.place, found.tokens) == ("private-first", "messages[1]", 248)


def test_hits_end_at_full_blocks() -> None:
    one, by_block = (lint([clock(9, "a"), clock(9, "abc")], block_size=size) for size in (1, 64))
    assert by_block.missed_tokens - one.missed_tokens == (one.prompt_tokens - one.missed_tokens) % 64 > 0


@pytest.mark.parametrize("name", [*TEXT_FORMATS, "sample:taubench", "sample:chat"])
def test_a_log_of_every_format_with_text_is_clean(name: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log").write_text(SAMPLES.get(name, ""))
    assert cli.main(["lint", str(tmp_path / "log") if name in SAMPLES else name, "--fail-over", "0%"]) == 0
    out = capsys.readouterr().out
    assert "breaks cost 0 (0.0%)" in out
    assert ("not in the file: system prompts" in out) == (name in ("sharegpt", "chat-logs", "claude-code"))


def write(path: Path, form: str = "lines") -> str:
    """Write a log of requests, each with the time in its system prompt."""
    log = [clock(hours, "abcdefg"[: 2 * hours - 17], ({"name": "read"},)) for hours in (9, 10, 11)]
    names = "session", "timestamp", "messages", "tools"
    lines = [{"output_length": 9} | {name: getattr(each, name) for name in names} for each in log]
    lines = lines if form == "lines" else [{"custom_id": "a", "body": each} for each in lines]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(path)


@pytest.mark.parametrize("form", ["lines", "openai-batch"])
def test_the_command_prints_a_table_or_json_and_texts_only_on_request(
    form: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "log.jsonl", form)

    def said(*options: str, status: int = 0) -> str:
        assert cli.main(["lint", *options]) == status
        return capsys.readouterr().out

    table = said(path)
    assert "volatile-text  system, character 6         2" in table
    assert "Move dates, times, ids" in table and "10:00" not in table
    assert "after  'It is 10:00. You are brief." in said(path, "--show-text")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(path).read_bytes())))
    found = json.loads(said("-", "--json", "--fail-over", "5%", status=1))
    (finding,) = found["findings"]
    assert (found["requests"], found["finished"], finding["requests"], "before" in finding) == (3, True, 2, False)
    assert finding["tokens_a_day"] == (finding["tokens"] * 12 if form == "lines" else None)
    shown = json.loads(said(path, "--json", "--show-text", "--fail-over", "99%"))["findings"][0]
    assert shown["before"].startswith("It is 09:00")


def test_bad_input_is_named(tmp_path: Path, capsys: Captured) -> None:
    path = Path(write(tmp_path / "log.jsonl"))
    path.write_text(path.read_text().replace('"role": "assistant"', '"role": "bot"', 1))
    assert cli.main(["lint", str(path)]) == 2
    assert "log.jsonl:2: messages[2].role: 'bot'" in capsys.readouterr().err
    path.write_text("")
    assert cli.main(["lint", str(path), "--fail-over", "5%"]) == 2
    assert "no request" in capsys.readouterr().err
    assert cli.main(["lint", "sample:conversation"]) == 2
    assert "formats with text are taubench, openai-batch" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["lint", str(path), "--fail-over", "5"])
    assert "5: allowed is a share such as 5%" in capsys.readouterr().err
