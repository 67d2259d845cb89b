"""Scores of prompts and continuations: always the log-softmax of the model's own logits, however they are computed."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv import AsyncEngine, Engine, SamplingParams, Score
from radixkv.config import EngineConfig
from radixkv.engine.output import Completion
from radixkv.engine.request import Request
from radixkv.engine.scores import PromptScores
from radixkv.errors import InvalidInput, InvalidTokens, PromptTooLong, RequestFailed
from radixkv.models.loaded import SequenceInput
from tests.engine.fakes import (
    VOCAB,
    FakeModel,
    FakeRunner,
    StatefulFakeRunner,
    chain,
    check,
    logits_of,
    make_engine,
)
from tests.engine.worlds import World

GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
PROMPT = [(7 * each + each * each) % 49 for each in range(30)]
CLOSE = 1e-5


def table(tokens: Sequence[int]) -> np.ndarray:
    """Return the log-softmax [n, vocab] of the fake model's logits after each token, in float64."""
    state, rows = 0, []
    for token in tokens:
        state = chain(state, int(token))
        rows.append(torch.from_numpy(logits_of(state).copy()))
    return torch.log_softmax(torch.stack(rows).double(), dim=1).numpy()


def assert_scored(done: Completion, prompt: Sequence[int], top: int) -> None:
    """Compare a completion's prompt logprobs with the model's own."""
    found, own = done.prompt_logprobs, table(prompt)
    assert found is not None and len(found) == len(prompt) and found[0] is None
    for position in range(1, len(prompt)):
        entry, row = found[position], own[position - 1]
        assert entry is not None
        assert entry.chosen == pytest.approx(row[prompt[position]], abs=CLOSE)
        assert entry.rank == 1 + (row > row[prompt[position]]).sum()
        assert [token for token, _ in entry.top] == np.argsort(-row)[:top].tolist()
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:top], abs=CLOSE)


def assert_score(score: Score, prompt: Sequence[int], continuation: Sequence[int]) -> None:
    """Compare the score of a continuation with the model's own."""
    own = table([*prompt, *continuation])[len(prompt) - 1 : -1]
    expected = [float(row[token]) for row, token in zip(own, continuation, strict=True)]
    assert score.token_ids == tuple(continuation)
    assert score.token_logprobs == pytest.approx(expected, abs=CLOSE)
    assert score.logprob == pytest.approx(sum(expected), abs=CLOSE * len(expected))
    assert score.greedy == (list(continuation) == own.argmax(axis=1).tolist())


# ---- prompt_logprobs


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_logprobs_match_the_model(chunk: int) -> None:
    engine, runner = make_engine(prefill_chunk=chunk)
    with engine:
        done = engine.generate([PROMPT], GREEDY.but(prompt_logprobs=3))[0]
        assert_scored(done, PROMPT, 3)
        assert done.token_ids == engine.generate([PROMPT], GREEDY)[0].token_ids
        assert len(runner.steps[0]) == 1 and runner.steps[0][0] == (0, min(chunk, 30))
        check(engine)


