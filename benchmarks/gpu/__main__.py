"""Measure kernels and engine on a GPU, in one command and under ten minutes.

    python benchmarks/gpu                         all parts
    python benchmarks/gpu --only decode tree      some of them (the ceilings are measured always)
    python benchmarks/gpu --peers FOLDER          also vLLM's and SGLang's Triton kernels, from unpacked wheels
    python benchmarks/gpu --list                  the parts, and the time that each may take
    python benchmarks/gpu --first-contact         check a new GPU before anything is measured, in one table

Each part runs in a process of its own and has a budget; rows that it has measured by then count. Before a kernel is
timed, ours or a peer's, its output is compared with the plain-torch reference in float64, with NaN in all memory that
must not be read. Times are medians of graph replays over pools of 2 GB, so that no cache helps.

Writes docs/results/gpu-<device>-<date>.json and a Markdown page of the same name, again after each part. Ends in one
JSON line: the bars, each met, missed or unmeasured. With --out, the running part's rows are in the folder `rows`.
Without a GPU every part is skipped with its reason, and nothing is written unless --out names a folder. The exit code
is 1 if a part failed, not if a bar was missed. `--smoke` runs all parts once on tiny shapes in Triton's interpreter, on
a CPU: its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder is the package `gpu`

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    options = _parser().parse_args()
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from gpu import first_contact, run
    from gpu.result import Ceilings

    if options.check:
        return first_contact.run_check(options.check, options.smoke)
    if options.first_contact:
        return first_contact.main(options.smoke, lambda text: print(text, flush=True))
    names = [part.name for part in run.PARTS]
    if options.list:
        for part in run.PARTS:
            print(f"{part.name:10s} {part.budget_s:4d} s  {part.says}")
        return 0
    if unknown := set(options.only or []) - set(names):
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    default = ROOT / ".peers"
    peers = options.peers or (default if default.is_dir() else None)
    order = run.Order(tuple(options.only or names), options.smoke, options.here, peers, options.stretch)
    if options.part:
        return run.part_main(options.part, order, Ceilings(**json.loads(options.ceilings)), options.rows_to)
    rows = options.out and options.out / "rows"
    result = run.whole(order, lambda text: print(text, flush=True), lambda found: _write(found, options.out), rows)
    return _finish(result, options.out)


def _write(result: dict, out: Path | None) -> Path | None:
    """Write the result, or its finished parts, and return the place."""
    from gpu.report import markdown

    device = result["device"]
    folder = out or (ROOT / "docs" / "results" if device and not result["smoke"] else None)
    if folder is None:
        return None
    place = folder / f"gpu-{device['slug'] if device else 'none'}-{result['date']}"
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".json", json.dumps(result, indent=1) + "\n"), (".md", markdown(result))):
        half = place.with_name(place.name + suffix + ".part")
        half.write_text(text)
        half.replace(place.with_name(place.name + suffix))  # if this is interrupted, the previous file stays
    return place


def _finish(result: dict, out: Path | None) -> int:
    """Write the result, print the bars, end in one JSON line."""
    from gpu.report import bar_table

    if (place := _write(result, out)) is not None:
        print(f"\nwritten: {place}.json and .md")
    device = result["device"]
    if result["reason"]:
        print(f"\nnothing was measured: {result['reason']}")
    print("\n" + "\n".join(bar_table(result["bars"])) + "\n")
    parts = {name: part["status"] for name, part in result["parts"].items()}
    states = {bar["name"]: bar.get("found", bar["state"]) for bar in result["bars"]}
    missed = [bar["name"] for bar in result["bars"] if bar["state"] == "missed"]
    line = {"benchmark": "gpu", "device": device["name"] if device else None, "reason": result["reason"]}
    print(json.dumps({**line, "smoke": result["smoke"], "parts": parts, "bars": states, "missed": missed}))
    return 1 if "failed" in parts.values() else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="measure these parts only")
    parser.add_argument("--list", action="store_true", help="list the parts and their budgets")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="holds vllm/ and sglang/ (default: .peers)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: docs/results)")
    parser.add_argument("--stretch", type=float, default=1.0, help="give every part this many times its budget")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes in Triton's interpreter, no GPU")
    parser.add_argument("--here", action="store_true", help="all parts in this process: for a debugger")
    parser.add_argument("--first-contact", action="store_true", help="check a new GPU; measures nothing")
    for name, kind in (("--check", str), ("--part", str), ("--rows-to", Path), ("--ceilings", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
