"""What telemetry costs the engine: a mark, an event, a look, and tokens/s with and without somebody attached.

    python benchmarks/telemetry.py [--quick] [--rounds 5]

"cache turn": open, extend by 64 tokens, commit and close of one conversation in a tree of 1,000, 10,000 and 100,000
nodes, watched and not, in turn; the difference by the marks and events of such a turn is what each costs. "look": one
`collect` after 64 such turns, for each size of the tree: it must not grow with the tree. "engine": tokens/s of the
bundled model with eight streams, monitor off, on with nobody attached, and on with a client at 10 Hz, in turn within
each round; ratios of medians. Clocks: process CPU time for the cache, wall time for the engine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.cache.ghosts import Pressure
from radixkv.cache.observer import guarded
from radixkv.telemetry.recorder import Recorder

TURN, PROMPT = 64, 64


def tree(nodes: int, *, watched: bool) -> tuple[PrefixCache, Recorder | None]:
    """Conversations of one turn each under 100 system prompts."""
    cache = PrefixCache(nodes * 6 + 8192, 16)
    recorder = None
    if watched:
        recorder = Recorder()
        recorder.attach(cache)
    for number in range(nodes):
        turn(cache, prompt(number))
    if recorder is not None:
        recorder.collect()
    return cache, recorder


def prompt(number: int) -> np.ndarray[Any, Any]:
    return np.array([number % 100 + 1] * 32 + [number + 1000] * 32, np.int32)


def turn(cache: PrefixCache, text: np.ndarray[Any, Any]) -> None:
    sequence = cache.open(text)
    sequence.extend(text[sequence.length :])
    sequence.commit()
    sequence.close()


def turns(cache: PrefixCache, first: int, count: int) -> float:
    """CPU microseconds a turn: a new conversation each, below a system prompt that is there."""
    texts = [prompt(number) for number in range(first, first + count)]
    begun = time.process_time_ns()
    for text in texts:
        turn(cache, text)
    return (time.process_time_ns() - begun) / count / 1000


def marks_of_a_turn() -> int:
    """How many marks and events one such turn takes, counted."""
    cache, recorder = tree(200, watched=True)
    assert recorder is not None
    counted = [0]
    changed, observer = cache._tree.changed, cache._tree.observer
    assert changed is not None and observer is not None
    mark = changed.mark

    def count(node: Any) -> None:
        counted[0] += 1
        mark(node)

    class Counting:
        def __getattr__(self, name: str) -> Callable[..., None]:
            def tell(*facts: object) -> None:
                counted[0] += 1

            return tell

    changed.mark = count
    cache._tree.observer = Counting()  # type: ignore[assignment]
    turn(cache, prompt(100_000_100))
    return counted[0]


def nanoseconds_of_an_event() -> dict[str, float]:
    """A mark and the three events that a recorder listens to, the guard included; an empty loop is taken off."""
    cache, recorder = tree(10, watched=True)
    assert recorder is not None and cache._tree.changed is not None
    told = guarded(recorder, lambda: None)
    node = next(iter(cache._tree.walk()))
    mark, pressure = cache._tree.changed.mark, Pressure(1, 0)
    calls: dict[str, Callable[[], object]] = {
        "mark": lambda: mark(node),
        "opened + closed": lambda: (told.opened(1, None, 1, 1, "request"), told.closed(1, 1)),
        "grown, which it ignores": lambda: told.grown(1, 1),
        "evicted": lambda: told.evicted(1, 2, 3, 4, 5, True, 1.0, 0, pressure),
        "regretted": lambda: told.regretted(1, 2, 3.0),
    }
    empty = _each(lambda: None)
    return {name: round(_each(call) - empty, 1) for name, call in calls.items()}


def _each(call: Callable[[], object], repeats: int = 100_000) -> float:
    best = float("inf")
    for _ in range(3):
        begun = time.process_time_ns()
        for _ in range(repeats):
            call()
        best = min(best, (time.process_time_ns() - begun) / repeats)
    return best


def cache_rows(sizes: tuple[int, ...], rounds: int) -> list[dict[str, float]]:
    rows = []
    for nodes in sizes:
        (plain, _), (seen, recorder) = tree(nodes, watched=False), tree(nodes, watched=True)
        assert recorder is not None
        off, on, looks, empty = [], [], [], []
        for round_ in range(rounds * 8):
            first = 10_000_000 + round_ * 64
            off.append(turns(plain, first, 64))
            on.append(turns(seen, first, 64))
            looks.append(_look(recorder))
            empty.append(_look(recorder))
        row = {"nodes": nodes, "turn_us": statistics.median(off), "watched_us": statistics.median(on)}
        row |= {"look_us": statistics.median(looks), "empty_look_us": statistics.median(empty)}
        rows.append({name: round(value, 2) for name, value in row.items()})
    return rows


def _look(recorder: Recorder) -> float:
    begun = time.process_time_ns()
    recorder.collect()
    return (time.process_time_ns() - begun) / 1000


@contextmanager
def client(pid: int) -> Iterator[list[int]]:
    """Somebody who reads all frames at 10 Hz; the bytes so far."""
    from radixkv.telemetry.discovery import connect

    connection, seen, done = connect(pid, hz=10.0), [0], threading.Event()
    connection.settimeout(0.1)

    def read() -> None:
        while not done.is_set():
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                continue
            if not data:
                return
            seen[0] += len(data)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
        connection.close()


def engine_rates(rounds: int, tokens: int) -> dict[str, Any]:
    from radixkv import Engine, SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {"off": [], "alone": [], "attached": []}
    shares, sent = [], 0
    engines = {on: Engine.load("tiny", num_blocks=2000, monitor=on) for on in (False, True)}

    def run(engine: Engine, round_: int) -> float:
        prompts = [f"{round_} {name}: tell me a story" for name in range(8)]
        begun = time.perf_counter()
        engine.generate(prompts, params)
        return 8 * tokens / (time.perf_counter() - begun)

    for engine in engines.values():
        run(engine, -1)
    for round_ in range(rounds):
        rates["off"].append(run(engines[False], round_))
        rates["alone"].append(run(engines[True], round_))
        before, begun = engines[True]._core.telemetry.cost_ns, time.perf_counter_ns()  # type: ignore[union-attr]
        recorder = engines[True]._core.telemetry._recorder  # type: ignore[union-attr]
        before += recorder.cost_ns
        with client(os.getpid()) as seen:
            rates["attached"].append(run(engines[True], round_))
            sent += seen[0]
        cost = engines[True]._core.telemetry.cost_ns + recorder.cost_ns - before  # type: ignore[union-attr]
        shares.append(cost / (time.perf_counter_ns() - begun))
    for engine in engines.values():
        engine.close()
    median = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "tokens_per_s": {name: round(value) for name, value in median.items()},
        "alone_ratio": round(median["alone"] / median["off"], 3),
        "attached_ratio": round(median["attached"] / median["off"], 3),
        "collecting_share": round(statistics.median(shares), 5),
        "bytes_per_round": sent // rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: smaller trees, fewer rounds")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    rounds = 2 if chosen.quick else chosen.rounds
    events = nanoseconds_of_an_event()
    for name, value in events.items():
        print(f"{name:26} {value:8.1f} ns")
    marks = marks_of_a_turn()
    rows = cache_rows((1000, 5000) if chosen.quick else (1000, 10_000, 100_000), rounds)
    for row in rows:
        more = (row["watched_us"] - row["turn_us"]) * 1000
        row["ns_per_event"] = round(more / marks, 1)
        print(
            f"{row['nodes']:8,} nodes: a turn {row['turn_us']:.1f} us, watched {row['watched_us']:.1f} us "
            f"({marks} marks and events, {row['ns_per_event']:.0f} ns each); a look after 64 turns "
            f"{row['look_us']:.0f} us, after none {row['empty_look_us']:.0f} us"
        )
    with tempfile.TemporaryDirectory(prefix="rkv") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        os.environ["RADIXKV_MONITOR"] = "1"
        engine = engine_rates(rounds, 32 if chosen.quick else 128)
    print(f"engine: {engine}")
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()}
    cache = {"events_ns": events, "marks": marks, "rows": rows}
    print(json.dumps({"benchmark": "telemetry", **cache, **engine, **machine}))


if __name__ == "__main__":
    main()
