"""Run a real model in a pool too small for its requests: preemption does not change answers."""

from __future__ import annotations

import pytest

from radixkv import Engine, SamplingParams
from tests.selection import mostly_long

MESSAGES = [[{"role": "user", "content": f"Number {i}: hello, what do you sell?"}] for i in range(6)]
GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
DRAWN = GREEDY.but(max_tokens=32, temperature=1, seed=4, n=2)


def answers(params: SamplingParams, **load: object) -> tuple[list[tuple[int, ...]], int]:
    with Engine.load("tiny", dtype="float32", **load) as engine:  # type: ignore[arg-type]
        done = engine.generate(MESSAGES, params)
        return [each.token_ids for first in done for each in (first, *first.alternatives)], engine.stats().preemptions


@pytest.mark.parametrize("params", mostly_long([GREEDY, DRAWN], GREEDY), ids=["greedy", "two samples"])
def test_preempted_answers_match_a_roomy_pool(params: SamplingParams) -> None:
    expected, none = answers(params, num_blocks=400)
    assert not none
    total = 0
    for victim, prefix_cache, chunk in (("cheapest", True, 16), ("last", True, 512), ("cheapest", False, 16)):
        got, preemptions = answers(params, num_blocks=12, victim=victim, prefix_cache=prefix_cache, prefill_chunk=chunk)
        assert got == expected
        total += preemptions
    assert total >= 3
