"""Each format of the table: a sample, its requests, and the facts that `import` reports as missing."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from radixkv_traces import cli
from radixkv_traces.formats import FORMAT_TABLE, ChatRequest, TraceError, TraceRequest, open_trace, parse
from radixkv_traces.live.requests import PromptMaker
from radixkv_traces.text_blocks import text_blocks
from tests.traces.format_samples import CLAUDE, CODEX, SAMPLES, lines


@pytest.fixture
def requests(tmp_path: Path) -> Any:
    """Read a text as a file: its requests."""

    def read(text: str, format: str = "auto") -> list[Any]:
        (tmp_path / "trace").write_text(text)
        return list(open_trace(tmp_path / "trace", format))

    return read


def turns(found: list[ChatRequest]) -> list[tuple[float, str, int, list[str]]]:
    return [(each.timestamp, each.session, each.turn, [m["role"] for m in each.messages]) for each in found]


def test_every_format_has_a_sample() -> None:
    assert set(SAMPLES) == set(FORMAT_TABLE)


@pytest.mark.parametrize("format", FORMAT_TABLE)
def test_a_sample_is_recognised_and_read(format: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(SAMPLES[format])
    reader = open_trace(tmp_path / "trace")
    found = list(reader)
    assert found and reader.format == format
    assert found == list(open_trace(tmp_path / "trace", format))


@pytest.mark.parametrize("format", FORMAT_TABLE)
def test_an_imported_sample_reads_back(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace").write_text(SAMPLES[format])
    found = list(open_trace(tmp_path / "trace"))
    blocks = list(text_blocks(found, 16)) if isinstance(found[0], ChatRequest) else found
    assert cli.main(["import", str(tmp_path / "trace")]) == 0
    out, err = capsys.readouterr()
    imported = [parse(line) for line in out.splitlines()]
    key = lambda each: (each.timestamp, each.session, each.input_length, each.output_length, each.stop)  # noqa: E731
    begin = min(each.timestamp for each in blocks)
    assert sorted((key(each)[1:] for each in imported), key=str) == sorted((key(each)[1:] for each in blocks), key=str)
    assert imported[0].timestamp == 0.0
    assert imported[-1].timestamp == round(max(each.timestamp for each in blocks) - begin, 3)
    assert f"trace ({format}): {len(found)} requests" in err
    assert all(f"not in the file: {text}" in err for text in FORMAT_TABLE[format].lacks)


def test_import_names_the_facts_that_a_file_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace").write_text(SAMPLES["openai-batch"])
    assert cli.main(["import", str(tmp_path / "trace"), "--tokenizer", "tiny"]) == 0
    lacks = [line.removeprefix("  not in the file: ") for line in capsys.readouterr().err.splitlines()[1:]]
    assert [each.partition(":")[0] for each in lacks] == [
        "times", "the reasons why answers ended", "2 of 2 answers or their lengths",
    ]  # fmt: skip
    assert cli.main(["import", "sample:recording"]) == 0
    assert capsys.readouterr().err == (
        "sample:recording (mooncake): 38 requests, 14 sessions, 6,631 prompt tokens, 98 unique blocks\n"
    )


def test_claude_codes_answers_are_joined_and_edited_turns_are_branches(requests: Any) -> None:
    found = requests(SAMPLES["claude-code"])
    call = ["user", "assistant", "tool", "tool"]
    assert turns(found) == [
        (0.0, "s1", 1, ["user"]),
        (8000.0, "s1", 2, call),
        (40000.0, "s1", 3, [*call, "assistant", "user"]),
        (60000.0, "s1", 4, [*call, "assistant", "user"]),
        (61000.0, "s1/g", 1, ["user"]),
    ]
    assert [each.output_length for each in found] == [61, 9, 3, 4, 2]
    assert [each.stop for each in found] == ["tool_use", "end_turn", "end_turn", "end_turn", "end_turn"]
    assert [each["function"]["name"] for each in found[1].messages[1]["tool_calls"]] == ["Read", "Grep"]
    assert [each["content"] for each in found[1].messages[2:]] == ["print('moss')", "a.py:1"]
    assert found[3].messages[:5] == found[2].messages[:5]
    assert "Hmm" not in json.dumps([each.messages for each in found])


def test_codex_items_are_joined_to_answers_and_a_compaction_replaces_the_history(requests: Any) -> None:
    found = requests(SAMPLES["codex"])
    assert turns(found) == [
        (2000.0, "c1", 1, ["system", "user"]),
        (8000.0, "c1", 2, ["system", "user", "assistant", "tool"]),
        (30000.0, "c1", 3, ["system", "user", "user"]),
    ]
    assert [each.output_length for each in found] == [31, 7, None]
    assert [each.stop for each in found] == ["tool_use", "end_turn", "end_turn"]
    assert found[2].messages[1]["content"] == "The user listed files."
    assert found[1].messages[2]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'


def test_published_sets_of_conversations(requests: Any) -> None:
    pair = ["user", "assistant", "user"]
    assert turns(requests(SAMPLES["sharegpt"])) == [
        (0.0, "a_0", 1, ["user"]), (0.0, "a_0", 2, pair), (0.0, "a_1", 1, ["assistant", "user"]),
    ]  # fmt: skip
    assert turns(requests(SAMPLES["chat-logs"])) == [
        (0.0, "h", 1, ["user"]), (20000.0, "h", 2, pair), (0.0, "l", 1, ["user"]),
    ]  # fmt: skip
    batch = requests(SAMPLES["openai-batch"])
    assert turns(batch) == [(0.0, "line 1", 1, pair), (0.0, "line 2", 1, ["system", "user"])]
    assert [each.output_length for each in batch] == [0, 0]
    assert len(requests(SAMPLES["chat"])) == 2


@pytest.mark.parametrize(("format", "times"), [("azure", [0.0, 52.0]), ("burstgpt", [5000.0, 45000.0])])
def test_lengths_only_are_for_fragmentation_and_run(
    requests: Any, format: str, times: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[TraceRequest] = requests(SAMPLES[format])
    assert [round(each.timestamp, 3) for each in found] == times
    assert cli.main(["simulate", str(tmp_path / "trace")]) == 2
    assert "lengths only" in capsys.readouterr().err
    assert cli.main(["fragmentation", str(tmp_path / "trace"), "--memory", "3000"]) == 0
    assert "2 requests" in capsys.readouterr().out
    maker = PromptMaker(1000, 512)
    one, two = map(maker.prompt, found)
    assert (len(one), len(two)) == (found[0].input_length, found[1].input_length)
    assert (one[:8] != two[:8]).any()
    assert cli.main(["run", str(tmp_path / "trace"), "--asap", "--max-output", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["runs"]["radixkv"]
    assert (figures["finished"], figures["cached_tokens"]) == (2, 0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"filetype": "generate_conversations"}', "trace:1: this describes how to generate"),
        (lines([{"conversations": [{"from": "cat", "value": "Miau."}]}]), r"conversations\[0\].from: 'cat'"),
        (lines([{"conversations": [{"from": "human"}]}]), r"conversations\[0\].value: None"),
        (lines([{"conversation_id": "l", "conversation": "Hi"}]), "conversation: 'Hi' is not a list"),
        (lines([{"custom_id": "1", "url": "/v1/embeddings", "body": {"input": "x"}}]), "body: there are no messages"),
        (lines([CODEX[0], {**CODEX[2], "timestamp": "noon"}]), "trace:2: timestamp: 'noon' is no date"),
        (lines([CODEX[0], {"type": "response_item", "payload": 7}]), "trace:2: payload: 7 is not an object"),
        (lines([CLAUDE[2], {**CLAUDE[3], "timestamp": None}]), "trace:2: timestamp: None is no date"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-3,1\n", "trace:2: ContextTokens: '-3' is not"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,3\n", "trace:2: 2 values for 3 columns"),
        ("Timestamp,Request tokens,Response tokens\nx,3,4\n", "trace:2: Timestamp: 'x' is not a number of seconds"),
    ],
)  # fmt: skip
def test_a_bad_file_names_line_and_field(requests: Any, text: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        requests(text)


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    2**70,
    "",
    "x",
    "2025-13-01",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
    [{}],
    [{"role": "user"}],
]


def damaged(value: Any, draw: Random) -> Any:
    """A JSON value in which one part, drawn at random, is replaced or left out."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: damaged(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], damaged(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD)


def broken(text: str, draw: Random) -> str:
    """A file in which one value, or one character, is another."""
    rows = text.splitlines()
    at = draw.randrange(len(rows))
    if rows[at][0] in "[{" and draw.random() < 0.9:
        rows[at] = json.dumps(damaged(json.loads(rows[at]), draw))
    else:
        place = draw.randrange(len(rows[at]))
        rows[at] = rows[at][:place] + draw.choice('\x00",x{') + rows[at][place + 1 :]
    return "\n".join(rows)


@pytest.mark.parametrize("format", FORMAT_TABLE)
def test_a_damaged_file_is_read_or_named_with_its_line(format: str, tmp_path: Path) -> None:
    """A value of a wrong type never raises another error, in any later use of the requests either."""
    draw = Random(format)
    for _ in range(300):
        (tmp_path / "trace").write_text(broken(SAMPLES[format], draw))
        found: list[Any] = []
        with suppress(TraceError):
            found += open_trace(tmp_path / "trace", format)
        texts = [each for each in found if isinstance(each, ChatRequest)]
        assert all(each.input_length >= 0 for each in text_blocks(texts, 16))
        assert all(isinstance(each.session, str | None) for each in found)
