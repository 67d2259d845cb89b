"""The order of eviction: trims block by block, the policies, inheritance, hints and priorities."""

from collections.abc import Callable

import pytest

from radixkv.cache import POLICIES, Hint, PrefixCache
from tests.cache.verbs import cached, held, prompt, publish

ALL = tuple(POLICIES)
BY_RECENCY = ("lru", "fifo", "lfu", "slru", "predictive")  # these evict the older of equal leaves first


def flood(cache: PrefixCache, blocks: int) -> None:
    """Take `blocks` blocks for a moment, which evicts as many as are not free."""
    seq = cache.open([], "flood")
    seq.extend([0] * (blocks * cache.block_size))
    seq.close()


def goes_first(cache: PrefixCache, texts: list[list[int]]) -> list[int]:
    """The order in which whole texts vanish when the pool is squeezed block by block."""
    order: list[int] = []
    total = cache.free_blocks + cache.evictable_blocks
    for blocks in range(cache.free_blocks + 1, total + 1):
        flood(cache, blocks)
        order += [i for i, text in enumerate(texts) if i not in order and not cached(cache, text)]
    return order


class TestEveryPolicy:
    def test_is_in_the_table(self) -> None:
        assert set(ALL) >= {"lru", "fifo", "lfu", "slru", "predictive"}

    @pytest.mark.parametrize("policy", ALL)
    def test_evicts_nothing_without_need(self, policy: str) -> None:
        cache = PrefixCache(8, 4, policy)
        publish(cache, prompt(1, 16))
        flood(cache, 4)
        assert cached(cache, prompt(1, 16)) == 16
        assert cache.stats().evicted_blocks == 0

    @pytest.mark.parametrize("policy", ALL)
    @pytest.mark.parametrize("length", [16, 14])
    def test_trims_a_leafs_tail_block_by_block(self, policy: str, length: int) -> None:
        cache = PrefixCache(8, 4, policy)
        publish(cache, prompt(1, length))
        for taken, left in ((5, 12), (6, 8), (7, 4), (8, 0)):
            flood(cache, taken)
            assert cached(cache, prompt(1, length)) == left
            cache.check()
        assert cache.stats().evicted_tokens == length
        assert cache.stats().evicted_blocks == 4

    @pytest.mark.parametrize("policy", ALL)
    def test_never_touches_what_is_held(self, policy: str) -> None:
        cache = PrefixCache(8, 4, policy)
        publish(cache, prompt(1, 16))
        reader = cache.open(prompt(1, 6))
        flood(cache, cache.free_blocks + cache.evictable_blocks)
        assert 6 <= cached(cache, prompt(1, 16)) <= 8  # tokens that share a held block may stay
        assert reader.tokens.tolist() == prompt(1, 6)

    @pytest.mark.parametrize("policy", ALL)
    def test_takes_branches_before_their_trunk(self, policy: str) -> None:
        cache = PrefixCache(12, 4, policy)
        trunk = prompt(1, 8)
        publish(cache, trunk + [50] * 8)
        publish(cache, trunk + [60] * 8)
        flood(cache, 10)
        assert cached(cache, trunk) == 8
        flood(cache, 11)
        assert cached(cache, trunk) == 4


DONE = Hint(done=True)
ORDERS = [  # of texts, by their uses
    *((policy, [0, 1, 2, 3], [0, 1, 2, 3]) for policy in BY_RECENCY),
    ("lru", [0, 1, 2, 3, 1, 0], [2, 3, 1, 0]),
    ("fifo", [0, 1, 2, 3, 1, 0, 0, 1], [0, 1, 2, 3]),
    ("lfu", [0, 0, 0, 1, 2, 2, 3, 3, 2], [1, 3, 0, 2]),  # 0 and 2 have two hits, 3 has one
    ("slru", [0, 1, 2, 3, 0], [1, 2, 3, 0]),
]


@pytest.mark.parametrize(("policy", "uses", "order"), ORDERS)
def test_a_policy_orders_texts_by_their_uses(policy: str, uses: list[int], order: list[int]) -> None:
    cache = PrefixCache(8, 4, policy)
    texts = [prompt(i, 8) for i in range(4)]
    for i in uses:
        publish(cache, texts[i])
    assert goes_first(cache, texts) == order


def give_up(cache: PrefixCache, text: list[int]) -> None:
    with cache.open(text) as sequence:
        sequence.truncate(0)


def demote_and_use(cache: PrefixCache, text: list[int]) -> None:
    cache.demote(text)
    publish(cache, text)


