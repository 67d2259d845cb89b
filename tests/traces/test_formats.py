"""Lines of recorded traces: valid values, and the reported place of invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import InvalidInput
from radixkv_traces.formats import TraceError, TraceRequest, parse, read, sample
from radixkv_traces.mooncake import MAX_BLOCKS

GOOD: dict[str, Any] = {"timestamp": 5, "input_length": 1100, "output_length": 7, "hash_ids": [4, 0, 9]}


def line(**changes: Any) -> str:
    fields = {**GOOD, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def test_what_is_optional_may_be_left_out_and_what_is_unknown_is_ignored() -> None:
    request = parse(line(model="m"))
    assert request == TraceRequest(5.0, 1100, 7, request.blocks)


def test_a_session_may_be_a_number_and_aiperf_calls_it_session_id() -> None:
    sessions = [parse(line(**fields)).session for fields in ({"session": 7}, {"session_id": "s"}, {"session_id": 8})]
    assert sessions == ["7", "s", "8"]
    assert parse(line(session="mine", session_id="theirs", tenant=3)).session == "mine"
    assert parse(line(tenant=3)).namespace == "3"


def test_ranges_expand_in_order() -> None:
    ranges = [[3, 4], [100, 1], [8, 0], [5, 2]]
    request = parse(line(hash_ids=..., hash_ranges=ranges))
    assert list(request.blocks) == [3, 4, 5, 6, 100, 5, 6]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        (None, "{"),
        (None, "[1]"),
        ("timestamp", line(timestamp=...)),
        ("timestamp", line(timestamp=float("nan"))),
        ("input_length", line(input_length=...)),
        ("input_length", line(input_length=True)),
        ("hash_ids", line(hash_ids=...)),
        ("hash_ids", line(hash_ids="4")),
        ("hash_ids", line(hash_ids=[1, 2**63])),
        ("hash_ranges", line(hash_ranges=[[1, 1]])),
        ("hash_ranges", line(hash_ids=..., hash_ranges=[[1]])),
        ("hash_ranges", line(hash_ids=..., hash_ranges=[[0, MAX_BLOCKS + 1]])),
        ("hash_ranges", line(hash_ids=..., hash_ranges=[[2**63 - 1, 2]])),
        ("session", line(session=[7])),
        ("timestamp", line(timestamp=..., delay=500)),
        ("turn", line(turn="1")),
        ("block_size", line(block_size=0)),
        ("tenant", line(tenant=["a"])),
        ("stop", line(stop=["end_turn"])),
    ],
)
def test_a_bad_line_names_file_line_and_field(tmp_path: Path, field: str | None, text: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{line()}\n\n{text}\n{line()}\n")
    requests = read(file)
    assert next(requests).input_length == 1100  # lines before the bad one are delivered: reading streams
    with pytest.raises(TraceError, match=r"trace\.jsonl:3: ") as caught:
        next(requests)
    assert (caught.value.file, caught.value.line, caught.value.field) == (str(file), 3, field)
    assert isinstance(caught.value, InvalidInput)


def test_an_unknown_sample_says_which_there_are() -> None:
    with pytest.raises(InvalidInput, match="conversation"):
        sample("conversations")
