"""A result as a Markdown page: bars first, then a table for each part."""

from __future__ import annotations

from typing import Any

from .result import Row

COLUMNS: dict[str, tuple[str, ...]] = {
    "ceilings": ("case", "us", "tb_s", "tflop_s", "how"),
    "decode": ("shape", "case", "layout", "us", "tb_s", "share", "tiles", "error"),
    "tree": ("shape", "case", "mode", "us", "floor_us", "speedup", "tb_s", "share", "tiles", "error"),
    "chunks": ("case", "us", "tflop_s", "sdpa_backend", "sdpa_us", "sdpa_tflop_s", "of_sdpa", "error"),
    "peers": ("shape", "case", "peer", "us", "ours_us", "ratio", "spread", "error"),
    "engine": (
        "case",
        "mode",
        "state",
        "step_ms",
        "floor_ms",
        "of_floor",
        "miss_ms",
        "hit_ms",
        "miss_of_floor",
        "seconds",
        "tokens_per_s",
        "over_flat",
        "attention",
    ),
    "profiles": ("case", "what", "launches", "kernel_us"),
}

UNITS = (
    "`us` is microseconds of one call over one layer, the median; `share` is of the read ceiling, `floor` the time of "
    "reading each byte once at that ceiling; `error` is the distance from the reference in float64, relative; "
    "`tiles` are counted by kind, from few rows to many; `ratio` is a peer's time over ours."
)


def markdown(result: dict[str, Any]) -> str:
    """The whole page."""
    device = result["device"]
    lines = [
        f"# GPU: {device['name'] if device else 'none'}, {result['date']}",
        "",
        f"`python benchmarks/gpu`, {', '.join(f'{name} {version}' for name, version in result['versions'].items())}, "
        f"commit {result['commit']}; {result['seconds']:.0f} s.",
        "",
        *([f"**Not measured: {result['reason']}.**", ""] if result["reason"] else []),
        "## Bars",
        "",
        *bar_table(result["bars"]),
        "",
        UNITS,
    ]
    for name, part in result["parts"].items():
        lines += ["", f"## {name}: {part['says']}", "", *_part(name, part)]
    return "\n".join(lines) + "\n"


def bar_table(bars: list[Row]) -> list[str]:
    """Return each bar, its result and whether that meets it."""
    rows = [
        {
            "bar": bar["says"],
            "wanted": f"{'<=' if bar['at_most'] else '>='} {bar['target']:g}",
            "found": f"{bar['found']:g} ({bar['case']})" if "found" in bar else bar["why"],
            "state": f"**{bar['state']}**" if bar["state"] != "met" else "met",
        }
        for bar in bars
    ]
    return table(rows, ("bar", "wanted", "found", "state"))


def table(rows: list[Row], columns: tuple[str, ...]) -> list[str]:
    """Rows as lines of Markdown; columns that no row has are left out."""
    used = [column for column in columns if any(row.get(column) is not None for row in rows)]
    head = ["| " + " | ".join(used) + " |", "|" + "---|" * len(used)]
    return head + ["| " + " | ".join(_cell(row.get(column)) for column in used) + " |" for row in rows]


def _part(name: str, part: dict[str, Any]) -> list[str]:
    lines = [f"{part['status'].capitalize()}{': ' + part['reason'] if part['reason'] else ''}.", ""]
    measured = [row for row in part["rows"] if not _reason(row)]
    without = [row for row in part["rows"] if _reason(row)]
    lines += table(measured, COLUMNS[name]) if measured else []
    lines += [f"- {row.get('peer') or row['case']}: {_reason(row)}" for row in without]
    lines += ["", "Log:", "", *(f"    {line}" for line in part["said"])] if part.get("said") else []
    for row in measured:
        if row.get("top"):
            title = ", ".join(str(row[key]) for key in ("case", "what") if row.get(key))
            lines += ["", f"{title}:", "", *table(row["top"], ("kernel", "launches", "us", "share"))]
    return lines


def _reason(row: Row) -> str:
    return str(row.get("failed") or row.get("skipped") or "")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
