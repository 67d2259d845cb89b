"""Test admission, order and preemption: the core without its thread, on a fake model that detects wrong blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from radixkv.cache import Sequence as CacheSequence
from radixkv.config import EngineConfig
from radixkv.engine import wait_queue
from radixkv.errors import InvalidInput, PinBudgetExceeded, PromptTooLong, RequestTimedOut
from tests.engine.fakes import sized
from tests.engine.worlds import GREEDY, World, answer, is_right, tokens

# ---- budget


@pytest.mark.parametrize("chunk", [16, 100, 512])
def test_a_long_prompt_never_keeps_a_running_stream_from_its_token(chunk: int) -> None:
    world = World(2048, 4, sized(16, chunk + 16, chunk))
    streams = [world.submit(tokens(5, i), GREEDY.but(max_tokens=300)) for i in range(8)]
    while any(len(s.live[0].tokens) < 10 if s.streams else True for s in streams):
        world.step()
    long = world.submit(tokens(3000, 9))
    steps = 0
    while not long.channel.ended:
        chunks = world.step()
        assert len([1 for _, n in chunks if n == 1]) >= 8
        assert sum(n for _, n in chunks) <= chunk + 16
        steps += 1
    assert steps == -(-3000 // chunk) + 5
    world.finish()
    assert all(map(is_right, [*streams, long]))


# ---- admission


def test_what_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    world = World(10, 4)
    with pytest.raises(PromptTooLong, match="takes 11 blocks of 4 tokens, and the pool has 10"):
        world.submit(tokens(36), GREEDY.but(max_tokens=8))
    with pytest.raises(PromptTooLong, match="in each of 3 streams"):
        world.submit(tokens(8), GREEDY.but(max_tokens=12, n=3))
    assert not world.core.busy


# ---- coalescing


@pytest.mark.parametrize("chunk", [128, 512, 2048, 8192])
def test_sixteen_equal_prompts_of_8k_are_computed_once(chunk: int) -> None:
    world = World(2048, 16, EngineConfig(max_batch_tokens=9000, prefill_chunk=chunk))
    prompt = tokens(8192)
    requests = [world.submit(prompt, GREEDY.but(max_tokens=2)) for _ in range(16)]
    world.finish()
    assert len({tuple(answer(each)) for each in requests}) == 1 and is_right(requests[0])
    counters = world.core.counters
    assert (
        counters.computed_tokens == 8192 + 15 + 16
    )  # a repeat computes its last token, and each request one sampled token
    assert (counters.coalesced_requests, counters.coalesced_tokens) == (15, 15 * 8191)
    # 512 blocks of the prompt, and one for the output of each stream
    assert world.cache.num_blocks - world.cache.stats().free_blocks <= 512 + 16


def test_the_wait_for_a_neighbour_is_bounded() -> None:
    world = World(256, 4, EngineConfig(prefill_chunk=8))
    shared = tokens(100)
    leader, follower = (world.submit([*shared, tail]) for tail in (1, 2))
    world.step()
    wait = follower.scheduling.queued.prefix_wait
    assert wait is not None and wait.leader is leader
    queue, waited = world.core.scheduler.waiting, 0
    while queue.first([]) is not follower:  # the leader makes no progress
        queue.begin_step()
        waited += 1
    assert 92 // 8 < waited <= 2 * -(-100 // 8) + 8 + 1
    world.step()
    assert follower in world.core.scheduler.running and follower.streams[0].counts.cached_tokens == 8
    world.finish()
    assert is_right(leader) and is_right(follower)


def test_a_leader_that_publishes_late_delays_no_request() -> None:
    world = World(32, 4, EngineConfig(prefill_chunk=8))
    shared = tokens(100)
    leader = world.submit([*shared, 1], GREEDY.but(max_tokens=28))  # the whole pool: no headroom
    world.step()
    assert leader.scheduling.publish_late
    follower = world.submit([*shared, 2])
    world.step()
    assert follower.scheduling.queued.prefix_wait is None
    world.finish()
    assert is_right(leader) and is_right(follower)


# ---- order


@pytest.mark.parametrize("delay", [1, 5, 32])
def test_longest_prefix_first_never_starves_beyond_its_bound(delay: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold request, and later ones that all hit a long cached prefix; a step takes a second."""
    monkeypatch.setattr(wait_queue.time, "perf_counter", lambda: float(len(world.runner.steps)))
    world = World(512, 4, EngineConfig(max_sequences=1, order="longest-prefix", max_delay=float(delay)))
    warm = tokens(40, 1)
    world.submit(warm, GREEDY.but(max_tokens=1))
    world.finish()
    cold = world.submit(tokens(30, 2), GREEDY.but(max_tokens=1))
    hot = [world.submit([*warm, i], GREEDY.but(max_tokens=1)) for i in range(50)]
    while not cold.channel.ended:
        world.step()
    assert sum(each.channel.ended for each in hot) == delay
    world.finish()
    assert all(map(is_right, [cold, *hot]))


