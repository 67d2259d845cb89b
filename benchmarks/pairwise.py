"""Time two versions of the prefix cache, and of an engine's step, against each other in one process.

    python benchmarks/pairwise.py [--base REVISION] [--slices 500] [--only turns,match]
    python benchmarks/pairwise.py --host

`--base` is a git revision (by default HEAD, so that uncommitted changes are measured). Both versions are imported into
this process, each with its own modules. Each workload runs in slices of some milliseconds; both versions
run the same slice of the same seeded workload in turn, and the one that goes first changes with every slice. A slice is
timed by the CPU time of the thread. A machine that gets slower or faster meanwhile changes both sides alike, so the
ratio of the medians is steady to about 1%. `watched`, `host` and `states` time the options of a cache, by the
constructor that each version has. With --host both versions are this checkout, and the second one has a host tier: idle
in `decode`, `match` and `step`, in use where the pool evicts. The last line is JSON; the exit code is 1 if a row is
slower than 1.02, or `watched` slower than 1.05.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent.parent
BAR, BARS = 1.02, {"watched": 1.05}
Slice = Callable[[int], None]


def check_out(revision: str, folder: Path) -> Path:
    """The files of a git revision, in `folder`."""
    archive = subprocess.run(["git", "archive", revision], cwd=HERE, capture_output=True, check=False)
    if archive.returncode:
        sys.exit(f"--base {revision}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder.resolve()


def import_from(checkout: Path) -> SimpleNamespace:
    """The modules of that checkout; modules of another one that were imported before stay with their importers."""
    for name in [name for name in sys.modules if name.split(".")[0].startswith("radixkv")]:
        del sys.modules[name]
    paths = [str(checkout), *(str(checkout / each) for each in ("kernels", "monitor", "traces"))]
    sys.path[:0] = paths
    try:
        modules = {name: importlib.import_module(f"radixkv.{name}") for name in ("cache", "engine", "engine.core")}
        request = importlib.import_module("radixkv.engine.request")
        package = importlib.import_module("radixkv")
        assert Path(package.__file__ or "").is_relative_to(checkout), package.__file__
        return SimpleNamespace(
            cache=modules["cache"],
            core=modules["engine.core"],
            request=request,
            config=package.EngineConfig,
            params=package.SamplingParams,
        )
    finally:
        del sys.path[: len(paths)]


def step(version: SimpleNamespace) -> Slice:
    """Steps of an engine core with 64 greedy streams and a runner that returns fixed logits: all but the forward."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(HERE / "radixkv" / "assets" / "tiny"))
    text = importlib.import_module(version.request.TextStream.__module__).decoder(tokenizer)
    random = np.random.default_rng(6)
    vocab = len(tokenizer)
    logits = torch.from_numpy(random.random((64, vocab), dtype=np.float32))

    class FixedLogits:
        row_dependent = False

        def run(self, chunks: Any, copies: Any) -> torch.Tensor:
            return logits[: len(chunks)]

    core = version.core.Core(version.cache.PrefixCache(8192, 16), FixedLogits(), version.config(max_sequences=64))
    prompts = random.integers(3, vocab, (64, 160)).astype(np.int32)
    prompts[:, :128] = prompts[0, :128]
    params = version.params(max_tokens=256, temperature=0, ignore_eos=True)

    def run(number: int) -> None:
        for _ in range(6):
            if not core.busy:
                for prompt in prompts:
                    core.add(version.request.Request(prompt, params, 256, frozenset(), 0, text))
            core.step()
        assert not core.counters.failed

    return run


def turns(version: SimpleNamespace) -> Slice:
    """Multi-turn conversations of 200 sessions in a pool too small for them: prompts of 512 more tokens a turn."""
    random = np.random.default_rng(1)
    histories = [np.empty(0, np.int32) for _ in range(200)]
    store = version.cache.PrefixCache(num_blocks=200 * 64, block_size=16)

    def run(number: int) -> None:
        for _ in range(8):
            at = int(random.integers(len(histories)))
            if len(histories[at]) > 4096:
                histories[at] = histories[at][:0]
            history = np.concatenate([histories[at], random.integers(0, 50_000, 496, dtype=np.int32)])
            with store.open(history) as sequence:
                sequence.extend(history[sequence.length :])
                sequence.commit()
                for token in random.integers(0, 50_000, 16, dtype=np.int32):
                    sequence.extend([int(token)])
                    sequence.commit()
                    history = np.append(history, token)
            histories[at] = history

    return run


