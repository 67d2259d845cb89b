"""The first run on a new GPU: one table of checks, each in a process of its own, and none that another one stops.

A check prints its rows as they come. A process that dies or takes too long adds a row of its own, and the next check
begins: an error of the device ends the use of the device in one process only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

HELD, FAILED, UNCHECKED = "held", "FAILED", "not checked"
MARK = "row "
"""What the line of a row begins with; all other lines of a check are shown if it fails."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    state: str
    said: str

    @classmethod
    def of(cls, name: str, held: bool, said: str) -> Row:
        """A row that is held, or not.

        >>> Row.of("a sum", 1 + 1 == 3, "it is 2")
        Row(name='a sum', state='FAILED', said='it is 2')
        """
        return cls(name, HELD if held else FAILED, said)


@dataclass(frozen=True)
class Check:
    """One process: the seconds that it may take, and what to do if a row of it fails."""

    name: str
    limit_s: int
    advice: str
    interpreted: bool = True  # whether it runs without a GPU, by --smoke


TORCH = "load engines with attention='torch', and send this whole output"
CHECKS = (
    Check("environment", 120, "install what the rows name"),
    Check("kernels", 480, f"a kernel computes something else: {TORCH}"),
    Check("memory", 480, f"a kernel reads or writes outside of a tensor: {TORCH}"),
    Check("capture", 120, f"torch does not recover from a failed capture, use torch 2.13 or later; or {TORCH}", False),
    Check("graphs", 240, f"recorded steps are missing, or compute something else: {TORCH}"),
    Check("tree", 240, f"attention along a deep tree computes something else: {TORCH}"),
    Check("sampling", 120, "tokens differ from those of the host: send this whole output"),
    Check("experts", 240, "a mixture of experts runs without graphs: send this whole output"),
    Check("engine", 360, "an engine's answers depend on hits, host memory or overlap: send this whole output"),
    Check("decode", 240, "send this whole output"),
)


def main(smoke: bool, say: Say) -> int:
    """Run all checks and print the table; return 0 if every row holds, 2 if a GPU cannot be used. `smoke`: on a CPU."""
    from radixkv.device import unusable_gpu

    from . import device

    found = device.find(smoke)
    if isinstance(found, str):
        unusable = unusable_gpu()
        say(f"nothing was checked: {unusable or found}")
        return 2 if unusable else 0
    say(f"{found.name}: {found.processors} processors, generation {found.generation}")
    rows, advice = list[Row](), dict[str, str]()
    for check in CHECKS:
        began = time.perf_counter()
        if smoke and not check.interpreted:
            ended = [Row(check.name, UNCHECKED, "needs a GPU")]
        else:
            ended = list(_run(check, smoke, say))
        rows += ended
        if any(row.state == FAILED for row in ended):
            advice[check.name] = check.advice
        say(f"{check.name}: {time.perf_counter() - began:.0f} s")
    say("\n" + "\n".join(table(rows)) + "\n")
    for name, text in advice.items():
        say(f"{name}: {text}.")
    if not advice:
        say("All rows hold. Next: python benchmarks/gpu")
    return int(bool(advice))


def table(rows: list[Row]) -> list[str]:
    """Return the rows as lines of one width.

    >>> print(*table([Row("graphs", "held", "35 of 35"), Row("tree", "FAILED", "off by 0.2")]), sep=chr(10))
    | row    | state  | seen       |
    | ------ | ------ | ---------- |
    | graphs | held   | 35 of 35   |
    | tree   | FAILED | off by 0.2 |
    """
    cells = [("row", "state", "seen"), *((row.name, row.state, row.said) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, tuple("-" * width for width in widths))
    return [f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in cells]


def _run(check: Check, smoke: bool, say: Say) -> Iterator[Row]:
    """Run a check in a process of its own; yield its rows, and one more if it ends as it must not."""
    command = [sys.executable, "-u", str(Path(__file__).parent), "--check", check.name, *(["--smoke"] * smoke)]
    environment = dict(os.environ)
    if check.name == "memory":
        sanitizer = _sanitizer()
        if sanitizer is None and not smoke:
            yield Row("memory", UNCHECKED, "compute-sanitizer, a part of the CUDA toolkit, is not installed")
            return
        if sanitizer is not None and not smoke:
            # Triton asks the driver for attributes that it does not know: an error of the API, and no fault.
            options = "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"
            command = [sanitizer, *options, *command]
        # torch hands out parts of larger allocations, in which an overrun would be within bounds.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    ended = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=check.limit_s)
            ended = f"its process ended with {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            ended = f"it took longer than {check.limit_s} s"
        finally:  # also the workers of a pool, and the process that a sanitizer watches: they hold the GPU's memory
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode is None:
            output, _ = process.communicate()
    lines = output.splitlines()
    rows = [Row(**json.loads(line.removeprefix(MARK))) for line in lines if line.startswith(MARK)]
    if ended or not rows:
        rows.append(Row(check.name, FAILED, ended or "it has no row"))
    if any(row.state == FAILED for row in rows):
        say("\n".join("    " + line for line in lines[-40:] if not line.startswith(MARK)))
    yield from rows


def _sanitizer() -> str | None:
    """Return the path of compute-sanitizer, if it is installed."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(str(Path(home) / "bin") for home in homes if home)])
    return shutil.which("compute-sanitizer", path=path)


def run_check(name: str, smoke: bool) -> int:
    """Run one check in this process and print its rows; return the exit status."""
    from . import contact_checks, device

    place = device.find(smoke)
    if isinstance(place, str):
        raise SystemExit(place)
    for row in contact_checks.RUN[name](place):
        print(MARK + json.dumps(asdict(row)), flush=True)
    return 0
