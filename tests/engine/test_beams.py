"""Beam search on a fake model: answers of a naive search, blocks recounted after each step, preemptions and ends."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from radixkv import SamplingParams
from radixkv.cache import Sequence as CachedSequence
from radixkv.engine.observers import EngineObserver
from radixkv.engine.output import Completion
from radixkv.engine.request import Request
from radixkv.errors import InvalidInput, PromptTooLong, RequestFailed
from radixkv.sampling.params import SampleRow
from tests.engine.fakes import STOP, VOCAB, FakeModel, chain, check, logits_of, make_engine

Beams = list[tuple[tuple[int, ...], float]]


def naive_beams(
    prompt: Sequence[int], params: SamplingParams, stops: frozenset[int] = frozenset({STOP}), vocab: int = VOCAB
) -> Beams:
    """Search over all continuations of all beams; returns (reply, score), best first."""
    width, running, done = params.beam_width, [((), 0.0)], []
    for length in range(1, params.max_tokens + 1):
        options = []
        for reply, total in running:
            state = 0
            for token in (*prompt, *reply):
                state = chain(state, int(token))
            logits = logits_of(state, vocab).astype(np.float64)
            table = logits - math.log(np.exp(logits).sum())
            allowed = [token for token in range(vocab) if length > params.min_tokens or token not in stops]
            options += [((*reply, token), total + float(table[token])) for token in allowed]
        options.sort(key=lambda option: -option[1])
        ends = [reply[-1] in stops or length == params.max_tokens for reply, _ in options]
        done += [
            (reply, total / length**params.length_penalty)
            for (reply, total), end in zip(options[:width], ends[:width], strict=True)
            if end
        ]
        done = sorted(done, key=lambda option: -option[1])[:width]
        running = [option for option, end in zip(options, ends, strict=True) if not end][:width]
        if not running or (len(done) == width and _is_over(params, running[0][1], done[-1][1], length)):
            break
    return done


def _is_over(params: SamplingParams, best: float, worst: float, length: int) -> bool:
    if params.early_stopping is True:
        return True
    longest = params.early_stopping == "never" and params.length_penalty > 0
    return best / (params.max_tokens if longest else length) ** params.length_penalty <= worst


def beams_of(completion: Completion) -> Beams:
    return [(each.token_ids, each.score or 0.0) for each in (completion, *completion.alternatives)]


def check_beams(found: Completion, expected: Beams) -> None:
    assert [reply for reply, _ in beams_of(found)] == [reply for reply, _ in expected]
    assert [score for _, score in beams_of(found)] == pytest.approx([score for _, score in expected], abs=1e-4)
    assert [each.index for each in (found, *found.alternatives)] == list(range(len(expected)))


def prompts(seed: int, count: int, length: int = 11) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(STOP), k=length + at) for at in range(count)]


PARAMS = SamplingParams(max_tokens=9, beam_width=4)
STOPS = list(range(0, 50, 6))  # so that beams finish early


def test_a_prompt_is_computed_once_and_found_by_a_later_search() -> None:
    text = prompts(4, 1, 40)[0]
    with make_engine(200, 4)[0] as engine:
        first, second = engine.generate([text], PARAMS)[0], engine.generate([text], PARAMS)[0]
        for found in (first, second):
            check_beams(found, naive_beams(text, PARAMS))
            for each in (found, *found.alternatives):
                assert each.usage.cached_tokens + each.usage.computed_tokens == 40 + len(each.token_ids) - 1
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 39)
        assert all(each.usage.cached_tokens >= 40 for each in first.alternatives)
        stats = engine.stats()
        assert stats.output_tokens == sum(len(reply) for found in (first, second) for reply, _ in beams_of(found))
        returned = [each.usage.computed_tokens for found in (first, second) for each in (found, *found.alternatives)]
        assert sum(returned) <= stats.computed_tokens <= 41 + 2 * 4 * 9  # beams that died were computed, too


def test_the_best_reply_is_cached_for_a_next_turn() -> None:
    text = prompts(5, 1)[0]
    with make_engine(200, 4)[0] as engine:
        found = engine.generate([text], PARAMS.but(stop_token_ids=STOPS))[0]
        for reply, _ in beams_of(found):
            again = engine.generate([[*text, *reply, 1, 2]], SamplingParams(max_tokens=1))[0]
            assert again.usage.cached_tokens == len(text) + len(reply) - 1


def test_log_probabilities_add_up_to_the_score() -> None:
    text = prompts(6, 1)[0]
    params = PARAMS.but(logprobs=3, length_penalty=0.0, repetition_penalty=1.0)
    with make_engine(200, 4)[0] as engine:
        found = engine.generate([text], params)[0]
    for each in (found, *found.alternatives):
        assert each.logprobs is not None and len(each.logprobs) == len(each.token_ids)
        assert sum(report.chosen for report in each.logprobs) == pytest.approx(each.score, abs=1e-4)
        assert all(len(report.top) == 3 for report in each.logprobs)
        for token, report in zip(each.token_ids, each.logprobs, strict=True):
            assert dict(report.top).get(token, report.chosen) == report.chosen


def test_chunks_come_at_the_end_one_for_each_token() -> None:
    text = prompts(7, 1)[0]
    with make_engine(200, 4)[0] as engine:
        handle = engine.submit(text, PARAMS)
        chunks, found = list(handle), handle.result()
        for rank, each in enumerate((found, *found.alternatives)):
            own = [chunk for chunk in chunks if chunk.index == rank]
            assert tuple(chunk.token_ids[0] for chunk in own) == each.token_ids
            assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [each.finish_reason]


def test_fewer_beams_where_the_vocabulary_ends() -> None:
    model, text = FakeModel(vocab_size=3, stop_token_ids=frozenset()), [1, 2, 0]
    with make_engine(64, 4, model=model)[0] as engine:
        for count, beams in ((1, 3), (2, 5)):
            params = SamplingParams(max_tokens=count, beam_width=5)
            found = engine.generate([text], params)[0]
            check_beams(found, naive_beams(text, params, frozenset(), vocab=3))
            assert len(found.alternatives) == beams - 1
        masked = SamplingParams(max_tokens=2, beam_width=2, min_tokens=2, stop_token_ids=[0, 1])
        found = engine.generate([text], masked)[0]
        assert [reply for reply, _ in beams_of(found)] == [(2, 2)]
        check(engine)


def test_beams_that_cannot_fit_are_refused_by_their_own_name() -> None:
    with make_engine(20, 4, max_sequences=4)[0] as engine:
        with pytest.raises(InvalidInput, match="beam_width=5 beams exceed max_sequences=4"):
            engine.submit([1, 2], PARAMS.but(beam_width=5))
        with pytest.raises(PromptTooLong, match=r"new ones in each of 4 beams .* lower max_tokens or beam_width"):
            engine.submit([1, 2], PARAMS.but(max_tokens=60))


def test_the_prompt_is_scored_once_for_all_beams() -> None:
    text = prompts(10, 1)[0]
    with make_engine(200, 4)[0] as engine:
        greedy = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2)
        expected = engine.generate([text], greedy, namespace="other")[0].prompt_logprobs
        handle = engine.submit(text, PARAMS.but(prompt_logprobs=2))
        chunks, found = list(handle), handle.result()
        check_beams(found, naive_beams(text, PARAMS))
        assert expected is not None
        assert [each.prompt_logprobs for each in (found, *found.alternatives)] == [expected] * 4
        assert [chunk.prompt_logprobs for chunk in chunks] == [expected] + [None] * (len(chunks) - 1)
        assert engine.stats().scored_tokens == 2 * (len(text) - 1)


def test_equal_prompts_wait_for_the_first_and_higher_priorities_go_first() -> None:
    text = prompts(11, 1, 60)[0]
    with make_engine(120, 4, max_sequences=8, prefill_chunk=16)[0] as engine:
        params = PARAMS.but(beam_width=3)
        handles = [engine.submit(text, params, priority=at % 2) for at in range(5)]
        for handle in handles:
            check_beams(handle.result(), naive_beams(text, params))
        assert sum(handle.result().usage.cached_tokens for handle in handles) >= 4 * 59
        check(engine)


def test_a_fork_that_raises_fails_its_search_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text, other = prompts(12, 2)
    forks: list[int] = []
    fork = CachedSequence.fork

    def failing(sequence: CachedSequence) -> CachedSequence:
        forks.append(sequence.length)
        if len(forks) == 3:
            raise RuntimeError("no fork")
        return fork(sequence)

    with make_engine(200, 4)[0] as engine:
        monkeypatch.setattr(CachedSequence, "fork", failing)
        with pytest.raises(RequestFailed, match="no fork"):
            engine.generate([text], PARAMS)
        check(engine)  # also the beams that were forked before hold no blocks
        check_beams(engine.generate([other], PARAMS)[0], naive_beams(other, PARAMS))
        check(engine)


class ShortReplies:
    """A logits processor that excludes every token once a reply has `most` tokens."""

    reads_history = True

    def applies(self, params: SamplingParams) -> bool:
        return "most" in params.extra_args

    def __call__(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        for values, row in zip(logits, rows, strict=True):
            if len(row.history) - row.prompt_length >= row.params.extra_args["most"]:
                values.fill_(-torch.inf)


def test_a_search_without_any_candidate_fails_unless_replies_are_complete() -> None:
    text = prompts(13, 1)[0]
    with make_engine(200, 4, logits_processors=(ShortReplies(),))[0] as engine:
        endless = PARAMS.but(ignore_eos=True, extra_args={"most": 2})
        with pytest.raises(RequestFailed, match="no candidate for a beam"):
            engine.generate([text], endless)
        check(engine)
        found = engine.generate([text], endless.but(stop_token_ids=STOPS, extra_args={"most": 4}))[0]
        replies = [found, *found.alternatives]
        assert all(each.finish_reason == "stop" and len(each.token_ids) <= 4 for each in replies)
        check(engine)


class ComputedTokens(EngineObserver):
    """Records the computed tokens of each request at its end."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def ended(self, request: Request, error: Exception | None) -> None:
        self.found.append(request.replies.computed_tokens(request))


def test_observers_count_the_tokens_of_beams_that_ended() -> None:
    text = prompts(14, 1)[0]
    with make_engine(200, 4)[0] as engine:
        observer = ComputedTokens()
        engine.core.observers.append(observer)
        found = engine.generate([text], PARAMS)[0]
        returned = sum(each.usage.computed_tokens for each in (found, *found.alternatives))
        assert observer.found == [engine.stats().computed_tokens]
        assert observer.found[0] > returned