def decode(version: SimpleNamespace) -> Slice:
    """One-token extends and commits of 16 sequences that share a prefix of 128 tokens."""
    store = version.cache.PrefixCache(num_blocks=65_536, block_size=16)
    prefix = np.arange(128, dtype=np.int32)
    open_: list[Any] = []

    def start() -> None:
        for each in open_:
            each.close()
        open_.clear()
        for each in range(16):
            prompt = np.append(prefix, np.int32(1000 + each))
            sequence = store.open(prompt)
            sequence.extend(prompt[sequence.length :])
            sequence.commit()
            open_.append(sequence)

    def run(number: int) -> None:
        if number % 32 == 0:
            start()
        for step in range(32):
            for sequence in open_:
                sequence.extend(np.array([step], np.int32))
                sequence.commit()

    return run


def match(version: SimpleNamespace) -> Slice:
    """Matches of 32k tokens along a chain of 64 nodes."""
    store = version.cache.PrefixCache(num_blocks=8192, block_size=16)
    text = np.random.default_rng(2).integers(0, 50_000, 32_768, dtype=np.int32)
    for end in range(512, len(text) + 1, 512):
        prompt = np.append(text[:end], np.int32(60_000))  # a branch after each run, so that the chain stays cut
        with store.open(prompt) as sequence:
            sequence.extend(prompt[sequence.length :])
            sequence.commit()

    def run(number: int) -> None:
        for _ in range(40):
            store.match(text)

    return run


def insert(version: SimpleNamespace) -> Slice:
    """Requests of 8k new tokens after a cached prefix of 2k, each of which evicts the one before."""
    store = version.cache.PrefixCache(num_blocks=8192, block_size=16)
    random = np.random.default_rng(3)
    head = random.integers(0, 50_000, 2048, dtype=np.int32)

    def run(number: int) -> None:
        for _ in range(10):
            prompt = np.concatenate([head, random.integers(0, 50_000, 8192, dtype=np.int32)])
            with store.open(prompt) as sequence:
                sequence.extend(prompt[sequence.length :])
                sequence.commit()

    return run


def evict(version: SimpleNamespace) -> Slice:
    """Requests of 64 tokens into a full pool of 20,000 leaves of 64 tokens each."""
    store = version.cache.PrefixCache(num_blocks=80_000, block_size=16)
    random = np.random.default_rng(4)

    def add() -> None:
        prompt = random.integers(0, 2**30, 64, dtype=np.int32)
        with store.open(prompt) as sequence:
            sequence.extend(prompt)
            sequence.commit()

    for _ in range(20_000):
        add()

    def run(number: int) -> None:
        for _ in range(60):
            add()

    return run


def agents(version: SimpleNamespace) -> Slice:
    """Forks: eight branches of a cached prompt decode a few tokens each and are closed."""
    store = version.cache.PrefixCache(num_blocks=4096, block_size=16)
    random = np.random.default_rng(5)

    def run(number: int) -> None:
        prompt = random.integers(0, 50_000, 1000, dtype=np.int32)
        with store.open(prompt) as lead:
            lead.extend(prompt[lead.length :])
            lead.commit()
            branches = [lead.fork() for _ in range(8)]
            for step in range(8):
                for at, branch in enumerate(branches):
                    branch.extend([at * 100 + step])
                    branch.commit()
            for branch in branches:
                branch.close()

    return run


class Events:
    """An observer that counts its events."""

    def __init__(self) -> None:
        self.count = 0

    def receive(self, *facts: object) -> None:
        self.count += 1

    opened = forked = closed = rooted = uprooted = inserted = grown = receive
    split = merged = trimmed = evicted = regretted = copied = receive


def watched(version: SimpleNamespace) -> Slice:
    """Turns of 100 sessions, two branches each, in a pool too small for them, with an observer and a change tracker."""
    random, events = np.random.default_rng(7), Events()
    histories = [np.empty(0, np.int32) for _ in range(100)]
    store = version.cache.PrefixCache(1024, 16)
    tracker = store.watch(events)

    def run(number: int) -> None:
        for _ in range(6):
            at, history = next_turn(histories, random)
            with store.open(history) as sequence:
                sequence.extend(history[sequence.length :])
                sequence.commit()
                with sequence.fork() as branch:
                    for token in random.integers(0, 50_000, 32, dtype=np.int32):
                        for each in (sequence, branch):
                            each.extend([int(token) + (each is branch)])
                            each.commit()
            histories[at] = history
            tracker.look()
        assert number < 100 or min(events.count, store.stats().evicted_blocks, store.stats().hit_tokens) > 0

    return run


def host(version: SimpleNamespace) -> Slice:
    """Turns of 100 sessions in a pool too small for them, with a host tier that holds most: offloads and loads."""
    random = np.random.default_rng(8)
    histories = [np.empty(0, np.int32) for _ in range(100)]
    store = version.cache.PrefixCache(1024, 16, host_blocks=4096)

    def write(sequence: Any, tokens: Any, verb: str = "extend") -> None:
        getattr(sequence, verb)(tokens)
        store.moves()
        store.moves_done()
        sequence.commit()

    def run(number: int) -> None:
        for _ in range(8):
            at, history = next_turn(histories, random)
            with store.open(history) as sequence:
                if loadable := sequence.loadable(history[sequence.length :]):
                    write(sequence, history[sequence.length : sequence.length + loadable], "load")
                write(sequence, history[sequence.length :])
                for token in random.integers(0, 50_000, 16, dtype=np.int32):
                    write(sequence, [int(token)])
            histories[at] = history
        assert number < 100 or store.stats().loaded_tokens > 0

    return run


