"""Custom logits processors in an engine: they change the requests that they apply to, and fail those only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv import LogitsProcessor, SampleRow, SamplingParams
from radixkv.config import EngineConfig
from radixkv.errors import InvalidInput, RequestFailed
from tests.engine.fakes import VOCAB, check, greedy_reply, make_engine

PLAIN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[1, 2, 3, at] for at in range(5)]


class Rotate(LogitsProcessor):
    """Moves the logits by as many tokens as extra_args says, and calls `extra` with the rows."""

    def __init__(self, extra: Callable[[Tensor, Sequence[SampleRow]], None] = lambda logits, rows: None) -> None:
        self.extra = extra

    def applies(self, params: SamplingParams) -> bool:
        return bool(params.extra_args.get("rotate", 0) > 0)

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        self.extra(logits, rows)
        for values, row in zip(logits, rows, strict=True):
            values.copy_(values.roll(row.params.extra_args["rotate"]))


def rotated(count: int, **changes: Any) -> SamplingParams:
    return PLAIN.but(extra_args={"rotate": count}, **changes)


def reply_by_hand(prompt: list[int], rotate: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(PLAIN.max_tokens):
        tokens.append((greedy_reply(tokens, 1)[0] + rotate) % VOCAB)
    return tokens[len(prompt) :]


def test_each_request_gets_its_own_arguments() -> None:
    histories: list[list[int]] = []
    process = Rotate(lambda logits, rows: histories.extend(list(row.history[row.prompt_length :]) for row in rows))
    engine, _ = make_engine(logits_processors=[process])
    params = [PLAIN, rotated(1), PLAIN, rotated(7), rotated(0)]
    with engine:
        assert engine.config.logits_processors == (process,)
        done = engine.generate(PROMPTS, params)
        check(engine)
    for prompt, completion, rotate in zip(PROMPTS, done, [0, 1, 0, 7, 0], strict=True):
        assert list(completion.token_ids) == reply_by_hand(prompt, rotate)
    wanted = [reply_by_hand(PROMPTS[at], rotate) for at, rotate in ((1, 1), (3, 7))]
    assert sorted(histories) == sorted(reply[:length] for reply in wanted for length in range(PLAIN.max_tokens))


def test_forked_streams_are_rows_of_their_own() -> None:
    sizes: list[int] = []
    engine, _ = make_engine(logits_processors=[Rotate(lambda logits, rows: sizes.append(len(rows)))])
    with engine:
        done = engine.generate([PROMPTS[0]], rotated(2, n=3))[0]
    assert sizes == [3] * PLAIN.max_tokens
    assert {each.token_ids for each in (done, *done.alternatives)} == {tuple(reply_by_hand(PROMPTS[0], 2))}


def fail_on(number: int) -> Callable[[Tensor, Sequence[SampleRow]], None]:
    """Return a function that raises if a row has this argument."""

    def extra(logits: Tensor, rows: Sequence[SampleRow]) -> None:
        if any(row.params.extra_args["rotate"] == number for row in rows):
            raise ArithmeticError("wrong row")

    return extra


def spoil(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Write a NaN into the rows with the argument 3."""
    for values, row in zip(logits, rows, strict=True):
        if row.params.extra_args["rotate"] == 3:
            values[5] = torch.nan


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (fail_on(3), "a step of this request raised ArithmeticError: wrong row"),
        (spoil, r"or a logits processor has left NaN or only -inf \(Rotate\)"),
    ],
)
def test_only_the_rows_that_a_processor_fails_on_fail(
    extra: Callable[[Tensor, Sequence[SampleRow]], None], message: str
) -> None:
    engine, _ = make_engine(logits_processors=[Rotate(extra)])
    params = [PLAIN, rotated(1), rotated(3), rotated(2), PLAIN]
    with engine:
        handles = [engine.submit(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
        with pytest.raises(RequestFailed, match=message):
            handles[2].result()
        for prompt, handle, rotate in zip(PROMPTS, handles, [0, 1, None, 2, 0], strict=True):
            if rotate is not None:
                assert list(handle.result().token_ids) == reply_by_hand(prompt, rotate)
        check(engine)
        assert engine.stats().failed == 1


def test_arguments_that_a_processor_refuses_refuse_the_request() -> None:
    engine, _ = make_engine(logits_processors=[Rotate()])
    with engine:
        with pytest.raises(InvalidInput, match=r"^the logits processor Rotate refuses the parameters: '>' not"):
            engine.submit(PROMPTS[0], PLAIN.but(extra_args={"rotate": "far"}))
        assert engine.stats().requests == 0
        assert list(engine.generate([PROMPTS[0]], rotated(1))[0].token_ids) == reply_by_hand(PROMPTS[0], 1)


class Quick(Rotate):
    reads_history = False


def test_rows_that_a_processor_reads_the_history_of_are_host_bound() -> None:
    for process, host_bound in ((Rotate(), True), (Quick(), False)):
        engine, _ = make_engine(logits_processors=[process])
        with engine:
            assert engine.client.inputs.request(PROMPTS[0], rotated(1)).replies.continuation.host_bound == host_bound
            assert not engine.client.inputs.request(PROMPTS[0], PLAIN).replies.continuation.host_bound


def test_a_class_in_place_of_an_object_is_refused() -> None:
    for wrong in ([Rotate], [print], [object()]):
        with pytest.raises(InvalidInput, match=r"each with what radixkv\.LogitsProcessor declares"):
            EngineConfig(logits_processors=wrong)
    given = [Rotate()]
    config = EngineConfig(logits_processors=given)
    given.append(Rotate())
    assert config.logits_processors == (given[0],)
