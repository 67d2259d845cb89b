"""Lint: its costs against a real cache, its findings on small logs, and the command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from radixkv.cache import PrefixCache
from radixkv_traces import cli
from radixkv_traces.chats import ChatRequest
from radixkv_traces.formats import TEXT_FORMATS
from radixkv_traces.lint import lint
from radixkv_traces.lint.linter import shown
from radixkv_traces.text_blocks import estimate
from tests.traces.format_samples import SAMPLES

SYSTEM = {"role": "system", "content": "You are brief. " * 20}
Said = dict[str, Any]
Captured = pytest.CaptureFixture[str]


def talk(*texts: str) -> tuple[Said, ...]:
    """Return questions and answers in turn, 100 characters each."""
    roles = "user", "assistant"
    return tuple({"role": roles[at % 2], "content": text.ljust(100, ".")} for at, text in enumerate(texts))


def request(*messages: Said, session: str = "s", tools: tuple[Said, ...] = (), **fields: Any) -> ChatRequest:
    return ChatRequest(fields.pop("timestamp", 0.0), messages, session, 1, tools=tools, **fields)


def clock(hours: int, *texts: str, **fields: Any) -> ChatRequest:
    """Return a request with the time in its system prompt, sent at that time."""
    system = {**SYSTEM, "content": f"It is {hours:02}:00. {SYSTEM['content']}"}
    return request(system, *talk(*texts), timestamp=hours * 3_600_000.0, **fields)


def tokens(each: ChatRequest) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.frombuffer(b"".join(estimate(shown(said)).tobytes() for said in (*each.tools, *each.messages)), np.int32)


def missed_by_a_cache(log: list[ChatRequest]) -> int:
    """Serve the prompts from a cache that never evicts."""
    cache, missed = PrefixCache(100_000, 1), 0
    for each in log:
        with cache.open(tokens(each), each.namespace) as opened:
            rest = tokens(each)[opened.length :]
            opened.extend(rest)
            opened.commit()
        missed += len(rest)
    return missed


@pytest.mark.parametrize("seed", range(20))
def test_the_cost_of_random_changes_is_at_most_the_misses_of_a_real_cache(seed: int) -> None:
    rng, log = Random(seed), list[ChatRequest]()
    prompts: list[list[Said]] = [[{**SYSTEM}] for _ in range(3)]
    for _ in range(40):
        prompt = rng.choice(prompts)
        prompt.append(rng.choice(talk(*(f"{rng.choice('abc')} at {rng.randint(10, 23)}:07" for _ in range(2)))))
        at = rng.randrange(len(prompt))
        prompt[:] = rng.choice([prompt, prompt[:at] + prompt[at + 1 :], prompt[at:]]) or [SYSTEM]
        tools = tuple({"name": name} for name in rng.sample("ab", 2))
        log.append(request(*prompt, session=str(prompts.index(prompt)), tools=tools, namespace=rng.choice("nm")))
    report = lint(log)
    assert report.missed_tokens == missed_by_a_cache(log)
    assert report.prompt_tokens == sum(len(tokens(each)) for each in log)
    assert 0 < report.cost <= report.missed_tokens


def test_a_clock_costs_what_a_cache_hits_more_without_it() -> None:
    sent = [clock(hours, *"abcdefg"[: 2 * hours - 17]) for hours in (9, 10, 11)]
    report = lint(sent)
    undone = [request(sent[0].messages[0], *each.messages[1:]) for each in sent]
    assert (report.findings[0].place, report.findings[0].requests) == ("system, character 6", 2)
    assert report.findings[0].tokens == missed_by_a_cache(sent) - missed_by_a_cache(undone)
    assert report.findings[0].tokens_a_day == report.findings[0].tokens * 12
    assert report.findings[0].before[:12] == "It is 09:00."
    assert lint(replace(each, timestamp=0.0) for each in sent).findings[0].tokens_a_day is None


def test_two_breaks_of_one_request_are_two_findings() -> None:
    tools = {"name": "read" * 20}, {"name": "grep" * 20}
    before = clock(9, "a", "b", "c", tools=tools)
    now = clock(10, "a", "b", "c", "d", "e", tools=tools[::-1])
    report = lint([before, now])
    assert [each.rule for each in report.findings] == ["volatile-text", "tools-order"]
    assert report.cost == len(tokens(before)) - 2  # a rendered role is shared


def test_the_instructions_after_a_document_are_private_text_first() -> None:
    asked = ({"role": "user", "content": f"Text {name}. {'Sum it up. ' * 90}"} for name in "ab")
    (found,) = lint(request(SYSTEM, each, session=each["content"][:6]) for each in asked).findings
    assert (found.rule, found.place, found.tokens) == ("private-first", "messages[1]", 248)


def test_hits_end_at_full_blocks() -> None:
    one, by_block = (lint([clock(9, "a"), clock(9, "a", "b", "c")], block_size=size) for size in (1, 64))
    assert by_block.missed_tokens - one.missed_tokens == (one.prompt_tokens - one.missed_tokens) % 64 > 0


@pytest.mark.parametrize("name", [*TEXT_FORMATS, "sample:taubench", "sample:chat"])
def test_a_log_of_every_format_with_text_is_clean(name: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "log").write_text(SAMPLES.get(name, ""))
    assert cli.main(["lint", str(tmp_path / "log") if name in SAMPLES else name, "--fail-over", "0%"]) == 0
    out = capsys.readouterr().out
    assert "breaks cost 0 (0.0%)" in out
    assert ("not in the file: system prompts" in out) == (name in ("sharegpt", "chat-logs", "claude-code"))


def write(path: Path) -> str:
    """Write a log of requests, each with the time in its system prompt."""
    log = [clock(hours, *"abcdefg"[: 2 * hours - 17]) for hours in (9, 10, 11)]
    fields = [{"session": each.session, "timestamp": each.timestamp, "messages": each.messages} for each in log]
    path.write_text("".join(json.dumps(each | {"output_length": 9}) + "\n" for each in fields))
    return str(path)


def test_the_command_prints_a_table_and_texts_only_on_request(tmp_path: Path, capsys: Captured) -> None:
    path = write(tmp_path / "log.jsonl")
    assert cli.main(["lint", path]) == 0
    out = capsys.readouterr().out
    assert "volatile-text  system, character 6         2" in out
    assert "Move dates, times, ids" in out and "10:00" not in out
    assert cli.main(["lint", path, "--show-text"]) == 0
    assert "after  'It is 10:00. You are brief." in capsys.readouterr().out


def test_json_and_the_status_of_a_bar(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "log.jsonl")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(path).read_bytes())))
    assert cli.main(["lint", "-", "--json", "--fail-over", "5%"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["finished"], found["findings"][0]["requests"]) == (3, True, 2)
    assert "before" not in found["findings"][0]
    assert cli.main(["lint", path, "--json", "--show-text", "--fail-over", "99%"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["before"].startswith("It is 09:00")


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
