"""Limits of namespaces: shares are kept, the greatest excess is evicted first, and the counts are exact.

`fuzz.shares` checks both rules at each eviction, with every policy.
"""

import random
from collections.abc import Hashable

import numpy as np
import pytest

from radixkv.cache import POLICIES, PrefixCache
from radixkv.cache.quotas import NamespaceLimits
from radixkv.errors import InvalidInput, OutOfBlocks, PinBudgetExceeded
from tests.cache.verbs import cached, prompt, publish


def used(cache: PrefixCache) -> dict[Hashable, int]:
    return {each.namespace: each.used_blocks for each in cache.namespace_usage()}


def fill(cache: PrefixCache, namespace: Hashable, texts: int, first: int = 0, length: int = 1) -> None:
    """Publish texts of `length` blocks of one token."""
    for name in range(first, first + texts):
        publish(cache, prompt(name, length), namespace)
        cache.check()


class TestLimits:
    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            ([("a", 0.5)], "must map namespaces to shares"),
            ({"a": 1.5}, "the share of 'a' must be a number from 0 to 1, got 1.5"),
            ({"a": -0.1}, "from 0 to 1"),
            ({"a": True}, "from 0 to 1"),
            ({"a": "half"}, "from 0 to 1"),
            ({"a": float("nan")}, "from 0 to 1"),
            ({("a", 1): np.float32}, "the share of a tuple must"),
            ({"a": 0.7, None: 0.4}, "1.1 together, more than the whole pool"),
        ],
    )
    def test_wrong_ones_are_refused_with_the_reason(self, limits, message):
        with pytest.raises(InvalidInput, match=message):
            PrefixCache(8, 1, namespace_limits=limits)

    def test_rounding_does_not_refuse_shares_that_add_up_to_one(self):
        limits = NamespaceLimits({"a": 0.1, "b": 0.2, "c": 0.7})
        assert limits.blocks(100) == [0, 10, 20, 70]
        assert NamespaceLimits({"a": 0.29}).blocks(100) == [0, 29], "0.29 * 100 is less than 29 in floating point"

    def test_a_share_of_a_tuple_counts_for_all_tuples_that_begin_with_it(self):
        limits = NamespaceLimits({("ann",): 0.1, ("ann", "mail"): 0.1, "ann": 0.1, (): 0.1})
        names = [("ann",), ("ann", "chat"), ("ann", "mail", 7), "ann", ("ben",), (), None, "mail"]
        assert [limits.group(each) for each in names] == [1, 1, 2, 3, 4, 4, 0, 0]

    def test_an_unhashable_namespace_is_refused_as_without_limits(self):
        cache = PrefixCache(8, 1, namespace_limits={("a",): 0.5})
        with pytest.raises(InvalidInput, match="hashable"):
            cache.open([1], ("a", []))
        cache.check()


class TestRules:
    def test_a_sequence_that_would_need_the_shares_of_others_runs_out_of_blocks(self):
        cache = PrefixCache(10, 1, namespace_limits={"a": 0.5, "b": 0.2})
        fill(cache, "a", 5)
        fill(cache, "b", 2)
        assert [cache.evictable_for(each) for each in ("a", "b", None)] == [5, 2, 0]
        with cache.open([7] * 4, "c") as sequence:
            with pytest.raises(OutOfBlocks, match=r"4 blocks wanted, 3 are free and 0 evictable for this namespace"):
                sequence.extend([7] * 4)
            cache.check()
            sequence.extend([7] * 3)
        assert used(cache) == {"a": 5, "b": 2}

    def test_leaves_whose_blocks_a_fork_holds_are_evicted_last(self):
        cache = PrefixCache(12, 1, namespace_limits={"a": 0.1, "b": 0.5})
        fill(cache, "b", 8)
        with cache.open(prompt(0, 3), "a") as first:
            first.extend(prompt(0, 3))
            first.commit(publish=False)
            twin = first.fork()
            first.commit()
        with cache.open([5] * 2, "c") as sequence:
            sequence.extend([5] * 2)
            cache.check()
        assert cached(cache, prompt(0, 3), "a") == 3, "to evict it would free nothing"
        assert used(cache) == {"a": 3, "b": 7}
        twin.close()

    def test_next_victims_begin_with_the_greatest_excess(self):
        cache = PrefixCache(10, 1, namespace_limits={"a": 0.5, "b": 0.1})
        fill(cache, "a", 3)
        fill(cache, "b", 3)
        fill(cache, None, 2)
        roots = {root.id: namespace.value for namespace, root in cache.state.tree.roots.items()}
        owner = {node.id: roots[node.parent.id] for node in cache.state.tree.walk() if node.parent is not None}
        assert [owner[node] for node in cache.next_victims()] == [None] * 2 + ["b"] * 3 + ["a"] * 3
        assert [owner[node] for node in cache.next_victims(3)] == [None] * 2 + ["b"]

    def test_pins_beyond_a_share_are_refused_and_without_a_share_beyond_what_is_left(self):
        cache = PrefixCache(10, 1, pin_budget=1.0, namespace_limits={"a": 0.4, "b": 0.4})
        for namespace, most in (("a", 4), (None, 2)):
            fill(cache, namespace, 1, length=most + 1)
            first = cache.pin(prompt(0, 2), namespace)
            with pytest.raises(PinBudgetExceeded, match=rf"^{most + 1} blocks .*, 2 are, .* allow {most}: release"):
                cache.pin(prompt(0, most + 1), namespace)
            cache.pin(prompt(0, most), namespace)
            first.release()
            cache.check()

    def test_a_cache_without_limits_has_no_usage(self):
        cache = PrefixCache(8, 1)
        fill(cache, "a", 2)
        assert cache.namespace_usage() == () and cache.evictable_for("b") == cache.evictable_blocks == 2


