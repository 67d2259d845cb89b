"""Run the parts, each in a process of its own, and collect their rows.

A part that crashes the device or hangs affects no other part, and every row is on disk as soon as it is measured.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from .result import Bench, Ceilings, Row, Skipped, why

ROOT = Path(__file__).parents[2]
START_S = 30
"""Seconds beyond its budget after which a part is ended: to start, and to finish the case it is at."""

LINES = 15
"""Of a part's log that are kept."""

WHOLE_S = 570
"""Seconds that all parts take together, at most: some machines end a command after 600."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class PartOf:
    """One part of the benchmark: `budget_s` after which no case is begun."""

    name: str
    says: str
    budget_s: int


PARTS = (
    PartOf("ceilings", "copy, read and matmul: the ceilings of the device", 20),
    PartOf("decode", "plain decode, paged and contiguous, by batch and context", 80),
    PartOf("tree", "decode along the tree against flat", 40),
    PartOf("chunks", "chunks after cached tokens, against torch's attention over contiguous KV", 50),
    PartOf("engine", "the engine on a random-weight Llama-3-8B: steps, first tokens, agents", 200),
    PartOf("profiles", "kernels, launches and times of the slowest parts", 70),
    PartOf("peers", "the same decodes by FlashInfer, vLLM's and SGLang's Triton kernels", 80),
)
"""In the order of running: peers last, as one of them may compile for minutes."""


@dataclass(frozen=True)
class Order:
    """The options of a run."""

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
    """Run a part in its own process: write rows into `path`, a line each; return 0 if it came to its end."""
    with path.open("a", buffering=1) as file:
        try:
            measure_part(name, order, ceilings, lambda row: print(json.dumps({"row": row}), file=file))
        except Exception as error:
            print(json.dumps({"end": why(error)}), file=file)
            return 1
        print(json.dumps({"end": {}}), file=file)
    return 0


# ---- all parts


def whole(order: Order, say: Say, keep: Callable[[dict[str, Any]], None], rows: Path | None = None) -> dict[str, Any]:
    """Run the requested parts, and always the ceilings; return the result as it is written.

    `keep` gets the result after each part, so that an interrupted command loses one part at most. The rows of that part
    are in the folder `rows`, if there is one, which is empty at the end.
    """
    begin = time.time()
    reason, device = _found(order)
    result = _begun(order, reason, device)
    ceilings = Ceilings()
    with contextlib.nullcontext(str(rows)) if rows else tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            if part.name not in order.parts and (part.name != "ceilings" or reason):
                continue
            path, left = Path(folder) / part.name, WHOLE_S * order.stretch - (time.time() - begin)
            path.parent.mkdir(parents=True, exist_ok=True)
            for old in (path, path.with_suffix(".log")):  # of an earlier run
                old.unlink(missing_ok=True)
            result["parts"][part.name] = found = _one(part, order, ceilings, path, reason, say, left)
            if part.name == "ceilings":
                ceilings = Ceilings.of(found["rows"])
            result |= _judged(result["parts"], order, ceilings, begin)
            say(f"  {part.name}: {found['status']}, {len(found['rows'])} rows in {found['seconds']:.0f} s")
            keep(result)
            for kept in (path, path.with_suffix(".log")):
                kept.unlink(missing_ok=True)
    return result


def _begun(order: Order, reason: str, device: dict[str, Any] | None) -> dict[str, Any]:
    """A result without parts."""
    return {
        "benchmark": "gpu",
        "date": datetime.date.today().isoformat(),
        "seconds": 0.0,
        "device": device,
        "reason": reason,
        "smoke": order.smoke,
        "commit": _commit(),
        "versions": _versions(),
        "ceilings": asdict(Ceilings()),
        "parts": {},
        "bars": [],
    }


def _judged(parts: dict[str, Any], order: Order, ceilings: Ceilings, begin: float) -> dict[str, Any]:
    """Return the judgement of all parts together."""
    from . import bars, shapes

    judged = bars.judge(parts, shapes.SMOKE if order.smoke else shapes.FULL, smoke=order.smoke)
    return {"seconds": round(time.time() - begin, 1), "ceilings": asdict(ceilings), "bars": judged}


def _one(
    part: PartOf, order: Order, ceilings: Ceilings, path: Path, reason: str, say: Say, left: float
) -> dict[str, Any]:
    """Run one part; return its rows and its end. It gets its budget, or the time `left` if that is less."""
    known = {"says": part.says, "budget_s": part.budget_s}
    budget = min(part.budget_s * order.stretch, left - START_S)
    if not reason and budget <= 0:
        reason = "the time of all parts together was used up"
    if reason:
        return {**known, "status": "skipped", "reason": reason, "seconds": 0.0, "rows": []}
    order = replace(order, stretch=budget / part.budget_s)
    say(f"{part.name}: {part.says} (at most {budget:.0f} s)")
    begin = time.time()
    ended = _here(part, order, ceilings, path) if order.here else _apart(part, order, ceilings, path, say)
    rows, end = read_rows(path)
    status, why_not = verdict(rows, end, ended)
    seconds = round(time.time() - begin, 1)
    return {**known, "status": status, "reason": why_not, "seconds": seconds, "rows": rows, "said": said(path)}


def said(path: Path) -> list[str]:
    """Return the last lines of a part's log: only there does a model report that it runs uncompiled or ungraphed."""
    log = path.with_suffix(".log")
    return log.read_text(errors="replace").strip().splitlines()[-LINES:] if log.exists() else []


