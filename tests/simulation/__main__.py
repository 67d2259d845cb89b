"""Replay simulated lives of the engine by their seeds. From the root of the checkout:

    .venv/bin/python -m tests.simulation --seed 123 --verbose    one life, step by step
    .venv/bin/python -m tests.simulation --seed 123 --shrink     the smallest one that fails
    .venv/bin/python -m tests.simulation --seeds 0 1000          many lives; names the seeds that fail

Exits 1 if anything failed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from tests.simulation.draw import draw, with_drafts, with_host, with_prefixes, with_states
from tests.simulation.gpu import live_on_gpu
from tests.simulation.scenario import Scenario
from tests.simulation.shrink import failure_of, shrink
from tests.simulation.world import Stuck, World

Life = Callable[[Scenario, bool], World]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="one life")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), help="many lives")
    parser.add_argument("--verbose", action="store_true", help="print every step")
    parser.add_argument("--shrink", action="store_true", help="drop the parts that the failure does not need")
    parser.add_argument("--states", action="store_true", help="of a model with recurrent state")
    parser.add_argument("--overlap", action="store_true", help="of an engine that launches steps ahead")
    parser.add_argument("--gpu", action="store_true", help="the same, on a simulated GPU")
    parser.add_argument("--host", action="store_true", help="of an engine with a host tier")
    parser.add_argument("--disk", action="store_true", help="with a disk below the host tier")
    parser.add_argument("--drafts", action="store_true", help="of an engine that speculates, not with --states")
    parser.add_argument(
        "--prefixes", action="store_true", help="with compressed prefixes, not with --states or --ranks"
    )
    parser.add_argument("--ranks", action="store_true", help="of an engine on two ranks, which do not overlap here")
    chosen = parser.parse_args()

    def drawn(seed: int) -> Scenario:
        life = draw(seed)
        life = replace(life, overlap=chosen.overlap or chosen.gpu, ranks=chosen.ranks)
        life = with_host(life) if chosen.host or chosen.disk else life
        life = replace(life, disk=chosen.disk and life.reuse)
        life = with_drafts(life) if chosen.drafts else life
        life = with_prefixes(life) if chosen.prefixes else life
        return with_states(life) if chosen.states else life

    run: Life = live_on_gpu if chosen.gpu else live_on_host
    logging.disable(logging.CRITICAL)  # the engine logs every injected fault
    torch.set_num_threads(1)
    if chosen.seed is not None:
        return replay(drawn(chosen.seed), chosen.verbose, chosen.shrink, run)
    return survey(map(drawn, range(*(chosen.seeds or (0, 200)))), run)


def live_on_host(scenario: Scenario, verbose: bool = False) -> World:
    """Run a life without a device."""
    return World(scenario, verbose=verbose).run()


def replay(scenario: Scenario, verbose: bool, smaller: bool, run: Life) -> int:
    """Run one life."""
    if smaller:
        scenario = shrink(scenario, lambda life: failure_of(life, lambda life: run(life, False)))
    print(scenario)
    try:
        run(scenario, verbose)
    except (Exception, Stuck):
        traceback.print_exc()
        return 1
    print("all is well")
    return 0


def survey(scenarios: Iterable[Scenario], run: Life) -> int:
    """Run many lives, each drawn when it begins; print one line for each that fails."""
    lives, failed, began, seen = 0, 0, time.perf_counter(), Counter[str]()
    for scenario in scenarios:
        lives += 1
        try:
            seen += run(scenario, False).sights()
        except (Exception, Stuck) as error:
            failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"--seed {scenario.seed}: {type(error).__name__} in {where.name}: {str(error)[:150]}")
    print(", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    print(f"{failed} of {lives} failed, {time.perf_counter() - began:.1f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
