"""Run the fuzz of the cache from fresh seeds. From the root of the checkout:

    .venv/bin/python -m tests.cache.fuzz --seeds 0 1000             many runs, each with options drawn from its seed
    .venv/bin/python -m tests.cache.fuzz --seed 123                 one of them
    .venv/bin/python -m tests.cache.fuzz --seed 123 --shrink        the fewest steps that fail
    .venv/bin/python -m tests.cache.fuzz --seeds 0 1000 --with host,states --without watched

Names the seed of each run that fails, with the command that repeats it, and exits 1 then.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback

from tests.cache.fuzz.machine import Machine, shrink
from tests.cache.fuzz.options import CHOICES, Options, draw

STEPS = 400


def main() -> int:
    flags = sorted(name for name, values in CHOICES.items() if values == (False, True))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="one run")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), default=(0, 100), help="many runs")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run (default {STEPS})")
    parser.add_argument("--shrink", action="store_true", help="drop the steps that the failure does not need")
    parser.add_argument("--with", dest="on", default="", help=f"options, with commas: {','.join(flags)}")
    parser.add_argument("--without", dest="off", default="", help="options that are off")
    parser.add_argument("--eviction", choices=CHOICES["eviction"])
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this time")
    chosen = parser.parse_args()
    kept = dict.fromkeys(filter(None, chosen.on.split(",")), True)
    kept |= dict.fromkeys(filter(None, chosen.off.split(",")), False)
    if unknown := kept.keys() - set(flags):
        parser.error(f"no such options: {', '.join(sorted(unknown))}")
    kept |= {name: value for name in ("eviction", "block_size") if (value := getattr(chosen, name)) is not None}
    facts = {"steps": chosen.steps, "with": chosen.on, "without": chosen.off, "eviction": chosen.eviction}
    facts["block-size"] = chosen.block_size
    command = " ".join(f"--{name} {value}" for name, value in facts.items() if value)

    seeds = range(*chosen.seeds) if chosen.seed is None else range(chosen.seed, chosen.seed + 1)
    start, runs, failed = time.monotonic(), 0, []
    for seed in seeds:
        if time.monotonic() - start > chosen.seconds:
            break
        runs += 1
        options = draw(random.Random(seed), **kept)
        if not survives(options, seed, chosen.steps, chosen.shrink, command):
            failed.append(seed)
    print(f"{runs} runs of {chosen.steps} steps in {time.monotonic() - start:.0f} s, failed: {failed or 'none'}")
    return bool(failed)


def survives(options: Options, seed: int, steps: int, smaller: bool, command: str) -> bool:
    """Run a seed; print what is needed to repeat it if it fails."""
    machine = Machine(options, seed)
    try:
        machine.run(range(steps))
        return True
    except Exception:
        traceback.print_exc()
    print(f"FAILED: seed {seed} at step {machine.done[-1] if machine.done else 0}, {options}")
    print(f"repeat: .venv/bin/python -m tests.cache.fuzz --seed {seed} {command}")
    if smaller:
        numbers, shrunk = shrink(options, seed, steps)
        print(f"shrunk: steps {numbers}: {'; '.join(shrunk.done)}")
    return False


if __name__ == "__main__":
    sys.exit(main())
