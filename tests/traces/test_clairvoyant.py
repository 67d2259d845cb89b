"""The optimum is one: no choice of victims hits more, as an exhaustive search confirms."""

from __future__ import annotations

from array import array
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.cache import POLICIES
from radixkv_traces.clairvoyant import ClairvoyantPool, next_uses
from radixkv_traces.formats import TraceRequest
from radixkv_traces.simulate import replay
from radixkv_traces.workload import Workload, prepare

# A tree of 13 prefixes: chains over two symbols, at most three long, so that paths branch and come back.
CHAINS = st.lists(st.integers(0, 1), min_size=0, max_size=3)
TRACES = st.lists(CHAINS, max_size=8)


def workload(chains: list[list[int]]) -> Workload:
    return prepare([TraceRequest(0.0, len(chain), 1, array("q", chain)) for chain in chains], 1)


def best(trace: Workload, capacity: int) -> int:
    """The most blocks that can hit, by trying every choice of evicted leaves."""
    chains = [tuple(request.blocks) for request in trace.requests]

    @cache
    def rest(index: int, cached: frozenset[int]) -> int:
        if index == len(chains):
            return 0
        chain = chains[index]
        hit = next((i for i, block in enumerate(chain) if block not in cached), len(chain))
        path = frozenset(chain[: max(hit, min(len(chain), capacity))])
        outcomes = {cached}
        while any(len(each | path) > capacity for each in outcomes):
            outcomes = {each - {leaf} for each in outcomes for leaf in leaves(each, frozenset(chain[:hit]))}
        return hit + max(rest(index + 1, each | path) for each in outcomes)

    def leaves(cached: frozenset[int], held: frozenset[int]) -> list[int]:
        inner = {trace.parents[block] for block in cached}
        return [block for block in cached if block not in inner and block not in held]

    return rest(0, frozenset())


@given(TRACES, st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_no_choice_of_victims_hits_more(chains: list[list[int]], capacity: int) -> None:
    trace = workload(chains)
    pool = ClairvoyantPool(trace, capacity)
    hits = 0
    for index in range(len(chains)):
        hits += pool.serve(index)
        pool.check()
    assert hits == best(trace, capacity)


@given(TRACES, st.integers(1, 5), st.sampled_from(sorted(POLICIES)))
@settings(max_examples=100, deadline=None)
def test_no_policy_of_the_cache_hits_more_and_infinity_hits_most(
    chains: list[list[int]], capacity: int, policy: str
) -> None:
    trace = workload(chains)
    real, optimum, endless = (replay(trace, capacity, each).hit_blocks for each in (policy, "clairvoyant", "infinite"))
    assert real <= optimum <= endless


@given(TRACES)
def test_next_uses_are_the_next_uses(chains: list[list[int]]) -> None:
    trace = workload(chains)
    used = [set(request.blocks) for request in trace.requests]
    expected = [
        next((later for later in range(index + 1, len(used)) if block in used[later]), len(used))
        for index, request in enumerate(trace.requests)
        for block in request.blocks
    ]
    assert list(next_uses(trace)) == expected
