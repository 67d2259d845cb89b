"""Results of `simulate --json` and `run --out`, read from disk and checked."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidInput
from radixkv_traces.live.results import MOMENTS, REQUESTS, SUMMARY

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Simulation:
    """The results of one `simulate`: a row for each policy and capacity."""

    name: str
    summary: dict[str, Any]
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one `run`; `requests` and `moments` are rows of its CSV files, numbers as floats."""

    name: str
    summary: dict[str, Any]
    requests: list[Row]
    moments: list[Row]


def read(path: str) -> Simulation | Run:
    """Read a file that `simulate --json` printed, or a folder of `run --out`. Raises InvalidInput for anything else."""
    where = Path(path)
    if where.is_dir():
        return _run(where)
    summary = _json(where)
    rows = summary.get("rows")
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise InvalidInput(
            f"{path}: not the output of `simulate --json`: its rows have no policy, capacity and hit rate"
        )
    if not rows:
        raise InvalidInput(f"{path}: the simulation has no rows")
    return Simulation(where.stem, summary, rows)


def _run(folder: Path) -> Run:
    if not (folder / SUMMARY).is_file():
        raise InvalidInput(f"{folder}: no {SUMMARY} there; give a folder that `run --out` wrote")
    summary = _json(folder / SUMMARY)
    return Run(
        folder.name, summary, list(_rows(folder / REQUESTS, "sent_s")), list(_rows(folder / MOMENTS, "num_blocks"))
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidInput(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{path}: a JSON {type(found).__name__}, not an object")
    return found


def _rows(path: Path, needed: str) -> Iterator[Row]:
    """Read the rows of a CSV file, numbers as floats and empty cells as None."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if needed not in (reader.fieldnames or ()):
                raise InvalidInput(f"{path}: no column {needed}")
            for row in reader:
                yield {name: _value(text) for name, text in row.items() if name is not None}
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from error


def _value(text: str | None) -> Any:
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _is_row(row: object) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("policy"), str)
        and all(isinstance(row.get(name), int | float) for name in ("capacity_blocks", "token_hit_rate"))
    )


def row_name(row: Mapping[str, Any]) -> str:
    """Return the policy of a row, with its lower tiers and order if it has any: the name of a line in a picture, or of
    a column.

    >>> row_name({"policy": "lru", "host": "2x"}), row_name({"policy": "lru"})
    ('lru, host 2x', 'lru')
    >>> row_name({"policy": "lru", "order": "fcfs"})
    'lru, fcfs'
    """
    parts = [row["policy"], *(f"{tier} {row[tier]}" for tier in ("host", "disk") if row.get(tier))]
    if row.get("order"):
        parts.append(row["order"])
    return ", ".join(parts)
