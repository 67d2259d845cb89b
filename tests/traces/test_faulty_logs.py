"""Lint finds each fault of made-up logs at its place and its cost, and nothing in logs without faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.prompt_breaks import RULES
from radixkv.serve.break_index import BreakIndex
from radixkv_traces import cli
from radixkv_traces.chats import ChatRequest
from radixkv_traces.lint import lint
from tests.traces.faulty_logs import CLEAN, FAULTS, LOGS, Oracle, prose

Write = Callable[[ChatRequest], dict[str, Any]]


def missed(requests: list[ChatRequest]) -> int:
    oracle = Oracle()
    return sum(map(oracle.add, requests))


def line(request: ChatRequest) -> dict[str, Any]:
    """Return a request as `serve --record-text` writes it."""
    fields = {"timestamp": request.timestamp, "session": request.session, "namespace": request.namespace}
    return {**fields, "messages": request.messages, "tools": request.tools, "output_length": request.output_length}


def batch(request: ChatRequest) -> dict[str, Any]:
    """Return a request as a line of OpenAI's Batch API, without times, sessions and namespaces."""
    body = {"model": "m", "messages": request.messages, "tools": request.tools}
    return {"custom_id": f"{request.session}-{request.turn}", "url": "/v1/chat/completions", "body": body}


def test_the_logs_are_the_promised_ones() -> None:
    assert (len(FAULTS), len(CLEAN)) == (20, 5)
    assert {fault.rule for fault in FAULTS.values()} == RULES.keys() - {"template-changed"}  # no file has tokens
    assert all(0 < fault.tokens <= missed(fault.requests) for fault in FAULTS.values())


@pytest.mark.parametrize("name", LOGS)
def test_lint_finds_the_fault_of_a_log_and_no_other(name: str) -> None:
    report = lint(LOGS[name].requests)
    assert [(each.rule, each.place, each.tokens, each.requests) for each in report.findings] == LOGS[name].findings()
    assert report.missed_tokens == missed(LOGS[name].requests)


@pytest.mark.parametrize("write", [line, batch])
@pytest.mark.parametrize("name", LOGS)
def test_the_command_finds_the_fault_in_a_file(name: str, write: Write, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(write(each)) + "\n" for each in LOGS[name].requests))
    assert cli.main(["lint", str(path), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(it["rule"], it["place"], it["tokens"], it["requests"]) for it in findings] == LOGS[name].findings()


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", LOGS)
def test_the_live_part_is_right_on_every_request(name: str, named: bool) -> None:
    """Clients may name their sessions or not."""
    index = BreakIndex(1 << 26)
    for at, it in enumerate(LOGS[name].requests):
        found = index.compared(it.namespace, it.messages, it.tools, it.session if named else None).found
        assert (found and (found.part, found.rule)) in LOGS[name].allowed(at), at


@settings(max_examples=20, deadline=None)
@given(names=st.lists(st.sampled_from([*LOGS]), min_size=1, max_size=3, unique=True), seed=st.integers(0, 99))
def test_all_findings_together_cost_at_most_the_tokens_that_missed(names: list[str], seed: int) -> None:
    """Logs are mixed, some requests are left out, and some have other texts."""
    rng = Random(seed)
    left, mixed = [[(name, each) for each in LOGS[name].requests] for name in names], list[ChatRequest]()
    while any(left):
        name, request = rng.choice([each for each in left if each]).pop(0)
        if rng.random() < 0.1:
            said = [*request.messages]
            said[rng.randrange(len(said))] = {"role": "user", "content": prose(rng, 40)}
            request = replace(request, messages=tuple(said))
        if rng.random() < 0.9:
            mixed.append(replace(request, session=f"{name} {request.session}"))
    report = lint(mixed)
    assert 0 <= report.cost <= report.missed_tokens == missed(mixed)
