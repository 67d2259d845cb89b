"""Namespaces are hashed and compared once, by the caller's thread, and are numbers from there on."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from radixkv import SamplingParams
from radixkv.engine.namespaces import NamespaceTable
from radixkv.errors import InvalidInput
from radixkv.telemetry.records import namespace_label, namespace_value
from tests.engine.fakes import check, make_engine

ONE = SamplingParams(max_tokens=1)
PROMPT = list(range(1, 18))


class Tenant:
    """A mutable key, which counts the threads that hash and compare it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []

    def __hash__(self) -> int:
        self.asked.append(threading.current_thread().name)
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        self.asked.append(threading.current_thread().name)
        return isinstance(other, Tenant) and self.name == other.name


class Clashing:
    """Has the hash of each other one; comparing them runs `compare`."""

    def __init__(self, compare: Any) -> None:
        self.compare = compare

    def __hash__(self) -> int:
        return 5

    def __eq__(self, other: object) -> bool:
        return bool(self.compare())


def test_a_key_whose_hash_changes_breaks_nothing() -> None:
    engine, _ = make_engine(200, 4)
    with engine:
        mutable = [Tenant("a"), Tenant("b"), Tenant("c")]
        for each in (*mutable, "text", None):
            engine.generate([PROMPT], ONE, namespace=each)  # type: ignore[arg-type]
        for each in mutable:
            each.name = "text"
        assert engine.generate([PROMPT], ONE, namespace="text")[0].usage.cached_tokens == 16
        assert engine.generate([PROMPT], ONE)[0].usage.cached_tokens == 16
        assert engine.generate([PROMPT], ONE, namespace=Tenant("new"))[0].usage.cached_tokens == 0
        check(engine)
        engine.clear_cache()
        check(engine)
        assert engine.stats().cache.namespaces == 0
        for each in (*mutable, "text", None):
            engine.generate([PROMPT], ONE, namespace=each)  # type: ignore[arg-type]
        check(engine)


def test_no_code_of_a_key_runs_on_the_engines_thread() -> None:
    engine, _ = make_engine(200, 4, monitor=False)
    with engine:
        tenants = [Tenant("a"), Tenant("a"), Tenant("b")]
        for each in tenants:
            handles = [engine.submit(PROMPT, ONE, namespace=each) for _ in range(3)]
            engine.probe(PROMPT, namespace=each)
            engine.warm(PROMPT, namespace=each, pin=True).release()
            engine.demote(PROMPT, namespace=each)
            engine.tree(each)
            for handle in handles:
                handle.result()
        engine.clear_cache()
        check(engine)
        assert {name for each in tenants for name in each.asked} == {threading.current_thread().name}
        assert len(engine.client.inputs.namespaces) == 2


def test_a_slow_comparison_delays_its_own_caller_only() -> None:
    engine, _ = make_engine(200, 4)
    begun, goes_on = threading.Event(), threading.Event()

    def compare() -> bool:
        begun.set()
        goes_on.wait(30)
        return False

    with engine:
        engine.generate([PROMPT], ONE, namespace=Clashing(compare))
        slow = threading.Thread(target=lambda: engine.generate([PROMPT], ONE, namespace=Clashing(compare)))
        slow.start()
        assert begun.wait(30)
        for other in (None, "a", 7):
            engine.generate([PROMPT], ONE, namespace=other)
        assert engine.stats().finished == 4
        goes_on.set()
        slow.join()
        assert engine.stats().finished == 5


