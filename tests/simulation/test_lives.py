"""Simulated lives of the engine: 27 in `make test`, 90 and fresh ones in `make test-all`.

`python -m tests.simulation --seed N --verbose` replays one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from radixkv.config import EngineConfig
from radixkv.errors import PromptTooLong
from radixkv.sampling.params import SamplingParams
from tests.simulation import accounting
from tests.simulation.draw import answers_of, draw
from tests.simulation.scenario import Ask, Fault, Forgetting, Pinning, Scenario
from tests.simulation.shrink import shrink
from tests.simulation.world import Stuck, World

KEPT = (42, 64)
"""Seeds of lives that failed once, or have a rare event: a beam search resumes, a preempted request is cancelled."""

FRESH = int(os.environ.get("RADIXKV_SEED") or 0) * 1000  # the first seed of a run with fresh examples
SIGHTS = (  # events that must occur, or the lives are too easy
    "cancelled: waiting",
    "cancelled: prefill",
    "cancelled: decode",
    "cancelled: preempted",
    "timed_out",
    "closed",
    "preemptions",
    "recomputed_tokens",
    "forced_tokens",
    "coalesced_tokens",
    "evicted",
    "copied",
    "hits",
    "pinned",
    "audited_blocks",
    "bad_words",
    "beams: finished",
    "beams: resumed and finished",
    "reused_scores",
    "scored_tokens",
    "refused",
    "forward",
    "memory",
    "nan",
    "put",
    "finish",
    "open",
    "rule",
    "a fault: forward",
    "a fault: memory",
    "a fault: sampler",
    "a fault: schedule",
    "a fault: garbled",
    "order: priority",  # the rules that decided between waiting requests
    "order: preempted",
    "order: turn",
    "order: overdue",
    "order: longest prefix",
    "order: half",
)


def more(first: int, end: int = 90) -> list[int]:
    """Return the seeds of lives that `make test-all` adds: up to `end`, and in a run with fresh examples 100 fresh."""
    return [*range(first, end), *(range(FRESH, FRESH + 100) if FRESH else ())]


def live(seeds: list[int], life: Callable[[int], Scenario] = draw) -> Counter[str]:
    """Run the life of each seed; return how often each event occurred in all of them."""
    failures, seen = [], Counter[str]()
    for seed in seeds:
        try:
            seen += World(life(seed)).run().sights()
        except (Exception, Stuck) as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(
        [
            f"{len(failures)} of {len(seeds)} lives failed",
            *failures[:5],
            "replay one: the first lines of this test file have the command",
        ]
    )
    return seen


def test_every_request_of_some_lives_ends_as_it_must() -> None:
    seen = live([*range(18), *range(24, 30), 78, *KEPT])
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


@pytest.mark.long
def test_every_request_of_every_life_ends_as_it_must() -> None:
    seen = live(more(40))
    assert not [sight for sight in SIGHTS if not seen[sight]], f"never met; seen: {seen}"


def test_the_same_seed_is_the_same_life() -> None:
    for seed in (3, 17, 40):
        assert draw(seed) == draw(seed)
        assert World(draw(seed)).run().trace == World(draw(seed)).run().trace


def test_what_a_failure_does_not_need_is_dropped() -> None:
    def failure(scenario: Scenario) -> str | None:
        many = any(ask.params.n > 1 and len(ask.prompt) > 2 for ask in scenario.asks)
        return "fails" if many and any(fault.kind == "sampler" for fault in scenario.faults) else None

    seed = next(seed for seed in range(100) if any(ask.params.n > 1 for ask in draw(seed).asks))
    scenario = replace(draw(seed), faults=tuple(Fault(at, "sampler") for at in range(5)))
    least = shrink(scenario, failure)
    assert failure(least)
    assert (len(least.asks), len(least.faults), len(least.pinnings), len(least.forgettings)) == (1, 1, 0, 0)
    assert least.asks[0].params.n > 1 and len(least.asks[0].prompt) == 3


def test_a_paused_request_of_another_group_loses_no_turn() -> None:
    greedy = SamplingParams(max_tokens=9, temperature=0)
    asks = (Ask(0, 0, (0,) * 8, greedy, 9, lags=((4, 20),)), Ask(1, 6, (1, 2, 3), greedy, 2, namespace="other"))
    world = World(Scenario(0, 4, 4, EngineConfig(max_sequences=2, max_batch_tokens=8, prefill_chunk=8), asks)).run()
    counters = world.core.counters
    assert (counters.preemptions, counters.turn_admissions) == (1, 0)


def test_what_a_paused_request_kept_to_itself_is_cached_when_it_gives_way() -> None:
    """The first request fills the pool, so it publishes late; its reader leaves, and the second request arrives."""
    greedy = SamplingParams(max_tokens=9, temperature=0)
    asks = (Ask(0, 0, (0,) * 8, greedy, 9, lags=((4, 20),)), Ask(1, 6, (1, 2, 3), greedy, 2))
    world = World(Scenario(0, 4, 4, EngineConfig(max_sequences=2, max_batch_tokens=8, prefill_chunk=8), asks)).run()
    assert world.customers[0].request.scheduling.preemptions == 1
    assert world.customers[0].channel.completion is not None


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize(("prompt", "blocks", "other"), [(4, 5, 1), (16, 10, 8)])
def test_streams_of_a_request_come_back_as_they_left(prompt: int, blocks: int, other: int, reuse: bool) -> None:
    """Two streams of one prompt need every block; after a preemption they share the prompt again."""
    sampled = SamplingParams(max_tokens=9, temperature=1, n=2)
    asks = (
        Ask(0, 0, tuple(range(prompt)), sampled, 9, lags=((6, 14),)),
        Ask(1, 8, (5,) * other, sampled.but(n=1), 1),
    )
    config = EngineConfig(max_sequences=3, max_batch_tokens=19, prefill_chunk=16)
    world = World(Scenario(0, blocks, 4, config, asks, reuse=reuse)).run()
    assert world.customers[0].request.scheduling.preemptions == 1
    assert world.customers[0].channel.completion is not None


def test_what_a_stream_that_gives_way_was_to_compute_others_may() -> None:
    """The budget of a planned decode that is preempted goes to the prompt that needed its blocks."""
    greedy = SamplingParams(max_tokens=30, temperature=0)
    asks = (Ask(0, 0, (1,), greedy, 30), Ask(1, 0, (2,) * 6, greedy, 30), Ask(2, 1, (3, 4) * 12, greedy, 2))
    config = EngineConfig(max_sequences=3, max_batch_tokens=5, prefill_chunk=8)
    world = World(Scenario(0, 41, 1, config, asks)).run()
    assert world.customers[0].request.scheduling.preemptions == 1
    work = {step: [(number, count) for at, number, _, _, count in world.trace if at == step] for step in (7, 8)}
    assert work == {7: [(0, 1), (1, 1), (2, 3)], 8: [(1, 1), (2, 4)]}


def test_streams_that_come_back_begin_inside_a_chunk_and_publish_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic: the first stream resumes with a hit beyond its prompt; the other begins at the prompt's end."""
    monkeypatch.setattr(accounting, "READ_ALL", 1.0)
    sampled = SamplingParams(max_tokens=16, temperature=1, n=2)
    ask = Ask(0, 0, tuple(range(6)), sampled, 16, lags=((8, 14),))
    turn = (*ask.prompt, *answers_of(ask)[0].tokens[:3])
    config = EngineConfig(max_sequences=2, max_batch_tokens=8, prefill_chunk=4, deterministic=True, block_size=1)
    world = World(Scenario(0, 40, 2, config, (ask, Ask(1, 9, turn, sampled.but(n=1), 1)))).run()
    assert world.customers[0].request.scheduling.preemptions == 1
    back = {index: start for step, number, index, start, _ in reversed(world.trace) if number == 0 and step > 9}
    assert back == {0: 8, 1: 6}


