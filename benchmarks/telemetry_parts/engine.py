"""Measure tokens per second of an engine without telemetry, with telemetry, and with a client at 10 Hz.

Three engines with the bundled model take turns with short runs of eight streams each, and the order rotates. After some
rounds all three are loaded again, because the memory addresses of its tensors change the speed of an engine by some
percent. The client is a separate process (reader.py) and stays attached. Each run gives wall time, the CPU time of the
engine's thread, and that of all threads of this process. The result is the median over all rounds of the ratio to the
run without telemetry in the same round, so that a load of a second affects both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from radixkv import Engine, SamplingParams

STREAMS, TOKENS, HZ = 8, 32, 10.0
KINDS = ("off", "alone", "attached")
Run = dict[str, float]


@contextmanager
def client(engine: Engine) -> Iterator[list[int]]:
    """A client that reads all frames at 10 Hz; after the end, the number of its bytes."""
    assert engine.monitoring is not None and engine.monitoring.publisher.path is not None
    socket = str(engine.monitoring.publisher.path)
    command = [sys.executable, str(Path(__file__).with_name("reader.py")), socket, str(HZ)]
    got: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield got
        child.stdin.close()
        got.append(int(child.stdout.readline()))


def clocks(engine: Engine) -> dict[str, int]:
    """Nanoseconds: of the wall, of the engine's thread, of all threads, and of the wall for telling and collecting."""
    watched, thread = engine.monitoring, engine.client.thread._thread.ident
    assert thread is not None
    return {
        "wall": time.perf_counter_ns(),
        "thread": time.clock_gettime_ns(time.pthread_getcpuclockid(thread)),
        "process": time.process_time_ns(),
        "telling": 0 if watched is None else watched.recorder.cost_ns + watched.recorder.cache_recorder.cost_ns,
    }


def generate(engine: Engine, name: str) -> Run:
    """Eight streams of greedy tokens: the seconds of each clock."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    prompts = [f"{name} {number}: tell me a story" for number in range(STREAMS)]
    before = clocks(engine)
    engine.generate(prompts, params)
    return {clock: (now - before[clock]) / 1e9 for clock, now in clocks(engine).items()}


def loaded(rounds: int) -> tuple[dict[str, list[Run]], int]:
    """All runs of some rounds with three engines that are new, and the bytes that the client got."""
    engines = {kind: Engine.load("tiny", num_blocks=2000, monitor=kind != "off") for kind in KINDS}
    runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    with client(engines["attached"]) as got:
        for engine in engines.values():
            generate(engine, "warm up")
        for round_ in range(rounds):
            for kind in KINDS[round_ % 3 :] + KINDS[: round_ % 3]:
                runs[kind].append(generate(engines[kind], str(round_)))
    for engine in engines.values():
        engine.close()
    return runs, got[0]


def engine_figures(loads: int, rounds: int) -> dict[str, Any]:
    """The figures of `loads` times `rounds` rounds."""
    runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    sent = 0
    for _ in range(loads):
        more, seen = loaded(rounds)
        sent += seen
        for kind in KINDS:
            runs[kind] += more[kind]
    told = KINDS[1:]
    return {
        "rounds": loads * rounds,
        "tokens_per_s": {kind: round(STREAMS * TOKENS / _median(runs[kind])) for kind in KINDS},
        "rate_ratio": {kind: _ratios(runs, kind, "wall") for kind in told},
        "thread_cpu_rate_ratio": {kind: _ratios(runs, kind, "thread") for kind in told},
        "process_cpu_rate_ratio": {kind: _ratios(runs, kind, "process") for kind in told},
        "telling_share": {kind: round(_total(runs[kind], "telling") / _total(runs[kind], "wall"), 5) for kind in told},
        "bytes_to_client": sent,
    }


def _median(runs: list[Run]) -> float:
    return statistics.median(each["wall"] for each in runs)


def _total(runs: list[Run], clock: str) -> float:
    return sum(each[clock] for each in runs)


def _ratios(runs: dict[str, list[Run]], kind: str, clock: str) -> list[float]:
    """Quartiles of the rate's ratio to that of the same round's run without telemetry."""
    found = [off[clock] / seen[clock] for off, seen in zip(runs["off"], runs[kind], strict=True)]
    return [round(each, 3) for each in statistics.quantiles(found, n=4)]