VERBS: list[tuple[Callable[[PrefixCache, list[int]], object], list[int]]] = [  # on the third of four texts
    (lambda cache, text: (cache.match(text), cache.explain(text)), [0, 1, 2, 3]),
    (give_up, [0, 1, 3, 2]),
    (lambda cache, text: cache.pin(text).release(), [0, 1, 3, 2]),
    (lambda cache, text: cache.demote(text), [2, 0, 1, 3]),
    (demote_and_use, [0, 1, 3, 2]),
    (lambda cache, text: publish(cache, text, hint=DONE), [2, 0, 1, 3]),
    (lambda cache, text: (publish(cache, text, hint=DONE), publish(cache, text)), [0, 1, 3, 2]),
]


@pytest.mark.parametrize(("verb", "order"), VERBS)
def test_verbs_change_the_order_of_the_default_policy(
    verb: Callable[[PrefixCache, list[int]], object], order: list[int]
) -> None:
    cache = PrefixCache(8, 4)
    texts = [prompt(i, 8) for i in range(4)]
    for text in texts:
        publish(cache, text)
    verb(cache, texts[2])
    assert cached(cache, texts[2]) == 8 and cache.evictable_blocks == 8
    assert goes_first(cache, texts) == order


def test_the_close_of_a_sequence_is_a_use() -> None:
    cache = PrefixCache(8, 4)
    texts = [prompt(i, 8) for i in range(4)]
    with held(cache, texts[0]):
        for text in texts[1:]:
            publish(cache, text)
    assert goes_first(cache, texts) == [1, 2, 3, 0]


@pytest.mark.parametrize("policy", ALL)
def test_texts_are_evicted_by_priority_and_finished_ones_first(policy: str) -> None:
    cache = PrefixCache(12, 4, policy)
    texts = [prompt(i, 8) for i in range(6)]
    publish(cache, texts[0], hint=Hint(priority=3))
    publish(cache, texts[1], priority=2)
    publish(cache, texts[1], priority=0)  # which does not lower it
    publish(cache, texts[2], priority=1)
    publish(cache, texts[3])
    publish(cache, texts[4], priority=1, hint=DONE)
    publish(cache, texts[5], priority=-1)
    assert goes_first(cache, texts) == [5, 3, 4, 2, 1, 0]


class TestLru:
    def test_a_trunk_is_as_young_as_the_branch_it_lost(self) -> None:
        cache = PrefixCache(12, 4, "lru")
        trunk, other = prompt(1, 8), prompt(2, 8)
        publish(cache, trunk + [50] * 4)
        publish(cache, trunk + [60] * 4)
        cache.demote(trunk + [50] * 4)
        flood(cache, 12 - 3)
        assert cached(cache, trunk + [60] * 4) == 12  # the trunk and one branch, used before the other text
        publish(cache, other)
        publish(cache, trunk + [60] * 4, hint=DONE)
        flood(cache, 12 - 4)
        assert cached(cache, trunk + [60] * 4) == 8  # the done branch was evicted, out of turn
        flood(cache, 12 - 2)
        assert (cached(cache, trunk), cached(cache, other)) == (8, 0)


class TestLfu:
    def test_a_trunk_has_the_hits_of_the_branch_it_lost(self) -> None:
        cache = PrefixCache(12, 4, "lfu")
        trunk, other = prompt(1, 8), prompt(2, 8)
        publish(cache, trunk + [50] * 4)
        for _ in range(5):
            publish(cache, trunk + [60] * 4)
        for _ in range(4):
            publish(cache, other)
        cache.demote(trunk + [50] * 4)
        flood(cache, 12 - 5)
        cache.demote(trunk + [60] * 4, start=8)
        flood(cache, 12 - 4)
        assert (cached(cache, trunk + [60] * 4), cached(cache, other)) == (8, 8)  # both branches are gone, out of turn
        flood(cache, 12 - 2)
        assert (cached(cache, trunk), cached(cache, other)) == (8, 0)

    def test_a_repeat_after_a_limit_is_one_hit(self) -> None:
        """The split and the merge must not count the hits again."""
        cache = PrefixCache(12, 4, "lfu")
        often, limited = prompt(1, 8), prompt(2, 8)
        publish(cache, limited)
        for _ in range(4):
            seq = cache.open(limited, limit=7)
            seq.extend(limited[7:])
            seq.commit()
            seq.close()
        for _ in range(7):
            publish(cache, often)
        cache.open(limited[:3]).close()
        cache.check()
        assert goes_first(cache, [often, limited]) == [1, 0]

    def test_a_text_keeps_its_hits_when_it_grows_under_two_readers(self) -> None:
        cache = PrefixCache(12, 4, "lfu")
        text, other = prompt(1, 8), prompt(2, 12)
        for _ in range(5):
            publish(cache, text)
        for _ in range(3):
            publish(cache, other)
        readers = [cache.open(text), cache.open(text)]
        for reader in readers:
            reader.extend([5] * 4)
            reader.commit()
        for reader in readers:
            reader.close()
        flood(cache, 12 - 3)
        assert (cached(cache, text + [5] * 4), cached(cache, other)) == (12, 0)


