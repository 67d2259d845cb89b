"""Draw pictures, a summary and a table of the results of `simulate` and `run`: `radixkv-replay report`.

matplotlib is imported only by `plots`, and may be missing. Results are read from disk and checked.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidInput
from radixkv_traces.live.results import MOMENTS, REQUESTS, SUMMARY, folder

_KINDS = ("svg", "png", "pdf")
_ABOUT = "draw the results of simulate --json or of run --out"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser("report", help=_ABOUT, description=f"{_ABOUT.capitalize()}.", parents=[common])
    parser.set_defaults(module=__name__)
    parser.add_argument(
        "results",
        nargs="+",
        metavar="RESULT",
        help="a file with the output of simulate --json, or a folder of run --out",
    )
    parser.add_argument(
        "--out", default=".", metavar="DIR", help="folder for the pictures (default: the current folder)"
    )
    parser.add_argument("--kind", default="svg,png", metavar="LIST", help="formats: svg, png and pdf; default svg,png")


def run(arguments: argparse.Namespace) -> int:
    """Draw everything; prints the name of each written file."""
    kinds = [kind.strip() for kind in arguments.kind.split(",")]
    for kind in kinds:
        if kind not in _KINDS:
            raise InvalidInput(f"--kind {kind!r}: allowed are {', '.join(_KINDS)}")
    results = [read(result) for result in arguments.results]
    out = folder(arguments.out)
    several = len(results) > 1
    for number, found in enumerate(results, 1):
        prefix = f"{number}-{found.name}-" if several else ""
        _write_tables(found, out, prefix)
        _draw(found, out, prefix, kinds)
    return 0


def _draw(found: Simulation | Run, out: Path, prefix: str, kinds: list[str]) -> None:
    try:
        from radixkv_traces.plots import figures
    except ImportError as error:
        raise InvalidInput(f"pictures need matplotlib: pip install 'radixkv[plots]' ({error})") from error
    for name, figure in figures(found):
        for kind in kinds:
            path = out / f"{prefix}{name}.{kind}"
            # No date, so that the same results give the same bytes.
            figure.savefig(path, dpi=150, metadata={"Date": None} if kind == "svg" else None)
            print(path)


def _write_tables(found: Simulation | Run, out: Path, prefix: str) -> None:
    """Write summary.json, and the rows as CSV; a run already has CSV files."""
    path = out / f"{prefix}summary.json"
    summary = {name: value for name, value in found.summary.items() if name != "rows"}
    if isinstance(found, Simulation):
        columns = [name for name, value in found.rows[0].items() if not isinstance(value, list)]
        rows = [{name: row.get(name) for name in columns} for row in found.rows]
        summary["rows"] = rows
        with (out / f"{prefix}rows.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(out / f"{prefix}rows.csv")
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(path)


# ---- saved results


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
    """Return the policy of a row, with its host tier if it has one: the name of a line in a picture, or of a column.

    >>> row_name({"policy": "lru", "host": "2x"}), row_name({"policy": "lru"})
    ('lru, host 2x', 'lru')
    """
    return f"{row['policy']}, host {row['host']}" if row.get("host") else str(row["policy"])
