"""Logits processors: those of the parameters change the bits that they always changed, custom ones their rows only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor

from radixkv import LogitsProcessor, SampleRow, SamplingParams
from radixkv.errors import InvalidInput
from radixkv.sampling import logits_processors
from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.logits_processors import adjusted, completing_tokens, nothing_to_draw, read_history
from radixkv.sampling.params import parameters
from radixkv.sampling.sampler import HostSampler, Sampler, sample
from tests.sampling.test_sampler import logits_for

SAMPLERS: list[Callable[[Sequence[LogitsProcessor]], Sampler]] = [
    HostSampler,
    lambda processors: DeviceSampler(torch.device("cpu"), processors=processors),
]
GREEDY = SamplingParams(temperature=0)


def test_fixed_bits_of_every_parameter() -> None:
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.1, frequency_penalty=0.7, min_tokens=3)
    row = SampleRow(params.but(logit_bias={2: 0.3}), 0, 6, [0, 1, 1, 3, 1, 4], 4, frozenset([5]))
    [found] = adjusted(torch.tensor([[1.0, -1.0, 0.5, 2.0, 3.0, 9.0]]), [row])
    assert [value.hex() for value in found.tolist()] == [
        "0x1.89d89e0000000p-1",
        "-0x1.0ccccc0000000p+1",
        "0x1.99999a0000000p-1",
        "0x1.89d89e0000000p+0",
        "0x1.81f8200000000p+0",
        "-inf",
    ]


def test_each_parameter_that_adjusts_logits_has_a_processor() -> None:
    """A value other than the default, of which some processor says that it applies."""
    values: dict[str, Any] = {"logit_bias": {1: 1.0}, "bad_words": ("x",)}
    names = [name for name, declared in parameters(SamplingParams).items() if declared.adjusts_logits]
    for name in names:
        changed = SamplingParams(**{name: values.get(name, 2)})
        assert changed.adjusts_logits
        assert sum(process.applies(changed) for process in logits_processors.PROCESSORS) == 1, name
    assert not any(process.applies(SamplingParams()) for process in logits_processors.PROCESSORS)


# ---- bad words

WORDS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(words=WORDS, prompt=st.lists(st.integers(0, 4), max_size=5), reply=st.lists(st.integers(0, 4), max_size=8))
def test_bad_words_exclude_the_tokens_that_transformers_excludes(
    words: list[tuple[int, ...]], prompt: list[int], reply: list[int]
) -> None:
    params = SamplingParams(bad_words="x")
    row = SampleRow(params, 0, 0, prompt + reply, len(prompt), bad_words=tuple(words))
    logits = logits_for(1, len(reply), vocab=6)
    reference = NoBadWordsLogitsProcessor([list(word) for word in words])
    expected = reference(torch.tensor([reply]).long(), logits.clone())
    assert torch.equal(adjusted(logits, [row]), expected)
    assert set(completing_tokens(row)) == set(torch.isinf(expected[0]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("make", SAMPLERS)
def test_bad_words_hold_in_both_samplers(make: Callable[[Sequence[LogitsProcessor]], Sampler]) -> None:
    banned = GREEDY.but(bad_words="x")
    rows = [
        SampleRow(banned, 0, 3, [1, 2, 3], 1, bad_words=((3, 9), (8,))),
        SampleRow(GREEDY, 0, 3, [1, 2, 3], 1),
        SampleRow(banned, 0, 3, [1, 2, 3], 1, bad_words=((2, 9), (2, 3, 8))),
        SampleRow(banned, 0, 3, [1, 2, 3], 3, bad_words=((3, 9), (2, 3, 8))),  # in the prompt
    ]
    logits = torch.arange(10.0).repeat(4, 1)
    assert make(()).begin(logits, rows).result().tokens == [7, 9, 9, 9]


# ---- custom processors


class Only(LogitsProcessor):
    """Excludes all tokens but those of extra_args["only"], and records its calls."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def applies(self, params: SamplingParams) -> bool:
        return "only" in params.extra_args

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        assert logits.shape[0] == len(rows)
        self.calls.append([row.position for row in rows])
        for values, row in zip(logits, rows, strict=True):
            kept = values[row.params.extra_args["only"]].clone()
            values.fill_(-torch.inf)
            values[row.params.extra_args["only"]] = kept


def only(*tokens: int, **params: Any) -> SamplingParams:
    return GREEDY.but(extra_args={"only": list(tokens)}, **params)


