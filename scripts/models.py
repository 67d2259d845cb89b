"""Try a small random model of every class that transformers' AutoModelForCausalLM maps to: `make models`.

Each model has the right kinds of layers, is loaded into a real engine, and is asked for prompts that share prefixes, in
chunks, several at once and in forks. Every row of logits and every greedy token must be the model's own. Writes
docs/models.md and its data, docs/results/models.json. Fails if a loaded model answers wrongly, or if loading fails in
any way other than a refusal. With `--only` it writes nothing. Takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import date
from pathlib import Path

import torch
import transformers
from model_parts import page, recipes
from model_parts.jobs import ProcessLimits, judged
from model_parts.verdict import AT_FAULT, RESULTS, Verdict

ROOT = Path(__file__).parent.parent
PAGE, DATA = ROOT / "docs" / "models.md", ROOT / "docs" / "results" / "models.json"


def main() -> int:
    """Try the models, print the results, and write them if all models were tried."""
    options = _options()
    todo = _chosen(options.only)
    found: list[Verdict] = []
    try:
        for verdict in judged(todo, options.jobs, ProcessLimits(options.seconds, int(options.memory * (1 << 30)))):
            found.append(verdict)
            print(f"[{len(found)}/{len(todo)}] {_summary(verdict)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {len(found)} of {len(todo)}; nothing was written", file=sys.stderr)
        return 130
    print(", ".join(f"{sum(each.result == result for each in found)} {result}" for result in RESULTS))
    if not options.only:
        run = page.Run(
            transformers.__version__, torch.__version__, date.today().isoformat(), page.sorted_by_name(found)
        )
        DATA.write_text(page.to_json(run))
        PAGE.write_text(page.render(page.from_json(DATA.read_text())))
    return int(any(each.result in AT_FAULT for each in found))


def _options() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--only", nargs="+", metavar="NAME", help="only these classes or model types; write nothing")
    arguments.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="models that are tried at once"
    )
    arguments.add_argument("--seconds", type=float, default=ProcessLimits.seconds, help="limit per model (%(default)g)")
    arguments.add_argument(
        "--memory", type=float, default=ProcessLimits.memory / (1 << 30), help="limit per model in GiB (%(default)g)"
    )
    options = arguments.parse_args()
    if options.jobs < 1:
        arguments.error("--jobs must be at least 1")
    return options


def _chosen(names: list[str] | None) -> list[tuple[str, tuple[str, ...]]]:
    """Return the classes and variants of these names, model types or variant names; exits for an unknown name."""
    every = {**recipes.classes(), **recipes.variants()}
    wanted = set(names or every)
    found = [(name, kinds) for name, kinds in every.items() if wanted & {name, recipes.class_of(name), *kinds}]
    unknown = wanted - {key for name, kinds in found for key in (name, recipes.class_of(name), *kinds)}
    if unknown:
        sys.exit(
            f"transformers {transformers.__version__} maps AutoModelForCausalLM to no {', '.join(sorted(unknown))}"
        )
    return found


def _summary(verdict: Verdict) -> str:
    error = "" if verdict.error is None else f"error {verdict.error:.0e}"
    parts = [verdict.name, verdict.result, error, verdict.attention, verdict.reason, verdict.note]
    return f"{', '.join(filter(None, parts))} ({verdict.seconds} s)"


if __name__ == "__main__":
    sys.exit(main())
