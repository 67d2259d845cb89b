"""Simulated lives of an engine with a host tier: 40 in `make test`, more in `make test-all`.

`python -m tests.simulation --host --seed N --verbose` replays one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.simulation.draw import draw, with_host, with_limits
from tests.simulation.test_lives import FRESH, LIVES, SHARD
from tests.simulation.world import Stuck, World

SIGHTS = (  # events that must occur, or the lives are too easy
    "a fault: load",
    "a fault: offload",
    "audited_blocks",
    "cancelled: preempted",
    "coalesced_tokens",
    "evicted",
    "failed_loads",
    "failed_offloads",
    "host_tokens",
    "pinned",
    "preemptions",
    "shaken",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def live(seeds: list[int]) -> Counter[str]:
    failures, seen = [], Counter[str]()
    for seed in seeds:
        life = draw(seed)
        try:
            seen += World(with_host(with_limits(life) if seed % 4 == 3 else life)).run().sights()
        except (Exception, Stuck) as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    assert not failures, "\n".join([f"{len(failures)} of {len(seeds)} lives failed", *failures[:5]])
    return seen


def test_every_request_of_some_lives_ends_as_it_must() -> None:
    seen = live(list(range(40)))
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


@pytest.mark.long
@pytest.mark.parametrize("first", range(40, LIVES, SHARD))
def test_every_request_of_every_life_ends_as_it_must(first: int) -> None:
    live([*range(first, min(first + SHARD, LIVES)), *(range(FRESH, FRESH + 100) if FRESH and first == 40 else ())])