def test_on_the_host_a_namespace_loses_the_recent_blocks_beyond_its_share_and_no_more() -> None:
    cache = PrefixCache(10, 1, host_blocks=5, namespace_limits={"a": 0.6, "b": 0.4})
    publish(cache, prompt(0, 4), "b")
    publish(cache, prompt(1, 5), "a")
    cache.evict(6, "a")
    assert len(cache.moves()) == cache.namespace_usage()[0].host_blocks == 5
    cache.moves_done()
    lent = cache.take_host_blocks(prompt(2, 4), "b", 4)
    for _ in ("lent", "offloaded"):
        cache.check()
        assert cache.match(prompt(1, 5), "a").host == 3
        assert [each.host_blocks for each in cache.namespace_usage()] == [3, 2]
        cache.arrive(prompt(2, 4), "b", lent, 0)
        cache.evict(10, "b")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["plain", "states", "host"])
def test_a_flood_leaves_the_hits_of_another_namespace_with_every_policy(policy: str, kind: str) -> None:
    now = [0.0]
    limits = {"quiet": 0.4, "loud": 0.6}
    options = {"eviction": policy, "clock": lambda: now[0], "namespace_limits": limits}
    cache = PrefixCache(30, 2, **options)
    if kind == "states":
        cache = PrefixCache(30, 2, state_rows=2, state_snapshots=60, **options)
    elif kind == "host":
        cache = PrefixCache(30, 2, host_blocks=10, **options)
    hits = 0
    for turn in range(40):
        for loud in range(5):
            publish(cache, prompt(100 + 5 * turn + loud, 12), "loud")
        hits += cache.match(prompt(turn % 2, 8), "quiet").matched == 8
        publish(cache, prompt(turn % 2, 8), "quiet")
        now[0] += 1
        cache.moves()
        cache.moves_done()
        cache.check()
    assert hits == 38, "all but the first two"


@pytest.mark.parametrize("policy", POLICIES)
def test_shares_are_kept_while_runs_move_to_the_host_and_back(policy: str) -> None:
    rng, now = random.Random(7), [0.0]
    limits: dict[Hashable, float] = {"a": 0.4, "b": 0.2}
    cache = PrefixCache(20, 2, policy, lambda: now[0], host_blocks=30, namespace_limits=limits)
    texts = [[name, *(rng.randrange(2) for _ in range(rng.randint(4, 15)))] for name in range(12)]
    loaded = 0
    for _ in range(400):
        now[0] += 1
        namespace, text = rng.choice(("a", "b", None, "c")), rng.choice(texts)
        others = {each.namespace: each for each in cache.namespace_usage() if each.namespace != namespace}
        with cache.open(text, namespace) as sequence:
            rest = text[sequence.length :]
            if (count := sequence.loadable(rest)) > 0:
                sequence.load(rest[:count])
                sequence.commit()
                loaded += count
            sequence.extend(text[sequence.length :])
            cache.check()
            sequence.commit()
        for each in cache.namespace_usage():
            before = others.get(each.namespace)
            kept = 0 if before is None else min(before.used_blocks, before.guaranteed_blocks)
            assert each.used_blocks >= kept, f"{each.namespace} has lost blocks of its share"
        cache.check()
        if rng.random() < 0.8:
            cache.moves()
            cache.moves_done()
            cache.check()
    assert loaded > 100 and cache.stats().evicted_blocks > 0
