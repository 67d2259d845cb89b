"""The values that name namespaces: a key that changes or raises affects its own calls only."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from radixkv.cache import PrefixCache
from radixkv.cache.namespaces import LEAST, Namespaces
from radixkv.errors import InvalidInput
from radixkv.telemetry.tree_view import tree_view
from tests.cache.verbs import cached, held, prompt, publish

TEXT = prompt(1, 10)


class Key:
    """A mutable key. Its hash and its comparison count their calls; `failing` makes them raise."""

    def __init__(self, name: object) -> None:
        self.name = name
        self.calls = 0
        self.failing = False

    def __hash__(self) -> int:
        return hash(self._asked())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and bool(self._asked() == other.name)

    def _asked(self) -> object:
        self.calls += 1
        if self.failing:
            raise RuntimeError("this key is broken")
        return self.name


class Restless:
    """A key with another hash at each call."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __hash__(self) -> int:
        return self._rng.randrange(4)

    def __eq__(self, other: object) -> bool:
        return self._rng.random() < 0.5


class Impostor:
    """A key that equals every other key, and has the hash of `victim` from its second hash on."""

    def __init__(self, victim: object) -> None:
        self._hashes = [1]
        self._victim = victim

    def __hash__(self) -> int:
        return self._hashes.pop() if self._hashes else hash(self._victim)

    def __eq__(self, other: object) -> bool:
        return True


CACHES: list[Callable[[], PrefixCache]] = [
    lambda: PrefixCache(64, 4),
    lambda: PrefixCache(64, 4, state_rows=8, state_snapshots=8),
    lambda: PrefixCache(64, 4, host_blocks=8),
]


def change(key: Key) -> None:
    key.name = "another name"


def fail(key: Key) -> None:
    key.failing = True


@pytest.mark.parametrize("spoil", [change, fail])
def test_a_key_that_changes_or_fails_later_breaks_no_other_call(spoil: Callable[[Key], None]) -> None:
    cache = PrefixCache(64, 4)
    keys = [Key("published"), Key("open"), Key("pinned"), Key("empty")]
    for key in keys[:3]:
        publish(cache, TEXT, key)
    publish(cache, TEXT, "text")
    publish(cache, TEXT)
    sequence, pin, empty = held(cache, prompt(2, 10), keys[1]), cache.pin(TEXT, keys[2]), cache.open([], keys[3])
    for key in keys:
        spoil(key)
        key.calls = 0
    cache.check()
    assert [cached(cache, TEXT, other) for other in ("text", None, "new")] == [10, 10, 0]
    assert [root.namespace for root in tree_view(cache).roots] == ["Key", "Key", "Key", "text", None, "Key"]
    sequence.close()
    pin.release()
    empty.close()  # the last holder: this removes the root
    cache.check()
    assert cache.stats().namespaces == 5
    for number in range(3, 40):  # evicts everything, so that all roots but one are removed
        publish(cache, prompt(number, 40))
    cache.check()
    assert cache.stats().namespaces == 1
    cache.clear()
    cache.check()
    assert (cache.stats().namespaces, cache.free_blocks) == (0, 64)
    assert [key.calls for key in keys] == [0, 0, 0, 0]


def test_a_key_that_changes_finds_its_namespace_when_it_changes_back() -> None:
    cache = PrefixCache(64, 4)
    key = Key("ann")
    publish(cache, TEXT, key)
    key.name = "ben"
    assert cached(cache, TEXT, key) == 0
    assert publish(cache, TEXT, key) == 0
    assert cached(cache, TEXT, Key("ben")) == 10
    key.name = "ann"
    assert cached(cache, TEXT, key) == 10
    cache.check()


@pytest.mark.parametrize("make", CACHES)
def test_a_known_namespace_is_hashed_once_in_a_call(make: Callable[[], PrefixCache]) -> None:
    cache, key = make(), Key("ann")
    publish(cache, TEXT, key)
    calls: list[Callable[[], object]] = [
        lambda: cache.match(TEXT, key),
        lambda: cache.explain(TEXT, key),
        lambda: cache.open(TEXT, key).close(),
        lambda: cache.pin(TEXT, key).release(),
    ]
    for call in calls:
        key.calls = 0
        call()
        assert key.calls == 1


@pytest.mark.parametrize(
    ("victim", "outcome"),
    [
        ("text", pytest.raises(InvalidInput, match="changed within the call")),
        (7, pytest.raises(InvalidInput, match="changed within the call")),
        (("text", 1), nullcontext()),  # not compared with a new key, so both are kept
    ],
)
def test_a_key_that_turns_into_another_within_a_call_replaces_no_namespace(
    victim: object, outcome: AbstractContextManager[object]
) -> None:
    cache = PrefixCache(64, 4)
    publish(cache, TEXT, victim)
    with outcome:
        cache.open(prompt(2, 10), Impostor(victim)).close()
    assert cached(cache, TEXT, victim) == 10
    cache.check()


