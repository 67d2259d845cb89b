"""The engine on a fake model whose answers depend on every token that the pool holds for a request."""

from __future__ import annotations

import gc
import random
import threading
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


def test_a_full_repeat_recomputes_one_token():
    engine, _ = make_engine()
    with engine:
        prompt = prompt_of(23)
        first, again = engine.generate([prompt], GREEDY)[0], engine.generate([prompt], GREEDY)[0]
        assert (first.usage.cached_tokens, first.usage.computed_tokens) == (0, 23 + 5)
        assert (again.usage.cached_tokens, again.usage.computed_tokens) == (22, 1 + 5)
        assert again.token_ids == first.token_ids


def test_decoded_tokens_are_published_except_the_last():
    engine, _ = make_engine()
    with engine:
        prompt = prompt_of(10)
        reply = engine.generate([prompt], GREEDY)[0].token_ids
        assert engine.probe([*prompt, *reply]).matched == 10 + 5
        longer = engine.generate([[*prompt, *reply, 1, 2]], GREEDY)[0]
        assert longer.usage.cached_tokens == 10 + 5
        assert list(longer.token_ids) == greedy_reply([*prompt, *reply, 1, 2], 6)


def test_requests_hit_the_prefix_of_a_running_request():
    engine, runner = make_engine()
    runner.gate = threading.Semaphore(0)
    with engine:
        prompt = prompt_of(12)
        first = engine.submit(prompt, GREEDY)
        runner.gate.release()  # its prompt
        next(iter(first))
        second = engine.submit(prompt, GREEDY)
        runner.gate.release(100)
        assert second.result().usage.cached_tokens == 11
        assert second.result().token_ids == first.result().token_ids == tuple(greedy_reply(prompt, 6))


def test_a_request_waits_for_a_prefix_that_another_one_computes():
    engine, runner = make_engine(prefill_chunk=8)
    shared = prompt_of(40)
    with engine:
        prompts = [[*shared, tail] for tail in range(8)]
        done = engine.generate(prompts, GREEDY)
        assert [list(each.token_ids) for each in done] == [greedy_reply(prompt, 6) for prompt in prompts]
        assert [each.usage.cached_tokens for each in done] == [0] + [40] * 7
        assert sum(n for step in runner.steps for _, n in step) == engine.stats().computed_tokens


def test_decodes_come_first_and_prompts_in_chunks_within_the_budget():
    engine, runner = make_engine(max_sequences=4, max_batch_tokens=10, prefill_chunk=6)
    runner.gate = threading.Semaphore(0)
    with engine:
        handles = [engine.submit(prompt_of(2, 1), GREEDY)]
        assert runner.began.acquire(timeout=10)
        handles += [engine.submit(prompt_of(n, n), GREEDY) for n in (9, 20)]
        runner.gate.release(1000)
        for handle, prompt in zip(handles, [prompt_of(2, 1), prompt_of(9, 9), prompt_of(20, 20)], strict=True):
            assert list(handle.result().token_ids) == greedy_reply(prompt, 6)
    # Step 2: one decoded token of the first, six of the nine, and the rest of the budget for the twenty.
    assert runner.steps[:3] == [[(0, 2)], [(2, 1), (0, 6), (0, 3)], [(3, 1), (6, 3), (3, 6)]]
    assert max(sum(n for _, n in step) for step in runner.steps) <= 10


def test_namespaces_do_not_share():
    engine, _ = make_engine()
    with engine:
        prompt = prompt_of(16)
        engine.generate([prompt], GREEDY, namespace="a")
        assert engine.generate([prompt], GREEDY, namespace="b")[0].usage.cached_tokens == 0
        assert engine.generate([prompt], GREEDY, namespace="a")[0].usage.cached_tokens == 15
        assert engine.probe(prompt, namespace="b").matched == 16
        assert engine.probe(prompt).matched == 0
        with pytest.raises(InvalidInput, match="hashable"):
            engine.submit(prompt, namespace=["a"])


@pytest.mark.parametrize("shared", [12, 13])
def test_streams_of_one_request_fork_after_one_prefill(shared):
    engine, runner = make_engine()
    prompt = prompt_of(shared)
    params = SamplingParams(max_tokens=8, n=4, seed=7, ignore_eos=True)
    with engine:
        done = engine.generate([prompt], params)[0]
        check(engine)
        assert runner.steps[0] == [(0, shared)]
        assert sum(n for step in runner.steps for _, n in step) == shared + 4 * 7
        streams = [done, *done.alternatives]
        assert [each.index for each in streams] == [0, 1, 2, 3]
        assert len({each.token_ids for each in streams}) == 4
        assert [each.usage.cached_tokens for each in streams] == [0, shared, shared, shared]
        # The first stream is the reply of n=1 with that seed; every stream repeats itself.
        assert engine.generate([prompt], params.but(n=1))[0].token_ids == done.token_ids
        assert engine.generate([prompt], params)[0].alternatives[2].token_ids == done.alternatives[2].token_ids


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


def test_a_pool_can_be_filled_to_its_last_slot():
    engine, _ = make_engine(num_blocks=5, block_size=4)
    with engine:
        for length in (19, 13, 18, 16, 19):  # hits that end inside a block must not make it too small
            prompt = prompt_of(length)
            done = engine.generate([prompt], GREEDY.but(max_tokens=100))[0]
            assert list(done.token_ids) == greedy_reply(prompt, 20 - length)
            check(engine)
        with pytest.raises(PromptTooLong, match="the pool holds 20"):
            engine.submit(prompt_of(20))
        with pytest.raises(PromptTooLong, match="7 blocks of 4 tokens, and the pool has 5"):
            engine.submit(prompt_of(13), GREEDY.but(max_tokens=8, n=2))


def test_a_hit_that_other_requests_hold_takes_no_block():
    engine, runner = make_engine(num_blocks=13)
    stem = prompt_of(32, 1)
    with engine:
        runner.gate = threading.Semaphore(0)
        first = engine.submit(stem, GREEDY.but(max_tokens=5))
        runner.gate.release(1)
        next(iter(first))
        second = engine.submit([*stem, 1], GREEDY.but(max_tokens=3))
        runner.gate.release(1000)
        assert list(second.result(timeout=10).token_ids) == greedy_reply([*stem, 1], 3)
        assert [(33 - 1, 1) in step and len(step) == 2 for step in runner.steps].count(True) == 1  # with the first
        assert second.result().usage.cached_tokens == 32
        check(engine)


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
