"""Memory by scheme, compared with a replay that goes step by step, token by token."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import InvalidInput
from radixkv_traces.fragmentation import Buddy, fragmentation

LENGTHS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=25)


def naive(lengths: list[tuple[int, int]], memory: int, need: str, size: int) -> tuple[float, ...]:
    """(used, reserved, sequences, preemptions, steps), summed over single steps while requests wait."""

    def reserved(length: int, final: int) -> int:
        return size if need == "slab" else -(-length // size) * size

    def room(sequences: list[list[int]]) -> bool:
        ahead = [reserved(length + 1, final) for length, final in sequences]
        return sum(ahead) <= memory // size * size

    waiting = deque([[prompt, prompt + max(1, output)] for prompt, output in lengths])
    running: list[list[int]] = []
    used = held = sequences = preemptions = steps = 0
    admitting = True
    while waiting:
        while admitting and waiting and room([*running, waiting[0]]):
            running.append(waiting.popleft())
        if not waiting:
            break
        admitting = False
        while not room(running):
            waiting.appendleft(running.pop())
            preemptions += 1
        steps += 1
        sequences += len(running)
        for each in running:
            each[0] += 1
            used += each[0]
            held += reserved(*each)
        admitting = any(length == final for length, final in running)
        running = [each for each in running if each[0] < each[1]]
    return used, held, sequences, preemptions, steps


def refusing(lengths: list[tuple[int, int]], memory: int, size: int, slab: int) -> dict[str, set[int]]:
    """Which requests never fit: in a slab, in the largest power of two, in all pages."""
    finals = dict(enumerate(prompt + max(1, output) for prompt, output in lengths))
    largest = max(1 << power for power in range(8) if 1 << power <= memory)
    most = {"contiguous": slab, "buddy": largest, "paged": memory // size * size}
    return {scheme: {index for index, final in finals.items() if final > room} for scheme, room in most.items()}


@given(LENGTHS, st.integers(20, 90), st.integers(1, 8), st.integers(10, 20))
@settings(max_examples=200, deadline=None)
def test_sums_equal_a_replay_step_by_step(lengths: list[tuple[int, int]], memory: int, size: int, slab: int) -> None:
    refused = refusing(lengths, memory, size, slab)
    left_out = set().union(*refused.values())
    rows = contiguous, _, paged = fragmentation(lengths, memory, slab, [size])
    assert [each.refused for each in rows] == [len(refused[each.scheme]) for each in rows]
    assert {each.left_out for each in rows} == {len(left_out)}
    served = [each for index, each in enumerate(lengths) if index not in left_out]
    for found, expected in (
        (contiguous, naive(served, memory, "slab", slab)),
        (paged, naive(served, memory, "pages", size)),
    ):
        total = max(1, found.steps) * memory
        sums = (found.used * total, (found.used + found.reserved_unused) * total, found.sequences * max(1, found.steps))
        assert sums == pytest.approx(expected[:3])
        assert (found.preemptions, found.steps) == expected[3:]
        if found.steps:
            assert found.used + found.reserved_unused + found.unreserved == pytest.approx(1.0)


@given(st.integers(1, 300), st.lists(st.tuples(st.booleans(), st.integers(1, 60), st.integers(0, 9)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_buddy_blocks_are_aligned_apart_and_whole_again_at_the_end(
    memory: int, moves: list[tuple[bool, int, int]]
) -> None:
    buddy = Buddy(memory)
    whole = {size: list(free) for size, free in buddy._free.items()}
    nobody = np.zeros(0, np.int64)
    for takes, tokens, which in moves:
        if takes:
            before = len(buddy._taken)
            assert buddy.admit(nobody, 1, tokens) == (len(buddy._taken) > before)
        elif buddy._taken:
            buddy.release(which % len(buddy._taken))
        check(buddy, memory)
    while buddy._taken:
        buddy.release(0)
    assert buddy._free == whole


def check(buddy: Buddy, memory: int) -> None:
    """Free and taken blocks tile the memory, each a power of two, aligned; no two free ones are buddies."""
    free = [(at, size) for size, places in buddy._free.items() for at in places]
    at = 0
    for start, size in sorted([*buddy._taken, *free]):
        assert start == at and start % size == 0 and size & (size - 1) == 0
        at += size
    assert at == memory
    for start, size in free:
        assert size == buddy._largest or (start ^ size, size) not in free


def test_wrong_sizes_are_refused_and_nothing_waits_in_an_empty_trace() -> None:
    for memory, slab, sizes in ((10, 11, [1]), (10, 0, [1]), (10, 5, [0]), (10, 5, [11])):
        with pytest.raises(InvalidInput):
            fragmentation([], memory, slab, sizes)
    assert all(each.steps == 0 == each.used_of_reserved for each in fragmentation([], 200, 5))
