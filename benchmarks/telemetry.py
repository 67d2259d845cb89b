"""Measure the cost of telemetry for the engine: a mark, an event, a collection, and tokens/s with and without a client.

    python benchmarks/telemetry.py [--quick] [--only events turns engine]

events  Nanoseconds of one mark and of each event that a recorder receives (telemetry_parts/events.py).
turns   A turn of a conversation in a tree of 1,000, 10,000 and 100,000 nodes, with and without a recorder. The
        difference, divided by the marks and events of such a turn, is the cost of one. One `collect` after 64 such
        turns is timed, too; it must not grow with the tree (telemetry_parts/turns.py).
engine  Tokens/s of the bundled model with eight streams: monitor off, on without a client, and on with a client at
        10 Hz (telemetry_parts/engine.py).

The variants of a comparison take turns within one run. The bar is 200 ns an event. torch has one thread, so that the
CPU time of the engine's thread is the whole cost of its steps. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from typing import Any

from telemetry_parts.events import nanoseconds
from telemetry_parts.turns import marks_of_a_turn, rows

PARTS = ("events", "turns", "engine")


def events(quick: bool) -> dict[str, Any]:
    """Print and give the nanoseconds of each event."""
    found = nanoseconds(40 if quick else 400)
    for name, (median, low) in found.items():
        print(f"{name:26} {median:7.1f} ns, at the quietest {low:7.1f}")
    return {"events_ns": found}


def turns(quick: bool) -> dict[str, Any]:
    """Print and return the cost of a turn and of a collection."""
    marks = marks_of_a_turn()
    found = rows((1000, 5000) if quick else (1000, 10_000, 100_000), 16 if quick else 60)
    for row in found:
        row["ns_per_event"] = round((row["watched_us"] - row["turn_us"]) * 1000 / marks, 1)
        print(
            f"{row['nodes']:8,} nodes: a turn {row['turn_us']:.1f} us, watched {row['watched_us']:.1f} us "
            f"({marks} marks and events, {row['ns_per_event']:.0f} ns each); a look after 64 turns "
            f"{row['look_us']:.0f} us, after none {row['empty_look_us']:.0f} us"
        )
    return {"marks": marks, "rows": found}


def engine(quick: bool) -> dict[str, Any]:
    """Print and give tokens/s with and without telemetry."""
    import torch
    from telemetry_parts.engine import engine_figures

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rkv") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        os.environ["RADIXKV_MONITOR"] = "1"
        found = engine_figures(*((1, 4) if quick else (5, 40)))
    for name, figures in found.items():
        print(f"{name:24} {figures}")
    return {"engine": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: smaller trees, fewer rounds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    chosen = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "telemetry"}
    for name in chosen.only:
        found |= {"events": events, "turns": turns, "engine": engine}[name](chosen.quick)
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()}
    print(json.dumps(found | machine))


if __name__ == "__main__":
    main()