def states(version: SimpleNamespace) -> Slice:
    """Turns of 100 sessions with recurrent state, a snapshot at the end of each prompt, and slots for half of them."""
    random = np.random.default_rng(9)
    histories = [np.empty(0, np.int32) for _ in range(100)]
    store = version.cache.PrefixCache(4096, 16, state_rows=4, state_snapshots=80)

    def write(sequence: Any, tokens: Any) -> None:
        sequence.extend(tokens)
        store.copies.drain()
        sequence.commit()

    def run(number: int) -> None:
        for _ in range(8):
            at, history = next_turn(histories, random)
            with store.open(history, limit=len(history) - 1) as sequence:
                sequence.snapshot_at(len(history) - 4)
                write(sequence, history[sequence.length :])
                for token in random.integers(0, 50_000, 16, dtype=np.int32):
                    write(sequence, [int(token)])
            histories[at] = history
        assert number < 100 or min(store.stats().hit_tokens, store.stats().evicted_states) > 0

    return run


def next_turn(histories: list[Any], random: np.random.Generator) -> tuple[int, Any]:
    """A session, and its next prompt: 160 more tokens, or a new text after 1,000."""
    at = int(random.integers(len(histories)))
    before = histories[at] if len(histories[at]) < 1000 else histories[at][:0]
    return at, np.concatenate([before, random.integers(0, 50_000, 160, dtype=np.int32)])


WORKLOADS = {each.__name__: each for each in (turns, decode, match, insert, evict, agents, step, watched, host, states)}


def compare(name: str, versions: list[SimpleNamespace], slices: int) -> dict[str, float]:
    """Milliseconds a slice of both versions, and their ratio."""
    runs = [WORKLOADS[name](version) for version in versions]
    seconds: list[list[float]] = [[], []]
    gc.collect()
    gc.disable()
    for number in range(slices + 5):
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.thread_time()
            runs[which](number)
            spent = time.thread_time() - start
            if number >= 5:
                seconds[which].append(spent)
        if number % 50 == 0:
            gc.collect()
            print(f"\r{name}: slice {number} of {slices}   ", end="", file=sys.stderr, flush=True)
    gc.enable()
    print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    base, ours = (statistics.median(each) for each in seconds)
    pairs = statistics.median(b / a for a, b in zip(*seconds, strict=True))
    return {
        "base_ms": round(base * 1e3, 4),
        "ours_ms": round(ours * 1e3, 4),
        "ratio": round(ours / base, 4),
        "pairs": round(pairs, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", metavar="REVISION", help="the version to compare with (default HEAD)")
    parser.add_argument("--quick", action="store_true", help="a smoke run of 20 slices")
    parser.add_argument("--slices", type=int, default=500)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="comma-separated names of workloads")
    parser.add_argument("--host", action="store_true", help="compare the cache with and without a host tier")
    options = parser.parse_args()
    slices = 20 if options.quick else options.slices
    if options.host:
        return report([import_from(HERE), with_host(import_from(HERE))], options.only.split(","), slices)
    with tempfile.TemporaryDirectory() as folder:
        base = check_out(options.base, Path(folder))
        return report([import_from(each) for each in (base, HERE)], options.only.split(","), slices)


def with_host(version: SimpleNamespace) -> SimpleNamespace:
    """The same modules with a cache that has a host tier twice as large as its pool."""

    def cache(num_blocks: int, block_size: int) -> Any:
        return version.cache.PrefixCache(num_blocks, block_size, host_blocks=2 * num_blocks)

    return SimpleNamespace(**{**vars(version), "cache": SimpleNamespace(PrefixCache=cache)})


def report(versions: list[SimpleNamespace], names: list[str], slices: int) -> int:
    rows = {}
    print(f"{'':10}{'base ms':>10}{'ours ms':>10}{'ratio':>8}{'of pairs':>10}")
    for name in names:
        rows[name] = row = compare(name, versions, slices)
        figures = f"{row['base_ms']:10.3f}{row['ours_ms']:10.3f}{row['ratio']:8.3f}{row['pairs']:10.3f}"
        print(f"{name:10}{figures}", flush=True)
    print(json.dumps({"benchmark": "pairwise", "slices": slices, "rows": rows}))
    return int(any(row["ratio"] > BARS.get(name, BAR) for name, row in rows.items()))


if __name__ == "__main__":
    sys.exit(main())
