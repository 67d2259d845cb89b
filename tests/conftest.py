"""Settings of every test run: which examples the tests try.

By default they are fixed: the same in every run and in every process, with any set of imported modules.
`RADIXKV_SEED=N` draws fresh examples from that seed (`make test-all` does), and a failure then prints how to keep the
example.

With `RADIXKV_LONG_UNTIL=T`, in Unix seconds, tests marked `long` run last, and begin until T only.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

if TYPE_CHECKING:
    from tests.virtual_gpu import VirtualGpu

SEED = os.environ.get("RADIXKV_SEED", "")
UNTIL = os.environ.get("RADIXKV_LONG_UNTIL", "")
OUT_OF_TIME = "no time is left for tests that are marked long"
KEEP = f"""\
The examples of this run were fresh, drawn from seed {SEED}: `make test-all SEED={SEED}` repeats it.
Keep each find as a fixed example, so that `make test` fails, too, until the fault is fixed:
  a property      add the printed arguments of the failing test case to the test as @example(...)
  a run of fuzz   add its seed to KEPT in tests/cache/test_fuzz.py
  a life          add its seed to RARE in tests/simulation/test_lives.py"""

# A shell starts background jobs, and nohup its command, with signals ignored: tests that send one would wait for ever.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# With CI set, transformers passes its warnings on to pytest, and tests that read the log would find them there.
os.environ.pop("CI", None)

# Hypothesis mixes the constants of all imported modules of a project into its examples. The examples of a test would
# then depend on the tests that ran before it in the same process, and on every edit of any module.
assert callable(providers._get_local_constants), "Hypothesis finds constants elsewhere now: switch that off"
providers._get_local_constants = providers.Constants  # an empty set of constants

rules = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, max_examples=50, **rules)
settings.register_profile("fresh", derandomize=False, database=None, **rules)
settings.load_profile("fresh" if SEED else "fixed")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported and tests collected: nearly all of these objects stay.

    That takes half of the CPU time of this phase otherwise. Later collections look at the objects of the tests only,
    and are rarer than usual: tests that need one call it.
    """
    atexit.register(gc.unfreeze)  # the interpreter frees all objects at its end; some libraries warn otherwise
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for no doctests in files of tests: each process would read all of them."""
    return [each for each in (yield) if not (file_path.name.startswith("test_") and isinstance(each, DoctestModule))]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long tests last if there may be no time for all of them."""
    if UNTIL:
        items.sort(key=lambda item: item.get_closest_marker("long") is not None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a long test that would begin too late."""
    if UNTIL and time.time() > float(UNTIL) and item.get_closest_marker("long"):
        pytest.skip(OUT_OF_TIME)


@pytest.fixture
def virtual_gpu() -> Iterator[VirtualGpu]:
    """Install a simulated GPU, and check at the end that no mistake was found; see `tests.virtual_gpu`."""
    from tests.virtual_gpu import VirtualGpu, installed  # imports torch

    with installed(VirtualGpu()) as gpu:
        yield gpu
        gpu.release_cached()
        assert not gpu.findings, "\n".join(map(str, gpu.findings))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many long tests were left out, and after failures with fresh examples, how to keep them."""
    skipped = [str(each.longrepr) for each in terminalreporter.stats.get("skipped", ())]
    if late := sum(OUT_OF_TIME in reason for reason in skipped):
        terminalreporter.write_line(f"Not run, since {OUT_OF_TIME}: {late}. `make test-all` runs all.")
    if SEED and terminalreporter.stats.get("failed"):
        terminalreporter.section("fresh examples")
        terminalreporter.write_line(KEEP)
