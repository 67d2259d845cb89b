"""Groups of namespaces: what names them, and how many of them are kept. Simulated lives check the turns themselves."""

from __future__ import annotations

import pytest

from radixkv import turns
from radixkv.engine.namespaces import NamespaceTable
from radixkv.turns import Turns


def test_idle_groups_are_forgotten_and_active_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_KEPT", 16)
    groups = Turns(4)
    active = groups.enter("active", waiting=[])
    active.tokens = 500
    for number in range(10_000):
        group = groups.enter(number, waiting=[active])
        assert group.tokens == 500, "it begins where the waiting group is"
        group.tokens = 600
        groups.last = group
        groups.leave(group)
    assert len(groups) <= 16 and not groups.several and groups.enter("active", waiting=[active]) is active
    groups.leave(active)
    groups.leave(active)
    assert groups.enter("later", waiting=[]).tokens == 600, "it begins where the last group was"


def test_the_namespaces_of_a_tenant_are_one_group() -> None:
    table = NamespaceTable(lambda: ())
    numbers = [table.number(each) for each in (("ann", 1), ("ann", "mail", 1), ("ann",), ("ben", 1), "ben")]
    names = [number and (number.turn or number).value for number in numbers]
    assert names == [("ann",), ("ann",), ("ann",), ("ben",), "ben"]


def test_the_number_of_a_group_is_kept_as_long_as_its_members() -> None:
    table = NamespaceTable(lambda: (), most=8)
    first = table.number(("ann", 0))
    for number in range(1000):
        member = table.number(("ann", number % 2))
        table.number(f"stranger {number}")
        assert first is not None and member is not None and member.turn is first.turn
    assert len(table) <= 9
