"""The pictures of `report`: matplotlib figures of simulations and runs.

The colours are Okabe and Ito's, which colour-blind people can distinguish. Each line has a second cue, its dashes or
its marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from radixkv_traces.saved_results import Row, Run, Simulation, row_name

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
_MARKS = "osD^vPX"
_BOUNDS = {"clairvoyant": "#000000", "infinite": "#7a7a7a"}
_STYLE = {
    "font.size": 9,
    "svg.hashsalt": "radixkv",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
_WINDOW = 50  # requests in the moving hit rate


def figures(found: Simulation | Run) -> Iterator[tuple[str, Figure]]:
    """Return each picture's name and figure; pictures without data are left out."""
    with mpl.rc_context(_STYLE):
        drawn = _of_simulation(found) if isinstance(found, Simulation) else _of_run(found)
        yield from ((name, figure) for name, figure in drawn if figure is not None)


def _of_simulation(found: Simulation) -> Iterator[tuple[str, Figure | None]]:
    yield "hit_rate", hit_rate(found)
    yield "hits_over_time", over_time(found, "hit_rates", "token hit rate")
    yield "occupancy", over_time(found, "occupancy", "blocks in use")


def _of_run(found: Run) -> Iterator[tuple[str, Figure | None]]:
    yield "ttft", ttft(found)
    yield "hits_over_time", hits(found)
    yield "occupancy", occupancy(found)


def hit_rate(found: Simulation) -> Figure:
    """Draw token hit rate against capacity, a line for each policy and lower tier, with the clairvoyant optimum and the
    infinite cache.

    Rows that Ctrl-C interrupted are left out: they cover another part of the trace.
    """
    unique = found.summary.get("unique_blocks")
    figure, axis = _one(f"{found.summary.get('trace', found.name)}: hit rate by pool size")
    for name, colour, dashes, mark in _styled([row_name(row) for row in found.rows]):
        mine = [row for row in found.rows if row_name(row) == name and row.get("finished", True)]
        points = sorted((row["capacity_blocks"], row["token_hit_rate"]) for row in mine)
        capacities = [blocks / unique * 100 if unique else blocks for blocks, _ in points]
        rates = [rate for _, rate in points]
        axis.plot(capacities, rates, color=colour, ls=dashes, marker=mark, ms=4, lw=1.5, label=name)
    infinite = found.summary.get("infinite_token_hit_rate")
    if infinite is not None:
        axis.axhline(infinite, color=_BOUNDS["infinite"], lw=1, ls=(0, (1, 3)), label="infinite pool")
    axis.set_xscale("log")
    _label(axis, "{x:g}%" if unique else "{x:g}")
    axis.set_xlabel("capacity, of the trace's unique blocks" if unique else "capacity, blocks")
    axis.set_ylabel("token hit rate")
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def over_time(found: Simulation, series: str, label: str) -> Figure | None:
    """Draw a series of each row over the trace's time, a panel for each capacity."""
    rows = [row for row in found.rows if row.get(series)]
    if not rows:
        return None
    capacities = list(dict.fromkeys(row["capacity_blocks"] for row in rows))
    figure = Figure(figsize=(6.4, 0.6 + 1.7 * len(capacities)), layout="constrained")
    axes = figure.subplots(len(capacities), 1, sharex=True, squeeze=False)[:, 0]
    styles = {name: style for name, *style in _styled([row_name(row) for row in rows])}
    for axis, capacity in zip(axes, capacities, strict=True):
        for row in rows:
            if row["capacity_blocks"] == capacity:
                name = row_name(row)
                colour, dashes, _ = styles[name]
                axis.plot(*zip(*row[series], strict=True), color=colour, ls=dashes, lw=1.2, label=name)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{capacity:,} blocks", loc="left")
        axis.set_ylabel(label)
    ends = {row[series][-1][0] for row in rows}
    timed = ends != {float(found.summary.get("requests", -1))}  # traces without times are counted in requests
    axes[-1].set_xlabel("seconds of the trace" if timed else "requests")
    labelled = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(labelled.values()), list(labelled), loc="outside lower center", ncols=4)
    return figure


def ttft(found: Run) -> Figure | None:
    """Draw the distribution of the time to first token, hits against misses, for each run."""
    figure, axis = _one(f"{found.summary.get('trace', found.name)}: time to first token")
    groups = list(_groups(found))
    if not groups:
        return None
    for (label, times), colour, dashes in zip(groups, _COLOURS * 2, _DASHES * 2, strict=False):
        share = np.arange(1, len(times) + 1) / len(times)
        # From zero up, so that a single request is a line too.
        steps = np.concatenate([np.sort(times)[:1], np.sort(times)])
        shares = np.concatenate([[0.0], share])
        axis.step(steps, shares, where="post", color=colour, ls=dashes, lw=1.5, label=f"{label} ({len(times)})")
    axis.set(xscale="log", xlabel="time to first token, ms", ylabel="share of the requests", ylim=(0, 1.02))
    _label(axis, "{x:g}")
    axis.legend()
    return figure


