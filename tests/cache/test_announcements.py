"""The text of waiting requests is evicted last. The fuzz checks where announcements end, and the order of eviction."""

import random

import pytest

from radixkv.cache import POLICIES, Hint, PrefixCache
from radixkv.cache.predictive.lru_baseline import LruBaseline
from tests.cache.test_eviction import flood
from tests.cache.verbs import cached, prompt, publish


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(10))
def test_no_announced_block_is_evicted_while_another_one_is_there(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of whole blocks branch, are hit and are demoted."""
    for name, value in (("leads", seed % 2 > 0), ("overdrawn", False)):
        monkeypatch.setattr(LruBaseline, name, value)
    rng = random.Random(seed)
    cache = PrefixCache(64, 4, policy)
    texts = [prompt(name % 4, 8) + [name] * rng.randrange(4, 24, 4) for name in range(8)]
    for text in rng.choices(texts, k=16) + texts:
        publish(cache, text, "a", rng.choice((None, Hint(returns_in=1e6), Hint(done=True))))
    waiting = {tuple(text): rng.choice((9, len(text))) for text in rng.sample(texts, 2)}
    announced = [cache.announce(text, "a", limit) for text, limit in waiting.items()]
    kept = {text[:end] for text, limit in waiting.items() for end in range(4, limit // 4 * 4 + limit % 4 * 4 + 1, 4)}
    for count in range(1, cache.num_blocks - len(kept) + 1):
        cache.evict(count)
        cache.check()
        assert all(cached(cache, text, "a") == len(text) for text in kept)
    assert cache.evictable_blocks == len(kept)
    assert cache.evict(cache.num_blocks), "the need of running requests comes first"
    assert not any(each.end for each in announced)


def test_priorities_come_first_and_a_closed_announcement_changes_nothing() -> None:
    cache = PrefixCache(12, 4)
    events = cache.state.events.split
    for name in (1, 2, 3):
        publish(cache, prompt(name, 16), priority=int(name == 3))
    victims = cache.next_victims()
    waiting, other = cache.announce(prompt(1, 16)), cache.announce([9], "other")
    assert cache.next_victims() == [victims[1], victims[0], victims[2]]
    waiting.close()
    other.close()
    assert cache.next_victims() == victims
    assert cache.state.events.split == events, "an empty queue costs nothing"


def test_text_that_comes_later_counts_too_and_so_does_its_namespace() -> None:
    cache = PrefixCache(4, 4)
    waiting = cache.announce(prompt(1, 8), "late")
    for name in range(1100):  # after so many the cache forgets unused namespaces
        publish(cache, [name], name)
    cache.clear()
    publish(cache, prompt(1, 4), "late")
    publish(cache, prompt(2, 12))
    flood(cache, 3)
    assert waiting.end == cached(cache, prompt(1, 4), "late") == 4


@pytest.mark.parametrize(("host_blocks", "length"), [(8, 10), (4, 16)])
def test_announced_text_leaves_the_host_last(host_blocks: int, length: int) -> None:
    """The announced text is the oldest one, and fills the host or a part of it."""
    cache = PrefixCache(4, 4, host_blocks=host_blocks)
    publish(cache, prompt(1, 16))
    waiting = cache.announce(prompt(1, length))
    for name in range(2, 8):
        publish(cache, prompt(name, 16))
        cache.moves()
        cache.moves_done()
        assert cache.match(prompt(1, 16)).host >= waiting.end == length
