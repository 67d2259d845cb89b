"""Parquet files are read like lines of JSON: with pyarrow, which only their readers install."""

from __future__ import annotations

import importlib.util
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import InvalidInput
from radixkv_traces.cli import main
from radixkv_traces.formats import TraceError, open_trace
from radixkv_traces.trace_file import PARQUET_MAGIC
from tests.traces.format_samples import LMSYS, WILDCHAT, lines

has_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")


def dated(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with dates in place of texts, as the published files have them."""
    said = [
        {**each, **({"timestamp": datetime.fromisoformat(each["timestamp"])} if each.get("timestamp") else {})}
        for each in row["conversation"]
    ]
    return {**row, "conversation": said}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


@has_pyarrow
@pytest.mark.parametrize("row", [LMSYS, WILDCHAT], ids=["lmsys", "wildchat"])
def test_rows_are_the_requests_of_the_same_lines(row: dict[str, Any], tmp_path: Path) -> None:
    text = tmp_path / "rows.jsonl"
    text.write_text(lines([{**row, "conversation_hash": str(number)} for number in range(5)]))
    rows = [dated({**row, "conversation_hash": str(number)}) for number in range(5)]
    table = write(tmp_path / "rows.parquet", rows)
    assert list(open_trace(table)) == list(open_trace(text)) != []


@has_pyarrow
def test_import_reads_a_parquet_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path / "rows.parquet", [LMSYS])
    assert main(["import", str(table)]) == 0
    assert "(chat-logs): 1 request" in capsys.readouterr().err


@has_pyarrow
def test_a_damaged_file_is_named_and_a_bad_row_has_its_number(tmp_path: Path) -> None:
    table = write(tmp_path / "rows.parquet", [LMSYS] * 3)
    whole = table.read_bytes()
    for cut in (4, len(whole) // 2, len(whole) - 1):
        table.write_bytes(whole[:cut])
        with pytest.raises(TraceError, match="damaged"):
            list(open_trace(table))
    bad = write(tmp_path / "bad.parquet", [LMSYS, {**LMSYS, "conversation": [{"role": None, "content": "Hi."}]}])
    with pytest.raises(TraceError, match=r"bad\.parquet:2"):
        list(open_trace(bad))


@has_pyarrow
def test_dates_with_a_zone_and_without(tmp_path: Path) -> None:
    when = datetime(2024, 5, 1, 12, tzinfo=UTC)
    rows = [{**LMSYS, "conversation_id": str(n), "timestamp": when.replace(second=n)} for n in (0, 30)]
    assert [each.timestamp for each in open_trace(write(tmp_path / "rows.parquet", rows))] == [0.0, 30000.0]


def test_without_pyarrow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    table = tmp_path / "rows.parquet"
    table.write_bytes(PARQUET_MAGIC + bytes(20))
    with pytest.raises(InvalidInput, match=r"radixkv\[parquet\]"):
        list(open_trace(table))
