"""Try every class that transformers' AutoModelForCausalLM maps to, in small and random: `make models`.

Each is built with the right kinds of layers, loaded into a real engine, and asked for prompts that share prefixes, in
chunks, several at once and in forks; every row of logits and every greedy token must be the model's own. Writes
docs/models.md, and what it was made of to docs/results/models.json; fails if a model that was loaded answers wrongly,
or if anything but a refusal came out of loading. With `--only` it writes nothing. Takes some minutes on two cores.
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
from model_parts.jobs import Limits, judged
from model_parts.verdict import AT_FAULT, RESULTS, Verdict

ROOT = Path(__file__).parent.parent
PAGE, DATA = ROOT / "docs" / "models.md", ROOT / "docs" / "results" / "models.json"


def main() -> int:
    """Try them, say how it went, and write it down if all were tried."""
    options = _options()
    todo = _chosen(options.only)
    found: list[Verdict] = []
    try:
        for verdict in judged(todo, options.jobs, Limits(options.seconds, int(options.memory * (1 << 30)))):
            found.append(verdict)
            print(f"[{len(found)}/{len(todo)}] {_told(verdict)}", file=sys.stderr, flush=True)
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
    arguments.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="how many at once")
    arguments.add_argument("--seconds", type=float, default=Limits.seconds, help="that one may take (%(default)g)")
    arguments.add_argument("--memory", type=float, default=Limits.memory / (1 << 30), help="GiB of one (%(default)g)")
    options = arguments.parse_args()
    if options.jobs < 1:
        arguments.error("--jobs must be at least 1")
    return options


def _chosen(names: list[str] | None) -> list[tuple[str, tuple[str, ...]]]:
    """The classes and variants meant, by class, by model type or by their own name; exits if one is not known."""
    every = {**recipes.classes(), **recipes.variants()}
    wanted = set(names or every)
    found = [(name, kinds) for name, kinds in every.items() if wanted & {name, recipes.class_of(name), *kinds}]
    unknown = wanted - {key for name, kinds in found for key in (name, recipes.class_of(name), *kinds)}
    if unknown:
        sys.exit(
            f"transformers {transformers.__version__} maps AutoModelForCausalLM to no {', '.join(sorted(unknown))}"
        )
    return found


def _told(verdict: Verdict) -> str:
    error = "" if verdict.error is None else f"error {verdict.error:.0e}"
    told = [verdict.name, verdict.result, error, verdict.attention, verdict.reason, verdict.note]
    return f"{', '.join(filter(None, told))} ({verdict.seconds} s)"


if __name__ == "__main__":
    sys.exit(main())
