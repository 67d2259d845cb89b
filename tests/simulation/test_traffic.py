"""The engine's real threads under mixed requests with random cancels; `benchmarks/soak.py` is the long one."""

from __future__ import annotations

import logging

import pytest

from tests.selection import mostly_long
from tests.simulation.traffic import Mixture, Traffic, is_expected, leaked, memory_engine


@pytest.mark.parametrize("order", mostly_long(["fcfs", "longest-prefix"], "longest-prefix"))
def test_mixed_requests_from_many_threads_are_all_answered_and_leave_nothing(
    order: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    config = {"max_sequences": 8, "max_batch_tokens": 32, "prefill_chunk": 16}
    with memory_engine(num_blocks=36, faults=0.01, order=order, **config) as engine:
        mixture = Mixture(longest_prompt=30, most_new=30, timeouts=(0.01,))
        tally = Traffic(engine, is_expected, mixture, after=lambda ended: None).run(requests=200, clients=12)
        stats = engine.stats()
        assert not tally.wrong
        assert sum(tally.ends.values()) >= 200
        assert tally.ends["finished"] and tally.ends["cancelled"]
        assert (stats.waiting, stats.running) == (0, 0)
        assert stats.preemptions and stats.recomputed_tokens
        assert leaked(engine) == 0
