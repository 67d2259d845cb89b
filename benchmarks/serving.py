"""Measure radixkv under load against the engines that a CPU user would run instead, on the same work in the same run.

    python benchmarks/serving.py [--rounds 3] [--models tiny 100m] [--workloads chat agent]
                                 [--quick] [--llama-server FILE] [--save FILE]

Work (serving_parts/workloads.py; seeded, the same for all): `chat`, conversations of several turns after one system
prompt, and `agent`, a long shared prefix, many short steps with appended tool results, and branches. The prompt of a
turn is the whole conversation, with the engine's own greedy replies. Replies have fixed lengths, so that all engines do
the same work. Models: the bundled one, and a Llama of 100M random weights (that of cpu_decode.py, its matrices times
1.5, so that replies vary). All run in float32, KV included.

Engines: radixkv with its cache and without; batched `generate` with a static cache (peers/generate_static.py);
transformers' continuous batching with prefix sharing (peers/continuous_batching.py); llama.cpp's own server with its
prompt cache (peers/llama_server.py), if its binary is found: --llama-server, $LLAMA_SERVER or `.peers/llama-server`.
That file says how to build it.

Fairness: each engine gets all cores, --clients requests at once, and KV for that many of the longest histories.
(llama.cpp has 8 GiB more for prompts, its default; `generate` takes as much as each batch needs.) Each run creates its
engine and warms it up with one short request; the first shared prefix is computed within the run. Engines take turns
within a round, and figures are medians over the rounds. Times are wall time at the client: a thread each, in this
process, over HTTP for llama.cpp.

--clients clients work through the sessions without pausing.

Answers are compared with those of radixkv without its cache, token by token. Where they differ, the logits of the two
tokens must lie within 0.001 of each other, or this benchmark fails. The last line is one JSON object; the exit code is
1 if a bar is missed: in requests/s on the agent workload with the 100M model, closed loop, 3 times `generate`, ahead of
llama.cpp, 6 times continuous batching.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from cpu_decode import cpu_name
from serving_parts.bench import BATCHING, ENGINES, GENERATE, LLAMA, OURS, Bench
from serving_parts.runs import measure_closed
from serving_parts.workloads import SHAPES, Shape, build

BARS = {GENERATE: 3.0, LLAMA: 1.0, BATCHING: 6.0}


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it sizes its memory with psutil
    print(f"{options.threads} threads, {options.clients} clients, {cpu_name()}, torch {torch.__version__}")
    llama = find_llama(options.llama_server)
    engines = [engine for engine in ENGINES if engine in options.engines and (engine != LLAMA or llama)]
    if llama is None and LLAMA in options.engines:
        print(f"{LLAMA} is left out: no server binary (peers/llama_server.py says how to make one)")
    result: dict[str, Any] = {"closed": {}}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            bench = Bench.of(name, Path(folder), llama, options.clients, options.threads)
            for workload in options.workloads:
                wrong += load(bench, workload, engines, options, result)
    missed = [*wrong, *_missed(result)]
    for line in missed:
        print(f"MISSED: {line}")
    _write(result, options)
    summary = {"closed": _ratios(result["closed"])}
    machine = {"threads": options.threads, "torch": torch.__version__, "cpu": cpu_name()}
    versions = {"transformers": transformers.__version__, "rounds": options.rounds}
    print(json.dumps({"benchmark": "serving", **summary, "missed": missed, **machine, **versions}))
    return 1 if missed else 0


def load(
    bench: Bench, workload: str, engines: list[str], options: argparse.Namespace, result: dict[str, Any]
) -> list[str]:
    """Run one workload on one model. Return the wrong answers."""
    sessions = build(_shape(workload, options.quick), bench.loaded.vocab_size)
    requests = sum(session.requests for session in sessions)
    print(f"{bench.name}, {workload}: {len(sessions)} sessions, {requests} requests", flush=True)
    key = f"{bench.name} {workload}"
    closed, wrong = measure_closed(bench, sessions, engines, options.rounds)
    result["closed"][key] = {engine: found.as_dict() for engine, found in closed.items()}
    return wrong


# ---- bars


def _ratios(closed: dict[str, Any]) -> dict[str, Any]:
    """Of each model and workload: our requests/s, and how many times each other engine's that is."""
    return {
        key: {"requests_per_s": rows[OURS]["requests_per_s"]}
        | {
            f"times {engine}": round(rows[OURS]["requests_per_s"] / row["requests_per_s"], 2)
            for engine, row in rows.items()
            if engine != OURS
        }
        for key, rows in closed.items()
        if OURS in rows
    }


def _missed(result: dict[str, Any]) -> list[str]:
    missed = []
    for engine, bar in BARS.items():
        times = _ratios(result["closed"]).get("100m agent", {}).get(f"times {engine}")
        if times is not None and times < bar:
            missed.append(f"{times} times {engine} on the agent workload, the bar is {bar:g}")
    return missed


# ---- options, files


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each engine; figures are medians")
    parser.add_argument("--models", nargs="+", choices=["tiny", "100m"], default=["tiny", "100m"])
    parser.add_argument("--workloads", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="small workloads, to see that everything works")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all figures there, as JSON")
    return parser.parse_args()


def find_llama(given: Path | None) -> Path | None:
    """The server's binary: as given, from the environment, or in `.peers`; None if there is none."""
    beside = Path(__file__).resolve().parent.parent / ".peers" / "llama-server"
    named = given or os.environ.get("LLAMA_SERVER")
    if named is not None and not Path(named).is_file():
        raise SystemExit(f"there is no llama.cpp server at {named}")
    return Path(named) if named else beside if beside.is_file() else None


def _shape(workload: str, quick: bool) -> Shape:
    shape = SHAPES[workload]
    return replace(shape, opening=shape.opening // 4, sessions=3, turns=2) if quick else shape


def _write(result: dict[str, Any], options: argparse.Namespace) -> None:
    if options.save:
        options.save.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    sys.exit(main())