class TestSlru:
    def test_a_scan_does_not_wash_out_what_was_hit_twice(self) -> None:
        def survives(policy: str) -> bool:
            cache = PrefixCache(16, 4, policy)
            favourite = prompt(1, 16)
            for _ in range(3):
                publish(cache, favourite)
            for name in range(2, 12):
                publish(cache, prompt(name, 16))
            return cached(cache, favourite) == 16

        assert survives("slru")
        assert not survives("lru")

    def test_ended_sessions_do_not_stay_protected(self) -> None:
        cache = PrefixCache(20, 4, "slru")
        for name in range(9):
            for _ in range(3):
                publish(cache, prompt(name, 8))
        newcomers = [prompt(100, 8), prompt(101, 8)]
        for _ in range(3):
            for text in newcomers:
                publish(cache, text)
        assert [cached(cache, text) for text in newcomers] == [8, 8]
        assert [cached(cache, prompt(name, 8)) for name in range(9)] == [0] + [8] * 8


class TestDone:
    def test_means_only_the_unshared_tail(self) -> None:
        cache = PrefixCache(12, 4)
        trunk, other = prompt(1, 8), prompt(2, 8)
        publish(cache, other)
        publish(cache, trunk + [50] * 8)
        publish(cache, trunk + [60] * 8, hint=DONE)
        flood(cache, 12 - 6)
        assert cached(cache, trunk + [60] * 8) == 8
        assert cached(cache, trunk + [50] * 8) == 16
        assert cached(cache, other) == 8
        flood(cache, 12 - 4)
        assert cached(cache, other) == 0
        assert cached(cache, trunk) == 8

    def test_means_nothing_while_another_sequence_holds_it(self) -> None:
        cache = PrefixCache(8, 4)
        texts = [prompt(i, 8) for i in range(3)]
        publish(cache, texts[0])
        one, two = held(cache, texts[1]), held(cache, texts[1])
        publish(cache, texts[2])
        one.close(Hint(done=True))
        two.close()
        assert goes_first(cache, texts) == [0, 2, 1]

    def test_reaches_up_a_whole_chain_of_turns(self) -> None:
        """A session of several turns, each its own sequence: `done` covers all of them, as nothing branches off."""
        cache = PrefixCache(12, 4)
        other = prompt(9, 8)
        publish(cache, other)
        for length in (8, 16, 24):
            publish(cache, prompt(1, length), hint=Hint(done=length == 24))
        flood(cache, 12 - 2)
        assert cached(cache, other) == 8
        assert cached(cache, prompt(1, 24)) == 0


class TestPriority:
    def test_counts_for_both_halves_of_a_split(self) -> None:
        cache = PrefixCache(8, 4)
        important, early, late = prompt(0, 16), prompt(1, 8), prompt(2, 8)
        publish(cache, important, priority=1)
        publish(cache, early)
        cache.open(important[:8]).close()
        flood(cache, 4)
        assert (cached(cache, early), cached(cache, important)) == (0, 16)
        flood(cache, 6)
        publish(cache, late)
        flood(cache, 6)
        assert (cached(cache, late), cached(cache, important)) == (0, 8)


