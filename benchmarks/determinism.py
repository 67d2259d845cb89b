"""Measure the cost of deterministic=True in hits and time, its effect, and the rounding differences without it.

    python benchmarks/determinism.py [--quick] [--model-100m]

  floors   Two recorded traces through the real cache. Hits that end at any multiple of the recorded block are compared
           with hits that end on a grid of a given number of tokens, where only whole chunks are cached.
  engine   Conversations and agents on the bundled model, one request at a time and several at once: hit tokens and CPU
           time, against an ordinary engine and against none. One at a time, an engine of the same kind without a cache
           answers every turn, too. The table gives the share of turns in which all log probabilities have the same
           bits, and in which the tokens are the same.
  spread   The KV of one prompt computed in several ways: the largest distance between two of them, in root mean squares
           of the head. The tolerances of an audit follow from this. With --model-100m also on 100M random weights;
           there, bits with and without hits are compared on one thread and on two.
  harm     The effect on the next logits of one number that differs by exactly the tolerance of an audit.
  audit    Thousands of blocks of a healthy pool audited: how many differ, and the cost of a block; then the smallest
           change of one number that is found.

One thread; times are process CPU time. The last line is one JSON object; the exit code is 1 if a deterministic engine
gave other bits, or if an audit found a difference in a healthy pool.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from cpu_decode import build_model, cpu_name

from radixkv import Engine, SamplingParams
from radixkv.models import adapter
from radixkv.models.kv_recompute import TOLERANCE, compare
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from radixkv_traces.formats import TraceRequest, read, sample
from radixkv_traces.simulate import replay, unique_blocks

DTYPES = ("float32", "bfloat16", "float16")
BLOCK = 16


# ---- floors


def on_grid(requests: Sequence[TraceRequest], blocks: int) -> list[TraceRequest]:
    """Merge blocks of the requests into blocks `blocks` times as large; the rest of a request is dropped."""
    numbers: dict[tuple[int, ...], int] = {}
    chunked = []
    for request in requests:
        whole = len(request.blocks) // blocks * blocks
        groups = [tuple(request.blocks[i : i + blocks]) for i in range(0, whole, blocks)]
        chunked.append(replace(request, blocks=array("q", [numbers.setdefault(g, len(numbers)) for g in groups])))
    return chunked


def floors() -> list[dict[str, Any]]:
    rows = []
    for name, block, grids in (("cc_agent", 64, (64, 128, 256, 512, 1024)), ("conversation", 512, (512, 1024, 2048))):
        requests = list(read(sample(name)))
        unique = unique_blocks(requests) * block
        lengths = sorted(request.input_length for request in requests)
        print(f"\nfloors: {name}, {len(requests)} requests of {lengths[len(lengths) // 2]:,} tokens (median)")
        for share in (1.0, 0.1):
            rates = {0: replay(requests, max(1, int(unique * share / block)), "lru", block).token_hit_rate}
            for grid in grids:
                # A recorded block that is not full is not a whole chunk, either.
                full = [replace(r, blocks=r.blocks[: r.input_length // block]) for r in requests]
                pool = max(1, int(unique * share / grid))
                rates[grid] = replay(on_grid(full, grid // block), pool, "lru", grid).token_hit_rate
            shown = ", ".join(f"{grid}: {rate:.3f}" for grid, rate in rates.items() if grid)
            print(f"  pool of {share:.0%} of what is unique: hit rate {rates[0]:.3f}; on a grid of {shown}")
            rows.append({"trace": name, "pool": share, "free": round(rates[0], 4)})
            rows[-1].update({f"grid_{grid}": round(rate, 4) for grid, rate in rates.items() if grid})
    return rows


# ---- engine


class Workload:
    """Sessions whose turns grow one history: (name, opening, turns of each session, new tokens a turn, reply)."""

    def __init__(self, name: str, opening: int, sessions: int, turns: int, new: tuple[int, int], reply: int) -> None:
        self.name, self.turns, self.reply = name, turns, reply
        rng = random.Random(name)
        self._new = [[self._tokens(rng, rng.randint(*new)) for _ in range(turns)] for _ in range(sessions)]
        self._opening = self._tokens(rng, opening)

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(300, 1500) for _ in range(count)]

    def run(self, ask: Callable[[list[list[int]]], list[Any]], *, together: bool) -> None:
        """Ask turn by turn, of all sessions in turn or at once; replies become part of the history."""
        histories = [list(self._opening) for _ in self._new]
        for turn in range(self.turns):
            for history, new in zip(histories, self._new, strict=True):
                history += new[turn]
            replies = ask(histories) if together else [ask([history])[0] for history in histories]
            for history, reply in zip(histories, replies, strict=True):
                history += reply.token_ids


KINDS: dict[str, dict[str, Any]] = {
    "no cache": {"prefix_cache": False},
    "ordinary": {},
    "grid 512": {"deterministic": True, "prefill_chunk": 512},
    "grid 256": {"deterministic": True, "prefill_chunk": 256},
    "grid 128": {"deterministic": True, "prefill_chunk": 128},
    "grid 64": {"deterministic": True, "prefill_chunk": 64},
    "grid 32": {"deterministic": True, "prefill_chunk": 32},
}


def engine_costs(workload: Workload, dtype: str, *, together: bool) -> list[dict[str, Any]]:
    how = "at once" if together else "one at a time"
    print(f"\nengine: {workload.name}, {dtype}, {how}")
    rows = []
    for kind, options in KINDS.items():
        rows.append(_cost(workload, dtype, kind, options, together=together))
        row = rows[-1]
        same = "" if "bits" not in row else f"   bits {row['bits']}, tokens {row['tokens']} of {row['turns']} turns"
        print(f"  {kind:9} {row['hit_rate']:6.1%} hit {row['computed']:>8,} computed {row['cpu_s']:7.2f} s{same}")
    return rows


def _cost(workload: Workload, dtype: str, kind: str, options: dict[str, Any], *, together: bool) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=workload.reply, ignore_eos=True, logprobs=1)
    asked: list[tuple[list[int], Any]] = []
    with Engine.load("tiny", dtype=dtype, kv_memory="256MB", **options) as engine:

        def ask(prompts: list[list[int]]) -> list[Any]:
            done = engine.generate(prompts, params)
            asked.extend((list(prompt), reply) for prompt, reply in zip(prompts, done, strict=True))
            return done

        begin = time.process_time()
        workload.run(ask, together=together)
        spent = time.process_time() - begin
        stats = engine.stats()
    row = {"workload": workload.name, "dtype": dtype, "together": together, "kind": kind, "cpu_s": round(spent, 3)}
    row.update(hit_rate=round(stats.hit_rate, 4), computed=stats.computed_tokens, turns=len(asked))
    if not together and kind != "no cache":
        with Engine.load("tiny", dtype=dtype, kv_memory="64MB", **{**options, "prefix_cache": False}) as cold:
            replies = [(reply, cold.generate([prompt], params)[0]) for prompt, reply in asked]
        row["bits"] = sum(reply.logprobs == again.logprobs for reply, again in replies)
        row["tokens"] = sum(reply.token_ids == again.token_ids for reply, again in replies)
    return row


# ---- spread


def spread(name: str, loaded: LoadedModel, length: int) -> dict[str, Any]:
    """The largest deviation of several ways to compute one prompt's KV from chunks of 128."""
    rng = random.Random(1)
    tokens = np.array([rng.randrange(300, 1500) for _ in range(length)], np.int32)
    ways: dict[str, Callable[[], int]] = {
        "whole": lambda: length,
        "512": lambda: 512,
        "mixed": lambda: rng.choice([1, 1, 5, 17, 64, 200]),
        "beside": lambda: 96,
    }
    blocks = -(-length // BLOCK)
    runner = Runner(loaded, 2 * blocks + blocks, BLOCK)
    tables = [np.array(part, np.int32) for part in np.array_split(np.random.default_rng(1).permutation(3 * blocks), 3)]
    _compute(runner, tokens, [tables[0]], lambda: 128)
    worst = {}
    for way, size in ways.items():
        _compute(runner, tokens, tables[1:] if way == "beside" else [tables[1]], size)
        worst[way] = compare(runner.store, tables[1], tables[0], 0, length).worst
    allowed = TOLERANCE[loaded.dtype]
    shown = ", ".join(f"{way} {value:.1e}" for way, value in worst.items())
    print(f"spread: {name}, {loaded.dtype}, {length} tokens: {shown}; allowed {allowed}")
    return {
        "model": name,
        "dtype": str(loaded.dtype),
        "tokens": length,
        "worst": max(worst.values()),
        "allowed": allowed,
    }


def _compute(runner: Runner, tokens: np.ndarray, tables: list[np.ndarray], size: Callable[[], int]) -> None:
    start = 0
    while start < len(tokens):
        end = min(start + size(), len(tokens))
        places = np.arange(start, end)
        runner.run(
            [
                SequenceInput(
                    tokens[start:end], start, t[places // BLOCK] * BLOCK + places % BLOCK, t[: -(-end // BLOCK)]
                )
                for t in tables
            ]
        )
        start = end


def harm(dtype: str, changes: int = 300) -> dict[str, Any]:
    """Compare the effect of one number at the tolerance of an audit on the next logits with the effect of rounding."""
    loaded = adapter.load("tiny", dtype=dtype)
    rng = random.Random(1)
    tokens = np.array([rng.randrange(300, 1500) for _ in range(400)], np.int32)
    runner, table = Runner(loaded, 30, BLOCK), np.arange(26, dtype=np.int32)

    def logits(size: Callable[[], int]) -> torch.Tensor:
        _compute(runner, tokens, [table], size)
        return decode()

    def decode() -> torch.Tensor:
        return runner.run([SequenceInput(np.array([500], np.int32), 400, np.array([400]), table)])[0]

    others = [logits(lambda: rng.choice([1, 5, 40, 200])) for _ in range(6)]
    base, moved = logits(lambda: 128), []
    for _ in range(changes):
        pool = rng.choice([*runner.store.keys, *runner.store.values])
        place = (rng.randrange(pool.shape[0]), rng.randrange(25), rng.randrange(BLOCK), rng.randrange(pool.shape[3]))
        before = pool[place].clone()
        pool[place] += TOLERANCE[loaded.dtype] * pool[place[0], :25].double().square().mean().sqrt()
        moved.append(float((decode() - base).abs().max()))
        pool[place] = before
    rounding = max(float((other - base).abs().max()) for other in others)
    row = {"dtype": dtype, "rounding": rounding, "median": sorted(moved)[changes // 2], "most": max(moved)}
    print(
        f"harm: {dtype}, one number off by {TOLERANCE[loaded.dtype]}: logits move by {row['median']:.1e} (median), at "
        f"most {row['most']:.1e}; rounding moves them by {rounding:.1e}, their spread is {float(base.std()):.1f}"
    )
    return row


def bits(dtype: str, threads: int) -> dict[str, Any]:
    """Requests that branch off each other, on 100M random weights: of how many are all log probabilities equal?"""
    torch.set_num_threads(threads)
    rng = random.Random(4)
    prompts = [[rng.randrange(300, 30000) for _ in range(700)]]
    for cut in (700, 500, 256, 90):
        prompts.append(prompts[0][:cut] + [rng.randrange(300, 30000) for _ in range(60)])
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
    options: dict[str, Any] = {"dtype": dtype, "deterministic": True, "prefill_chunk": 128, "num_blocks": 200}
    with Engine.load(build_model(), **options) as engine:
        warm = [engine.generate([prompt], params)[0].logprobs for prompt in prompts]
        cached = engine.stats().cached_tokens
        # The same model, which the first engine has taken over.
        with Engine.load(engine.model.model, **options, prefix_cache=False) as cold:
            same = sum(cold.generate([p], params)[0].logprobs == w for p, w in zip(prompts, warm, strict=True))
    torch.set_num_threads(1)
    print(f"bits: 100M, {dtype}, {threads} threads: {same} of {len(prompts)} the same, {cached:,} tokens hit")
    return {"dtype": dtype, "threads": threads, "same": same, "of": len(prompts), "cached": cached}


# ---- audit


def audit(dtype: str, blocks: int, *, deterministic: bool) -> dict[str, Any]:
    workload = Workload("audited", 300, 6, 5, (20, 200), 24)
    params = SamplingParams(temperature=0, max_tokens=workload.reply, ignore_eos=True)
    options = {"deterministic": True, "prefill_chunk": 128} if deterministic else {}
    with Engine.load("tiny", dtype=dtype, num_blocks=400, **options) as engine:
        workload.run(lambda prompts: engine.generate(prompts, params), together=True)
        begin = time.process_time()
        report = engine.audit(blocks)
        spent = time.process_time() - begin
        smallest = _smallest_found(engine)
    kind = "deterministic" if deterministic else "ordinary"
    cost = spent / report.blocks * 1000
    print(f"audit: {dtype}, {kind}: {report}; {cost:.2f} ms of CPU a block; finds a change of {smallest:.1e}")
    return {"dtype": dtype, "kind": kind, "blocks": report.blocks, "differ": report.differ, "ms": round(cost, 3)} | {
        "finds": smallest
    }


def _smallest_found(engine: Engine) -> float:
    """The smallest of some changes to one cached number that an audit finds, in root mean squares of its head."""
    found = 0.0
    for change in (2.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1.5e-3, 1e-3, 3e-4, 1e-4):
        engine.clear_cache()
        prompt = [random.Random(5).randrange(300, 1500) for _ in range(256)]
        engine.generate([prompt], SamplingParams(max_tokens=1))
        core = engine.core
        block, store = int(core.cache.match(np.array(prompt, np.int32)).blocks[5]), core.runner.store  # type: ignore[attr-defined]
        pool = store.values[-1]
        scale = float(pool[0, block].double().square().mean().sqrt())
        before = float(pool[0, block, 3, 2])
        pool[0, block, 3, 2] = before + change * scale
        if float(pool[0, block, 3, 2]) == before or not engine.audit(64).differ:
            return found
        found = change
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short workloads, few audits")
    parser.add_argument(
        "--model-100m", action="store_true", help="spread and bits on 100M random weights, too (minutes)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{cpu_name()}, torch {torch.__version__}, one thread")
    size = 3 if options.quick else 6
    chat = Workload("conversations", 200, size, size, (15, 60), 32)
    agents = Workload("agents", 900, size, size + 2, (60, 300), 24)
    found: dict[str, Any] = {"floors": floors()}
    found["engine"] = [
        row
        for workload, dtype, together in (
            (chat, "float32", False),
            (chat, "bfloat16", False),
            (agents, "float32", False),
            (chat, "float32", True),
            (agents, "float32", True),
        )
        for row in engine_costs(workload, dtype, together=together)
    ]
    print()
    found["spread"] = [spread("tiny", adapter.load("tiny", dtype=dtype), 1500) for dtype in DTYPES]
    found["harm"] = [harm(dtype) for dtype in DTYPES]
    if options.model_100m:
        found["spread"] += [spread("100M", adapter.load(build_model(), dtype=dtype), 700) for dtype in DTYPES[:2]]
        found["bits"] = [bits(dtype, threads) for dtype in DTYPES[:2] for threads in (1, 2)]
    print()
    count = 500 if options.quick else 3100
    found["audit"] = [audit(dtype, count, deterministic=d) for dtype in DTYPES[:2] for d in (False, True)]
    right = all(
        row["bits"] == row["turns"] for row in found["engine"] if row["kind"].startswith("grid") and "bits" in row
    )
    right &= all(row["same"] == row["of"] for row in found.get("bits", ()))
    healthy = not any(row["differ"] for row in found["audit"])
    print(json.dumps({"benchmark": "determinism", "right": right, "healthy": healthy, **found}))
    sys.exit(0 if right and healthy else 1)


if __name__ == "__main__":
    main()
