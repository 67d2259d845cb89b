"""The engine on a fake model whose answers depend on every token that the pool holds for a request."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest

from radixkv import SamplingParams
from radixkv.errors import InvalidInput, InvalidTokens, PinBudgetExceeded, PromptTooLong
from tests.engine.fakes import STOP, FakeModel, check, greedy_reply, make_engine

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(STOP), k=length)


def test_each_prompt_of_a_batch_gets_the_reply_of_its_own_history():
    engine, _ = make_engine()
    prompts = [prompt_of(length, length) for length in (1, 3, 4, 5, 17)]
    with engine:
        done = engine.generate(prompts, GREEDY)
        assert [list(each.token_ids) for each in done] == [greedy_reply(prompt, 6) for prompt in prompts]
        assert all(each.finish_reason == "length" for each in done)
        check(engine)


def test_chunks_of_forked_streams_add_up():
    engine, _ = make_engine()
    with engine:
        handle = engine.submit(prompt_of(9), SamplingParams(max_tokens=5, n=3, seed=1))
        collected: dict[int, list[int]] = {0: [], 1: [], 2: []}
        ends = []
        for chunk in handle:
            collected[chunk.index] += chunk.token_ids
            ends += [chunk.index] if chunk.finish_reason else []
        done = handle.result()
        assert sorted(ends) == [0, 1, 2]
        assert [tuple(collected[i]) for i in range(3)] == [each.token_ids for each in (done, *done.alternatives)]


def test_stop_ids_end_a_reply_and_ignore_eos_does_not():
    prompt = prompt_of(8)
    reply = greedy_reply(prompt, 6)
    engine, _ = make_engine(model=FakeModel(stop_token_ids=frozenset({reply[2]})))
    with engine:
        params = SamplingParams(max_tokens=6, temperature=0)
        stopped = engine.generate([prompt], params)[0]
        first = reply.index(reply[2])
        assert (list(stopped.token_ids), stopped.finish_reason) == (reply[: first + 1], "stop")
        assert list(engine.generate([prompt], params.but(ignore_eos=True))[0].token_ids) == reply
        own = engine.generate([prompt], params.but(ignore_eos=True, stop_token_ids=[reply[0]]))[0]
        assert (list(own.token_ids), own.finish_reason) == (reply[:1], "stop")


def test_no_stop_before_min_tokens():
    prompt = prompt_of(8)
    first = greedy_reply(prompt, 1)[0]
    engine, _ = make_engine(model=FakeModel(stop_token_ids=frozenset({first})))
    with engine:
        done = engine.generate([prompt], SamplingParams(max_tokens=4, min_tokens=3, temperature=0))[0]
        assert len(done.token_ids) >= 3
        assert first not in done.token_ids[:3]


def test_seeds_repeat_and_come_from_the_engine_if_none_is_given():
    prompt, params = prompt_of(6), SamplingParams(max_tokens=12)

    def replies(seed: int) -> list[tuple[int, ...]]:
        engine, _ = make_engine(seed=seed)
        with engine:
            return [each.token_ids for each in engine.generate([prompt] * 3, params)]

    assert replies(1) == replies(1)
    assert replies(1) != replies(2)
    assert len(set(replies(1))) == 3


def test_every_token_has_logprobs():
    engine, _ = make_engine()
    with engine:
        done = engine.generate([prompt_of(5), prompt_of(6)], [GREEDY.but(logprobs=2), GREEDY])
        assert done[1].logprobs is None
        assert done[0].logprobs is not None
        assert [entry.top[0][0] for entry in done[0].logprobs] == list(done[0].token_ids)
        assert all(entry.chosen == entry.top[0][1] < 0 for entry in done[0].logprobs)


def test_a_reply_ends_where_the_context_does():
    engine, _ = make_engine(model=FakeModel(max_length=20))
    with engine:
        done = engine.generate([prompt_of(15)], GREEDY.but(max_tokens=100))[0]
        assert (len(done.token_ids), done.finish_reason) == (5, "length")
        with pytest.raises(PromptTooLong, match="20 tokens"):
            engine.submit(prompt_of(20))


def test_a_forgotten_engine_ends_its_thread():
    engine, _ = make_engine()
    engine.generate([[1, 2]], GREEDY)
    thread, gone = engine.client.thread._thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_warm_computes_and_pins():
    engine, _ = make_engine(num_blocks=16)
    with engine:
        prompt = prompt_of(20)
        with engine.warm(prompt, pin=True) as warmed:
            assert (warmed.usage.computed_tokens, warmed.usage.output_tokens, warmed.pinned_tokens) == (20, 0, 20)
            assert engine.stats().cache.pinned_blocks == 5
            engine.generate([prompt_of(30, seed) for seed in range(5)], GREEDY)  # to evict other prefixes
            assert engine.probe(prompt).matched == 20
            assert engine.warm(prompt).usage.computed_tokens == 1
            with pytest.raises(PinBudgetExceeded):
                engine.warm(prompt_of(30, 9), pin=True)
        assert engine.stats().cache.pinned_blocks == 0
        with pytest.raises(InvalidInput, match="pin=True"):
            engine.warm(prompt, ttl=3.0)
        check(engine)


def test_a_prompt_that_fills_the_pool_can_be_warmed_and_not_answered():
    engine, _ = make_engine(num_blocks=8)
    with engine:
        assert engine.warm(prompt_of(32)).usage.prompt_tokens == 32 == engine.context_limit
        with pytest.raises(PromptTooLong, match="leaves no room for a reply"):
            engine.generate([prompt_of(32)], GREEDY)
        check(engine)


def test_probe_changes_nothing_and_gives_the_reason():
    engine, _ = make_engine()
    with engine:
        prompt = prompt_of(10)
        assert engine.probe(prompt).reason == "never_seen"
        engine.warm(prompt)
        before = engine.stats().cache
        found = engine.probe([*prompt[:7], 48, 48])
        assert (found.matched, found.reason, found.diverged_at) == (7, "diverged", 7)
        assert engine.stats().cache == before


def test_demoted_prompts_are_evicted_first():
    engine, _ = make_engine(num_blocks=20)
    with engine:
        old, new = prompt_of(30, 1), prompt_of(30, 2)
        for prompt in (old, new):
            engine.warm(prompt)
        engine.demote(new, keep=10)
        engine.warm(prompt_of(30, 3))
        assert engine.probe(old).matched == 30
        assert 10 <= engine.probe(new).matched < 30
        check(engine)


def test_clear_cache_drops_everything():
    engine, _ = make_engine()
    with engine:
        engine.warm(prompt_of(30))
        engine.clear_cache()
        stats = engine.stats()
        assert stats.cache.free_blocks == stats.cache.num_blocks
        assert engine.probe(prompt_of(30)).matched == 0


def test_stats_add_up():
    engine, runner = make_engine()
    with engine:
        prompts = [prompt_of(20)[:n] for n in (5, 12, 20, 20)]
        done = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
        stats = engine.stats()
        assert stats.finished == stats.requests == 4
        assert stats.steps == len(runner.steps)
        assert stats.prompt_tokens == sum(each.usage.prompt_tokens for each in done) == 57
        assert stats.cached_tokens == sum(each.usage.cached_tokens for each in done) == stats.cache.hit_tokens
        assert stats.computed_tokens == sum(each.usage.computed_tokens for each in done)
        assert stats.output_tokens == 24
        assert stats.hit_rate == stats.cache.hit_rate == stats.cached_tokens / 57
        assert all(0 < each.usage.ttft_s <= each.usage.total_s for each in done)


def test_bad_prompts_have_named_errors():
    engine, _ = make_engine()
    with engine:
        for prompt in ([], np.empty(0, np.int32)):
            with pytest.raises(InvalidTokens, match="empty"):
                engine.submit(prompt)
        with pytest.raises(InvalidTokens, match=r"token 50 at position 1 .* 0\.\.49"):
            engine.submit([1, 50])
        with pytest.raises(InvalidTokens, match="token -1 at position 0"):
            engine.submit([-1])
        for prompt in ([1.5], [[1], [2]], [[1], [2, 3]], [True], [None], np.ones((2, 2), int)):
            with pytest.raises(InvalidTokens):
                engine.submit(prompt)
        with pytest.raises(InvalidInput, match="no tokenizer"):
            engine.submit("hello")
        with pytest.raises(InvalidInput, match="need a tokenizer"):
            engine.submit([1, 2], SamplingParams(stop="x"))
        with pytest.raises(InvalidInput, match=r"engine.generate\(\[ids\]\)"):
            engine.generate([1, 2, 3])
        for params in (GREEDY.but(logit_bias={50: 1.0}), GREEDY.but(stop_token_ids=[7, 99])):
            with pytest.raises(InvalidInput, match=r"vocabulary is 0\.\.49"):
                engine.submit([1], params)
        with pytest.raises(InvalidInput, match="max_sequences"):
            engine.submit([1], GREEDY.but(n=65))
        assert engine.generate([]) == []
        assert engine.stats().requests == 0


def test_bad_limits_are_refused():
    for limits in ({"max_sequences": 0}, {"prefill_chunk": 0}, {"max_sequences": 10, "max_batch_tokens": 9}):
        with pytest.raises(InvalidInput, match="at least"):
            make_engine(**limits)


def test_attention_is_named_and_an_unknown_one_is_refused():
    from radixkv import Engine

    with pytest.raises(InvalidInput, match="attention='quick'"):
        Engine.load("tiny", attention="quick")
    engine, _ = make_engine()
    with engine:
        assert engine.stats().attention == "torch"
