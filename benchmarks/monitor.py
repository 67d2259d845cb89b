"""Measure the cost of the terminal monitor next to a busy engine: CPU, memory, terminal output, start-up.

    python benchmarks/monitor.py [--seconds 10] [--repeats 3] [--views tree,pool] [--nodes 5000] [--blocks 100000]

A child process publishes made-up telemetry over the real Unix socket, as engines do (monitor_parts/made_up.py). It
has a tree of `--nodes` nodes over a pool of `--blocks` blocks. Ten times a second 200 nodes are used, 40 are held or
released, 20 are evicted and 20 published. 16 requests run, and two of them end and two begin. The records hold 512
ended requests, 1,024 sessions and 1,024 evictions.

The monitor runs in another process on a real tty of 200 x 60 characters, and attaches to the socket. Only this
process is measured. CPU time (user + system, all threads, of one core) and resident memory count from three seconds
after the first frame. Terminal output is read and dropped here. The start lasts until the first frame of the view.
The pool is measured twice: as it opens (all blocks in view), and zoomed in to two blocks a character.

Every view is run `--repeats` times, in turn with the others, and the median of each figure counts. A first start,
which compiles the modules, is not counted. Frames per second are shown because the monitor draws less often where
frames are expensive (self_usage.py); a frame is a burst of output after 50 ms of silence. Bars: at most 20% of a
core, 100 MiB, and 0.7 s of CPU until the first frame. CPU time is disturbed least by other processes; the wall time
of the start is shown as well. The last line is JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from monitor_parts.made_up import publish

ROOT = Path(__file__).parents[1]
ROWS, COLUMNS = 60, 200
WARM_S = 3.0
APART = 0.05  # seconds between two frames
BARS = {"cpu_percent": 20.0, "rss_mib": 100.0, "start_cpu_s": 0.7}
PICTURES = {
    "overview": b"since load", "tree": b"next victim", "pool": b"blocks,", "sessions": b"from cache",
    "evictions": b"requested again", "requests": b"waterfall:", "latency": b"p99",
}  # fmt: skip
"""Text in the first frame of each view."""
FIGURES = ("cpu_percent", "rss_mib", "kib_per_s", "pictures_per_s", "start_s", "start_cpu_s")
RUNS = (*((view, view, "") for view in PICTURES), ("pool zoomed", "pool", "+++"))
"""Name, view, keys."""

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
        self.pictures, self._last = 0, 0.0

    def read(self, seconds: float, until: bytes | None = None) -> bool:
        """Read and drop its output for `seconds`, or until it contains `until`; return whether it did."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            if select.select([self.tty], [], [], min(left, 0.05))[0]:
                try:
                    drawn = os.read(self.tty, 1 << 16)
                except OSError:  # the process ended and closed its side of the tty
                    return False
                self._count(drawn)
                self.tail = self.tail[-200:] + drawn
                if until is not None and until in self.tail:
                    return True
        return False

    def _count(self, drawn: bytes) -> None:
        now = time.perf_counter()
        self.pictures += now - self._last > APART
        self.bytes, self._last = self.bytes + len(drawn), now

    def press(self, keys: str) -> None:
        """Type keys."""
        os.write(self.tty, keys.encode())

    def cpu(self) -> float:
        """Return the CPU seconds of all threads so far, user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss(self) -> float:
        """Return the resident memory in MiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def close(self) -> None:
        """Quit as a user does."""
        self.press("q")
        self.read(1.0)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.tty)


def measure(target: str, view: str, folder: str, seconds: float, keys: str) -> dict[str, float]:
    """Measure one run."""
    monitor = Monitor(target, view, folder)
    try:
        if not monitor.read(20.0, PICTURES[view]):
            raise SystemExit(f"the {view} view did not come: {monitor.tail[-500:]!r}")
        start, start_cpu = time.perf_counter() - monitor.started, monitor.cpu()
        monitor.press(keys)
        monitor.read(WARM_S)
        cpu, written, pictures, began = monitor.cpu(), monitor.bytes, monitor.pictures, time.perf_counter()
        monitor.read(seconds)
        took = time.perf_counter() - began
        return {
            "cpu_percent": round(100 * (monitor.cpu() - cpu) / took, 1),
            "rss_mib": round(monitor.rss(), 1),
            "kib_per_s": round((monitor.bytes - written) / took / 1024, 1),
            "pictures_per_s": round((monitor.pictures - pictures) / took, 1),
            "start_s": round(start, 3),
            "start_cpu_s": round(start_cpu, 3),
        }
    finally:
        monitor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--views", default=",".join(PICTURES))
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--publish", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.publish:
        publish(arguments.nodes, arguments.blocks)
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = run(arguments, folder)
    print(
        f"{'view':<12} {'CPU %':>7} {'MiB':>7} {'KiB/s':>8} {'pictures/s':>10} {'start s':>8} {'its CPU s':>10}"
        "   each CPU %"
    )
    for name, each in runs.items():
        cpu, rss, kib, pictures, start, start_cpu = (each[key] for key in FIGURES)
        singly = " ".join(map(str, each["cpu_percents"]))
        print(f"{name:<12} {cpu:7.1f} {rss:7.1f} {kib:8.1f} {pictures:10.1f} {start:8.3f} {start_cpu:10.3f}   {singly}")
    worst = {name: max(figures[name] for figures in runs.values()) for name in BARS}
    result = {
        "benchmark": "monitor", "nodes": arguments.nodes, "blocks": arguments.blocks, "hz": 10,
        "tty": [COLUMNS, ROWS], "runs": runs, "worst": worst, "bars": BARS,
        "passes": {name: worst[name] <= bar for name, bar in BARS.items()},
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "python": platform.python_version(), "load": os.getloadavg(),
    }  # fmt: skip
    print(json.dumps(result))


def run(arguments: argparse.Namespace, folder: str) -> dict[str, dict[str, Any]]:
    """Measure every view repeatedly next to one engine; return the medians."""
    os.chmod(folder, 0o700)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "monitor")))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    bytecode = os.path.join(folder, "bytecode")
    environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "PYTHONPATH": paths, "PYTHONPYCACHEPREFIX": bytecode}
    os.environ.update(environment)
    command = [sys.executable, __file__, "--publish", f"--nodes={arguments.nodes}", f"--blocks={arguments.blocks}"]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)
    assert engine.stdin is not None and engine.stdout is not None
    target = engine.stdout.readline().strip()
    wanted = [each for each in RUNS if each[1] in arguments.views.split(",")]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in wanted}
    try:
        for _, view, keys in wanted:
            measure(target, view, folder, 0.1, keys)
        for _ in range(arguments.repeats):
            for name, view, keys in wanted:
                runs[name].append(measure(target, view, folder, arguments.seconds, keys))
    finally:
        engine.stdin.close()
        engine.wait(10)
    return {name: _medians(each) for name, each in runs.items()}


def _medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median of each figure, and the CPU time of each run."""
    medians = {figure: statistics.median(run[figure] for run in runs) for figure in FIGURES}
    return {**medians, "cpu_percents": [run["cpu_percent"] for run in runs]}


if __name__ == "__main__":
    main()
