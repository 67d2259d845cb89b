"""The rules of breaks, each on its own example, and the prompts that break none."""

from __future__ import annotations

import pytest

from radixkv.prompt_breaks import RULES, break_between, parts_of


@pytest.mark.parametrize("name", RULES)
def test_an_example_breaks_its_rule_and_no_other(name: str) -> None:
    before, now = (parts_of(*prompt) for prompt in RULES[name].example)
    found = break_between(before, now)
    assert found is not None
    assert found.rule == name
