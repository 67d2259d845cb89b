"""Groups of namespaces: what names them, and how many of them are kept. Simulated lives check the turns themselves."""

from __future__ import annotations

import pytest

from radixkv import turns
from radixkv.cache.quotas import NamespaceLimits
from radixkv.engine.namespaces import NamespaceTable
from radixkv.turns import Turns


def test_idle_groups_are_forgotten_and_active_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_KEPT", 16)
    groups = Turns()
    active = groups.enter("active")
    active.requests, active.tokens = 1, 500
    for number in range(100_000):
        group = groups.enter(number, waiting=[active])
        assert group.count == 500, "it begins where the waiting group is"
        group.tokens, group.ran_until = 600, number
    assert len(groups.groups) <= 20 and groups.groups["active"] is active
    active.requests = 0
    assert groups.enter("later").count == 600, "it begins where the last group was"


def test_the_namespaces_of_a_tenant_are_one_group() -> None:
    table = NamespaceTable(lambda: (), limits=NamespaceLimits({("ann", "mail"): 0.5, ("ben",): 0.25}))
    numbers = [table.number(each) for each in (("ann", 1), ("ann", 2), ("ann", "mail", 1), ("ben", 1), "ben")]
    names = [number and (number.turn or number).value for number in numbers]
    assert names == [("ann",), ("ann",), ("ann", "mail"), ("ben",), "ben"]


def test_the_number_of_a_group_is_kept_as_long_as_its_members() -> None:
    table = NamespaceTable(lambda: (), most=8)
    first = table.number(("ann", 0))
    for number in range(1000):
        member = table.number(("ann", number % 2))
        table.number(f"stranger {number}")
        assert first is not None and member is not None and member.turn is first.turn
    assert len(table) <= 9