@pytest.mark.parametrize("make", CACHES)
def test_a_hash_that_changes_at_every_call_harms_its_own_calls_only(make: Callable[[], PrefixCache]) -> None:
    rng = random.Random(5)
    cache, key = make(), Restless(rng)
    publish(cache, TEXT, "other")
    pin = cache.pin(TEXT, "other")
    for _ in range(300):
        text = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        try:
            sequence = held(cache, text, key)
        except InvalidInput:  # it was another key when it was added
            cache.check()
            continue
        cache.match(text, key)
        cache.explain(text, key)
        cache.pin(text, key).release()
        cache.demote(text, key)
        cache.check()
        sequence.close()
        if rng.random() < 0.3:
            cache.discard(text, key)
        cache.check()
        assert cache.match(TEXT, "other").matched == 10
    pin.release()
    cache.clear()
    cache.check()
    assert (cache.stats().namespaces, len(cache.state.tree.namespaces)) == (0, 0)


def test_a_key_that_fails_is_refused_and_changes_nothing() -> None:
    cache = PrefixCache(64, 4)
    publish(cache, TEXT, Key("ann"))
    key = Key("ann")
    key.failing = True
    calls: list[Callable[[Any], object]] = [
        lambda namespace: cache.open(TEXT, namespace),
        lambda namespace: cache.match(TEXT, namespace),
        lambda namespace: cache.explain(TEXT, namespace),
        lambda namespace: cache.pin(TEXT, namespace),
        lambda namespace: cache.demote(TEXT, namespace),
        lambda namespace: cache.discard(TEXT, namespace),
    ]
    for call in calls:
        for refused in (key, ("in a tuple", key), ["not hashable"], ("x", {})):
            with pytest.raises(InvalidInput, match="hashable"):
                call(refused)
    cache.check()
    assert (cache.stats().namespaces, cache.stats().sequences) == (1, 0)


def test_a_comparison_that_raises_is_seen_by_keys_of_its_class_only() -> None:
    cache = PrefixCache(64, 4)
    broken = Key("x")
    publish(cache, TEXT, broken)
    broken.failing = True
    assert hash("x") == hash(Key("x"))
    with pytest.raises(InvalidInput, match="broken"):
        cache.open(TEXT, Key("x"))
    for other in ("x", Key("y"), None):
        assert publish(cache, TEXT, other) == 0
        assert cached(cache, TEXT, other) == 10
    cache.clear()
    cache.check()
    assert cache.stats().namespaces == 0


def test_a_comparison_that_raises_for_all_classes_does_not_reach_the_others() -> None:
    class Fussy:
        """A key that has the hash of a text and cannot be compared."""

        def __hash__(self) -> int:
            return hash("x")

        def __eq__(self, other: object) -> bool:
            raise TypeError("not comparable")

    cache = PrefixCache(64, 4)
    publish(cache, TEXT, Fussy())
    assert publish(cache, TEXT, "x") == 0
    assert cached(cache, TEXT, "x") == 10
    with pytest.raises(InvalidInput, match="not comparable"):
        cache.open(TEXT, Fussy())


def test_equal_values_of_different_classes_are_one_namespace() -> None:
    class Name(str):
        """A class that inherits hash and comparison."""

    for first, same, other in (
        (1, True, "1"),
        (("a", 1), ("a", 1.0), ("a",)),
        (Name("a"), "a", Name("b")),
        (frozenset({1}), frozenset({1}), 1),
        (Key("a"), Key("a"), "a"),
    ):
        for given, again in ((first, same), (same, first)):
            cache = PrefixCache(64, 4)
            publish(cache, TEXT, given)
            assert [cached(cache, TEXT, each) for each in (again, other, None)] == [10, 0, 0]


def test_evictions_are_explained_after_the_root_was_removed() -> None:
    cache = PrefixCache(8, 4)
    publish(cache, TEXT, ("ann", 1))
    publish(cache, prompt(2, 32))
    assert cache.stats().namespaces == 1
    assert cache.explain(TEXT, ("ann", 1)).reason == "evicted"
    assert cache.explain(TEXT, ("ann", 2)).reason == "never_seen"
    publish(cache, TEXT, ("ann", 1))
    assert cache.stats().regret_tokens == 10


def test_values_without_root_and_ghosts_are_forgotten() -> None:
    cache = PrefixCache(32, 4)
    namespaces = cache.state.tree.namespaces
    publish(cache, TEXT, "stays")
    pin = cache.pin(TEXT, "stays")
    for number in range(5 * LEAST):
        cache.open(TEXT, ("salt", number)).close()
        assert len(namespaces) <= LEAST
    assert cached(cache, TEXT, "stays") == 10
    for number in range(2 * LEAST):
        publish(cache, TEXT, ("salt", number))
        assert len(namespaces) <= LEAST
        assert cache.explain(TEXT, ("salt", max(0, number - 11))).reason == "evicted" or number < 12
    cache.check()
    pin.release()
    cache.clear()
    assert len(namespaces) == 0


def test_many_used_namespaces_raise_the_bound() -> None:
    known = Namespaces()
    made = [known.add(number) for number in range(3 * LEAST)]
    known.keep({each.number for each in made})
    assert known.limit == 6 * LEAST
    assert [known.find(number) for number in range(3 * LEAST)] == made
    known.keep({each.number for each in made[:10]}, 5000)
    assert (len(known), known.limit) == (10, 5000)
    assert known.find(9) is made[9] and known.find(10) is None
