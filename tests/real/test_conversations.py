"""Forty interleaved conversations in a small pool: every reply is the model's own, and equals the uncached one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv import Engine
from tests.real.conftest import Figure
from tests.real.conversations import CONVERSATIONS, STORIES, Answer, play
from tests.real.reference import Reference

Answers = dict[tuple[str, int], Answer]
POOL = 80  # blocks of 16 tokens; the longest conversation needs 40, and the stories alone would fill 140


@pytest.fixture(scope="module")
def crowded(model_file: Path, model_code: str) -> Iterator[Engine]:
    """An engine whose pool holds the running conversations only in part."""
    settings = {"num_blocks": POOL, "prefill_chunk": 128, "dtype": "float32", "monitor": False}
    with Engine.load(str(model_file), model_code=model_code, **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(crowded: Engine) -> Answers:
    return play(crowded)


def test_greedy_replies_match_transformers(answers: Answers, reference: Reference, figure: Figure) -> None:
    greedy = [(each.prompt, each.reply) for each in answers.values() if each.params.greedy]
    compared = reference.compare(greedy)
    figure(str(compared))
    assert len({name for name, _ in answers}) == CONVERSATIONS + len(STORIES)
    assert compared.tokens > 2500
    assert not compared.mismatches
    assert len(compared.near_ties) <= compared.tokens // 1000


def test_requests_were_preempted_and_prefixes_evicted(crowded: Engine, answers: Answers, figure: Figure) -> None:
    stats = crowded.stats()
    cache = stats.cache
    figure(
        f"{len(answers)} replies in {POOL} blocks: hit rate {stats.hit_rate:.1%}, {stats.preemptions} preemptions, "
        f"{cache.evicted_blocks} blocks evicted, {stats.recomputed_tokens} tokens recomputed"
    )
    assert stats.preemptions == sum(each.usage.preemptions for each in answers.values()) >= 3
    assert cache.evicted_blocks > 5 * POOL
    assert cache.regret_tokens > 0  # prompts came back for evicted tokens
    assert stats.hit_rate > 0.3


def test_the_cache_is_sound_afterwards(crowded: Engine, answers: Answers, figure: Figure) -> None:
    crowded.client.thread.ask(crowded.core.cache.check)
    stats = crowded.stats()
    assert (stats.running, stats.waiting, stats.cache.held_blocks) == (0, 0, 0)
    report = crowded.audit(2 * POOL)
    figure(f"{report.blocks} blocks of the small pool audited, {report.differ} differ")
    assert report.blocks >= 2 * POOL
    assert report.differ == 0


def test_replies_without_a_cache_are_the_same(model_file: Path, answers: Answers, figure: Figure) -> None:
    """All of them: greedy, sampled with a seed, after forks, edits, rewinds and preemptions."""
    with Engine.load(str(model_file), num_blocks=800, dtype="float32", monitor=False, prefix_cache=False) as engine:
        uncached = play(engine)
        stats = engine.stats()
    assert stats.cached_tokens == stats.preemptions == 0
    assert uncached.keys() == answers.keys()
    for key, each in uncached.items():
        assert (each.params, each.prompt) == (answers[key].params, answers[key].prompt), key
        assert each.reply == answers[key].reply, key
    sampled = [each for each in answers.values() if not each.params.greedy]
    tokens = sum(len(each.reply) for each in answers.values())
    assert len(sampled) > 20
    figure(f"{len(answers)} replies, {tokens:,} tokens, {len(sampled)} replies sampled: equal without the cache")
