"""Speculation: replies, log probabilities, usage, counters and cached prefixes are those of an engine without it.

An adversary drafts right, half right and wrong tokens. `tests.simulation.test_draft_lives` has depth 1 and faults.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from torch import Tensor

from radixkv import Completion, Engine, LogitsProcessor, SampleRow, SamplingParams
from radixkv.engine import core, draft_length
from radixkv.engine.admission import blocks_needed
from radixkv.engine.output import Usage
from radixkv.engine.request import Scheduling, Stream
from radixkv.engine.speculation import DraftedTokens
from radixkv.engine.stats import EngineStats
from radixkv.errors import InvalidConstraint, RequestFailed
from radixkv.grammar.matcher import GrammarMatcher
from radixkv.models.loaded import SequenceInput
from tests.engine.fakes import FakeRunner, check, make_engine
from tests.grammar.engines import random_engine
from tests.grammar.test_replies import QUICK, SCHEMAS
from tests.simulation.drafts import Adversary

COUNTERS = ("prompt_tokens", "computed_tokens", "recomputed_tokens", "cached_tokens", "decode_tokens", "output_tokens")
COUNTERS += ("finished", "failed")
USED = attrgetter(
    "prompt_tokens", "cached_tokens", "computed_tokens", "recomputed_tokens", "output_tokens", "preemptions"
)
NO_USAGE = Usage(0, 0, 0, 0, 0, 0)
SPELLED = tuple(range(3, 256, 3))
"""Token ids that often end a reply."""


@pytest.fixture(autouse=True)
def _steps_of_a_second() -> Iterator[None]:
    ticks = map(float, count(1))
    with mock.patch.object(draft_length, "perf_counter", partial(next, ticks)):
        yield


def test_on_a_gpu_rows_that_read_a_history_do_not_draft() -> None:
    """Only the host knows the history of each row of a draft."""
    with random_engine(speculate="ngram") as engine:
        inputs = engine.client.inputs
        for on_host, params, drafts in (
            (True, SamplingParams(repetition_penalty=1.5), True),
            (False, SamplingParams(repetition_penalty=1.5), False),
            (False, SamplingParams(temperature=0.5), True),
            (True, SamplingParams(speculate=False), False),
            (True, SamplingParams(prompt_logprobs=0), False),
        ):
            inputs._host_sampler = on_host
            made = inputs.request([5, 6, 7], params)
            assert isinstance(made.replies.continuation, DraftedTokens) == drafts


def test_a_draft_in_flight_takes_nothing_from_the_promise_to_its_stream() -> None:
    sequence = SimpleNamespace(length=40, closed=False)
    stream: Any = SimpleNamespace(sequence=sequence, tokens=[0] * 25, active=True)
    request: Any = SimpleNamespace(
        prompt=[0] * 20,
        max_tokens=60,
        live=[stream],
        streams_left=1,
        scheduling=Scheduling(),
        replies=None,
    )
    assert blocks_needed(request, 4) == -(-25 // 4) - 25 // 4
    request.scheduling.guaranteed = True
    assert blocks_needed(request, 4) == -(-79 // 4) - 25 // 4


class OncePerReply(LogitsProcessor):
    """Excludes the tokens of the reply, if extra_args say so."""

    def applies(self, params: SamplingParams) -> bool:
        return "once" in params.extra_args

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        for values, row in zip(logits, rows, strict=True):
            assert len(row.history) == row.position
            values[list(row.history[row.prompt_length :])] = -100.0


def engine_of(make: Callable[..., Any], source: Any = None, **settings: Any) -> Engine:
    """Return an engine which drafts from `source`, or one that does not speculate."""
    with mock.patch.object(core, "source_of", return_value=source):
        made = make(speculate=None if source is None else "tree", **settings)
    return cast(Engine, made[0] if isinstance(made, tuple) else made)


def known(prompts: Sequence[Sequence[int]], done: Sequence[Completion], seed: int = 0, vocab: int = 256) -> Adversary:
    """Return an adversary that knows the replies to prompts, all of them distinct."""
    replies = {
        (*prompt,): [each.token_ids, *(other.token_ids for other in each.alternatives)]
        for prompt, each in zip(prompts, done, strict=True)
    }

    def answer(stream: Stream) -> tuple[int, ...]:
        found = replies.get(tuple(stream.request.prompt.tolist()), ())
        return found[stream.index] if stream.index < len(found) else ()

    return Adversary(answer, seed, vocab)


def drafted(stats: EngineStats) -> int:
    """Return the number of drafted tokens."""
    return sum(count for name, count in asdict(stats).items() if name.startswith("drafted_from_"))


def outcome(done: Sequence[Completion]) -> list[Any]:
    """Return all facts of replies, without times and counts of drafts."""
    streams = [each for first in done for each in (first, *first.alternatives)]
    return [(USED(each.usage), replace(each, usage=NO_USAGE, alternatives=())) for each in streams]


def cached(engine: Engine, prompts: Sequence[Sequence[int]], done: Sequence[Completion]) -> list[int]:
    """Return how many tokens of each prompt with its replies are cached, and the number of free blocks."""
    pairs = [
        (prompt, each) for prompt, first in zip(prompts, done, strict=True) for each in (first, *first.alternatives)
    ]
    cache = engine.core.cache
    find = lambda: [cache.match((*prompt, *each.token_ids)).length for prompt, each in pairs]  # noqa: E731
    return [*engine.client.thread.ask(find), cache.free_blocks]


def assert_the_same(make: Callable[..., Any], prompts: list[list[int]], params: list[SamplingParams], seed: int) -> int:
    """Compare engines with and without speculation, also in the next turn; returns the number of accepted tokens."""
    with engine_of(make) as plain:
        done = plain.generate(prompts, params)
        turns = [[*prompt, *each.token_ids, 9, 9] for prompt, each in zip(prompts, done, strict=True)]
        found = cached(plain, prompts, done)
        next_done, stats = plain.generate(turns, params[0]), plain.stats()
    with engine_of(make, known([*prompts, *turns], [*done, *next_done], seed)) as drafting:
        drafted = drafting.generate(prompts, params)
        assert outcome(drafted) == outcome(done)
        assert cached(drafting, prompts, drafted) == found
        assert outcome(drafting.generate(turns, params[0])) == outcome(next_done)
        check(drafting)
        after = drafting.stats()
        assert {name: getattr(after, name) for name in COUNTERS} == {name: getattr(stats, name) for name in COUNTERS}
        return round((after.tokens_per_step - 1) * after.drafting_steps)


def drawn(rng: random.Random) -> SamplingParams:
    """Draw sampling parameters; the ends of the reply are inside a draft as a rule."""
    params = SamplingParams(
        temperature=rng.choice((0, 1)), seed=rng.randrange(100), max_tokens=rng.randint(1, 40),
        n=rng.choice((1, 1, 3)), ignore_eos=rng.random() < 0.5, logprobs=rng.choice((None, None, 2)),
        repetition_penalty=rng.choice((1, 1, 1.3)), presence_penalty=rng.choice((0, 0, 1)),
    )  # fmt: skip
    more: dict[str, Any] = rng.choice(
        (
            {},
            {"stop": rng.sample("aeiou", 2)},
            {"stop_token_ids": SPELLED, "min_tokens": rng.randint(0, params.max_tokens)},
            {"bad_words": ["e", "th", "an"]},
            {"extra_args": {"once": True}},
            {"json_schema": SCHEMAS[rng.choice(QUICK)]},
            {"regex": "[a-f ]{4,30}"},
        )
    )
    return params.but(**more)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))])
def test_an_engine_that_speculates_does_all_as_one_that_does_not(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[3 + at, *rng.choices(range(3, 200), k=rng.randint(1, 12))] for at in range(6)]
    params = [drawn(rng) for _ in prompts]
    make = partial(random_engine, 1000, logits_processors=[OncePerReply()])
    assert assert_the_same(make, prompts, params, seed) > 20


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"temperature": 0}, {"temperature": 1, "seed": 5, "n": 2}, {"logprobs": 1}])
def test_replies_to_all_schemas_are_the_same(changes: dict[str, Any]) -> None:
    prompts = [[3 + number % 50, 5 + number // 50, 7] for number in range(len(SCHEMAS))]
    params = [SamplingParams(json_schema=SCHEMAS[name], max_tokens=100, seed=1).but(**changes) for name in SCHEMAS]
    assert assert_the_same(partial(random_engine, 12_000), prompts, params, 0) > 500


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_draft_may_reach_the_end_of_a_constraint(ignore_eos: bool) -> None:
    """No token may follow it then; and a plain decode computes no tokens that were forced after the last draw."""
    texts = [f"{first}es, that is {last}" for first in "yY" for last in ("right", "rigid", "all right")]
    params = SamplingParams(choice=texts, max_tokens=40, seed=1, ignore_eos=ignore_eos)
    prompts = [[3 + at, 7] for at in range(12)]
    assert assert_the_same(partial(random_engine, 1000), prompts, [params] * len(prompts), 1) > 10


@pytest.mark.parametrize("fails", ["consume", "fill"])
def test_a_grammar_that_fails_in_a_draft_ends_no_request_before_that_token_is_drawn(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks of a stream's matcher follow the tokens of drafts; here all of them fail, so that drafts are cut."""
    fork, fill, error = GrammarMatcher.fork, GrammarMatcher.fill, InvalidConstraint("too expensive")

    def failing(matcher: GrammarMatcher) -> GrammarMatcher:
        twin = fork(matcher)
        twin.depth = getattr(matcher, "depth", 0) + 1  # type: ignore[attr-defined]
        if fails == "consume" and twin.depth > 1:  # type: ignore[attr-defined]
            monkeypatch.setattr(twin, "consume", mock.Mock(side_effect=error))
        return twin

    def failing_fill(matchers: Sequence[GrammarMatcher], bits: Any) -> dict[int, InvalidConstraint]:
        return fill(matchers, bits) | {at: error for at, each in enumerate(matchers) if getattr(each, "depth", 0) > 1}

    monkeypatch.setattr(GrammarMatcher, "fork", failing)
    if fails == "fill":
        monkeypatch.setattr(GrammarMatcher, "fill", failing_fill)
    params = SamplingParams(max_tokens=30, temperature=0, regex="[a-f ]{4,30}")
    with engine_of(partial(random_engine, 400)) as plain:
        done = plain.generate([[3, 4], [5, 6]], params)
    with engine_of(partial(random_engine, 400), known([[3, 4], [5, 6]], done)) as engine:
        assert outcome(engine.generate([[3, 4], [5, 6]], params)) == outcome(done)
        assert drafted(engine.stats())


class NanRunner(FakeRunner):
    """Computes NaN after `first` tokens of a text that begins with token 7, and finite logits after that."""

    first = 0

    def _logits(self, chunk: SequenceInput, end: int) -> np.ndarray:
        logits = super()._logits(chunk, end)
        begins = self.tokens[chunk.block_table[0] * self.size] == 7
        return np.full_like(logits, np.nan) if begins and chunk.start + end == self.first else logits


@pytest.mark.parametrize("after", range(2, 9))
def test_nan_in_a_row_of_a_draft_ends_its_request_and_publishes_nothing_from_there_on(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = [[7, 1, 2], [8, 1, 2]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with engine_of(make_engine) as plain:
        done = plain.generate(prompts, params)
    monkeypatch.setattr(NanRunner, "first", 3 + after)
    with engine_of(partial(make_engine, runner_class=NanRunner), known(prompts, done)) as engine:
        handles = [engine.submit(prompt, params) for prompt in prompts]
        with pytest.raises(RequestFailed, match="no finite maximum"):
            handles[0].result(10)
        assert handles[1].result(10).token_ids == done[1].token_ids
        assert drafted(engine.stats())
        assert cached(engine, prompts, done)[0] <= 3 + after
        check(engine)
