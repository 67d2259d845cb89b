"""What the terminal monitor costs beside a busy engine: CPU, memory, terminal output, start-up.

    python benchmarks/monitor.py [--seconds 10] [--views tree,pool] [--nodes 5000] [--blocks 100000]

A child process publishes made-up telemetry over the real Unix socket, as engines do: a tree of `--nodes` nodes over a
pool of `--blocks` blocks, of which ten times a second 200 nodes are used, 40 are held or let go, 20 are evicted and 20
published. The monitor runs in another process on a real tty of 200 x 60 characters, and only that one is measured: the
CPU time of all its threads (user + system, of one core) and its resident memory, from three seconds after its first
picture on; the bytes that it writes to the terminal, which this process reads and drops; and the time from its start to
the first picture of the view. It attaches to the engine by its socket. The pool is measured twice: as it opens (all
blocks in view), and zoomed in to two blocks a character.

Bars (facts/monitor.md): at most 20% of a core, 100 MiB, 0.7 s. CPU time is what others on the machine disturb least;
start-up is wall time, the best of three. The last line is JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import pty
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from radixkv.telemetry.publisher import Publisher
from radixkv.telemetry.records import Changes, EngineFacts, NodeRecord, SequenceRecord

ROOT = Path(__file__).parents[1]
ROWS, COLUMNS = 60, 200
HZ, USED, TOGGLED, REPLACED = 10, 200, 40, 20
WARM_S = 3.0
BARS = {"cpu_percent": 20.0, "rss_mib": 100.0, "start_s": 0.7}
PICTURES = {"tree": b"next to go", "pool": b"blocks,", "overview": b"hit"}
"""What the first picture of a view has."""

# ---- the engine that is none


class Engine:
    """A tree that changes at random, from a seed; every block has one owner."""

    def __init__(self, nodes: int, blocks: int) -> None:
        self.random = random.Random(1)
        self.facts = EngineFacts(
            engine="benchmark", pid=os.getpid(), started=time.time(), version="0", model="made-up", device="none",
            dtype="none", attention="none", eviction="lru", num_blocks=blocks, block_size=16, bytes_per_block=2**21,
            max_length=32768, max_sequences=64, max_batch_tokens=2048, prefill_chunk=512,
        )  # fmt: skip
        self.free = list(range(blocks))
        self.nodes: dict[int, NodeRecord] = {}
        self.children: dict[int, int] = {}
        self.ids = 0
        self.each = max(1, blocks * 95 // 100 // nodes)
        for namespace in (None, "team-red", "team-blue"):
            self._add(0, namespace)
        while len(self.nodes) < nodes:
            self._add(self._any(), None)
        self.told = False

    def _any(self) -> int:
        """A parent: mostly one of the young ones, so that the tree is deep as well as wide."""
        ids = list(self.nodes)
        return self.random.choice(ids[-400:] if self.random.random() < 0.8 else ids[:3])

    def _add(self, parent: int, namespace: str | None) -> NodeRecord:
        self.ids += 1
        above = self.nodes.get(parent)
        runs: list[int] = []
        for block in sorted(self.free.pop() for _ in range(self.each if above else 0)):
            if runs and runs[-2] + runs[-1] == block:
                runs[-1] += 1
            else:
                runs += [block, 1]
        now = time.time()
        node = self.nodes[self.ids] = NodeRecord(
            id=self.ids, parent=parent, start=above.start + above.tokens if above else 0,
            tokens=16 * self.each if above else 0, blocks=tuple(runs), holders=0, locks=0, pins=0, hits=0, priority=0,
            demoted=False, born=now, used=now, namespace=namespace,
            head=tuple(self.random.randrange(32000) for _ in range(8)),
        )  # fmt: skip
        self.children[parent] = self.children.get(parent, 0) + 1
        return node

    def changes(self) -> Changes:
        """What a tenth of a second changes; everything, the first time."""
        if not self.told:
            self.told = True
            return Changes(time=time.time(), reset=True, nodes=tuple(self.nodes.values()), stats=self._stats())
        gone = self._evict()
        changed = {node.id: node for node in (self._add(self._any(), None) for _ in range(REPLACED))}
        for place, number in enumerate(self.random.sample(list(self.nodes), USED)):
            node = self.nodes[number]
            locks = 1 - min(1, node.locks) if place < TOGGLED else node.locks
            node = replace(node, used=time.time(), hits=node.hits + 1, locks=locks, holders=locks)
            changed[number] = self.nodes[number] = node
        held = [node for node in changed.values() if node.locks][:16]
        sequences = tuple(
            SequenceRecord(place + 1, None, 0, node.id, node.start + node.tokens, 0, (), node.used)
            for place, node in enumerate(held)
        )
        nodes = tuple(changed.values())
        return Changes(time.time(), nodes=nodes, gone_nodes=gone, sequences=sequences, stats=self._stats())

    def _evict(self) -> tuple[int, ...]:
        leaves = [number for number, node in self.nodes.items() if node.parent and not self.children.get(number)]
        gone = tuple(self.random.sample(leaves, REPLACED))
        for number in gone:
            node = self.nodes.pop(number)
            self.children[node.parent] -= 1
            for first, count in zip(node.blocks[::2], node.blocks[1::2], strict=True):
                self.free.extend(range(first, first + count))
        return gone

    def _stats(self) -> dict[str, float]:
        return {"cache.num_blocks": self.facts.num_blocks, "cache.free_blocks": len(self.free), "steps": time.time()}


def publish(nodes: int, blocks: int) -> None:
    """Be the engine until the standard input ends; say where the socket is."""
    engine = Engine(nodes, blocks)

    def collect() -> Future[Changes]:
        future: Future[Changes] = Future()
        future.set_result(engine.changes())
        return future

    publisher = Publisher(engine.facts, collect, lambda: True)
    publisher.start()
    print(publisher.path, flush=True)
    sys.stdin.read()
    publisher.close("the benchmark is over")


# ---- the monitor on a tty


class Monitor:
    """`radixkv-monitor` in a process of its own, on a tty."""

    def __init__(self, target: str, view: str, folder: str) -> None:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        code = "import sys; from radixkv_monitor.cli import main; sys.exit(main())"
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "XDG_RUNTIME_DIR": folder}
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, target, "--view", view],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.tty, self.bytes, self.tail = master, 0, b""

    def read(self, seconds: float, until: bytes | None = None) -> bool:
        """Read and drop what it draws, for so long or until it drew this; whether it did."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            if select.select([self.tty], [], [], min(left, 0.05))[0]:
                try:
                    drawn = os.read(self.tty, 1 << 16)
                except OSError:  # it has quit, and its side of the tty is closed
                    return False
                self.bytes += len(drawn)
                self.tail = self.tail[-200:] + drawn
                if until is not None and until in self.tail:
                    return True
        return False

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self.tty, keys.encode())

    def cpu(self) -> float:
        """Seconds of CPU that it took so far, all threads, user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss(self) -> float:
        """MiB that are resident."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def close(self) -> None:
        """Quit as a person does."""
        self.press("q")
        self.read(1.0)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.tty)