def test_prompt_logprobs_are_a_sequence_that_does_not_change() -> None:
    prompt = [(5 * each + each // 3) % 49 for each in range(600)]  # more than an iteration makes at once
    engine, _ = make_engine(num_blocks=200)
    with engine:
        found = engine.generate([prompt], GREEDY.but(prompt_logprobs=1))[0].prompt_logprobs
    assert found is not None and len(found) == 600
    entries = tuple(found)
    assert found == entries and entries == tuple(found[at] for at in range(600)) and found != entries[1:]
    assert found[-2:] == entries[-2:] and found[:2] == (None, entries[1]) and found[::-200] == entries[::-200]
    assert found[-1] == entries[599] and found[-600] is None and hash(found) == hash(entries)
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(IndexError):
        found[600]


def test_all_streams_of_a_request_have_the_same_prompt_logprobs() -> None:
    engine, _ = make_engine()
    with engine:
        done = engine.generate([PROMPT], GREEDY.but(prompt_logprobs=1, n=3, temperature=1, seed=2))[0]
        assert_scored(done, PROMPT, 1)
        assert len(done.alternatives) == 2
        assert all(each.prompt_logprobs is done.prompt_logprobs for each in done.alternatives)
        beams = engine.generate([PROMPT], SamplingParams(max_tokens=3, beam_width=3, prompt_logprobs=1))[0]
        assert_scored(beams, PROMPT, 1)
        assert [each.prompt_logprobs is beams.prompt_logprobs for each in beams.alternatives] == [True, True]
        assert engine.generate([PROMPT], GREEDY)[0].prompt_logprobs is None


@pytest.mark.parametrize("many", [{}, {"n": 3}, {"beam_width": 3}], ids=["one", "samples", "beams"])
def test_the_first_chunk_has_the_prompt_logprobs(many: dict[str, int]) -> None:
    engine, _ = make_engine()
    with engine:
        handle = engine.submit(PROMPT, replace(GREEDY, prompt_logprobs=2, **many))
        first, *others = list(handle)
        assert first.prompt_logprobs == handle.result().prompt_logprobs
        assert len(others) == 3 * (many or {"n": 1}).popitem()[1] - 1
        assert all(chunk.prompt_logprobs is None for chunk in others)


def test_a_prompt_is_scored_without_a_reply_and_may_fill_the_context() -> None:
    params = replace(GREEDY, prompt_logprobs=2)
    engine, _ = make_engine(model=FakeModel(max_length=len(PROMPT)))
    with engine:
        handle = engine.submit(PROMPT, params, sample=False)
        assert list(handle) == []
        done = handle.result()
        assert (done.text, done.token_ids, done.finish_reason) == ("", (), "length")
        assert_scored(done, PROMPT, 2)
        with pytest.raises(PromptTooLong, match="31 tokens: the model takes 30") as refused:
            engine.submit([*PROMPT, 1], params, sample=False)
        assert refused.value.limit == 30
        with pytest.raises(PromptTooLong, match="no room for a reply"):
            engine.submit(PROMPT, params)
        with pytest.raises(PromptTooLong):
            engine.warm([*PROMPT, 1])
        check(engine)


def test_a_prompt_of_one_token_has_no_score() -> None:
    engine, _ = make_engine()
    with engine:
        assert engine.generate([[5]], GREEDY.but(prompt_logprobs=2))[0].prompt_logprobs == (None,)


def test_more_alternatives_than_the_vocabulary_are_all_of_it() -> None:
    engine, _ = make_engine()
    with engine:
        assert_scored(engine.generate([PROMPT[:4]], GREEDY.but(prompt_logprobs=100))[0], PROMPT[:4], VOCAB)


# ---- score


def test_scores_match_the_model_and_share_the_prompt() -> None:
    engine, runner = make_engine()
    best = int(table(PROMPT)[-1].argmax())
    then = int(table([*PROMPT, best])[-1].argmax())
    continuations = [[1], [best], [2, 3, 4], [2, 3, 5], [best, then], [best, (then + 1) % VOCAB]]
    with engine:
        scores = engine.score(PROMPT, continuations)
        for score, continuation in zip(scores, continuations, strict=True):
            assert_score(score, PROMPT, continuation)
        assert [each.greedy for each in scores] == [False, True, False, False, True, False]
        stats = engine.stats()
        # Three requests: the prompt alone, with two tokens, with one. The first computes the prompt for all of them.
        # The others compute its last token again, because the score of the first new token needs its logits.
        assert stats.finished == 3
        assert stats.computed_tokens == 30 + 3 + 2
        assert stats.scored_tokens == 2 + (2 + 2) + (1 + 2)
        runner.steps.clear()
        engine.score(PROMPT, continuations)
        assert sum(tokens for step in runner.steps for _, tokens in step) == 1 + 3 + 2
        check(engine)


@pytest.mark.parametrize(
    ("continuations", "error", "message"),
    [
        ([[]], InvalidInput, "has no tokens"),
        ([""], InvalidInput, "has no tokens"),
        ("yes", InvalidInput, "wrap one continuation"),
        ([1, 2], InvalidInput, "bare list of token ids"),
        (["yes"], InvalidInput, "no tokenizer"),
        ([None], InvalidInput, "text or a sequence of token ids, got NoneType"),
        ([[1], 5.0], InvalidInput, "text or a sequence of token ids, got float"),
        ([[1], [VOCAB]], InvalidTokens, "outside the vocabulary"),
        ([[1] * 260], PromptTooLong, "290|289"),
    ],
)
def test_continuations_that_cannot_be_scored_are_refused(
    continuations: Any, error: type[Exception], message: str
) -> None:
    engine, _ = make_engine()
    with engine:
        with pytest.raises(error, match=message):
            engine.score(PROMPT, continuations)
        assert engine.stats().requests == 0
        assert engine.score(PROMPT, []) == []


def test_a_continuation_may_fill_the_context() -> None:
    engine, _ = make_engine(num_blocks=10)
    with engine:
        continuation = random.Random(1).choices(range(49), k=11)
        assert_score(engine.score(PROMPT, [continuation])[0], PROMPT, continuation)


def test_one_failing_continuation_fails_the_call() -> None:
    def fault(chunks: Sequence[SequenceInput]) -> None:
        if any(42 in chunk.tokens for chunk in chunks):
            raise ValueError("broken")

    engine, _ = make_engine(fault=fault)
    with engine:
        with pytest.raises(RequestFailed, match="broken"):
            engine.score(PROMPT[:9], [[1, 2], [42, 1], [3, 4]])
        assert_score(engine.score(PROMPT[:9], [[1, 2]])[0], PROMPT[:9], [1, 2])
        check(engine)


def test_the_options_of_requests_reach_the_scores() -> None:
    engine, _ = make_engine()
    with engine:
        with pytest.raises(InvalidInput, match="timeout"):
            engine.score(PROMPT, [[1]], timeout=-1)
        engine.score(PROMPT, [[1]], namespace="ann")
        assert engine.score(PROMPT, [[1]], namespace="ben")[0].usage.cached_tokens == 0
        assert engine.score(PROMPT, [[1]], namespace="ann")[0].usage.cached_tokens == 29


def test_asyncio_scores_and_cancels() -> None:
    engine, runner = make_engine(prefill_chunk=8)
    gate = runner.gate = threading.Semaphore(0)

    async def main() -> list[Score]:
        scoring = asyncio.create_task(AsyncEngine(engine).score(PROMPT, [[1, 2], [3]]))
        await asyncio.to_thread(runner.began.acquire)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        gate.release(1000)
        return await AsyncEngine(engine).score(PROMPT, [[1, 2], [3]])

    with engine:
        for score, continuation in zip(asyncio.run(main()), ([1, 2], [3]), strict=True):
            assert_score(score, PROMPT, continuation)
        assert engine.stats().cancelled == 2
        check(engine)


# ---- texts


def test_texts_are_split_where_the_ids_of_the_prompt_end() -> None:
    with Engine.load("tiny", dtype="float32", num_blocks=64, monitor=False) as engine:
        encode, prompt = engine.model.tokenizer.encode, "Which drink do you sell?"
        texts = [" tea", " cold coffee", "tea"]
        scores = engine.score(prompt, texts)
        ids = encode(prompt)
        for score, text in zip(scores, texts, strict=True):
            assert [*ids, *score.token_ids] == encode(prompt + text)
        again = engine.score(ids, [list(each.token_ids) for each in scores])
        assert [each.token_logprobs for each in again] == [
            pytest.approx(each.token_logprobs, abs=CLOSE) for each in scores
        ]
        # The ids of a prompt that ends inside a word do not begin the ids of the whole text.
        cut = "Which drink do yo"
        assert encode(cut + "u")[: len(encode(cut))] != encode(cut)
        assert list(engine.score(cut, ["u"])[0].token_ids) == encode("u", add_special_tokens=False)
        chat = [{"role": "user", "content": prompt}]
        assert list(engine.score(chat, ["tea"])[0].token_ids) == encode("tea", add_special_tokens=False)


# ---- one core, many requests


class OverlappedRunner(FakeRunner):
    """Reads the tokens of relayed chunks from the tensor of sampled tokens."""

    def run(
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: torch.Tensor | None = None
    ) -> torch.Tensor:
        chunks = [
            each
            if each.sampled_row < 0 or sampled is None
            else each._replace(tokens=np.array([int(sampled[each.sampled_row])], np.int32))
            for each in chunks
        ]
        return super().run(chunks, copies)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"runner": OverlappedRunner, "depth": 1},
    "host": {"host_blocks": 100},
    "deterministic host": {"host_blocks": 100},
    "hybrid": {"runner": StatefulFakeRunner, "snapshots": 6},
    "deterministic": {},
    "no reuse": {"reuse": False},
}


