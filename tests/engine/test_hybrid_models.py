"""Engines of small random hybrid models: hits, forks, preemptions and failures leave the answers as they are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from radixkv import SamplingParams
from radixkv.chat import Engine
from radixkv.errors import InvalidInput, RequestFailed
from tests.engine.fakes import check
from tests.models.recurrent.hybrids import hybrid
from tests.selection import mostly_long, sampled

KINDS = mostly_long(
    sampled(["qwen3_5", "lfm2", "granitemoehybrid", "falcon_h1"], "qwen3_5", "lfm2", "falcon_h1"), "lfm2"
)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def load(kind: str, **settings: Any) -> Engine:
    options = {"num_blocks": 60, "block_size": 4, "max_sequences": 4, "prefill_chunk": 32, "monitor": False}
    return Engine.load(hybrid(kind), **{**options, **settings})


def prompts(count: int = 8) -> list[list[int]]:
    """Prompts that share beginnings of many lengths."""
    rng = random.Random(1)
    stem = rng.choices(range(5, 60), k=70)
    return [stem[: rng.randrange(20, 70)] + rng.choices(range(5, 60), k=rng.randrange(1, 30)) for _ in range(count)]


def answers(engine: Engine, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    done = [engine.submit(prompt, params).result() for prompt in prompts()]
    return [each.token_ids for one in done for each in (one, *one.alternatives)]


@pytest.mark.parametrize("kind", KINDS)
def test_hits_leave_the_answers_as_they_are(kind: str) -> None:
    with load(kind, prefix_cache=False) as engine:
        expected = answers(engine)
        assert engine.stats().cache.state_slots_used == 0
    with load(kind) as engine:
        assert answers(engine) == expected == answers(engine)
        assert engine.stats().cached_tokens > 400
        check(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_run_together_and_are_preempted_answer_as_alone(kind: str) -> None:
    params = GREEDY.but(n=2, temperature=1, seed=3)
    with load(kind, prefix_cache=False) as engine:
        expected = answers(engine, params)
    with load(kind, num_blocks=45, max_sequences=6) as engine:
        handles = [engine.submit(prompt, params) for prompt in prompts()]
        done = [handle.result() for handle in handles]
        assert [each.token_ids for one in done for each in (one, *one.alternatives)] == expected
        check(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deterministic_engine_repeats_the_bits_of_a_miss(kind: str) -> None:
    params = GREEDY.but(logprobs=3)

    def logprobs(engine: Engine) -> list[Any]:
        return [engine.submit(prompt, params).result().logprobs for prompt in prompts(4)]

    with load(kind, deterministic=True, prefix_cache=False) as engine:
        expected = logprobs(engine)
    with load(kind, deterministic=True) as engine:
        assert logprobs(engine) == expected == logprobs(engine)
        assert engine.stats().cached_tokens > 0


def test_a_failed_step_ends_no_request_that_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with load("qwen3_5") as engine:
        expected = [engine.submit(prompt, GREEDY).result().token_ids for prompt in prompts(4)]
    with load("qwen3_5") as engine:
        run, steps = engine.core.runner.run, []

        def failing(chunks: Any, copies: Any) -> Any:
            steps.append(len(chunks))
            logits = run(chunks, copies)
            if len(steps) in (3, 9):
                raise MemoryError("no memory for this step")
            return logits

        monkeypatch.setattr(engine.core.runner, "run", failing)
        handles = [engine.submit(prompt, GREEDY) for prompt in prompts(4)]
        assert [handle.result().token_ids for handle in handles] == expected
        assert engine.stats().preemptions >= 2
        monkeypatch.setattr(engine.core.runner, "run", lambda chunks, copies: np.zeros(0).item())
        with pytest.raises(RequestFailed):
            engine.submit([5, 6, 7], GREEDY).result()
        check(engine)


def test_an_audit_is_refused_with_the_reason() -> None:
    with load("lfm2") as engine, pytest.raises(InvalidInput, match="recurrent state"):
        engine.audit()