def _here(part: PartOf, order: Order, ceilings: Ceilings, path: Path) -> str:
    part_main(part.name, order, ceilings, path)
    return ""


def _apart(part: PartOf, order: Order, ceilings: Ceilings, path: Path, say: Say) -> str:
    """Run a part in its own process; return the reason if it ended early, else nothing."""
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
    if lines := said(path):
        say("    " + "\n    ".join(lines))
    return f"its process ended with {code}" if code else ""


def environment(order: Order) -> dict[str, str]:
    """Return a part's environment: only smoke tests are interpreted."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return found | ({"TRITON_INTERPRET": "1"} if order.smoke else {})


def read_rows(path: Path) -> tuple[list[Row], Row | None]:
    """Return the rows that a part wrote, and its end; an incomplete last line is skipped."""
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
    """Return "measured", "partial", "skipped" or "failed", and the reason."""
    number = [row for row in rows if not row.get("failed") and not row.get("skipped")]
    if end is None or end.get("failed"):
        reason = (end or {}).get("failed") or ended or "it stopped without a message"
        return ("partial" if number else "failed"), reason
    if end.get("skipped"):
        return "skipped", end["skipped"]
    without = len(rows) - len(number)
    if not number:
        return "failed", "; ".join(sorted({str(row.get("failed") or row.get("skipped")) for row in rows}))[:500]
    return ("partial", f"{without} of {len(rows)} cases have no number") if without else ("measured", "")


def _found(order: Order) -> tuple[str, dict[str, Any] | None]:
    """Return the reason why nothing can be measured, or the device; found in a process that then frees the device."""
    if order.here:
        return describe(order.smoke)
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); from gpu import run\n"
    code += "print(json.dumps(run.describe(sys.argv[2] == 'True')))"
    command = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(order.smoke)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(order), check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no Python"])[-1], None
    reason, device = json.loads(done.stdout.splitlines()[-1])
    return reason, device


def describe(smoke: bool) -> tuple[str, dict[str, Any] | None]:
    """Return the same as `_found`, in this process."""
    from . import device

    found = device.find(smoke)
    if isinstance(found, str):
        return found, None
    return "", {key: value for key, value in asdict(found).items() if key != "torch"} | {"slug": found.slug}


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
