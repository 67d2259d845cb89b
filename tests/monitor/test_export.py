"""Tables for other programs read back as what they were."""

from __future__ import annotations

import csv
import io
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv_monitor.export import Table

VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
ROWS = st.lists(st.fixed_dictionaries({"id": st.integers(), "what": VALUES, "blocks": st.lists(st.integers())}))


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
@given(ROWS)
def test_json_reads_back(rows: list[dict[str, object]]) -> None:
    assert json.loads(Table("x", rows).to_json()) == rows


@settings(suppress_health_check=[HealthCheck.too_slow])  # a busy machine draws slowly
@given(ROWS)
def test_csv_has_a_line_for_each_row(rows: list[dict[str, object]]) -> None:
    read = list(csv.DictReader(io.StringIO(Table("x", rows).to_csv(), newline="")))
    assert [row["id"] for row in read] == [str(row["id"]) for row in rows]
    assert [row["blocks"] for row in read] == [" ".join(map(str, row["blocks"])) for row in rows]  # type: ignore[call-overload]


def test_an_empty_table() -> None:
    assert Table("x", []).to_csv() == "" and json.loads(Table("x", []).to_json()) == []