def measure(target: str, view: str, folder: str, seconds: float, keys: str) -> dict[str, float]:
    """One run."""
    monitor = Monitor(target, view, folder)
    try:
        if not monitor.read(20.0, PICTURES[view]):
            raise SystemExit(f"the {view} view did not come: {monitor.tail[-500:]!r}")
        start, start_cpu = time.perf_counter() - monitor.started, monitor.cpu()
        monitor.press(keys)
        monitor.read(WARM_S)
        cpu, written, began = monitor.cpu(), monitor.bytes, time.perf_counter()
        monitor.read(seconds)
        took = time.perf_counter() - began
        return {
            "cpu_percent": round(100 * (monitor.cpu() - cpu) / took, 1),
            "rss_mib": round(monitor.rss(), 1),
            "kib_per_s": round((monitor.bytes - written) / took / 1024, 1),
            "start_s": round(start, 3),
            "start_cpu_s": round(start_cpu, 3),
        }
    finally:
        monitor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--views", default="tree,pool")
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--publish", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.publish:
        publish(arguments.nodes, arguments.blocks)
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = run(arguments, folder)
    print(f"{'view':<12} {'CPU %':>7} {'MiB':>7} {'KiB/s':>8} {'start s':>8} {'its CPU s':>10}")
    for name, figures in runs.items():
        print(f"{name:<12} {figures['cpu_percent']:7.1f} {figures['rss_mib']:7.1f} {figures['kib_per_s']:8.1f} "
              f"{figures['start_s']:8.3f} {figures['start_cpu_s']:10.3f}")  # fmt: skip
    worst = {name: max(figures[name] for figures in runs.values()) for name in BARS}
    start = {"start_s": min(figures["start_s"] for figures in runs.values())}
    result = {
        "benchmark": "monitor", "nodes": arguments.nodes, "blocks": arguments.blocks, "hz": HZ,
        "tty": [COLUMNS, ROWS], "runs": runs, "worst": worst, "best_start_s": start["start_s"], "bars": BARS,
        "passes": {name: (worst | start)[name] <= bar for name, bar in BARS.items()},
        "machine": platform.processor() or platform.machine(), "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }  # fmt: skip
    print(json.dumps(result))


def run(arguments: argparse.Namespace, folder: str) -> dict[str, dict[str, float]]:
    """Every view beside one engine. The start of the pool is the best of its runs."""
    os.chmod(folder, 0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'monitor'}"}
    os.environ.update(environment)
    command = [sys.executable, __file__, "--publish", f"--nodes={arguments.nodes}", f"--blocks={arguments.blocks}"]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    assert engine.stdin is not None and engine.stdout is not None
    target = engine.stdout.readline().strip()
    try:
        runs = {}
        for view in arguments.views.split(","):
            runs[view] = measure(target, view, folder, arguments.seconds, "")
            if view == "pool":
                runs["pool zoomed"] = measure(target, view, folder, arguments.seconds, "+++")
        return runs
    finally:
        engine.stdin.close()
        engine.wait(10)


if __name__ == "__main__":
    main()