@pytest.mark.parametrize("wrong", [{"order": "sjf"}, {"max_delay": -1.0}, {"order": None}])
def test_unknown_orders_and_delays_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        EngineConfig(**wrong)


# ---- preemption


def test_the_victim_has_the_lowest_priority_then_costs_least() -> None:
    def first_victim(prompts: list[list[int]], priorities: list[int]) -> int:
        world = World(20, 4)
        requests = [
            world.submit(prompt, GREEDY.but(max_tokens=30), priority=priority)
            for prompt, priority in zip(prompts, priorities, strict=True)
        ]
        while not world.core.counters.preemptions:
            world.step()
        return next(i for i, each in enumerate(requests) if each.scheduling.preemptions)

    long, short, middle = tokens(24, 1), tokens(6, 2), tokens(12, 3)
    assert first_victim([long, short, middle], [0, 0, 0]) == 1
    assert first_victim([short, long, middle], [0, 0, 0]) == 0
    assert first_victim([short, long, middle], [1, 0, 1]) == 1


def test_shared_tokens_cost_nothing_to_bring_back() -> None:
    world = World(24, 4)
    shared = tokens(28, 1)
    a = world.submit([*shared, 1], GREEDY.but(max_tokens=30))
    b = world.submit([*shared, 2], GREEDY.but(max_tokens=30))
    own = world.submit(tokens(14, 3), GREEDY.but(max_tokens=30))
    while not world.core.counters.preemptions:
        world.step()
    assert (
        a.scheduling.preemptions or b.scheduling.preemptions
    ) and not own.scheduling.preemptions  # 29 tokens, 28 of them shared with another request
    world.finish()
    assert all(map(is_right, (a, b, own)))


def test_pins_never_take_what_a_request_under_way_may_need() -> None:
    world = World(24, 4)
    pinned = tokens(24, 1)
    world.submit(pinned, GREEDY.but(max_tokens=1))
    world.finish()
    running = world.submit(tokens(40, 2), GREEDY.but(max_tokens=40))
    world.step()
    with pytest.raises(PinBudgetExceeded, match="under way"):
        world.core.admission.pin(np.array(pinned, np.int32))
    world.finish()
    assert is_right(running)


def test_pins_never_take_what_a_preempted_request_may_need() -> None:
    world = World(24, 4)
    pinned = tokens(16, 1)
    world.submit(pinned, GREEDY.but(max_tokens=1))
    world.finish()
    running = [world.submit(tokens(24, 2 + i), GREEDY.but(max_tokens=50)) for i in range(2)]
    while not world.core.counters.preemptions:
        world.step()
    [preempted] = world.core.scheduler.waiting
    world.core.cancel(next(each for each in running if each is not preempted))
    world.submit(pinned, GREEDY.but(max_tokens=1))
    left = world.cache.match(preempted.prompt).length
    with pytest.raises(PinBudgetExceeded, match="under way"):
        _pin_all(world, [pinned, preempted.prompt[:left]])
    world.finish()
    assert is_right(preempted)


def _pin_all(world: World, prompts: Sequence[Sequence[int]]) -> None:
    for prompt in prompts:
        world.core.admission.pin(np.array(prompt, np.int32))


def test_timeouts_of_requests_that_have_ended_are_forgotten() -> None:
    world = World(256, 4)
    long = world.submit(tokens(4), GREEDY.but(max_tokens=500), deadline=1e15)
    for i in range(100):
        world.submit(tokens(4, i), GREEDY.but(max_tokens=1), deadline=1e16)
        world.step()
    assert len(world.core.deadlines.heap) < 10
    world.core.cancel(long)
    world.finish()