class TestDemote:
    """`demote` marks a branch as done after its sequence was closed."""

    @pytest.mark.parametrize("policy", BY_RECENCY)
    def test_from_a_start_on_spares_what_is_before(self, policy: str) -> None:
        cache = PrefixCache(8, 4, policy)
        text, other = prompt(1, 16), prompt(2, 8)
        publish(cache, other)
        publish(cache, text)
        cache.demote(text, start=8)
        cache.check()
        flood(cache, 8 - 4)
        assert cached(cache, text) == 8
        assert cached(cache, other) == 8
        flood(cache, 8 - 2)
        assert cached(cache, other) == 0
        assert cached(cache, text) == 8

    def test_spares_what_is_held_or_branches_off(self) -> None:
        cache = PrefixCache(12, 4)
        trunk, other = prompt(1, 8), prompt(2, 8)
        publish(cache, other)
        publish(cache, trunk + [50] * 8)
        publish(cache, trunk + [60] * 8)
        reader = cache.open(trunk + [50] * 8)
        cache.demote(trunk + [50] * 8)
        cache.demote(trunk)
        reader.close()
        cache.demote(trunk + [60] * 8)
        flood(cache, 12 - 6)
        assert cached(cache, trunk + [60] * 8) == 8
        assert cached(cache, trunk + [50] * 8) == 16
        flood(cache, 12 - 4)
        assert cached(cache, other) == 0

    @pytest.mark.parametrize("start", [0, 3, 8, 99])
    def test_of_what_is_not_cached_is_nothing(self, start: int) -> None:
        cache = PrefixCache(8, 4)
        publish(cache, prompt(1, 8))
        for text in ([], prompt(2, 8), prompt(1, 6), [*prompt(1, 8), 5]):
            cache.demote(text, start=start)
            cache.demote(text, "elsewhere", start=start)
            cache.check()
        assert cached(cache, prompt(1, 8)) == 8
        assert cache.stats().namespaces == 1


def test_a_publisher_gives_its_priority_to_what_another_published_first() -> None:
    cache = PrefixCache(8, 1)
    shared, rest = [1, 2], [3, 4]
    with cache.open(shared) as first:
        first.extend(shared)
        first.commit()
    dear, cheap = cache.open(shared, priority=5), cache.open(shared)
    for sequence in (dear, cheap):
        sequence.extend(rest)
    cheap.commit()
    dear.commit()
    dear.close()
    cheap.close()
    with cache.open([7, 8, 9, 10]) as other:
        other.extend([7, 8, 9, 10])
        other.commit()
    with cache.open([11]) as pressure:
        pressure.extend([11])
    assert cache.match([*shared, *rest]).length == 4
    assert cache.match([7, 8, 9, 10]).length == 3
    cache.check()


def test_demote_reaches_a_branch_that_was_partly_evicted() -> None:
    cache = PrefixCache(20, 1)
    dead, dear = [50, *range(60, 69)], list(range(1, 11))
    for text in (dead, dear):
        with cache.open(text) as sequence:
            sequence.extend(text)
            sequence.commit()
    with cache.open([], "flood") as flood:
        flood.extend([0] * 3)
    cache.open(dead[:7]).close()  # warmer than the other now
    cache.demote(dead)
    with cache.open([], "flood") as flood:
        flood.extend([0] * 6)
    assert (cache.match(dear).length, cache.match(dead).length) == (10, 4)


def test_a_return_to_a_finished_tail_keeps_it() -> None:
    cache = PrefixCache(12, 1)
    start, tail, older = [1, 2], [3, 4, 5], [9, 9, 9]

    def publish(tokens: list[int], hint: Hint | None = None) -> None:
        sequence = cache.open(tokens)
        sequence.extend(tokens[sequence.length :])
        sequence.commit()
        sequence.close(hint)

    publish(start)
    follower = cache.open([*start, *tail], limit=2)
    publish([*start, *tail], Hint(done=True))
    publish(older)
    follower.extend(tail)
    follower.commit()
    follower.close()
    with cache.open([], "flood") as flood:
        flood.extend([0] * 7)
    assert cache.match([*start, *tail]).length == 5
    assert cache.match(older).length == 0
    cache.check()


def test_done_says_nothing_of_what_others_published_and_hit() -> None:
    cache = PrefixCache(8, 1)
    shared, other = [1, 2, 3], [7, 8, 9]
    for text in (other, shared):
        with cache.open(text) as sequence:
            sequence.extend(text)
            sequence.commit()
    cache.open(shared).close()
    cache.open(shared).close(Hint(done=True))
    with cache.open([], "flood") as flood:
        flood.extend([0] * 3)
    assert (cache.match(shared).length, cache.match(other).length) == (3, 2)


def test_slru_protects_after_the_second_hit() -> None:
    cache = PrefixCache(6, 1, "slru")
    for text in ([1, 1], [2, 2], [3, 3]):
        with cache.open(text) as sequence:
            sequence.extend(text)
            sequence.commit()
    for text in ([1, 1], [1, 1], [2, 2]):
        cache.open(text).close()
    with cache.open([], "flood") as flood:
        flood.extend([0] * 4)
    assert [cache.match(text).length for text in ([1, 1], [2, 2], [3, 3])] == [2, 0, 0]
