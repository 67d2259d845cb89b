"""Measure what block events (radixkv/cache/block_events.py) cost a cache: time of a step, of operations, and bytes.

    python benchmarks/block_events.py [--quick] [--only steps,operations,bytes] [--processes 5]

Times are CPU times. Each part runs in fresh processes, and a figure is the median over them.

steps: a tree of 100,000 nodes (64 tokens each, blocks of 16) and 32 sequences that decode. In turn, 50 steps run
without a reader and 50 with one, which looks at the cache after every 10th step, as a worker does 10 times a second at
steps of 10 ms. The cost of a step is the difference, the look included. It is compared with 10 ms, and with the step
of 32 streams of the bundled model in this run (process time). The cost of a stored and of a removed block is the time
of a look at 512 prompts of 1,024 tokens that were just published, and of one after they were discarded. `first_look_ms`
is the time of a look at the whole tree, when a reader is attached.

operations: slices of `pairwise.py`'s workloads on three caches in turn: no reader, one that was attached and detached
again, and one that is attached and looks every 100 ms of its own CPU time. Ratios of the sums, to no reader. These
caches do nothing but cache operations; an engine spends most of its time elsewhere.

bytes: memory that Python allocates for a reader after its first look, per announced block (nodes of 4 blocks, and texts
of 512). Event bytes of each cached token: its id (4 bytes) and 8 bytes for each block; the JSON and MessagePack of the
records that the worker passes to Dynamo in process; and the JSON of a block in Dynamo's index, which has hashes in
place of tokens.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pairwise

import radixkv.cache
from radixkv import Engine, SamplingParams
from radixkv.cache import PrefixCache
from radixkv.cache.block_events import BlockEvents
from radixkv.fleet.publisher import batch_of, salt_of

BLOCK, LEAF, STREAMS = 16, 64, 32
INTERVAL, STEP_MS = 0.1, 10.0
OPERATIONS = ("turns", "decode", "insert", "evict", "agents", "host")
BARS = {"share_of_10_ms_step": 0.01, "detached": 1.03}
Numbers = dict[str, float]
cpu = time.thread_time


def publish(cache: PrefixCache, tokens: Any) -> None:
    with cache.open(tokens) as sequence:
        sequence.extend(tokens[sequence.length :])
        sequence.commit()


def texts(count: int, length: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 128_000, (count, length), dtype=np.int32)


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    start = cpu()
    call()
    return (cpu() - start) * 1e3


# ---- parts


def steps(quick: bool) -> Numbers:
    nodes, rounds = (2000, 4) if quick else (100_000, 40)
    cache = PrefixCache(nodes * (LEAF // BLOCK) + 65_536, BLOCK)
    for text in texts(nodes, LEAF, 1):
        publish(cache, text)
    running = [cache.open(text) for text in texts(STREAMS, 512, 2)]
    for sequence, text in zip(running, texts(STREAMS, 512, 2), strict=True):
        sequence.extend(text)
        sequence.commit()
    gc.collect()
    gc.freeze()
    reader = BlockEvents(cache, salt_of)
    first = timed(reader.take)
    decode(running, reader)
    spent: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for read in (True, False) if number % 2 else (False, True):
            if read:
                cache.state.events.connect(reader)
                for sequence in running:  # what it missed costs nothing
                    reader.grown(sequence.node, 50)
                reader.take()
            spent[read].append(timed(partial(decode, running, reader if read else None)) / 50)
            reader.disconnect()
    assert cache.state.tree.nodes >= nodes
    cost = statistics.median(spent[True]) - statistics.median(spent[False])
    model = step_of_a_model(16 if quick else 96)
    return {
        "first_look_ms": first,
        "cost_of_a_step_us": cost * 1e3,
        "share_of_10_ms_step": cost / STEP_MS,
        "model_step_ms": model,
        "share_of_model_step": cost / model,
        **looks(8 if quick else 512),
    }


def decode(running: list[Any], reader: BlockEvents | None) -> None:
    """50 steps, each with a token more of each sequence."""
    for step in range(50):
        for at, sequence in enumerate(running):
            sequence.extend([at * 100 + step])
            sequence.commit()
        if reader is not None and step % 10 == 9:
            reader.take()


def looks(prompts: int) -> Numbers:
    """Microseconds of a look for each stored block, and for each removed one."""
    cache, said = PrefixCache(prompts * 64, BLOCK), texts(prompts, 1024, 3)
    reader = BlockEvents(cache, salt_of)
    for text in said:
        publish(cache, text)
    stored = timed(reader.take)
    for text in said:
        cache.discard(text)
    removed = timed(reader.take)
    assert not cache.state.tree.nodes
    return {"stored_block_us": stored * 1e3 / (prompts * 64), "removed_block_us": removed * 1e3 / (prompts * 64)}


def step_of_a_model(tokens: int) -> float:
    """Milliseconds of a decode step of the bundled model, of all threads: the difference of two lengths."""
    prompts = [f"{at}: Hello there, my name is Nora and I live in Oslo." for at in range(STREAMS)]

    def run(length: int) -> float:
        start = time.process_time()
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
        return time.process_time() - start

    with Engine.load("tiny", monitor=False, num_blocks=4096) as engine:
        run(8)
        short, long = run(8), run(8 + tokens)
    return (long - short) * 1e3 / tokens


def operations(quick: bool) -> Numbers:
    found: Numbers = {}
    for name in OPERATIONS:
        readers: list[BlockEvents] = []
        runs = [pairwise.WORKLOADS[name](version(kind, readers)) for kind in ("none", "detached", "attached")]
        found |= {f"{name}.{kind}": ratio for kind, ratio in compared(runs, readers[0], 10 if quick else 200).items()}
    return found


def version(kind: str, readers: list[BlockEvents]) -> SimpleNamespace:
    """Stand in for the modules of a checkout, with caches that have such a reader."""

    def make(*sizes: Any, **more: Any) -> PrefixCache:
        cache = PrefixCache(*sizes, **more)
        if kind != "none":
            reader = BlockEvents(cache, salt_of)
            reader.disconnect() if kind == "detached" else readers.append(reader)
        return cache

    return SimpleNamespace(cache=SimpleNamespace(**{**vars(radixkv.cache), "PrefixCache": make}), host_cache=make)


def compared(runs: list[pairwise.Slice], reader: BlockEvents, slices: int) -> Numbers:
    sums, since = [0.0, 0.0, 0.0], 0.0
    reader.take()  # a workload may have filled its cache
    gc.collect()
    gc.disable()
    for number in range(slices):
        for which in np.roll(range(3), number).tolist():
            spent = timed(partial(runs[which], number)) / 1e3
            if which == 2 and (since := since + spent) > INTERVAL:
                spent += timed(reader.take) / 1e3
                since = 0.0
            sums[which] += spent
    gc.enable()
    return {"detached": sums[1] / sums[0], "attached": sums[2] / sums[0]}


def sizes(quick: bool) -> Numbers:
    small, large = (memory(500 if quick else 25_000, LEAF), memory(4 if quick else 200, 512 * BLOCK))
    cache = PrefixCache(64, BLOCK)
    reader = BlockEvents(cache, salt_of)
    publish(cache, texts(1, 1024, 4)[0])
    batch = batch_of(reader.take())
    block = {"block_hash": batch[0]["block_hashes"][0] % (1 << 64), "tokens_hash": (1 << 64) - 1}
    return {
        "memory_per_block_small_nodes": small,
        "memory_per_block_long_texts": large,
        "token_bytes_plain": 4 + 8 / BLOCK,
        "token_bytes_json": len(json.dumps(batch)) / 1024,
        "token_bytes_msgpack": len(msgpack.packb(batch)) / 1024,
        "token_bytes_index_json": len(json.dumps(block)) / BLOCK,
    }


def memory(nodes: int, length: int) -> float:
    """Bytes that a reader has for each block that it announced."""
    cache = PrefixCache(nodes * (length // BLOCK), BLOCK)
    for text in texts(nodes, length, 5):
        publish(cache, text)
    gc.collect()
    tracemalloc.start()
    reader = BlockEvents(cache, salt_of)
    blocks = sum(len(run.ids) for run in reader.take().stored)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert blocks == nodes * length // BLOCK
    return used / blocks


PARTS: dict[str, Callable[[bool], Numbers]] = {"steps": steps, "operations": operations, "bytes": sizes}


# ---- processes


def in_fresh_process(part: str, quick: bool) -> Numbers:
    command = [sys.executable, __file__, "--here", part, *(["--quick"] if quick else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{part}:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: small trees, one process")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes of each part (default 5)")
    parser.add_argument("--here", choices=PARTS, help="run one part in this process and print its numbers")
    chosen = parser.parse_args()
    if chosen.here:
        print(json.dumps(PARTS[chosen.here](chosen.quick)))
        return
    figures: Numbers = {}
    processes = 1 if chosen.quick else chosen.processes
    for part in chosen.only.split(","):
        runs = [in_fresh_process(part, chosen.quick) for _ in range(processes)]
        for name in runs[0]:
            values = sorted(run[name] for run in runs)
            figures[name] = float(f"{statistics.median(values):.4g}")
            bar = BARS.get(name.rsplit(".", 1)[-1])
            judged = "" if bar is None else f"bar {bar}: {'met' if figures[name] <= bar else 'MISSED'}"
            bounds = f"{values[0]:.4g} to {values[-1]:.4g}"
            print(f"{name:32}{figures[name]:>10g}   {bounds:24}{judged}".rstrip(), flush=True)
    facts = {"processes": processes, "quick": chosen.quick, "load": os.getloadavg()}
    print(json.dumps({"benchmark": "block_events", **facts, "figures": figures}))


if __name__ == "__main__":
    main()
