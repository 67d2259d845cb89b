"""Made-up workloads: the same bytes from the same seed, blocks shared where texts agree, the stated distributions."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import InvalidInput
from radixkv_traces import generate as module
from radixkv_traces.formats import TraceRequest
from radixkv_traces.generate import AGENT_CONTEXT, KINDS, Call, Draw, Segment, Session, Shared, generate
from radixkv_traces.mooncake import to_line


def made(kind: str, sessions: int = 12, seed: int = 7, **options: Any) -> list[TraceRequest]:
    return list(generate(KINDS[kind], sessions, seed, **options))


def by_session(requests: list[TraceRequest]) -> dict[str | None, list[TraceRequest]]:
    found: dict[str | None, list[TraceRequest]] = defaultdict(list)
    for each in requests:
        found[each.session].append(each)
    return found


def test_the_bytes_are_the_same_on_every_machine_and_in_every_version() -> None:
    """A change here changes the output of published commands: add a line to the changelog."""
    text = "\n".join(to_line(each) for kind in KINDS for each in made(kind, 3))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "c92cf8f3c6313408"


SEGMENTS = st.lists(st.builds(Segment, st.sampled_from("abc"), st.integers(1, 7)), min_size=1, max_size=4)


@given(st.lists(SEGMENTS, min_size=1, max_size=6), st.integers(1, 5))
@settings(deadline=None)
def test_blocks_are_equal_exactly_where_all_text_before_them_is(prompts: list[list[Segment]], size: int) -> None:
    def session(draw: Draw, number: int, shared: Shared) -> Iterator[Call]:
        for prompt in prompts:
            yield Call(0.0, tuple(prompt), 1)

    texts = [[(each.name, at) for each in prompt for at in range(each.tokens)] for prompt in prompts]
    chains = [each.blocks for each in generate(session, 1, 0, block_tokens=size)]
    for a, mine in zip(texts, chains, strict=True):
        for b, theirs in zip(texts, chains, strict=True):
            for end, (x, y) in enumerate(zip(mine, theirs, strict=False), 1):
                assert (x == y) == (a[: end * size] == b[: end * size])


def test_agents_stop_for_tools_repeat_calls_and_summarise(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = made("agent", 25)
    assert {each.stop for each in requests} == {"tool_use", "end_turn"}
    pairs = [(a, b) for mine in by_session(requests).values() for a, b in pairwise(mine)]
    assert sum(a.blocks == b.blocks for a, b in pairs) / len(pairs) == pytest.approx(0.05, abs=0.02)
    assert max(each.input_length for each in requests) <= AGENT_CONTEXT
    monkeypatch.setattr(module, "AGENT_CONTEXT", 40_000)
    short = made("agent", 25)
    assert max(each.input_length for each in short) <= 40_000
    assert any(b.input_length < a.input_length for mine in by_session(short).values() for a, b in pairwise(mine))


@pytest.mark.parametrize("wrong", [{"sessions": 0}, {"block_tokens": 0}, {"rate": 0.0}, {"rate": float("nan")}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    session: Session = KINDS["chat"]
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        generate(session, **{"sessions": 1, "seed": 0, **wrong})
