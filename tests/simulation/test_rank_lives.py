"""Lives of an engine on two ranks whose steps do not reach both; `test_option_lives` has the others."""

from __future__ import annotations

import pytest

from radixkv.models.ranks.messages import Buffer, Step
from tests.simulation import ranks
from tests.simulation.test_lives import live
from tests.simulation.test_option_lives import on_ranks
from tests.simulation.world import World


def test_each_rank_raises_some_of_the_faults() -> None:
    models = [World(on_ranks(seed)).run().model for seed in (1, 4, 7)]
    assert all(sum(model.raised[rank] for model in models) > 2 for rank in (0, 1))  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", ["moves", "loads", "copies"])
def test_a_part_of_a_step_that_does_not_reach_rank_1_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(buffer: Buffer) -> Step:
        step = decode(buffer)
        return step._replace(**{part: getattr(step, part)[:-1]})

    decode = ranks.decode
    monkeypatch.setattr(ranks, "decode", losing)
    with pytest.raises(AssertionError, match="lives failed"):
        live([1, 4, 7, 10], on_ranks)
