"""Compare a fleet of two workers with one engine: hits by router, cost of frontend and adapter, deaths of workers.

    .fleet/bin/python benchmarks/fleet.py [--only hits cost deaths] [--requests 300] [--kills 50] [--traces DIR]
                                      [--smg PROGRAM] [--workloads agents]

It needs the environment of `make fleet`. All processes run on this machine, with one thread of torch each, and the
bundled model.

  hits    Recorded traces (the samples; with --traces the two whole ones) and made-up sessions with one system prompt.
          A block of a trace becomes a sentence, and a request a completion of one token. The pool has a third of all
          blocks, and room for four of the longest prompts. One engine has the whole pool, each of two workers a half.
          The share of prompt tokens that hit, and of the rate of the one engine, by router: with events, without
          (approximate), round robin; with --smg, two `radixkv serve` behind that gateway. `busier` is the computed
          tokens of the busier worker over the other's.
  cost    The same chats of 8 clients, whole replies of 40 tokens, through a frontend and one worker, and through
          `radixkv serve`: CPU time of all processes but the client's, and tokens a second.
  deaths  A stream is read, its worker is killed after 15 tokens, and another worker is started: the time from the kill
          to the next token, and the requests that failed or have another text.

Bars: at least 0.95 of the one engine's hits with events, the busier worker computes at most 1.5 times as much, and no
request is lost. The last line is JSON; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' launcher

from radixkv import Engine
from radixkv_traces.formats import read, sample
from tests.fleet.processes import Fleet, Process, Reply, free_port, until

WHOLE = {"conversation": "mooncake_conversation_512.jsonl", "agents": "cc_agent_dev_512.jsonl"}
SAMPLES = {"conversation": "conversation", "agents": "cc_agent"}
WORKLOADS = ("conversation", "agents", "sessions")
MOST = 150  # sentences of a prompt
CLIENTS = 8
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--requests", type=int, default=300, help="requests of each workload (default 300)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--kills", type=int, default=50, help="workers to kill (default 50)")
    parser.add_argument("--traces", type=Path, help="folder with the whole traces")
    parser.add_argument("--smg", help="the program of the gateway, to compare with it")
    options = parser.parse_args()
    results = {name: PARTS[name](options) for name in options.only}
    missed = [each for part in results.values() for each in part.pop("missed")]
    print("bars missed:", "; ".join(missed) or "none")
    print(json.dumps({"benchmark": "fleet", **results, "missed": missed}))
    return bool(missed)


# ---- hits


def workloads(options: argparse.Namespace) -> dict[str, list[list[str]]]:
    """The prompts of each session, by workload. A session's next request waits for the answer to the one before."""
    found: dict[str, dict[object, list[str]]] = {}
    for name, file in (WHOLE if options.traces else SAMPLES).items():
        source: Any = options.traces / file if options.traces else sample(file)
        sessions = found.setdefault(name, {})
        for number, each in zip(range(options.requests), read(source), strict=False):
            prompt = "".join(f"Box {block} has a kite. " for block in each.blocks[:MOST])
            sessions.setdefault(number if each.session is None else each.session, []).append(prompt)
    system, rng = "You are Mira, and you know the shop by heart. " * 30, random.Random(5)
    sessions = found.setdefault("sessions", {})
    for number in range(options.requests // 10):
        text = f"{system} Session {number}."
        for turn in range(10):
            text += f" Turn {turn} asks for {rng.choice(('boats', 'kites', 'clocks'))}, and gets some. " * 6
            sessions.setdefault(number, []).append(text)
    return {name: list(sessions.values()) for name, sessions in found.items()}


def hits(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"missed": []}
    print(f"{'workload':14}{'router':22}{'hit rate':>10}{'of one':>8}{'busier':>8}")
    for name, sessions in workloads(options).items():
        if name in options.workloads:
            results[name] = {}
            for router, rate, busier in routed(sessions, options.smg):
                results[name][router] = {"rate": rate, "busier": busier}
                of_one = rate / results[name]["one engine"]["rate"]
                print(f"{name:14}{router:22}{rate:10.3f}{of_one:8.3f}{busier:8.2f}", flush=True)
                if router == "events" and (of_one < 0.95 or busier > 1.5):
                    results["missed"].append(
                        f"{name}: {of_one:.3f} of the hits (0.95), {busier:.2f} times as busy (1.5)"
                    )
    return results


def routed(sessions: list[list[str]], gateway: str | None) -> Iterator[tuple[str, float, float]]:
    """Yield each router, its hit rate, and how busy the busier worker was."""
    with Engine.load("tiny", monitor=False) as engine:
        stats, prompts = engine.stats(), [prompt for session in sessions for prompt in session]
        longest = max(len(engine.client.inputs.encode(each)) for each in prompts) // 16 + 4
        size = max(blocks_of(engine, prompts) // 3, 4 * longest) * (stats.kv_bytes // stats.cache.num_blocks)
    yield "one engine", *replay(sessions, 1, size)
    modes: dict[str, tuple[str, ...]] = {
        "events": (),
        "approximate": ("--no-router-kv-events",),
        "round robin": ("--router-mode", "round-robin"),
    }
    for router, arguments in modes.items():
        yield router, *replay(sessions, 2, size // 2, *arguments)
    if gateway:
        yield "gateway", *replay_gateway(sessions, size // 2, gateway)


def blocks_of(engine: Engine, prompts: list[str]) -> int:
    """The number of different blocks of 16 tokens."""
    found: set[int] = set()
    for prompt in prompts:
        ids, number = engine.client.inputs.encode(prompt), 0
        for at in range(0, len(ids) - 15, 16):
            number = hash((number, *ids[at : at + 16]))
            found.add(number)
    return len(found)


def replay(sessions: list[list[str]], workers: int, size: int, *router: str) -> tuple[float, float]:
    """Send the prompts of four sessions at a time, and return the hit rate and how busy the busier worker was."""
    with tempfile.TemporaryDirectory() as folder:
        made = Fleet(Path(folder))
        try:
            made.frontend(*router)
            made.joined(*[made.worker("--kv-memory", str(size)) for _ in range(workers)])
            return send(sessions, made.url)
        finally:
            made.close()


def replay_gateway(sessions: list[list[str]], size: int, program: str) -> tuple[float, float]:
    """As `replay`, by two servers behind a gateway that guesses by text."""
    with tempfile.TemporaryDirectory() as folder:
        made, urls = Fleet(Path(folder)), list[str]()
        try:
            for _ in range(2):
                port = free_port()
                made.start(
                    "serve", "radixkv", "serve", "tiny", "--port", str(port), "--quiet", "--kv-memory", str(size)
                )
                urls.append(f"http://127.0.0.1:{port}")
            for url in urls:
                until(lambda url=url: is_ready(f"{url}/health"), "a server")
            port = str(made.port)
            where = ("--host", "127.0.0.1", "--port", str(made.port), "--policy", "cache_aware")
            made.spawn("smg", program, "launch", "--worker-urls", *urls, *where)
            until(lambda: is_ready(f"{made.url}/v1/models"), "the gateway")
            rate, _ = send(sessions, made.url, workers=False)
            computed = [counter(f"{url}/metrics", "radixkv:computed_tokens_total") for url in urls]
            return rate, max(computed) / max(min(computed), 1)
        finally:
            made.close()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def counter(url: str, name: str) -> float:
    lines = httpx.get(url, timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def send(sessions: list[list[str]], url: str, *, workers: bool = True) -> tuple[float, float]:
    """Return the hit rate, and the computed tokens of the busier worker over those of the other."""
    asked: Counter[str] = Counter()
    computed: Counter[int] = Counter()
    with httpx.Client(timeout=120) as client:

        def ask(prompt: str) -> None:
            body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            if workers:
                body["nvext"] = {"extra_fields": ["worker_id"]}
            response = client.post(f"{url}/v1/completions", json=body)
            found = response.json()
            assert response.status_code == 200, response.text[:500]
            usage = found["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            asked["prompt"] += usage["prompt_tokens"]
            asked["cached"] += cached
            worker = ((found.get("nvext") or {}).get("worker_id") or {}).get("decode_worker_id", 0)
            computed[worker] += usage["prompt_tokens"] - cached

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda session: [ask(prompt) for prompt in session], sessions))
    busier = max(computed.values()) / max(min(computed.values()), 1) if len(computed) > 1 else 1.0
    return asked["cached"] / asked["prompt"], busier


# ---- cost


def cost(options: argparse.Namespace) -> dict[str, Any]:
    rows: dict[str, list[dict[str, float]]] = {"fleet": [], "serve": []}
    for _ in range(3):
        for name in rows:
            with server(name) as (made, processes):
                rows[name].append(load(made.url, processes, options.requests))
    print(f"{'':8}{'CPU ms a request':>18}{'CPU ms a token':>16}{'tokens/s':>10}")
    found = {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in rows.items()}
    for name, row in found.items():
        print(f"{name:8}{row['request']:18.2f}{row['token']:16.3f}{row['rate']:10.0f}")
    return {**found, "missed": []}


@contextmanager
def server(name: str) -> Iterator[tuple[Fleet, list[Process]]]:
    with tempfile.TemporaryDirectory() as folder:
        made = Fleet(Path(folder))
        try:
            if name == "fleet":
                made.frontend()
                made.joined(made.worker())
            else:
                made.start("serve", "radixkv", "serve", "tiny", "--port", str(made.port), "--quiet")
                until(lambda: is_ready(f"{made.url}/health"), "the server")
            yield made, made.processes
        finally:
            made.close()


def load(url: str, processes: list[Process], requests: int) -> dict[str, float]:
    def ask(number: int) -> int:
        messages = [{"role": "user", "content": f"Tell me story {number} about boats and kites."}]
        body = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        count = 0
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
            count = sum(line.startswith("data: {") for line in response.iter_lines())
        return count

    ask(-1)
    before, began = cpu_seconds(processes), time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(requests)))
    used, wall = cpu_seconds(processes) - before, time.monotonic() - began
    return {"request": 1e3 * used / requests, "token": 1e3 * used / requests / 40, "rate": 40 * requests / wall}


def cpu_seconds(processes: list[Process]) -> float:
    stats = [Path(f"/proc/{each.popen.pid}/stat").read_text().rpartition(")")[2].split() for each in processes]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / TICKS


# ---- deaths


def deaths(options: argparse.Namespace) -> dict[str, Any]:
    waits: list[float] = []
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        made = Fleet(Path(folder))
        try:
            made.frontend()
            alive = [made.worker(), made.worker()]
            made.joined(*alive)
            calm = made.stream(STORY, 300).text
            for _ in range(options.kills):
                killed: list[tuple[Process, float]] = []

                def kill(
                    reply: Reply, alive: list[Process] = alive, killed: list[tuple[Process, float]] = killed
                ) -> None:
                    if len(reply.chunks) == 15:
                        each = next(each for each in alive if serves(each))
                        each.signal(signal.SIGKILL)
                        killed.append((each, time.monotonic()))

                reply = made.stream(STORY, 300, kill)
                lost += reply.error is not None or reply.text != calm
                ((dead, at),) = killed
                gaps = [later - max(earlier, at) for earlier, later in pairwise(reply.arrivals) if later > at]
                waits.append(max(gaps, default=0.0))
                dead.ended()
                alive = [each for each in alive if each is not dead] + [made.worker()]
                made.joined(*alive)
        finally:
            made.close()
    waits.sort()
    print(
        f"{len(waits)} kills: {lost} requests lost; to the next token {1e3 * statistics.median(waits):.0f} ms, at most "
        f"{1e3 * waits[-1]:.0f} ms"
    )
    missed = [f"{lost} requests were lost (0)"] if lost else []
    return {
        "kills": len(waits),
        "lost": lost,
        "median_s": statistics.median(waits),
        "most_s": waits[-1],
        "missed": missed,
    }


def serves(worker: Process) -> bool:
    return worker.output.count("request received") > worker.output.count("request completed")


STORY = "Tell me a story about boats and kites."
PARTS = {"hits": hits, "cost": cost, "deaths": deaths}

if __name__ == "__main__":
    sys.exit(main())