def world_of(kind: str, num_blocks: int, config: EngineConfig, **more: Any) -> World:
    config = replace(config, block_size=4, deterministic="deterministic" in kind)
    return World(num_blocks, 4, config, **KINDS[kind] | more)


def ask(world: World, prompt: Sequence[int], params: SamplingParams, most_rows: int = 1000) -> Request:
    """Queue a request, which is scored if `params` say so."""
    if params.prompt_logprobs is None:
        return world.submit(prompt, params)
    ids = np.array(prompt, np.int32)
    return world.submit(prompt, params, scores=PromptScores(ids, 1, params.prompt_logprobs, most_rows=most_rows))


def score(world: World, prompt: Sequence[int], continuation: Sequence[int], most_rows: int = 1000) -> Request:
    """Queue the request of one score."""
    ids, targets = np.array([*prompt, *continuation[:-1]], np.int32), (continuation[-1], 0)
    scores = PromptScores(ids, len(prompt), 1, most_rows=most_rows, last_targets=targets)
    return world.submit(ids.tolist(), GREEDY, max_tokens=0, scores=scores)


def check_scores(world: World) -> None:
    """Compare every finished request with the model."""
    for request in world.requests:
        done, prompt = request.channel.wait(0), request.prompt.tolist()
        if request.params.prompt_logprobs is not None:
            assert_scored(done, prompt, request.params.prompt_logprobs)
        elif isinstance(request.scores, PromptScores):
            assert_last(request.scores)