PINNED = tuple(range(8))
"""Two pinned blocks of four tokens, in a pool of ten blocks."""


def beside_pins(prompt: tuple[int, ...], tokens: int, *pinnings: Pinning, until: int = 90) -> World:
    """A request of nine blocks runs next to one of seven, and is preempted as it is the later one."""
    greedy = SamplingParams(max_tokens=1, temperature=0)
    asks = (Ask(0, 0, PINNED, greedy, 1), Ask(1, 3, (9,), greedy, 28), Ask(2, 4, prompt, greedy, tokens))
    pins = (Pinning(2, PINNED, None, until), *pinnings)
    config = EngineConfig(max_sequences=2, max_batch_tokens=16, prefill_chunk=8)
    forgets = Forgetting(22, "discard", PINNED, 6)  # the pinned part stays
    return World(Scenario(0, 10, 4, config, asks, pinnings=pins, forgettings=(forgets,))).run()


def test_a_request_that_pins_would_keep_out_is_refused_before_its_first_token() -> None:
    stranger = beside_pins((10, 11, 12), 33).customers[2]
    assert isinstance(stranger.channel.error, PromptTooLong)
    assert "takes 9 blocks; the pool has 10, and 2 are pinned" in str(stranger.channel.error)
    assert not stranger.channel.chunks and not stranger.request.scheduling.admitted


def test_a_request_that_begins_with_a_pinned_text_counts_on_it() -> None:
    regular = beside_pins((*PINNED, 9), 28).customers[2]
    assert regular.channel.completion is not None
    assert regular.request.scheduling.preemptions == 1, "it was admitted next to another one, and preempted"


@pytest.mark.parametrize("until", [20, 90])
def test_a_pin_that_ends_inside_a_block_holds_a_block_that_is_no_hit(until: int) -> None:
    """With the longer pin ten blocks just fit alone; with only the shorter one they do not."""
    last = beside_pins((*PINNED, 9), 32, Pinning(2, PINNED[:6], None, 90), until=until).customers[2]
    assert not last.request.scheduling.preemptions, (
        "it was admitted next to another one without a guarantee to be admitted again"
    )
    assert (last.channel.completion is None) == (until == 20)


def test_of_a_hit_that_costs_a_block_more_what_is_pinned_stays() -> None:
    """After the pin two branches differ inside a block, and each has a copy: next to both the last one does not fit."""
    greedy = SamplingParams(max_tokens=1, temperature=0)
    stem = (*PINNED, 9, 9)
    asks = [Ask(0, 0, PINNED, greedy, 1), Ask(1, 3, (*stem, 1), greedy, 1), Ask(2, 6, (*stem, 2, 2, 2), greedy, 1)]
    asks.append(Ask(3, 9, (*stem, 2, 2, 2, 3), greedy, 27))
    config = EngineConfig(max_sequences=2, max_batch_tokens=16, prefill_chunk=8)
    world = World(Scenario(0, 10, 4, config, tuple(asks), pinnings=(Pinning(2, PINNED, None, 90),))).run()
    done = world.customers[3].channel.completion
    assert done is not None
    assert done.usage.cached_tokens == len(PINNED)