def hits(found: Run) -> Figure | None:
    """Draw the hit rate of the last requests, over the time of the replay."""
    figure, axis = _one(f"{found.summary.get('trace', found.name)}: hit rate of the last {_WINDOW} requests")
    drawn = False
    for run, colour, dashes, _ in _styled([str(row["run"]) for row in found.requests]):
        rows = [row for row in _counted(found) if row["run"] == run and row["cached_tokens"] is not None]
        rows.sort(key=lambda row: row["sent_s"])
        if rows:
            drawn = True
            axis.plot([row["sent_s"] for row in rows], _moving(rows), color=colour, ls=dashes, lw=1.3, label=run)
    axis.set(xlabel="seconds of the replay", ylabel="token hit rate", ylim=(0, 1.02))
    axis.legend()
    return figure if drawn else None


def occupancy(found: Run) -> Figure | None:
    """Draw the blocks in use, and the ones among them that only the cache holds, over the time of the replay."""
    if not found.moments:
        return None
    runs = list(dict.fromkeys(str(row["run"]) for row in found.moments))
    figure = Figure(figsize=(6.4, 0.6 + 1.9 * len(runs)), layout="constrained")
    for axis, run in zip(figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0], runs, strict=True):
        rows = [row for row in found.moments if row["run"] == run]
        times = [row["at"] for row in rows]
        held = [row["used_blocks"] - row["cached_blocks"] for row in rows]
        used = [row["used_blocks"] for row in rows]
        axis.fill_between(times, held, color=_COLOURS[1], alpha=0.75, step="post", label="held by requests")
        axis.fill_between(
            times, held, used, color=_COLOURS[0], alpha=0.5, step="post", hatch="///", lw=0, label="cached only"
        )
        axis.axhline(rows[-1]["num_blocks"], color="#000000", lw=0.8, ls=":", label="the pool")
        axis.set_title(run, loc="left")
        axis.set_ylabel("blocks")
    axis.set_xlabel("seconds of the replay")
    axis.legend()
    return figure


def _groups(found: Run) -> Iterator[tuple[str, list[float]]]:
    """Return the TTFTs of hits and of misses, for each run; of all requests where the target does not report cached
    tokens.
    """
    rows = [row for row in _counted(found) if row["ttft_ms"] is not None]
    runs = list(dict.fromkeys(str(row["run"]) for row in rows))
    for run in runs:
        for label, want in (("hit", True), ("miss", False), ("all", None)):
            times = [row["ttft_ms"] for row in rows if row["run"] == run and _is_hit(row) is want]
            if times:
                yield (label if len(runs) == 1 else f"{label}, {run}"), times


def _is_hit(row: Row) -> bool | None:
    if row["cached_tokens"] is None or not row["prompt_tokens"]:
        return None
    return bool(row["cached_tokens"] * 2 >= row["prompt_tokens"])


def _counted(found: Run) -> list[Row]:
    return [row for row in found.requests if not row["warmup"]]


def _moving(rows: Sequence[Row]) -> list[float]:
    cached = np.cumsum([0.0, *(row["cached_tokens"] for row in rows)])
    prompt = np.cumsum([0.0, *(row["prompt_tokens"] for row in rows)])
    begin = np.maximum(0, np.arange(1, len(rows) + 1) - _WINDOW)
    end = np.arange(1, len(rows) + 1)
    return list((cached[end] - cached[begin]) / np.maximum(1.0, prompt[end] - prompt[begin]))


def _styled(names: Sequence[str]) -> Iterator[tuple[str, str, Any, str]]:
    """Return each name once, with its colour, dashes and mark; bounds are black and grey."""
    online = [name for name in dict.fromkeys(names) if name not in _BOUNDS]
    for at, name in enumerate(online):
        yield name, _COLOURS[at % 7], _DASHES[at % 7], _MARKS[at % 7]
    for name in _BOUNDS:
        if name in names:
            yield name, _BOUNDS[name], "--", ""


def _one(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.set_title(title, loc="left")
    return figure, axis


def _label(axis: Any, text: str) -> None:
    """Label a logarithmic axis with plain numbers at 1, 2 and 5 of each decade."""
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(text)
    axis.xaxis.set_minor_formatter(NullFormatter())
