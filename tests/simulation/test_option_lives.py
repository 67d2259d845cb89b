"""Simulated lives of engines with each option: some of each kind in `make test`, more in `make test-all`.

`python -m tests.simulation --host --drafts --seed N --verbose` replays one with these options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import pytest

from tests.simulation.draw import draw, with_drafts, with_host, with_prefixes, with_states
from tests.simulation.scenario import Scenario
from tests.simulation.test_lives import live, more


class Kind(NamedTuple):
    """Lives with an option, the seeds that `make test` runs, and the events that must occur in these."""

    life: Callable[[int], Scenario]
    seeds: Iterable[int]
    sights: tuple[str, ...]


def with_disk(seed: int) -> Scenario:
    scenario = with_host(draw(seed))
    return replace(scenario, disk=scenario.reuse, overlap=seed % 3 == 2)


def drafted(seed: int) -> Scenario:
    scenario = draw(seed)
    scenario = with_drafts(with_host(scenario) if seed % 3 == 2 else scenario)
    return replace(scenario, disk=scenario.reuse and seed % 9 == 8, overlap=seed % 4 == 1)


def after_prefixes(seed: int) -> Scenario:
    scenario = draw(seed)
    scenario = with_host(scenario) if seed % 3 == 2 else scenario
    scenario = with_prefixes(with_drafts(scenario) if seed % 5 == 4 else scenario)
    return replace(scenario, disk=seed % 9 == 8, overlap=seed % 4 == 1)


def on_ranks(seed: int) -> Scenario:
    kinds = (lambda scenario: scenario, with_host, with_drafts)
    return replace(kinds[seed % 3](draw(seed)), ranks=True)


def overlapped(seed: int) -> Scenario:
    return replace(draw(seed), overlap=True)


KINDS: dict[str, Kind] = {
    "host": Kind(
        lambda seed: with_host(draw(seed)),
        (*range(10), 15, 20, 42, 64),
        (
            "a fault: load", "a fault: offload", "audited_blocks", "beams: resumed and finished",
            "cancelled: preempted", "coalesced_tokens", "evicted", "failed_loads", "failed_offloads", "host_tokens",
            "pinned", "preemptions", "shaken",
        ),
    ),
    "disk": Kind(
        with_disk,
        (*range(6), 20, 42),
        ("disk_tokens", "host_tokens", "cancelled: waiting", "preemptions", "failed_writes"),
    ),
    "drafts": Kind(
        drafted,
        (*range(8), 15, 16, 21, 27, 42),
        (
            "a fault: forward", "a fault: garbled", "a fault: sampler", "accepted_from_tree", "audited_blocks",
            "bad_words", "beams: finished", "cancelled: decode", "copied", "drafted_from_own", "evicted",
            "forced_tokens", "hits", "host_tokens", "nan", "pinned", "preemptions", "rule", "scored_tokens",
            "timed_out", "wasted_tokens",
        ),
    ),
    "prefixes": Kind(
        after_prefixes,
        (*range(4, 9), 15, 18, 64, 65),
        (
            "a fault: forward", "accepted_from_tree", "audited_blocks", "beams: finished", "copied", "host_tokens",
            "after a prefix: PrefixGone", "after a prefix: finished", "after a prefix: resumed and finished",
        ),
    ),
    "ranks": Kind(
        on_ranks,
        (*range(9), 11, 16, 27, 29),
        (
            "a fault: forward", "a fault: load", "a fault: offload", "forward", "preemptions", "shaken", "copied",
            "hits", "host_tokens", "audited_blocks", "scored_tokens", "beams: finished", "accepted_from_tree",
        ),
    ),
    "overlap": Kind(
        overlapped,
        (*range(10), 11, 16, 21, 27, 42),
        (
            "a fault: forward", "a fault: garbled", "a fault: memory", "a fault: sampler", "a fault: schedule",
            "audited_blocks", "beams: finished", "cancelled: decode", "coalesced_tokens", "evicted", "hits",
            "host_bound_rows", "nan", "pinned", "preemptions", "scored_tokens", "timed_out", "wasted_tokens",
        ),
    ),
    "overlap, host": Kind(
        lambda seed: with_host(overlapped(seed)),
        range(16),
        ("a fault: offload", "audited_blocks", "host_tokens", "preemptions", "wasted_tokens"),
    ),
    "overlap, states": Kind(
        lambda seed: with_states(overlapped(seed)),
        range(16),
        ("evicted_states", "hits", "preemptions", "shaken", "wasted_tokens"),
    ),
    "overlap, host, states": Kind(
        lambda seed: with_states(with_host(overlapped(seed))),
        range(16),
        ("evicted_states", "host_tokens", "hits", "preemptions", "wasted_tokens"),
    ),
    "states": Kind(
        lambda seed: with_states(draw(seed)),
        range(12),
        (
            "beams: resumed and finished", "cancelled: preempted", "preemptions", "recomputed_tokens",
            "coalesced_tokens", "evicted", "evicted_states", "hits", "pinned", "shaken",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_of_some_lives_ends_as_it_must(kind: str) -> None:
    life, seeds, sights = KINDS[kind]
    seen = live(list(seeds), life)
    assert not [sight for sight in sights if not seen[sight]], f"never met; seen: {seen}"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_of_every_life_ends_as_it_must(kind: str) -> None:
    live(more(30), KINDS[kind].life)