@pytest.mark.parametrize("make", SAMPLERS)
def test_a_custom_processor_is_called_once_for_its_rows(
    make: Callable[[Sequence[LogitsProcessor]], Sampler],
) -> None:
    process = Only()
    params = [only(3, 5), GREEDY, only(0), only(2, 8, logit_bias={2: 7.0}), GREEDY.but(logprobs=1), only(1, logprobs=2)]
    rows = [SampleRow(each, 0, position) for position, each in enumerate(params)]
    logits = torch.arange(10.0).repeat(6, 1)
    before = logits.clone()
    found = make([process]).begin(logits, rows).result()
    assert found.tokens == [5, 9, 0, 2, 9, 1]
    assert process.calls == [[0, 2, 3, 5]]
    assert torch.equal(logits, before)
    assert found.logprobs is not None and found.logprobs[5] is not None
    assert [token for token, _ in found.logprobs[5].top] == [9, 8]  # of the model's own distribution
    make([process]).begin(logits[:2], [rows[0], rows[2]])
    assert process.calls[1:] == [[0, 2]]
    make([process]).begin(logits[:1], rows[1:2])
    assert len(process.calls) == 2


@pytest.mark.parametrize("make", SAMPLERS)
def test_custom_processors_follow_the_parameters_and_one_another(
    make: Callable[[Sequence[LogitsProcessor]], Sampler],
) -> None:
    seen: list[list[float]] = []

    class Double(LogitsProcessor):
        def applies(self, params: SamplingParams) -> bool:
            return bool(params.extra_args)

        def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
            seen.append(logits[0].tolist())
            logits.mul_(2)

    rows = [SampleRow(GREEDY, 0, 0), SampleRow(GREEDY.but(logit_bias={0: 1.0}, extra_args={"x": 1}), 0, 0)]
    make([Double(), Double()]).begin(torch.tensor([[3.0, 4.0], [3.0, 4.5]]), rows)
    assert seen == [[4.0, 4.5], [8.0, 9.0]]


@pytest.mark.parametrize("make", SAMPLERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits: logits * 2, "the logits processor Wrong returned Tensor: it must change the logits in place"),
        (lambda logits: [logits.unsqueeze_(0)].clear(), "Wrong changed the shape of the logits from"),
    ],
)
def test_a_processor_with_another_protocol_is_named(
    make: Callable[[Sequence[LogitsProcessor]], Sampler], change: Callable[[Tensor], Any], message: str
) -> None:
    class Wrong(LogitsProcessor):
        def applies(self, params: SamplingParams) -> bool:
            return params.top_k == 5

        def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
            return change(logits)

    rows = [SampleRow(SamplingParams(top_k=5), 0, 0), SampleRow(GREEDY, 0, 0)]
    logits = torch.arange(1.0, 9.0).repeat(2, 1)
    before = logits.clone()
    with pytest.raises(InvalidInput, match=message):
        make([Wrong()]).begin(logits[:1], rows[:1])
    assert torch.equal(logits, before)
    assert make([Wrong()]).begin(logits[1:], rows[1:]).result().tokens == [7]


class Fill(LogitsProcessor):
    """Sets all logits to a number."""

    reads_history = False

    def applies(self, params: SamplingParams) -> bool:
        return "fill" in params.extra_args

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        for values, row in zip(logits, rows, strict=True):
            values[:: row.params.extra_args.get("step", 1)] = row.params.extra_args["fill"]


@pytest.mark.parametrize("make", SAMPLERS)
@pytest.mark.parametrize("random", [False, True])
def test_rows_that_a_processor_breaks_are_broken_alone(
    make: Callable[[Sequence[LogitsProcessor]], Sampler], random: bool
) -> None:
    process = Fill()
    base = SamplingParams() if random else GREEDY
    given = [{"fill": float("nan"), "step": 7}, {}, {"fill": -torch.inf}, {"fill": 1.0}]
    rows = [SampleRow(base.but(extra_args=each), 1, at) for at, each in enumerate(given)]
    found = make([process]).begin(logits_for(4, 1), rows).result()
    assert found.broken == {0, 2}
    assert found.tokens[1] == sample(logits_for(4, 1)[1:2], rows[1:2]).tokens[0]
    message = str(nothing_to_draw([process, Only()], rows[0].params))
    assert message.endswith("leave nothing to draw, or a logits processor has left NaN or only -inf (Fill)")
    assert str(nothing_to_draw([process], rows[1].params)).endswith("leave nothing to draw")


def test_rows_that_need_the_last_token_are_found_at_submission() -> None:
    assert read_history([Fill(), Only()], only(1))
    assert not read_history([Fill(), Only()], GREEDY.but(extra_args={"fill": 1.0}))
    assert not read_history([], only(1))