def assert_last(scores: PromptScores) -> None:
    """Compare the scores of a request of `score` with the model's own."""
    own = table(scores.prompt.tolist())
    rows = np.arange(scores.first - 1, len(scores.prompt) - 1)
    assert scores.missing == len(scores.prompt) and scores.last is not None
    np.testing.assert_allclose(scores.chosen, own[rows, scores.prompt[scores.first :]], atol=CLOSE)
    np.testing.assert_allclose(scores.last.chosen, own[-1, list(scores.last_targets)], atol=CLOSE)


def test_the_additional_rows_of_a_step_are_bounded() -> None:
    seen: list[int] = []

    class Counting(FakeRunner):
        def run(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]]) -> torch.Tensor:
            seen.append(sum(chunk.logit_rows - 1 for chunk in chunks))
            return super().run(chunks, copies)

    config = EngineConfig(max_sequences=4, max_batch_tokens=200, prefill_chunk=64)
    world = world_of("plain", 100, config, runner=Counting)
    for each in range(4):
        ask(world, [each, *PROMPT], GREEDY.but(prompt_logprobs=0), most_rows=6)
    world.finish()
    check_scores(world)
    assert max(seen) == 6
    assert seen.count(6) >= 4 * 29 // 7, "and every step takes as many as it may"
    seen.clear()
    exact = world_of("deterministic", 100, config, runner=Counting)
    for each in range(4):
        ask(exact, [each, *PROMPT], GREEDY.but(prompt_logprobs=0), most_rows=6)
    exact.finish()
    check_scores(exact)
    assert [each for each in seen if each] == [30] * 4, "a chunk that must not be cut has a step of its own"


def test_tokens_before_the_first_score_take_no_rows_of_the_bound() -> None:
    config = EngineConfig(max_sequences=4, max_batch_tokens=100, prefill_chunk=64)
    world = world_of("plain", 100, config)
    score(world, PROMPT, [1, 2, 3, 4], most_rows=2)
    world.finish()
    check_scores(world)
    assert world.runner.steps == [[(0, 32)], [(32, 1)]]


@pytest.mark.parametrize("row", [3, 20, 29])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_is_not_finite_fails_its_own_request_only(row: int, overlap: bool) -> None:
    class Broken(OverlappedRunner):
        def _logits(self, chunk: SequenceInput, end: int) -> np.ndarray:
            logits = super()._logits(chunk, end)
            return logits * np.nan if chunk.start + end == row + 1 and chunk.tokens[0] == 45 else logits

    config = EngineConfig(max_sequences=4, max_batch_tokens=100, prefill_chunk=64)
    world = world_of("plain", 100, config, runner=Broken, depth=int(overlap))
    broken = ask(world, [45, *PROMPT[1:]], GREEDY.but(prompt_logprobs=0))
    ask(world, [44, *PROMPT[1:]], GREEDY.but(prompt_logprobs=0))
    world.requests.remove(broken)
    world.finish()
    check_scores(world)
    with pytest.raises(RequestFailed):
        broken.channel.wait(0)