def test_a_request_that_cannot_fit_because_of_pins_is_refused() -> None:
    world = World(16, 4)
    pinned, cached = tokens(32, 1), tokens(12, 3)
    world.submit(pinned, GREEDY.but(max_tokens=1))
    world.submit(cached, GREEDY.but(max_tokens=1))
    world.finish()
    pin = world.core.admission.pin(np.array(pinned, np.int32))
    request = world.submit(tokens(40, 2))
    world.finish()
    with pytest.raises(PromptTooLong, match="8 are pinned"):
        request.channel.wait(0)
    assert world.core.cache.match(cached).length == 12, "nothing was evicted for it in vain"
    pin.release()
    again = world.submit(tokens(40, 2))
    world.finish()
    assert is_right(again)


# ---- parallel sampling


# ---- faults


def test_what_is_too_much_for_the_memory_at_once_is_computed_in_parts() -> None:
    world = World(256, 4)

    def fault(chunks: Any) -> None:
        if sum(len(chunk.tokens) for chunk in chunks) > 20:
            raise MemoryError("too many tokens at once")

    world.runner.fault = fault
    requests = [world.submit(tokens(10, i)) for i in range(8)]
    world.finish()
    assert all(map(is_right, requests))


def test_a_failed_publication_harms_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in publishing at a cancel, a timeout or a preemption costs other requests a hit at most."""
    world = World(24, 4)
    requests = [world.submit(tokens(20, i), GREEDY.but(max_tokens=30)) for i in range(3)]
    late = world.submit(tokens(4, 8), GREEDY.but(max_tokens=30), deadline=0.0)
    cancelled = world.submit(tokens(4, 9), GREEDY.but(max_tokens=30))
    commit = CacheSequence.commit

    def broken(self: CacheSequence, publish: bool = True) -> None:
        if self._planned is None:  # nothing was computed: this call only publishes
            raise RuntimeError("cannot publish")
        commit(self, publish)

    monkeypatch.setattr(CacheSequence, "commit", broken)
    world.step()
    world.core.cancel(cancelled)
    assert cancelled.channel.ended and late.channel.ended
    world.finish()
    assert all(map(is_right, requests))
    assert world.core.counters.preemptions
    with pytest.raises(RequestTimedOut):
        late.channel.wait(0)


# ---- pins


def test_a_pin_whose_time_is_over_is_in_nobodys_way() -> None:
    """The cache was not used since the pin expired, which would have released it."""
    now = 0.0
    world = World(10, clock=lambda: now)
    world.submit(tokens(8), GREEDY.but(max_tokens=1))
    world.finish()
    pin = world.core.admission.pin(np.array(tokens(8), np.int32), ttl=5.0)
    assert pin.blocks == 2
    now = 6.0
    whole = world.submit(tokens(36, 1), GREEDY.but(max_tokens=5))
    world.finish()
    assert is_right(whole)


def test_an_expired_pin_does_not_make_a_request_publish_late() -> None:
    now = 0.0
    world = World(10, clock=lambda: now)
    world.submit(tokens(8), GREEDY.but(max_tokens=1))
    world.finish()
    world.core.admission.pin(np.array(tokens(8), np.int32), ttl=5.0)
    now = 6.0
    nearly_whole = world.submit(tokens(4, 1), GREEDY.but(max_tokens=33))  # 9 blocks and one of headroom
    world.step()
    assert nearly_whole in world.core.scheduler.running and not nearly_whole.scheduling.publish_late
    world.finish()
    assert is_right(nearly_whole)


def test_a_preempted_request_that_no_longer_fits_fails_because_of_pins() -> None:
    """Alone it just fits with the longer pin; the shorter pin holds a block that is not part of a hit."""
    world = World(10)
    text = tokens(8)
    world.submit(text, GREEDY.but(max_tokens=1))
    world.finish()
    longer, shorter = (world.core.admission.pin(np.array(text[:length], np.int32)) for length in (8, 6))
    big = world.submit([*text, 1], GREEDY.but(max_tokens=32))
    for _ in range(4):
        world.step()
    big.channel.paused = True
    other = world.submit(tokens(4, 5), GREEDY.but(max_tokens=2))
    world.step()
    assert big.scheduling.preemptions == 1
    longer.release()
    world.cache.discard(text, None, 6)
    big.channel.disable_backpressure()
    world.finish()
    assert is_right(other)
    assert shorter.active
    with pytest.raises(PromptTooLong, match=r"had begun, and pins have changed since: .* takes 9 blocks beside 1 that"):
        answer(big)
