"""How many requests found each token in the cache, against a count of each prefix that `open` and loads returned."""

from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

from radixkv.cache import PrefixCache
from radixkv.cache.reuse import count, join, split, total
from radixkv.cache.types import Purpose
from tests.cache.host.world import HostWorld
from tests.cache.test_fuzz import PROOFS, Story
from tests.cache.world import Tracked, World

OPERATIONS = 3_000


class CountingWorld(World):
    """A world that counts the requests for each token of each cached text, and forgets texts that leave the tree."""

    def make_cache(self, eviction: str) -> PrefixCache:
        self.prefixes: dict[tuple[int, object], int] = {}  # (the prefix before a token, the token) -> this prefix
        self.found: Counter[int] = Counter()
        cache = super().make_cache(eviction)
        self.tracker = cache.watch()
        return cache

    def open(
        self,
        namespace: Hashable,
        prompt: Sequence[int],
        limit: int | None = None,
        priority: int = 0,
        purpose: Purpose = "request",
    ) -> Tracked:
        self.forget_uncounted()
        opened = super().open(namespace, prompt, limit, priority, purpose)
        if purpose == "request":
            self.found.update(self.numbers(namespace, prompt[: opened.seq.length]))
        self.assert_reuse()
        return opened

    def commit(self, one: Tracked, publish: bool = True) -> None:
        self.forget_uncounted()
        super().commit(one, publish)
        self.assert_reuse()

    def publish(self, one: Tracked, length: int) -> None:
        self.forget_uncounted()
        super().publish(one, length)
        self.assert_reuse()

    def verify(self) -> None:
        super().verify()
        self.forget_uncounted()
        self.assert_reuse()

    def numbers(self, namespace: Hashable, tokens: Sequence[int]) -> list[int]:
        """Return a number for each prefix of a text."""
        numbers, number = [], self.number(0, ("namespace", namespace))
        for token in tokens:
            number = self.number(number, token)
            numbers.append(number)
        return numbers

    def number(self, before: int, token: object) -> int:
        return self.prefixes.setdefault((before, token), len(self.prefixes) + 1)

    def cached_prefixes(self) -> dict[int, int]:
        """The number of each cached prefix, with the count that the cache has for its last token."""
        tree, counted = self.cache.state.tree, {}
        for node in tree.residents():
            text = b"".join(bytes(each.key) for each in tree.path(node))
            numbers = self.numbers(tree.namespace(node), memoryview(text).cast("i").tolist())
            ends = node.reuse or {}
            assert all(node.start < end <= node.end for end in ends), f"{ends} of [{node.start}, {node.end})"
            for at in range(node.start, node.end):
                counted[numbers[at]] = sum(found for end, found in ends.items() if end > at)
            if node.parent is not None:
                assert total(node.reuse) == counted[numbers[node.start]]
        return counted

    def forget_uncounted(self) -> None:
        """Forget the counts of text that is not cached any more."""
        cached = self.cached_prefixes()
        self.found = Counter({number: found for number, found in self.found.items() if number in cached})

    def assert_reuse(self) -> None:
        for number, found in self.cached_prefixes().items():
            assert found == self.found[number]


class CountingHostWorld(CountingWorld, HostWorld):
    """The same with a host tier: a request also counts for the tokens that it loads and publishes."""

    def commit(self, one: Tracked, publish: bool = True) -> None:
        start, loads = len(one.tokens), one.seq.id in self.loads and one.purpose == "request" and publish
        text = one.tokens + one.planned
        self.execute([one])  # failed moves drop text before it is published again
        self.forget_uncounted()
        HostWorld.commit(self, one, publish)
        if loads:
            self.found.update(self.numbers(one.namespace, text)[start:])
        self.assert_reuse()


@pytest.mark.parametrize(
    ("block_size", "blocks", "policy", "suffix", "most_open"),
    [(1, 40, "lru", 12, 6), (3, 12, "lfu", 8, 4), pytest.param(16, 12, "slru", 40, 6, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("kind", [CountingWorld, CountingHostWorld])
def test_each_token_has_the_number_of_requests_that_found_it(
    kind: type[CountingWorld], block_size: int, blocks: int, policy: str, suffix: int, most_open: int
) -> None:
    world = kind(blocks, block_size, policy, seed=11, proofs=PROOFS)
    story = Story(world, suffix, most_open, seed=12)
    story.run(OPERATIONS)
    world.wind_down()


def test_an_open_costs_nothing_without_a_tracker() -> None:
    cache = PrefixCache(8, 4)
    for _ in range(3):
        with cache.open([1, 2, 3, 4, 5]) as sequence:
            sequence.extend([1, 2, 3, 4, 5][sequence.length :])
            sequence.commit()
    assert all(node.reuse is None for node in cache.state.tree.walk())


def test_requests_that_go_on_below_count_at_the_shared_prefix() -> None:
    cache = PrefixCache(64, 4)
    cache.watch()
    system = list(range(20))
    for user in range(5):
        with cache.open([*system, 100 + user, 7]) as sequence:
            sequence.extend([*system, 100 + user, 7][sequence.length :])
            sequence.commit()
    (shared,) = (node for node in cache.state.tree.walk() if node.end == 20)
    assert total(shared.reuse) == 4, "all requests but the first one"
    assert [total(child.reuse) for child in shared.children.values()] == [0] * 5
    assert shared.hits == 4
    cache.open([*system, 102, 7, 8]).close()
    assert total(shared.reuse) == 5
    assert sum(total(child.reuse) for child in shared.children.values()) == 1


def test_a_conversation_counts_each_turn() -> None:
    cache = PrefixCache(64, 4)
    cache.watch()
    text: list[int] = []
    for turn in range(4):
        text += [turn] * 5
        with cache.open(text) as sequence:
            sequence.extend(text[sequence.length :])
            sequence.commit()
    (node,) = (node for node in cache.state.tree.walk() if node.parent is not None)
    assert node.reuse == {5: 1, 10: 1, 15: 1}
    cache.open(text[:8]).close()
    assert [(each.end, each.reuse) for each in cache.state.tree.walk()] == [
        (0, None),
        (8, {5: 1, 8: 3}),
        (20, {10: 1, 15: 1}),
    ]


def test_an_evicted_child_changes_nothing_at_its_parent() -> None:
    cache = PrefixCache(64, 4)
    cache.watch()
    for text in ([1] * 8, [1] * 8 + [2] * 4, [1] * 8 + [3] * 4, [1] * 8 + [3] * 4):
        with cache.open(text) as sequence:
            sequence.extend(text[sequence.length :])
            sequence.commit()
    (top,) = (node for node in cache.state.tree.walk() if node.end == 8)
    assert total(top.reuse) == 3
    cache.evict(64 - 2)
    assert not top.children
    assert total(top.reuse) == 3


def test_a_split_and_a_join_keep_each_token() -> None:
    whole = {3: 2, 5: 1, 9: 4}
    for cut in range(1, 9):
        upper, lower = split(dict(whole), cut)
        assert total(upper) == total(whole)
        assert join(upper, cut, lower) == whole
    assert split(None, 3) == (None, None)
    assert join(None, 3, None) is None
    assert count({4: 1}, 4, -1) == {}
