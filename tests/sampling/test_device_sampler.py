"""`DeviceSampler` draws the tokens of `sample`, in a number of launches that does not depend on the rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import InvalidInput
from radixkv.sampling.batch_draw import DrawRows, draw
from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import sample
from radixkv.sampling.token_mask import TokenMasks
from tests.sampling.launches import Launches
from tests.sampling.lives import PARAM_LISTS, VOCAB, Life, compare_lives
from tests.sampling.test_sampler import logits_for
from tests.sampling.test_token_mask import row
from tests.selection import mostly_long
from tests.simulation.draw import draw as scenario
from tests.simulation.world import World

CPU = torch.device("cpu")
CASES = 25


@settings(max_examples=CASES, deadline=None)
@given(params=PARAM_LISTS, seed=st.integers(0, 10**6))
def test_streams_get_the_tokens_of_the_host_sampler(params: list[SamplingParams], seed: int) -> None:
    compare_lives(params, seed, DeviceSampler(CPU), CPU)


PENALTIES = SamplingParams(temperature=0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5)
BATCHES = {
    "greedy": [SamplingParams(temperature=0)],
    "random": [SamplingParams()],
    "top-p": [SamplingParams(top_p=0.9)],
    "top-k": [SamplingParams(top_k=5)],
    "penalties": [PENALTIES],
    "log probabilities": [SamplingParams(temperature=0, logprobs=5)],
    "bias": [SamplingParams(temperature=0, logit_bias={3: 1.0, 5: -1.0})],
    "min_tokens": [SamplingParams(temperature=0, min_tokens=50)],
    "bad words": [SamplingParams(temperature=0, bad_words=["word"])],
    "beams": [SamplingParams(beam_width=2)],
    "beams with penalties": [PENALTIES.but(beam_width=2, logprobs=3, bad_words=["word"])],
    "beams and others": [SamplingParams(beam_width=2), SamplingParams(temperature=0), SamplingParams(temperature=0)],
    "mixed": [
        SamplingParams(min_p=0.1, logprobs=2, min_tokens=50, logit_bias={7: 2.0}),
        SamplingParams(temperature=0.5),
        PENALTIES,
    ],
}
# With the torch operators of `draw`; an upload and a download count as one each.
LAUNCHES = {
    "greedy": 4,
    "random": 66,
    "top-p": 64,
    "top-k": 64,
    "penalties": 27,
    "log probabilities": 13,
    "bias": 11,
    "min_tokens": 10,
    "mixed": 152,
    "bad words": 10,
    "beams": 11,
    "beams with penalties": 35,
    "beams and others": 21,
}


def lived(number: int, params: SamplingParams) -> Life:
    """Return a stream with a reply, whose rows have candidates if the parameters ask for beams."""
    words = ((2, 9), (3, 8, 7), (number,)) if params.bad_words else ()
    return Life(number, params, [1, 2, 3, number], 2, candidates=params.beam_width // 2 * 3, bad_words=words)


@pytest.mark.parametrize("kind", BATCHES)
def test_the_number_of_launches_does_not_depend_on_the_rows(kind: str) -> None:
    counts = []
    for size in (len(BATCHES[kind]), 7, 64):
        device = DeviceSampler(CPU)
        lives = [lived(number, each) for number, each in enumerate((BATCHES[kind] * size)[:size])]
        logits = torch.randn(size, VOCAB)
        first = device.begin(logits, [each.row() for each in lives]).result()  # fills the slots
        for each, token in zip(lives, first.tokens, strict=True):
            each.flying = token
            if each.host_bound:
                each.land()
        with Launches() as launches:
            device.begin(logits, [each.row() for each in lives])
        counts.append(launches.found)
    assert counts[0] == counts[1] == counts[2]
    assert counts[0].total() <= LAUNCHES[kind]


def test_a_batch_that_raises_can_be_repeated_in_parts() -> None:
    device = DeviceSampler(CPU)
    lives = [Life(number, PENALTIES, [number, 5], 1) for number in range(3)]
    logits = logits_for(4, 3)
    pending = device.begin(logits[:3], [each.row() for each in lives])
    for each, token in zip(lives, pending.result().tokens, strict=True):
        each.flying = token
    bad = Life(3, PENALTIES.but(logit_bias={VOCAB: 1.0}), [1], 1)
    with pytest.raises(InvalidInput, match="logit_bias names token 150"):
        device.begin(logits, [each.row() for each in (*lives, bad)])
    for part in ([0, 1], [2]):
        chosen = [lives[at] for at in part]
        found = device.begin(logits, [each.row() for each in chosen], part).result().tokens
        assert found == sample(logits[part], [each.row(whole=True) for each in chosen]).tokens


def test_a_failed_launch_leaves_the_counts_right() -> None:
    def no_memory(*arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    draws = [draw]
    device = DeviceSampler(CPU, lambda *arguments: draws[0](*arguments))
    each = Life(0, PENALTIES.but(temperature=1.0), [1, 2], 1)
    logits = logits_for(1, 3)
    for _ in range(4):
        draws[0] = no_memory
        with pytest.raises(torch.OutOfMemoryError):
            device.begin(logits, [each.row()])
        draws[0] = draw
        pending = device.begin(logits, [each.row()])
        assert pending.result() == sample(logits, [each.row(whole=True)])
        each.land()
        each.flying = int(pending.tokens[0])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_kernels_get_aligned_columns(size: int) -> None:
    """Triton compiles a kernel again for addresses that are no multiples of 16."""
    seen: list[int] = []

    def kernel(logits: torch.Tensor, best: torch.Tensor, given: DrawRows) -> torch.Tensor:
        seen.extend(each.data_ptr() % 16 for each in (logits, best, *given.tensors(logits)))
        return draw(logits, best, given)

    rows = [SampleRow(SamplingParams(top_p=0.5), 0, 0)] * size
    DeviceSampler(CPU, kernel).begin(logits_for(size, 0, vocab=160), rows)
    assert seen == [0] * 8


def test_rows_may_be_none_while_prompts_are_computed() -> None:
    logits = logits_for(3, 1)
    logits[1, 4] = torch.nan
    pending = DeviceSampler(CPU).begin(logits, [], [])
    assert pending.finite() == [True, False, True]
    assert pending.result().tokens == []


def test_masked_rows_leave_others_and_the_model_apart() -> None:
    """A row may be broken because the model computed NaN, or because nothing is left to draw."""
    logits = logits_for(3, 1)
    logits[1, 4] = torch.nan
    step = TokenMasks().begin({"a": row(3, 8), "b": row()})
    step.wait()
    rows = [SampleRow(SamplingParams(logprobs=1), 0, 0)] * 3
    keys = ["a", None, "b"]
    pending = DeviceSampler(CPU).begin(logits, rows, None, step.select(keys))
    expected = sample(logits, rows, step.select(keys))
    assert pending.finite() == [True, False, True]
    assert pending.result().broken == expected.broken == {1, 2}
    assert pending.result().tokens[0] == expected.tokens[0]
    assert expected.logprobs is not None and pending.result().logprobs is not None
    assert pending.result().logprobs[0] == expected.logprobs[0]


def test_a_mask_holds_for_a_greedy_batch_of_all_rows() -> None:
    logits, rows = logits_for(2, 1), [SampleRow(SamplingParams(temperature=0), 0, 0)] * 2
    step = TokenMasks().begin({"a": row(3, 8), "b": row(7)})
    step.wait()
    found = DeviceSampler(CPU).begin(logits, rows, None, step.select(["a", "b"])).result()
    assert found == sample(logits, rows, step.select(["a", "b"]))
    assert found.tokens[1] == 7


@pytest.mark.parametrize("seed", mostly_long([0, 5, 14, 32, 41, 75, 80, 116], 5, 14))
def test_simulated_lives_of_an_engine_get_the_same_answers(seed: int) -> None:
    """Requests with penalties fork, are preempted, fail and end; the world checks each answer."""
    World(scenario(seed), sampler=DeviceSampler(CPU)).run()
