"""Draw pictures, a summary and a table of the results of `simulate` and `run`: `radixkv-replay report`.

matplotlib is imported only by `plots`, and may be missing.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from radixkv.cli.entry_point import AddCommand
from radixkv.errors import InvalidInput
from radixkv_traces.live.results import folder
from radixkv_traces.saved_results import Run, Simulation, read

_KINDS = ("svg", "png", "pdf")
_ABOUT = "draw the results of simulate --json or of run --out"


def add(add_command: AddCommand) -> None:
    """Add the command to a parser's commands."""
    parser = add_command("report", _ABOUT, __name__)
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
