"""`random_run` returns cached runs only, reaches every run, and changes nothing."""

import random
from collections.abc import Hashable

import numpy as np

from radixkv.cache import PrefixCache
from tests.cache.test_eviction import flood
from tests.cache.verbs import held, prompt, publish


def texts(cache: PrefixCache, draws: int, seed: int = 0) -> set[tuple[Hashable, int, tuple[int, ...]]]:
    """Draw runs `draws` times; return the namespace, start and tokens of each."""
    rng = random.Random(seed)
    found = [cache.random_run(rng) for _ in range(draws)]
    return {(run.namespace, run.start, tuple(run.tokens.tolist())) for run in found if run is not None}


def test_covers_what_is_held_too() -> None:
    cache = PrefixCache(64, 4)
    publish(cache, prompt(1, 8))
    cache.pin(prompt(1, 8))
    one = held(cache, prompt(2, 8))
    twin = one.fork()
    publish(cache, prompt(3, 8))
    cache.open([])
    assert {tokens[0] for _, _, tokens in texts(cache, 100)} == {1001, 1002, 1003}
    twin.close()


def test_every_leaf_comes_up() -> None:
    """With thousands of leaves, the sorted list has several pieces; some leaves were removed."""
    cache = PrefixCache(5000, 1)
    for name in range(5000):
        publish(cache, [name])
    flood(cache, 1500)
    rng = random.Random(1)
    seen = np.zeros(5000, np.int64)
    for _ in range(42_000):
        run = cache.random_run(rng)
        assert run is not None
        seen[run.tokens[0]] += 1
    assert not seen[:1500].any()
    assert seen[1500:].all()
    assert seen.max() < 4 * 12  # about twelve each
    publish(cache, [9999])
    assert cache.match([9999]).length == 1
    cache.check()


def test_is_the_callers_own() -> None:
    cache = PrefixCache(64, 4)
    publish(cache, prompt(1, 10))
    run = cache.random_run(random.Random(0))
    assert run is not None
    run.tokens[:] = 0
    run.blocks[:] = 0
    cache.check()
    assert cache.match(prompt(1, 10)).length == 10
