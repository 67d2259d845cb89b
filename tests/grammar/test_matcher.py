"""The matcher of one stream: its tokens are allowed, forced ones leave no choice, and forks and rollbacks are exact."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from radixkv import Completion, Engine, SamplingParams
from radixkv.engine.reuse_policy import AlignedReuse
from radixkv.errors import InvalidConstraint, RequestFailed
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.matcher import GrammarMatcher
from tests.engine.fakes import FakeModel, check, make_engine
from tests.grammar.engines import STOP, RandomRunner, random_engine, tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2020},
        "children": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["first_name", "year_of_birth", "children"],
    "additionalProperties": False,
}
PARAMS = SamplingParams(json_schema=PERSON, max_tokens=200)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), len(tokenizer()), {STOP})


@pytest.fixture
def engine() -> Iterator[Engine]:
    with random_engine() as engine:
        yield engine
        check(engine)


def start(compiler: GrammarCompiler, params: SamplingParams = PARAMS) -> GrammarMatcher:
    matcher = compiler.matcher(params)
    assert matcher is not None
    return matcher


def allowed(*matchers: GrammarMatcher) -> list[list[int]]:
    bits = np.empty((len(matchers), -(-matchers[0].vocab_size // 32)), np.int32)
    assert not GrammarMatcher.fill(matchers, bits)
    return [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in bits]


def walk(matcher: GrammarMatcher, rng: random.Random) -> Iterator[int]:
    """Consume random allowed tokens up to the end of a text, and yield each."""
    while not matcher.finished:
        token = rng.choice(allowed(matcher)[0])
        if token == STOP:
            return
        matcher.consume([token])
        yield token


@pytest.mark.parametrize("seed", range(5))
def test_a_rollback_restores_every_earlier_state(compiler: GrammarCompiler, seed: int) -> None:
    matcher, rng = start(compiler), random.Random(seed)
    before = [(allowed(matcher)[0], matcher.accepts, matcher.forced())]
    tokens = []
    for token in walk(matcher, rng):
        tokens.append(token)
        before.append((allowed(matcher)[0], matcher.accepts, matcher.forced()))
    assert matcher.finished
    while tokens:
        count = rng.randint(1, min(4, len(tokens)))
        matcher.rollback(count)
        del tokens[-count:]
        assert not matcher.finished
        assert (allowed(matcher)[0], matcher.accepts, matcher.forced()) == before[len(tokens)]


def test_a_token_that_is_not_allowed_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = start(compiler)
    with pytest.raises(InvalidConstraint, match="json_schema cannot be followed any further"):
        matcher.consume(tokenizer().encode("no JSON", add_special_tokens=False))
    bits = np.empty((2, -(-matcher.vocab_size // 32)), np.int32)
    assert list(GrammarMatcher.fill([start(compiler), matcher], bits)) == [1]


def test_a_rollback_beyond_the_start_is_an_error(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidConstraint):
        start(compiler).rollback(1)


def test_the_stop_token_is_allowed_exactly_where_the_text_is_complete(compiler: GrammarCompiler) -> None:
    matcher = start(compiler, SamplingParams(regex="[0-9]{2,4}"))
    for count in range(5):
        assert (STOP in allowed(matcher)[0]) == matcher.accepts == (count >= 2)
        assert matcher.finished == (count == 4)
        if count < 4:
            matcher.consume(tokenizer().encode("7", add_special_tokens=False))


def test_a_model_without_stop_tokens_can_be_constrained() -> None:
    compiler = GrammarCompiler(tokenizer(), len(tokenizer()), ())
    matcher = start(compiler, SamplingParams(regex="[0-9]{2,4}"))
    assert all(token < len(tokenizer()) for token in allowed(matcher)[0])
    model = FakeModel(tokenizer=tokenizer(), vocab_size=len(tokenizer()), stop_token_ids=frozenset())
    engine, _ = make_engine(400, model=model, runner_class=RandomRunner)
    with engine:
        done = engine.generate([[5, 6]] * 4, SamplingParams(regex="[0-9]{2,4}", max_tokens=20))
        assert all(len(each.text) == 4 and whole(each) for each in done)


def test_more_logits_than_tokens_are_never_allowed() -> None:
    compiler = GrammarCompiler(tokenizer(), len(tokenizer()) + 64, {STOP})
    matcher = start(compiler, SamplingParams(regex="(?s).*"))
    assert max(allowed(matcher)[0]) < len(tokenizer())


# ---- in an engine


def whole(done: Completion) -> bool:
    return done.finish_reason == "stop"


def test_forced_tokens_are_counted_as_output_and_save_steps(engine: Engine) -> None:
    handle = engine.submit([5, 6], PARAMS)
    chunks = list(handle)
    done, stats = handle.result(), engine.stats()
    assert [token for chunk in chunks for token in chunk.token_ids] == list(done.token_ids)
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert stats.output_tokens == len(done.token_ids) == done.usage.output_tokens
    assert stats.forced_tokens > 10
    assert stats.steps == len(done.token_ids) - stats.forced_tokens  # one a sampled token
    assert done.usage.cached_tokens + done.usage.computed_tokens <= 2 + len(done.token_ids) - 1


def test_ignore_eos_ends_a_reply_that_cannot_go_on(engine: Engine) -> None:
    done = engine.generate([[5, 6]], PARAMS.but(ignore_eos=True))[0]
    assert whole(done) and STOP not in done.token_ids
    number = engine.generate([[5, 6]], SamplingParams(regex="[0-9]+", ignore_eos=True, max_tokens=30))[0]
    assert (number.finish_reason, number.text.isdecimal()) == ("length", True)


def test_a_stop_token_of_the_request_ends_only_a_complete_reply(engine: Engine) -> None:
    [comma] = tokenizer().encode(",", add_special_tokens=False)
    stops = {"stop_token_ids": [comma], "logit_bias": {comma: 5.0}, "ignore_eos": True}
    params = SamplingParams(regex="[0-9]{3,}", n=8, max_tokens=60, seed=5, **stops)
    done = engine.generate([[5, 6]], params)[0]
    for each in (done, *done.alternatives):
        digits = tokenizer().decode([token for token in each.token_ids if token not in (comma, STOP)])
        assert digits.isdecimal() and (len(digits) >= 3 or not whole(each))
    assert {each.token_ids[-1] for each in (done, *done.alternatives) if whole(each)} == {comma}


def test_a_stop_string_ends_a_reply_inside_forced_tokens(engine: Engine) -> None:
    done = engine.generate([[5, 6]], PARAMS.but(stop=["_of_"]))[0]
    assert (done.finish_reason, done.stop_text) == ("stop", "_of_")
    assert done.text.endswith('"year')


def test_parameters_that_leave_no_token_fail_the_request_with_the_reason(engine: Engine) -> None:
    other = engine.submit([8, 9], SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    params = SamplingParams(regex="[0-9]{8}", stop_token_ids=tokenizer().encode("0123456789", add_special_tokens=False))
    with pytest.raises(RequestFailed, match="leave nothing to draw"):
        engine.generate([[5, 6]], params)
    assert other.result().usage.output_tokens == 20


@pytest.mark.parametrize("seed", range(4))
def test_a_hit_does_not_change_a_deterministic_reply(seed: int) -> None:
    """Forced chunks of a deterministic engine have forwards of their own; the tree gets whole chunks only."""
    params = PARAMS.but(seed=seed)
    prompt = [3 + at % 40 for at in range(50)]
    settings = {"deterministic": True, "prefill_chunk": 16, "max_batch_tokens": 96, "block_size": 4}
    with random_engine(**settings) as engine:  # type: ignore[arg-type]
        assert isinstance(engine.core._reuse, AlignedReuse)
        cold = engine.generate([prompt], params)[0]
        warm = engine.generate([prompt], params)[0]
        assert warm.usage.cached_tokens and warm.token_ids == cold.token_ids
        longer = engine.generate([[*prompt, *cold.token_ids]], SamplingParams(max_tokens=1))[0]
        assert longer.usage.cached_tokens % 16 == 0
        check(engine)


def test_cancelled_and_finished_requests_leave_nothing(engine: Engine) -> None:
    handles = [engine.submit([5, number], PARAMS.but(n=2)) for number in range(8)]
    for handle in handles[::2]:
        next(iter(handle))
        handle.cancel()
    assert all(whole(handle.result()) for handle in handles[1::2])
