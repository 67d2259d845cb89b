"""Runs the parts, each in a process of its own, and puts together what they found.

Knows: the parts by name, their budgets, and files. Knows nothing that is measured. A part that crashes the device, or
hangs, takes nobody along: every row is on disk as soon as it is measured.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .result import Bench, Ceilings, Row, Skipped, why

ROOT = Path(__file__).parents[2]
START_S = 30
"""Seconds beyond its budget after which a part is ended: to start, and to finish the case it is at."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class PartOf:
    """One part of the benchmark: `budget_s` after which no case is begun."""

    name: str
    says: str
    budget_s: int


PARTS = (
    PartOf("ceilings", "copy, read and matmul: what the device can do", 20),
    PartOf("decode", "plain decode, paged and contiguous, by batch and context", 100),
    PartOf("tree", "decode along the tree against flat", 45),
    PartOf("chunks", "chunks behind cached tokens, against torch's attention over contiguous KV", 60),
    PartOf("engine", "the engine on a random-weight Llama-3-8B: steps, first tokens, agents", 130),
    PartOf("profiles", "kernels, launches and times of the slowest parts", 70),
    PartOf("peers", "the same decodes by FlashInfer, vLLM's and SGLang's Triton kernels", 100),
)
"""In the order of running: peers last, as one of them may compile for minutes."""


@dataclass(frozen=True)
class Order:
    """What was asked for."""

    parts: tuple[str, ...]
    smoke: bool
    here: bool  # in this process, without the protection of one for each part
    peers: Path | None
    stretch: float


# ---- one part


def measure_part(name: str, order: Order, ceilings: Ceilings, rows: Callable[[Row], None]) -> None:
    """Run one part in this process and hand each row to `rows`; raises Skipped where there is no device."""
    from . import device, shapes

    found = device.find(order.smoke)
    if isinstance(found, str):
        raise Skipped(found)
    sizes = shapes.SMOKE if order.smoke else shapes.FULL
    budget = next(part.budget_s for part in PARTS if part.name == name) * order.stretch
    bench = Bench(found, sizes, time.monotonic() + budget, ceilings, order.peers)
    for row in importlib.import_module(f"gpu.{name}").run(bench):
        rows(row)


def part_main(name: str, order: Order, ceilings: Ceilings, path: Path) -> int:
    """What a part's own process does: rows into `path`, a line each; the exit code says whether it came to its end."""
    with path.open("a", buffering=1) as file:
        try:
            measure_part(name, order, ceilings, lambda row: print(json.dumps({"row": row}), file=file))
        except Exception as error:
            print(json.dumps({"end": why(error)}), file=file)
            return 1
        print(json.dumps({"end": {}}), file=file)
    return 0


# ---- all parts


def whole(order: Order, say: Say) -> dict[str, Any]:
    """Every part that was asked for, and the ceilings always; the result as it is written."""
    from . import bars, device, shapes

    begin = time.time()
    reason = _reason(order)
    parts: dict[str, Any] = {}
    ceilings = Ceilings()
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            if part.name not in order.parts and (part.name != "ceilings" or reason):
                continue
            parts[part.name] = found = _one(part, order, ceilings, Path(folder) / part.name, reason, say)
            if part.name == "ceilings":
                ceilings = Ceilings.of(found["rows"])
            say(f"  {part.name}: {found['status']}, {len(found['rows'])} rows in {found['seconds']:.0f} s")
    sizes = shapes.SMOKE if order.smoke else shapes.FULL
    found_device = device.find(order.smoke) if not reason else None
    described = None
    if isinstance(found_device, device.Device):
        described = {key: value for key, value in asdict(found_device).items() if key != "torch"}
        described["slug"] = found_device.slug
    return {
        "benchmark": "gpu",
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.time() - begin, 1),
        "device": described,
        "reason": reason,
        "smoke": order.smoke,
        "commit": _commit(),
        "versions": _versions(),
        "ceilings": asdict(ceilings),
        "parts": parts,
        "bars": bars.judge(parts, sizes, smoke=order.smoke),
    }


def _one(part: PartOf, order: Order, ceilings: Ceilings, path: Path, reason: str, say: Say) -> dict[str, Any]:
    """One part's rows and how it ended."""
    known = {"says": part.says, "budget_s": part.budget_s}
    if reason:
        return {**known, "status": "skipped", "reason": reason, "seconds": 0.0, "rows": []}
    say(f"{part.name}: {part.says} (at most {part.budget_s * order.stretch:.0f} s)")
    begin = time.time()
    ended = _here(part, order, ceilings, path) if order.here else _apart(part, order, ceilings, path, say)
    rows, end = read_rows(path)
    status, why_not = verdict(rows, end, ended)
    seconds = round(time.time() - begin, 1)
    return {**known, "status": status, "reason": why_not, "seconds": seconds, "rows": rows}


def _here(part: PartOf, order: Order, ceilings: Ceilings, path: Path) -> str:
    part_main(part.name, order, ceilings, path)
    return ""


def _apart(part: PartOf, order: Order, ceilings: Ceilings, path: Path, say: Say) -> str:
    """Run a part in its own process; why it ended before its time, or nothing."""
    command = [sys.executable, str(Path(__file__).parent), "--part", part.name, "--rows-to", str(path)]
    command += ["--ceilings", json.dumps(asdict(ceilings)), "--stretch", str(order.stretch)]
    command += ["--smoke"] if order.smoke else []
    command += ["--peers", str(order.peers)] if order.peers else []
    limit = part.budget_s * order.stretch + START_S
    log = path.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment(order))
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"it was ended after {limit:.0f} s"
        except BaseException:
            process.kill()
            raise
    if code and (text := log.read_text(errors="replace").strip()):
        say("    " + "\n    ".join(text.splitlines()[-15:]))
    return f"its process ended with {code}" if code else ""


def environment(order: Order) -> dict[str, str]:
    """A part's environment: interpreted if it is a smoke test, and only then."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return found | ({"TRITON_INTERPRET": "1"} if order.smoke else {})


def read_rows(path: Path) -> tuple[list[Row], Row | None]:
    """The rows that a part wrote, and how it says it ended; a last line that was cut off is passed over."""
    rows: list[Row] = []
    end: Row | None = None
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "row" in found:
            rows.append(found["row"])
        else:
            end = found["end"]
    return rows, end


def verdict(rows: list[Row], end: Row | None, ended: str) -> tuple[str, str]:
    """measured, partial, skipped or failed, and why."""
    number = [row for row in rows if not row.get("failed") and not row.get("skipped")]
    if end is None or end.get("failed"):
        reason = (end or {}).get("failed") or ended or "it stopped without a word"
        return ("partial" if number else "failed"), reason
    if end.get("skipped"):
        return "skipped", end["skipped"]
    without = len(rows) - len(number)
    if not number:
        return "failed", "; ".join(sorted({str(row.get("failed") or row.get("skipped")) for row in rows}))[:500]
    return ("partial", f"{without} of {len(rows)} cases have no number") if without else ("measured", "")


def _reason(order: Order) -> str:
    """Why nothing can be measured; asked in a process of its own, so that this one holds no memory of the device."""
    if order.here:
        from . import device

        found = device.find(order.smoke)
        return found if isinstance(found, str) else ""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from gpu import device; d = device.find(sys.argv[2] == 'True')\n"
    )
    code += "print(d if isinstance(d, str) else '')"
    command = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(order.smoke)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(order), check=False)
    return done.stdout.strip() if not done.returncode else (done.stderr.strip().splitlines() or ["no Python"])[-1]


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "flashinfer-python"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
