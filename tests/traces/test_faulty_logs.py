"""Lint finds each fault of made-up logs at its place and its cost, and nothing in logs without faults."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.prompt_breaks import RULES
from radixkv.serve.break_index import BreakIndex
from radixkv_traces.chats import ChatRequest
from radixkv_traces.lint import lint
from tests.traces.faulty_logs import CLEAN, NAMES, Oracle, faults, interleaved, log_of, prose, tokens


def missed(requests: list[ChatRequest]) -> int:
    oracle = Oracle()
    return sum(map(oracle.add, requests))


def requests_of(name: str, named: bool) -> list[ChatRequest]:
    """Return a log, whose clients name their sessions or not."""
    return [each if named else replace(each, session=str(at)) for at, each in enumerate(log_of(name).requests)]


def test_the_logs_are_the_promised_ones() -> None:
    assert (len(faults()), len(CLEAN)) == (20, 5)
    assert {fault.rule for fault in faults().values()} == RULES.keys() - {"template-changed"}  # no file has tokens
    assert all(0 < fault.tokens <= missed(fault.requests) for fault in faults().values())


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_lint_finds_the_fault_of_a_log_and_no_other(name: str, named: bool) -> None:
    report = lint(log := requests_of(name, named))
    assert [(each.rule, each.place, each.tokens, each.requests) for each in report.findings] == log_of(name).findings()
    assert report.missed_tokens == missed(log)
    assert all(each.tokens_a_day == each.tokens * 86_400 / report.seconds for each in report.findings)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_live_part_is_right_on_every_request(name: str, named: bool) -> None:
    index = BreakIndex(1 << 26)
    for at, it in enumerate(requests_of(name, named)):
        found = index.compared(it.namespace, it.messages, it.tools, it.session if named else None).found
        assert (found and (found.part, found.rule)) in log_of(name).allowed(at), at


@settings(max_examples=20, deadline=None)
@given(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True), seed=st.integers(0, 99))
def test_all_findings_together_cost_at_most_the_tokens_that_missed(names: list[str], seed: int) -> None:
    """Logs are mixed, some requests are left out, and some have other texts."""
    rng, mixed = Random(seed), list[ChatRequest]()
    logs = [[replace(each, session=f"{name} {each.session}") for each in log_of(name).requests] for name in names]
    for request in interleaved(rng, logs):
        said = [*request.messages]
        if rng.random() < 0.1:
            said[rng.randrange(len(said))] = {"role": "user", "content": prose(rng, 40)}
        if rng.random() < 0.9:
            mixed.append(replace(request, messages=tuple(said), namespace=rng.choice("nnnnm")))
    report = lint(mixed)
    assert 0 <= report.cost <= report.missed_tokens == missed(mixed)
    assert report.prompt_tokens == sum(len(tokens(each)) for each in mixed)