def test_a_comparison_that_raises_is_refused_at_the_door() -> None:
    engine, _ = make_engine(200, 4)
    with engine:
        engine.generate([PROMPT], ONE, namespace=Clashing(lambda: 1 // 0))
        with pytest.raises(InvalidInput, match="hashable"):
            engine.submit(PROMPT, ONE, namespace=Clashing(lambda: False))
        assert engine.stats().requests == 1


def test_equal_values_are_one_namespace_and_others_are_apart() -> None:
    engine, _ = make_engine(500, 4)
    with engine:
        for first, same, other in ((1, True, "1"), (("a", 1), ("a", 1.0), ("a",)), ("", "", ()), (0, False, -1)):
            engine.clear_cache()
            assert engine.generate([PROMPT], ONE, namespace=first)[0].usage.cached_tokens == 0
            assert engine.generate([PROMPT], ONE, namespace=same)[0].usage.cached_tokens == 16
            assert engine.generate([PROMPT], ONE, namespace=other)[0].usage.cached_tokens == 0
            assert engine.generate([PROMPT], ONE)[0].usage.cached_tokens == 0
        numbers = [engine.client.inputs.namespaces.number(each) for each in (1, 2, 3)]
        assert len(set(numbers)) == 3


def test_views_show_the_callers_value_and_not_the_number() -> None:
    engine, _ = make_engine(200, 4)
    with engine:
        for owner in ("ann", ("ben", 2), 7, Tenant("x")):
            engine.generate([PROMPT], ONE, namespace=owner)
        assert [root.namespace for root in engine.tree().roots] == ["ann", "(ben, 2)", "7", "Tenant"]
        assert [root.namespace for root in engine.tree(("ben", 2)).roots] == ["(ben, 2)"]
        assert len(engine.tree("nobody")) == 0
        assert engine.probe(PROMPT, namespace="ann").matched >= 16
        number = engine.client.inputs.namespaces.number(("ben", 2))
        assert namespace_label(number) == "(ben, 2)" and namespace_value(number) == ("ben", 2)


# ---- the table


def test_memory_is_bounded_and_cached_namespaces_stay() -> None:
    cached: set[Any] = set()
    table = NamespaceTable(lambda: cached, most=100)
    kept = {name: table.number(name) for name in ("a", "b")}
    cached.update(kept.values())
    seen = set(cached)
    for at in range(5000):
        number = table.number(at)
        assert number is not None and number not in seen  # never used again
        seen.add(number)
        assert len(table) <= 110
    assert {name: table.number(name) for name in kept} == kept
    assert table.number(4999) in seen and table.number(0) not in seen
    cached.clear()
    for at in range(200):
        table.number(("more", at))
    assert table.number("a") not in seen


def test_the_name_of_a_group_stays_as_long_as_a_member_is_cached() -> None:
    cached: set[Any] = set()
    table = NamespaceTable(lambda: cached, most=100)
    member = table.number(("ann", "mail"))
    cached.add(member)
    for at in range(1000):
        table.number(at)
    other, same = table.number(("ann", "news")), table.number(("ann", "mail"))
    assert other is not None and same is member is not None and other.turn is member.turn


def test_many_cached_namespaces_raise_the_bound() -> None:
    cached: set[Any] = set()
    table = NamespaceTable(lambda: cached, most=10)
    first = [table.number(at) for at in range(500) if not cached.add(table.number(at))]  # type: ignore[func-returns-value]
    assert [table.number(at) for at in range(500)] == first
    cached.clear()
    for at in range(2000):
        table.number(("new", at))
    assert len(table) <= 1001


def test_an_engine_with_many_tenants_keeps_few_names() -> None:
    engine, _ = make_engine(40, 4)
    with engine:
        table = engine.client.inputs.namespaces
        table._most = table._limit = 50
        for at in range(300):
            engine.generate([[1, 2, 3, 4, 5]], ONE, namespace=at)
            assert len(table) <= 100
        check(engine)
        assert engine.generate([[1, 2, 3, 4, 5]], ONE, namespace=299)[0].usage.cached_tokens == 4


def test_threads_with_equal_values_get_one_number() -> None:
    table = NamespaceTable(lambda: (), most=400)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found: list[list[Any]] = [[] for _ in range(4)]
        threads = [
            threading.Thread(
                target=lambda numbers=numbers: numbers.extend(table.number((at, "x")) for at in range(150))
            )
            for numbers in found
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert found[0] == found[1] == found[2] == found[3] and len(set(found[0])) == 150
