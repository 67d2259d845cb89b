"""A disk behind the host tier: openings after a restart, gaps of running streams meanwhile, a start, an idle disk."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tiers_parts.live import BLOCK, CONTEXT, SUFFIX, Clock, bytes_per_token, first_token, greedy, load, medians, tokens

from radixkv import Engine
from radixkv.disk.store import Run, Store

SESSIONS, ROOM = 5, CONTEXT + 8 * SUFFIX
OPENED = ("computed", "restarted", "disk", "host", "device", "file")
STREAMS, STREAMED, ASKED_AT = 4, 128, 32  # running streams, their tokens, the token at which a session is opened
SIDES = ("alone", "disk", "host", "device")
RECORDS, CHAIN = 100_000, 250  # records of an index, and of one text
IDLE_PROMPT, IDLE_REPLY = 64, 64
Times = tuple[float, float]


def restarted(path: Path, rounds: int) -> dict[str, Any]:
    """Write sessions of CONTEXT tokens to a folder, restart, and open them; then what a start and an idle disk cost."""
    draw = random.Random(6)
    sessions = [tokens(draw, CONTEXT) for _ in range(SESSIONS)]
    with TemporaryDirectory() as folder:
        with load(path, SESSIONS * ROOM, host_tokens=ROOM, disk=folder) as engine:
            computed = [first_token(engine, session + tokens(draw, SUFFIX))[0] for session in sessions]
            settle(engine)
        found = {"computed": computed} | _opened(path, folder, sessions, rounds)
        with load(path, ROOM + 2 * STREAMS * STREAMED, host_tokens=2 * ROOM, disk=folder) as engine:
            gaps = _gaps(engine, sessions, 5 if rounds > 1 else 1)
    row = {"tokens": CONTEXT + SUFFIX} | medians(found)
    return row | {"gaps": gaps, "start": _start(), "idle": _idle(rounds)}


def _opened(path: Path, folder: str, sessions: Sequence[list[int]], rounds: int) -> dict[str, list[Times]]:
    """Open sessions from the disk, from the host and from the device, in a pool of one session.

    Each round loads an engine, and opens a session ("restarted": each page of memory is new). Two more use the rest of
    the memory. The fourth is opened from the disk ("disk"), and moves the third to the host, which is opened twice.
    "file" is a plain read.
    """
    draw = random.Random(8)
    found: dict[str, list[Times]] = {name: [] for name in OPENED[1:]}
    for _ in range(rounds):
        with load(path, ROOM, host_tokens=2 * ROOM, disk=folder) as engine:
            for name, session in (("restarted", 0), ("", 1), ("", 2), ("disk", 3), ("host", 2), ("device", 2)):
                times, usage = first_token(engine, sessions[session] + tokens(draw, SUFFIX))
                _check_source(name, usage)
                found.get(name, []).append(times)
        with next(Path(folder).glob("*/slab-00000")).open("rb", buffering=0) as file:
            buffer, clock = memoryview(bytearray(BLOCK * bytes_per_token(path))), Clock()
            assert all(file.readinto(buffer) for _ in range(CONTEXT // BLOCK))
            found["file"].append(clock())
    return found


def _check_source(name: str, usage: Any) -> None:
    """Assert that nearly all tokens of a session came from where `name` says, and from no lower tier."""
    sources = {"host": usage.host_tokens, "device": usage.cached_tokens - usage.host_tokens}
    assert sources.get(name, usage.disk_tokens) > CONTEXT - 8 * SUFFIX, (name, usage)
    assert name not in sources or usage.disk_tokens < BLOCK * 8, (name, usage)


# ---- inter-token gaps


def _gaps(engine: Engine, sessions: Sequence[list[int]], runs: int) -> dict[str, Any]:
    """Time the tokens of STREAMS streams: alone, and while a session is opened from the disk, the host, the device.

    `p99` and `slowest` are of all gaps of a run. `reading` is the largest gap between the submission of the session and
    the step that loads its KV. Medians over the runs, in ms.
    """
    draw = random.Random(7)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    first, *others = sessions  # the first one is on the device, until another one moves it to the host
    for run in range(-1, runs):
        for side, session in zip(SIDES, (None, others[run % len(others)], first, first), strict=True):
            row = _streamed(engine, draw, side, session, checked=run >= 0)
            if run >= 0:
                found[side].append(row)
    return {
        f"{side}_{name}": round(statistics.median(row[name] for row in rows), 1)
        for side, rows in found.items()
        for name in rows[0]
    }


def _streamed(
    engine: Engine, draw: random.Random, side: str, session: list[int] | None, *, checked: bool
) -> dict[str, float]:
    """Run the streams, and open a session meanwhile; return figures of the gaps of the first stream."""
    handles = [engine.submit(tokens(draw, SUFFIX), greedy(STREAMED)) for _ in range(STREAMS)]
    times, asked, began = [], None, 0.0
    for number, _ in enumerate(handles[0]):
        times.append(time.perf_counter())
        if number == ASKED_AT and session is not None:
            began = times[-1]
            asked = engine.submit([*session, *tokens(draw, SUFFIX)], greedy(1))
    for handle in handles:
        handle.result()
    gaps = [(after, (after - before) * 1e3) for before, after in pairwise(times[1:])]
    lengths = sorted(length for _, length in gaps)
    row = {"median": statistics.median(lengths), "p99": lengths[len(lengths) * 99 // 100], "slowest": lengths[-1]}
    if asked is not None:
        usage = asked.result().usage
        if checked:
            _check_source(side, usage)
        until_first = [length for end, length in gaps if began < end < began + usage.ttft_s + 0.005]
        row |= {"reading": max(until_first[:-2], default=0.0)}  # the last two steps load the KV and compute the message
    return row


# ---- without a model of this size


def _start() -> dict[str, Any]:
    """Open a folder with RECORDS records and an empty one, each in a process of its own: what the first costs more."""
    draw = random.Random(9)
    with TemporaryDirectory() as full, TemporaryDirectory() as empty:
        store = Store(lambda: Path(full), 1, RECORDS)
        assert store.settle(60.0)
        for _ in range(RECORDS // CHAIN):
            store.offer(
                Run(b"None", [draw.randbytes(4 * BLOCK) for _ in range(CHAIN)], [np.zeros(1, np.uint8)] * CHAIN, 0.0)
            )
            assert store.settle(60.0)
        assert store.stats().records == RECORDS and store.close(60.0)
        (cpu, mb), (no_cpu, no_mb) = (
            [statistics.median(each) for each in zip(*(_cost(folder) for _ in range(5)), strict=True)]
            for folder in (full, empty)
        )
    return {"records": RECORDS, "cpu_s": round(cpu - no_cpu, 3), "mb": round(mb - no_mb, 1)}


_OPEN = """
import re, sys, time
from pathlib import Path
from radixkv.disk.store import Store
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
begun, before = time.process_time(), peak()
store = Store(lambda: Path(sys.argv[1]), 1, 200_000)
assert store.settle(60.0) and store.ready
print(time.process_time() - begun, peak() - before)
assert store.close(10.0)
"""


def _cost(folder: str) -> tuple[float, ...]:
    command = [sys.executable, "-c", _OPEN, folder]
    return tuple(map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))


def _idle(rounds: int) -> dict[str, Any]:
    """Run streams on two engines of the bundled model in turn, one of which has a disk that finds nothing.

    CPU time from the submission of the streams to their end; what the disk writes afterwards is not counted.
    """
    draw = random.Random(10)
    found: dict[str, list[float]] = {"on": [], "off": []}
    with TemporaryDirectory() as folder, _tiny(disk_cache=folder) as on, _tiny() as off:
        for number in range(-5, 40 * rounds):
            sides = [("on", on), ("off", off)]
            for name, engine in sides if number % 2 else sides[::-1]:
                settle(on)
                clock = Clock()
                prompts = [[draw.randrange(3, 500) for _ in range(IDLE_PROMPT)] for _ in range(STREAMS)]
                engine.generate(prompts, greedy(IDLE_REPLY))
                if number >= 0:
                    found[name].append(clock()[0])
    on_ms, off_ms = (statistics.median(found[name]) for name in ("on", "off"))
    pairs = statistics.median(on / off for on, off in zip(found["on"], found["off"], strict=True))
    return {"on_cpu_ms": round(on_ms, 2), "off_cpu_ms": round(off_ms, 2), "ratio": round(pairs, 4)}


@contextmanager
def _tiny(**options: Any) -> Iterator[Engine]:
    with Engine.load("tiny", num_blocks=4096, host_memory="32MiB", monitor=False, **options) as engine:
        yield engine


def settle(engine: Engine) -> None:
    """Wait until an idle engine writes no more."""
    written = -1
    while (now := engine.stats().disk.written_blocks) != written:
        written = now
        time.sleep(0.2)
