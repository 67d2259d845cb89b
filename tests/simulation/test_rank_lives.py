"""Simulated lives of an engine on two ranks: eight of each kind in `make test`, more in `make test-all`.

`python -m tests.simulation --ranks --host --seed N --verbose` replays one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from radixkv.models.ranks.messages import Buffer, Step
from tests.simulation import ranks
from tests.simulation.draw import draw, with_drafts, with_host
from tests.simulation.scenario import Scenario
from tests.simulation.test_lives import live, more
from tests.simulation.world import World

SIGHTS = ("a fault: forward", "a fault: load", "a fault: offload", "forward", "preemptions", "shaken", "copied")
SIGHTS += ("hits", "host_tokens", "audited_blocks", "scored_tokens", "beams: finished", "accepted_from_tree")


def life(seed: int) -> Scenario:
    kinds = (lambda scenario: scenario, with_host, with_drafts)
    return replace(kinds[seed % 3](draw(seed)), ranks=True)


def test_every_request_of_some_lives_ends_as_it_must() -> None:
    seen = live(list(range(24)), life)
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


def test_each_rank_raises_some_of_the_faults() -> None:
    models = [World(life(seed)).run().model for seed in (1, 4, 7)]
    assert all(sum(model.raised[rank] for model in models) > 2 for rank in (0, 1))  # type: ignore[attr-defined]


@pytest.mark.long
def test_every_request_of_every_life_ends_as_it_must() -> None:
    live(more(24), life)


@pytest.mark.parametrize("part", ["moves", "loads", "copies"])
def test_a_part_of_a_step_that_does_not_reach_rank_1_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(buffer: Buffer) -> Step:
        step = decode(buffer)
        return step._replace(**{part: getattr(step, part)[:-1]})

    decode = ranks.decode
    monkeypatch.setattr(ranks, "decode", losing)
    with pytest.raises(AssertionError, match="lives failed"):
        live([1, 4, 7, 10], life)
