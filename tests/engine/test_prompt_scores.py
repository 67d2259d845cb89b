"""Kept scores of prompts: a naive model of the store, and requests that take scores in place of computing them."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixkv import Engine, SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.audit import drop_wrong
from radixkv.engine.reuse_policy import reuse_policy
from radixkv.engine.scores import NO_SCORES, KeptScores, PromptScores
from radixkv.errors import RequestFailed, WeightsChanged
from radixkv.sampling.row_scores import RowScores
from tests.engine.fakes import make_engine
from tests.engine.test_scoring import (
    GREEDY,
    KINDS,
    PROMPT,
    ask,
    assert_score,
    assert_scored,
    check_scores,
    score,
    world_of,
)
from tests.selection import mostly_long

LONG = random.Random(8).choices(range(49), k=200)


def all_rows(first: int, rows: int) -> int:
    """Share all rows, as a policy does whose hits end anywhere."""
    return rows


def scored(tokens: Sequence[int], top: int, rows: int | None = None) -> PromptScores:
    """Return a prompt with scores that follow from the tokens: of all positions, or of the first `rows`."""
    scores = PromptScores(np.array(tokens, np.int32), 1, top, most_rows=1)
    scores.put(scores_of(tokens, top, len(tokens) - 1 if rows is None else rows))
    return scores


def scores_of(tokens: Sequence[int], top: int, rows: int) -> RowScores:
    """Return numbers that identify the tokens up to each position."""
    chosen = np.array([hash(tuple(tokens[: end + 1])) % 1000 for end in range(1, rows + 1)], np.float32)
    ids = chosen.astype(np.int32)[:, None] + np.arange(top, dtype=np.int32)
    return RowScores(chosen, chosen.astype(np.int32), ids, ids.astype(np.float32))


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix, token by token."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def found_rows(store: KeptScores, tokens: Sequence[int], top: int, namespace: Hashable) -> int:
    """Return the number of scores that the store has for a prompt, which must be those of its tokens."""
    found = store.find(PromptScores(np.array(tokens, np.int32), 1, top, most_rows=1), namespace)
    if found is None:
        return 0
    expected = scores_of(tokens, found.ids.shape[1], len(found.chosen))
    for mine, own in zip(vars(found).values(), vars(expected).values(), strict=True):
        np.testing.assert_array_equal(mine, own)
    return len(found.chosen)


@pytest.mark.parametrize("most_bytes", [300, 1000, 100_000])
@pytest.mark.parametrize("seed", mostly_long(range(4), 0, 1))
def test_the_store_finds_the_longest_common_prefix(seed: int, most_bytes: int) -> None:
    rng, store = random.Random(seed), KeptScores(all_rows, most_bytes)
    kept: list[tuple[Hashable, int, list[int]]] = []  # everything, as if the memory had no bound
    for _ in range(200):
        tokens = [rng.choice([0, 1, 255, 256, 70_000]) for _ in range(rng.randint(2, 7))]
        top, namespace = rng.choice([0, 1, 3]), rng.choice([None, "ann"])
        if rng.random() < 0.6:
            rows = rng.randint(1, len(tokens) - 1)
            store.keep(scored(tokens, top, rows), namespace)
            kept.append((namespace, top, tokens[: rows + 1]))
            assert found_rows(store, tokens, top, namespace) >= rows, "the newest is never dropped"
        else:
            rows = found_rows(store, tokens, top, namespace)
            usable = [held for space, most, held in kept if space == namespace and most >= top]
            naive = max((common(held, tokens) for held in usable), default=1)
            assert rows <= max(naive - 1, 0)
            assert rows == max(naive - 1, 0) or most_bytes < 100_000
        store.check()
        if rng.random() < 0.01:
            store.clear()
            kept.clear()
            store.check()


def test_the_least_recently_used_prompt_is_dropped_first() -> None:
    size = scored([1, 2, 3], 0).nbytes
    store = KeptScores(all_rows, 3 * size)
    for first in (1, 2, 3):
        store.keep(scored([first, 2, 3], 0), None)
    assert found_rows(store, [1, 2], 0, None) == 1
    store.keep(scored([2, 2, 3], 0, 1), None)  # the beginning of a kept prompt counts as its use
    store.keep(scored([4, 2, 3], 0), None)
    assert [found_rows(store, [first, 2, 3], 0, None) for first in (1, 2, 3, 4)] == [2, 2, 0, 2]
    store.keep(scored([4, 2, 3, *range(200)], 0, 199), None)
    assert len(store) == 3, "a prompt that exceeds the bound alone is not kept"
    assert found_rows(store, [4, 2, 3], 0, None) == 2, "and its beginning stays"
    store.check()


# ---- requests


def test_score_takes_the_scores_of_a_prompt_and_gives_none() -> None:
    engine, _ = make_engine()
    with engine:
        assert_score(engine.score(PROMPT[:20], [PROMPT[20:]])[0], PROMPT[:20], PROMPT[20:])
        assert engine.generate([PROMPT], GREEDY.but(prompt_logprobs=0))[0].usage.cached_tokens == 0
        # `score` asks for one alternative, to say whether each token is the most likely one.
        assert engine.score(PROMPT[:20], [PROMPT[20:]])[0].usage.cached_tokens == 19
        engine.generate([PROMPT], GREEDY.but(prompt_logprobs=1))
        again = engine.score(PROMPT[:20], [PROMPT[20:]])[0]
        assert_score(again, PROMPT[:20], PROMPT[20:])
        assert again.usage.cached_tokens == 28
        assert engine.stats().reused_scores == 9


@pytest.mark.parametrize("drop", ["clear_cache", "prefix_cache"])
def test_scores_are_not_kept_longer_than_the_cache(drop: str) -> None:
    engine, _ = make_engine(prefix_cache=drop != "prefix_cache")
    with engine:
        for _ in range(2):
            assert_scored(engine.generate([PROMPT], GREEDY.but(prompt_logprobs=1))[0], PROMPT, 1)
            engine.clear_cache()
        assert engine.stats().scored_tokens == 2 * 29 and not engine.stats().reused_scores


CONFIG = EngineConfig(max_sequences=4, max_batch_tokens=40, prefill_chunk=16)
SCORED = GREEDY.but(prompt_logprobs=1)


def test_new_weights_drop_the_scores_that_waiting_requests_took() -> None:
    world = world_of("plain", 20, CONFIG)
    ask(world, PROMPT, SCORED)
    world.finish()
    running = ask(world, LONG[:45], GREEDY)
    world.step()
    waiting = ask(world, PROMPT, SCORED)
    world.step()
    assert waiting.scores.missing == 30 and not waiting.streams
    world.core.forget(WeightsChanged("new weights"))
    world.requests.remove(running)
    assert waiting.scores.missing == 1
    world.finish()
    check_scores(world)
    assert world.core.counters.scored_tokens == 2 * 29


def test_wrong_kv_drops_all_scores_and_fails_requests_with_scores_of_it() -> None:
    world = world_of("plain", 100, CONFIG)
    tokens = np.array(PROMPT, np.int32)
    ask(world, PROMPT, SCORED)
    begun, other = ask(world, PROMPT, GREEDY.but(prompt_logprobs=2)), ask(world, PROMPT[1:], SCORED)
    world.step()
    world.core.scheduler.preempt(begun)  # it holds no blocks now, but its scores are those of the wrong KV
    assert 1 < begun.scores.missing < 30
    drop_wrong(world.core, tokens, None, 5)
    with pytest.raises(RequestFailed, match="is wrong"):
        begun.channel.wait(0)
    world.requests = [other]
    world.finish()
    scores = world.core.counters.scored_tokens
    ask(world, PROMPT, SCORED)
    world.finish()
    check_scores(world)
    assert world.core.counters.scored_tokens == scores + 29


def test_requests_wait_for_the_scores_that_a_leader_will_keep_and_no_others() -> None:
    prompt = np.array(PROMPT, np.int32)
    cache, exact = PrefixCache(20, 4), replace(CONFIG, deterministic=True)
    plain, aligned = reuse_policy(cache, CONFIG).kept_scores, reuse_policy(cache, exact).kept_scores
    dependent = reuse_policy(cache, exact, row_dependent=True).kept_scores
    all_scores, more, tail = (PromptScores(prompt, first, top, most_rows=9) for first, top in [(1, 1), (1, 2), (20, 2)])
    assert plain.reach(all_scores, more, 25) == 24, "the row of the last common token scores another token"
    assert plain.reach(all_scores, NO_SCORES, 25) == plain.reach(more, all_scores, 25) == 0
    assert plain.reach(all_scores, tail, 25) == 0, "the leader keeps no scores"
    assert plain.reach(tail, all_scores, 25) == plain.reach(tail, NO_SCORES, 25) == 19
    assert plain.reach(tail, more, 10) == 10
    assert aligned.reach(all_scores, more, 25) == 16
    assert aligned.reach(PromptScores(prompt, 5, 1, most_rows=9), more, 25) == 4, "the rows of its first chunk differ"
    assert dependent.reach(all_scores, more, 25) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", mostly_long(range(2), 0))
def test_scores_are_right_whatever_is_kept(seed: int, kind: str) -> None:
    rng = random.Random(f"{seed}/{kind}")
    world = world_of(kind, 60, CONFIG)
    stems = [rng.choices(range(49), k=40) for _ in range(2)]
    for _ in range(40):
        prompt = [*rng.choice(stems)[: rng.randint(1, 40)], *rng.choices(range(2), k=rng.randint(0, 3))]
        if rng.random() < 0.2:
            score(world, prompt, rng.choices(range(49), k=2))
        else:
            ask(world, prompt, GREEDY.but(prompt_logprobs=rng.choice([0, 1, 4]), max_tokens=rng.randint(1, 4)))
        for _ in range(rng.choice([0, 1, 4])):
            world.step()
        if rng.random() < 0.1:
            world.core.finish_step()
            if world.core.scheduler.running:
                world.core.scheduler.preempt(world.core.scheduler.running[-1])
        if rng.random() < 0.05:
            world.core.clear_cache()
    world.finish()
    check_scores(world)
    assert (world.core.counters.reused_scores > 0) == (kind != "no reuse")


@pytest.mark.long
def test_deterministic_engines_repeat_every_bit_of_a_score() -> None:
    load: dict[str, Any] = {"dtype": "float32", "num_blocks": 400, "block_size": 16, "monitor": False}
    load |= {"deterministic": True, "prefill_chunk": 16, "max_sequences": 4}
    prompts = [LONG[:40], LONG[:48], [*LONG[:33], 7, 7, *LONG[40:60]], LONG[:16], LONG[:17], LONG[:40]]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    with Engine.load("tiny", prefix_cache=False, **load) as engine:
        cold = [(engine.generate([each], params)[0], engine.score(each, [[1, 2], [3]])) for each in prompts]
    with Engine.load("tiny", **load) as engine:
        warm = [(engine.generate([each], params)[0], engine.score(each, [[1, 2], [3]])) for each in prompts]
        assert engine.stats().reused_scores > 60
    for (done, scores), (again, same) in zip(cold, warm, strict=True):
        assert again.prompt_logprobs == done.prompt_logprobs
        assert again.token_ids == done.token_ids
        assert [each.token_logprobs for each in same] == [each.token_logprobs for each in scores]
