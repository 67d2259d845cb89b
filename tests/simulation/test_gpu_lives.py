"""Simulated lives of an overlapped engine on a simulated GPU: nothing waits, and every answer is right.

A few lives. `python -m tests.simulation --gpu --seed N --verbose` replays
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.simulation.draw import with_drafts, with_host, with_states
from tests.simulation.gpu import GpuSlotModel, live_on_gpu
from tests.simulation.scenario import Scenario
from tests.simulation.test_faults import LIFE, failed
from tests.simulation.test_lives import FRESH
from tests.simulation.test_option_lives import overlapped
from tests.virtual_gpu import VirtualGpuError

SIGHTS = ("evicted", "hits", "host_bound_rows", "nan", "preemptions", "wasted_tokens")
SIGHTS += ("beams: finished", "scored_tokens")
OVERLAPPED = replace(LIFE, overlap=True)


def test_every_request_of_some_lives_ends_as_it_must() -> None:
    seen = Counter[str]()
    for seed in (8, 10, 13, 57, *((FRESH + 1,) if FRESH else ())):
        seen += live_on_gpu(overlapped(seed)).sights()
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


@pytest.mark.parametrize(("option", "seed"), [(with_drafts, 2), (with_host, 1), (with_host, 6), (with_states, 4)])
def test_every_request_of_a_life_with_an_option_ends_as_it_must(
    option: Callable[[Scenario], Scenario], seed: int
) -> None:
    live_on_gpu(option(overlapped(seed)))


def test_a_life_without_a_fault_ends_all_requests() -> None:
    assert not failed(live_on_gpu(OVERLAPPED))


def test_a_forward_that_reads_its_results_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = GpuSlotModel._launch

    def reads(model: GpuSlotModel, *args: object) -> object:
        logits = launch(model, *args)  # type: ignore[arg-type]
        logits.max().item()
        return logits

    monkeypatch.setattr(GpuSlotModel, "_launch", reads)
    with pytest.raises((AssertionError, VirtualGpuError), match=r"synchronisation|must not end"):
        live_on_gpu(OVERLAPPED)


def test_a_step_that_is_finished_before_the_next_is_launched_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap itself is observed: with it, a step is launched while the draws of the preceding one are unread."""
    unread: list[int] = []
    run = GpuSlotModel.run

    def noting(model: GpuSlotModel, *args: object, **kwargs: object) -> object:
        unread.append(model.unread)
        return run(model, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(GpuSlotModel, "run", noting)
    live_on_gpu(OVERLAPPED)
    assert sum(unread) > 0.8 * len(unread)
