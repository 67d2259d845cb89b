"""Draw the figures of the serving benchmark as SVG files. Needs matplotlib.

Draws the results of an earlier `serving.py --save`:

    python benchmarks/serving_parts/plots.py FILE FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

COLOURS = {
    "radixkv": "#c1272d",
    "radixkv, no cache": "#e8a09b",
    "generate, static cache": "#7a7a7a",
    "continuous batching": "#e0a100",
    "llama.cpp": "#0071a4",
}
MODELS = {"tiny": "bundled model", "100m": "100M Llama"}


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write serving_closed.svg, serving_sweep.svg and serving_isolation.svg, as far as there are figures for them."""
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams.update(
        {
            "font.size": 9,
            "svg.hashsalt": "radixkv",
            "svg.fonttype": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    for name, part in (("closed", _closed), ("sweep", _sweep), ("isolation", _isolation)):
        if result[name]:
            figure = part(result[name])
            figure.savefig(folder / f"serving_{name}.svg", metadata={"Date": None}, bbox_inches="tight")
            plt.close(figure)


def _title(key: str) -> str:
    model, workload = key.split()
    return f"{MODELS[model]}, {workload}"


def _closed(parts: dict[str, Any]) -> Any:
    """Requests a second of every engine, a panel for each model and workload."""
    figure, axes = plt.subplots(1, len(parts), figsize=(2.9 * len(parts), 2.4), squeeze=False, layout="constrained")
    for axis, (key, rows) in zip(axes[0], parts.items(), strict=True):
        names = list(rows)[::-1]
        values = [rows[name]["requests_per_s"] for name in names]
        bars = axis.barh(names, values, color=[COLOURS[name] for name in names])
        axis.bar_label(bars, fmt="%.3g", padding=2)
        axis.set_xlim(0, max(values) * 1.2)
        axis.set_title(_title(key), loc="left")
        axis.set_xlabel("requests/s, 8 clients")
        if axis is not axes[0][0]:
            axis.set_yticklabels([])
    return figure


def _sweep(parts: dict[str, Any]) -> Any:
    """Draw the waiting time over the rate of arrivals: time to first token above, gaps between tokens below."""
    size = (1.6 + 2.6 * len(parts), 5)
    figure, axes = plt.subplots(2, len(parts), figsize=size, squeeze=False, sharex="col", layout="constrained")
    for column, (key, points) in enumerate(parts.items()):
        for engine in dict.fromkeys(point["engine"] for point in points):
            mine = [point for point in points if point["engine"] == engine]
            rates = [point["rate"] for point in mine]
            for axis, figures in zip(axes[:, column], ("ttft_p90_ms", "gap_p99_ms"), strict=True):
                values = [point[figures] / 1e3 for point in mine]
                axis.plot(rates, values, "o-", ms=3, lw=1.3, color=COLOURS[engine], label=engine)
                axis.set(xscale="log", yscale="log")
                axis.grid(alpha=0.25, which="major")
        ticks = list(dict.fromkeys(point["rate"] for point in points))
        axes[1, column].set_xticks(ticks, [f"{rate:.2g}" for rate in ticks], minor=False)
        for axis in axes[:, column]:
            axis.minorticks_off()
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axis.yaxis.set_major_formatter("{x:g}")
        axes[0, column].set_title(_title(key), loc="left")
        axes[1, column].set_xlabel("arrivals, requests/s")
    axes[0, 0].set_ylabel("time to first token, p90, s")
    axes[1, 0].set_ylabel("gap between tokens, p99, s")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _isolation(parts: dict[str, Any]) -> Any:
    """Each gap between tokens of 8 streams while a long prompt is computed, sorted; dashed: one budgeted step."""
    figure, axes = plt.subplots(
        1, len(parts), figsize=(1.6 + 3.1 * len(parts), 2.8), squeeze=False, layout="constrained"
    )
    for axis, (model, found) in zip(axes[0], parts.items(), strict=True):
        for (chunk, row), colour in zip(found["chunks"].items(), ("#7a7a7a", "#c1272d", "#0071a4"), strict=True):
            gaps = row["gaps_ms"]
            share = [(number + 1) / len(gaps) for number in range(len(gaps))]
            label = "without chunks" if chunk == "whole" else f"chunks of {chunk}"
            axis.step(gaps, share, where="post", color=colour, lw=1.4, label=label)
        axis.axvline(found["budgeted_step_ms"], color="#c1272d", ls=":", lw=1, label="one step with 512")
        quiet = min(row["quiet_ms"] for row in found["chunks"].values())  # shorter ones: two read at once
        axis.set(xscale="log", xlabel="gap between tokens, ms", ylim=(0, 1.02), xlim=(quiet / 3, None))
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.set_title(MODELS[model], loc="left")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("share of gaps")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
