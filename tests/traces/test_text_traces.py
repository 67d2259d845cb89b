"""Recognised formats, the text of requests and of blocks, and the reported place of invalid values."""

from __future__ import annotations

import gzip
import io
import json
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import InvalidInput
from radixkv_traces.chats import trajectories
from radixkv_traces.formats import ChatRequest, TraceError, TraceRequest, open_trace, read, sample
from radixkv_traces.mooncake import parse, to_line
from radixkv_traces.records import Line
from radixkv_traces.text_blocks import estimate, rendered, text_blocks, tokenizer
from radixkv_traces.trace_file import array_elements
from tests.traces.format_samples import SAMPLES

BLOCKS = json.dumps({"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]})
USER = {"role": "user", "content": "Hi."}
SAYS = {"role": "assistant", "content": "Hello."}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
CHAT = json.dumps({"session": "s", "messages": [USER, SAYS]})
TRAJECTORY = {"task_id": 3, "trial": 1, "traj": [USER, CALLS, {"role": "tool", "content": "x"}, SAYS]}


def requests(text: str | bytes, format: str = "auto", path: Path | None = None) -> list[Any]:
    file = (path or Path(".")) / "trace"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(open_trace(file, format))


@pytest.mark.parametrize(
    ("text", "format"),
    [
        (BLOCKS, "mooncake"),
        (CHAT, "chat"),
        (json.dumps(TRAJECTORY), "taubench"),
        (json.dumps([TRAJECTORY], indent=1), "taubench"),
    ],
)
def test_how_a_file_begins_says_what_it_is(tmp_path: Path, text: str, format: str) -> None:
    plain = requests(text, path=tmp_path)
    assert plain
    for same in (f"\n \n{text}\n\n", f"\ufeff{text}", gzip.compress(text.encode())):
        assert requests(same, path=tmp_path) == requests(same, format, path=tmp_path) == plain or format != "mooncake"
    assert requests(gzip.compress(text.encode()), format, path=tmp_path) == plain


@pytest.mark.parametrize(
    "text", ["{}", '{"prompt": "Hi"}', "7", '"hash_ids"', "nothing", "\x00\x01", "{", b"\xff\xfe{"]
)
def test_what_begins_like_no_trace_says_so(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(TraceError, match=r"trace:1: ") as caught:
        requests(text, path=tmp_path)
    assert caught.value.line == 1 and caught.value.field is None


def test_an_empty_file_has_no_requests_and_an_unknown_format_is_refused(tmp_path: Path) -> None:
    assert requests("", path=tmp_path) == requests(" \n\n", path=tmp_path) == []
    with pytest.raises(InvalidInput, match="taubench"):
        open_trace(tmp_path / "trace", "csv")


def test_standard_input_is_read_and_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BufferedReader(io.BytesIO(gzip.compress(BLOCKS.encode())))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(buffer))
    assert [request.input_length for request in read("-")] == [9]
    assert not buffer.closed


def test_a_damaged_gzip_file_and_what_is_no_text_name_the_line(tmp_path: Path) -> None:
    lines = "\n".join(parse_line(number) for number in range(2000))
    packed = gzip.compress(lines.encode())
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    found: list[Any] = []
    with pytest.raises(TraceError, match="damaged") as caught:
        found.extend(open_trace(tmp_path / "cut.gz"))
    assert 0 < len(found) < 2000 and caught.value.line == len(found) + 1
    with pytest.raises(TraceError, match=r"trace:2: not UTF-8"):
        requests(BLOCKS.encode() + b"\n\xff\n", path=tmp_path)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("text", [r'"\ud83d\ude00 \u00e9 \" \\"', '"é 日本 😀"'])
def test_a_last_line_that_is_cut_is_left_out_with_a_warning(
    tmp_path: Path, pack: Callable[[bytes], bytes], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    others = '"x": [1, -2.5e-3, 1E+9, true, false, null, NaN, -Infinity, {}, []]'
    last = f'{{"messages": [{{"role": "user", "content": {text}}}], {others}}}'.encode()
    assert len(requests(last, path=tmp_path)) == 1
    for end in range(len(last) + 1):
        caplog.clear()
        found = requests(pack(f"{CHAT}\n{CHAT}\n".encode() + last[:end]), path=tmp_path)
        is_cut = 0 < end < len(last)
        assert len(found) == (2 if end < len(last) else 3)
        warned = [record.getMessage() for record in caplog.records]
        assert warned == [f"{tmp_path / 'trace'}:3: the last line is cut, and is left out"] * is_cut


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{BLOCKS}\n{BLOCKS[:-1]}\n", 2),  # a whole line
        (f"{BLOCKS}\n{BLOCKS[:-1]}\n{BLOCKS}", 2),  # not the last one
        (BLOCKS[:-1], 1),  # the only one
        (BLOCKS + '\n{"timestamp": what', 2),
        (BLOCKS + '\n{"timestamp": "1"}', 2),
        (BLOCKS + "\n7", 2),
    ],
)
def test_other_damaged_lines_are_no_cut_lines(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(TraceError) as caught:
        requests(text, path=tmp_path)
    assert caught.value.line == line


@pytest.mark.parametrize("name", ["azure", "burstgpt"])
def test_a_last_row_that_is_cut_is_left_out_with_a_warning(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = SAMPLES[name].splitlines()[:2]
    for columns in range(1, whole[0].count(",") + 1):
        cut = ",".join(whole[1].split(",")[:columns])
        assert len(requests("\n".join([*whole, cut]), path=tmp_path)) == 1
        assert "trace:3: the last line is cut" in caplog.text
        caplog.clear()
        with pytest.raises(TraceError, match=r"trace:3: .*columns"):
            requests("\n".join([*whole, cut, ""]), path=tmp_path)


def parse_line(number: int) -> str:
    fields = {"timestamp": number, "input_length": 9, "output_length": number * 7919 % 1000, "hash_ids": [number]}
    return json.dumps(fields)


def test_each_assistant_turn_is_a_request(tmp_path: Path) -> None:
    line = {
        "session": "s", "timestamp": 5, "tenant": "t", "tools": [{"type": "function"}],
        "messages": [USER, CALLS, {"role": "tool", "content": "x"}, {**SAYS, "timestamp": 90}],
    }  # fmt: skip
    first, second = requests(json.dumps(line), path=tmp_path)
    tools = ({"type": "function"},)
    assert first == ChatRequest(5.0, (USER,), "s", 1, None, CALLS, "tool_use", "t", tools)
    assert (second.timestamp, second.turn, second.stop, len(second.messages)) == (90.0, 2, "end_turn", 3)


@pytest.mark.parametrize("indent", [None, 1])
def test_conversations_may_be_an_array(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps([{"messages": [USER, SAYS]}, json.loads(CHAT), {"messages": [USER]}], indent=indent)
    found = requests(text, path=tmp_path)
    assert [each.session for each in found] == ["conversation 1", "s", "conversation 3"]
    assert found == requests(text, "chat", path=tmp_path)
    assert len(requests(f"[{BLOCKS}, {BLOCKS}]", path=tmp_path)) == 2
    with pytest.raises(TraceError, match=r"trace:1: this begins with a message: .*\{\"messages\""):
        requests(json.dumps([USER, SAYS]), path=tmp_path)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("messages", {"messages": "Hi"}),
        ("messages[0]", {"messages": ["Hi"]}),
        ("messages[0]", {"messages": [SAYS]}),
        ("messages[1].role", {"messages": [USER, {"role": "robot", "content": ""}]}),
        ("messages[0].role", {"messages": [{"content": "Hi"}]}),
        ("messages[1].content", {"messages": [USER, {**SAYS, "content": 7}]}),
        ("messages[1].content", {"messages": [USER, {**SAYS, "content": ["Hi"]}]}),
        ("messages[1].tool_calls", {"messages": [USER, {**SAYS, "tool_calls": "f"}]}),
        ("messages[1].timestamp", {"messages": [USER, {**SAYS, "timestamp": -1}]}),
        ("messages[1].timestamp", {"messages": [USER, {**SAYS, "timestamp": None}]}),
        ("tools", {"tools": [1]}),
        ("session", {"session": 7.5}),
        ("id", {"id": False}),
        ("timestamp", {"timestamp": "now"}),
        ("tenant", {"tenant": "a", "namespace": "b"}),
    ],
)
def test_a_bad_conversation_names_file_line_and_field(tmp_path: Path, field: str, changes: dict[str, Any]) -> None:
    bad = json.dumps({"messages": [USER, SAYS], **changes})
    with pytest.raises(TraceError) as caught:
        requests(f"{CHAT}\n{bad}\n", path=tmp_path)
    assert (caught.value.line, caught.value.field) == (2, field)


def test_trajectories_are_sessions_of_task_and_trial(tmp_path: Path) -> None:
    found = requests(json.dumps([TRAJECTORY, {**TRAJECTORY, "trial": 2}]), path=tmp_path)
    assert [(each.session, each.turn, each.stop) for each in found] == [
        ("3.1", 1, "tool_use"), ("3.1", 2, "end_turn"), ("3.2", 1, "tool_use"), ("3.2", 2, "end_turn"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[\n{},\n", 2),  # no task_id
        ('[\n{"task_id": 1},\n{}]', 2),  # no traj
        ("[\n1]", 2),
        ('[\n{"task_id": true, "traj": []}]', 2),
        ("[", 1),
        ("[\n\n{", 3),
        ("[] []", 1),
        ("[],\n", 1),
        ('[\n{"task_id": 1, "traj": []}\n{"task_id": 1, "traj": []}]', 3),
        ('[\n{"task_id": 1,\n"traj": oops}]', 3),
        ("[" * 5000, 1),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_array_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(TraceError) as caught:
        requests(text, path=tmp_path)
    assert caught.value.line == line


class Drops(io.StringIO):
    """A text that is read a few characters at a time."""

    def read(self, size: int | None = -1, /) -> str:
        return super().read(min(7, size or 7))


ODD = [None, True, 0, 1, -1, 7, 1.5, -0.0, 1e300, 2**63, 10**300, "", "x", "7", '\u2028\ud800"\\', [], [[]], {}, [1]]
ODD += [
    [1, -1],
    [1, "x"],
    [[0, 2]],
    [[0, -1]],
    [[1, 2], [3, 4]],
    [[0, 2**62]],
    {"a": [1, {}]},
    [{}],
    [{"role": "user"}],
]
JSON = st.sampled_from(ODD)


@given(st.lists(st.dictionaries(st.sampled_from('ab"'), JSON, max_size=3), max_size=4), st.sampled_from([None, 1]))
@settings(deadline=None)
def test_an_array_read_in_pieces_is_the_array(values: list[dict[str, Any]], indent: int | None) -> None:
    text = json.dumps(values, indent=indent)
    assert [line.fields for line in array_elements(Drops(text), "file")] == values
    with pytest.raises(TraceError):
        list(array_elements(Drops(text[:-1]), "file"))


def test_an_array_is_not_read_to_its_end_to_give_its_first_session() -> None:
    endless = io.StringIO("[" + f"{json.dumps(TRAJECTORY)}," * 5000)
    assert next(trajectories(("", line) for line in array_elements(endless, "file"))).session == "3.1"
    assert endless.tell() < 200_000


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | JSON.map(lambda x: json.dumps(x).encode()))
@settings(max_examples=200, deadline=None)
def test_garbage_is_a_trace_error_or_nothing(tmp_path_factory: pytest.TempPathFactory, garbage: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "garbage"
    file.write_bytes(garbage)
    for format in ("auto", "mooncake", "chat", "taubench"):
        error = wrong(lambda format=format: list(open_trace(file, format)))
        assert error is None or (error.line >= 1 and str(error).startswith(f"{file}:{error.line}: "))


def wrong(reading: Callable[[], object]) -> TraceError | None:
    """The error, if it raises one."""
    try:
        reading()
    except TraceError as error:
        return error
    return None


NAMES = (
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "hash_ranges",
    "session",
    "turn",
    "stop",
    "block_size",
)


@given(st.dictionaries(st.sampled_from(NAMES), JSON))
@settings(max_examples=300, deadline=None)
def test_any_object_is_a_request_or_a_trace_error_that_names_a_field(odd: dict[str, Any]) -> None:
    line = json.dumps({**json.loads(BLOCKS), **odd})
    error = wrong(lambda: parse(line))
    if error is None:
        assert parse(to_line(parse(line))) == parse(line)
    else:
        assert error.field in NAMES and len(str(error)) < 300


@given(st.builds(TraceRequest, st.integers(0, 10**9).map(float) | st.floats(0, 1e9), *[st.integers(0, 10**6)] * 2,
                 st.lists(st.integers(0, 2**63 - 1)).map(lambda ids: array("q", ids)),
                 *[st.none() | st.text(), st.none() | st.integers(0, 99)], *[st.none() | st.text()] * 2,
                 st.none() | st.integers(1, 512)))  # fmt: skip
def test_a_line_reads_back_as_what_was_written(request_: TraceRequest) -> None:
    assert parse(to_line(request_)) == request_


# ---- text to blocks


def tokens_of(request: ChatRequest) -> list[int]:
    return [token for message in (*request.tools, *request.messages) for token in estimate(rendered(message))]


@pytest.mark.parametrize("name", ["chat", "taubench"])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_prompts_share_as_many_blocks_as_tokens(name: str, size: int) -> None:
    texts = [each for each in open_trace(sample(name)) if isinstance(each, ChatRequest)]
    blocks = list(text_blocks(texts, size))
    tokens = [tokens_of(each) for each in texts]
    for mine, ours in zip(tokens, blocks, strict=True):
        assert (ours.input_length, len(ours.blocks)) == (len(mine), -(-len(mine) // size))
    for a in range(0, len(texts), 3):
        for b in range(a):
            common = next((i for i, (x, y) in enumerate(zip(tokens[a], tokens[b], strict=False)) if x != y), None)
            if common is None:
                common = min(len(tokens[a]), len(tokens[b]))
            both = sum(x == y for x, y in zip(blocks[a].blocks, blocks[b].blocks, strict=False))
            assert both == common // size or len(tokens[a]) == len(tokens[b]) == common


def test_of_turns_that_follow_each_other_only_new_text_is_encoded() -> None:
    encoded: list[str] = []

    def encode(text: str) -> array[int]:
        encoded.append(text)
        return estimate(text)

    said = tuple({"role": role, "content": f"{role} {turn}"} for turn in range(50) for role in ("user", "assistant"))
    texts = [ChatRequest(0.0, said[: 2 * turn + 1], "s", turn + 1, 5) for turn in range(50)]
    blocks = list(text_blocks(texts, 4, encode))
    assert encoded == [rendered(message) for message in said[:-1]]
    assert blocks[-1] == next(text_blocks(texts[-1:], 4))


def test_the_bundled_tokenizer_counts_what_it_encodes() -> None:
    encode = tokenizer("tiny")
    texts = [ChatRequest(0.0, (USER,), "s", 1, None, SAYS), ChatRequest(0.0, (USER, SAYS, USER), "s", 2, 9)]
    first, second = text_blocks(texts, 4, encode)
    assert first.input_length == len(encode("<|user|>\nHi.\n"))
    assert (first.output_length, second.output_length) == (len(encode("Hello.")), 9)
    assert second.input_length == 2 * first.input_length + len(encode("<|assistant|>\nHello.\n"))


def test_parts_and_calls_count_and_the_order_of_keys_does_not() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "u"}]}
    assert rendered(parts) == '<|user|>\na{"type":"image","url":"u"}\n'
    turned = {"tool_calls": [{"function": {"name": "f"}, "id": "1"}], "content": None, "role": "assistant"}
    assert rendered(turned) == rendered(CALLS)
    assert "surrogates" in rendered({"role": "user", "content": "\ud800 surrogates"})
    assert len(estimate("\ud800")) == 1
    assert Line("f", 1, {}).text("session") is None
