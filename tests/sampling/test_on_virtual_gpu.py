"""`DeviceSampler` on a simulated GPU: nothing waits, nothing is overwritten, and late results are right."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.device import device_of
from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import sample
from radixkv.sampling.token_counts import TokenCounts
from radixkv.sampling.token_mask import TokenMasks
from tests.sampling.lives import PARAM_LISTS, Life, compare_lives
from tests.sampling.test_sampler import logits_for
from tests.sampling.test_token_mask import row
from tests.virtual_gpu import VirtualGpu, installed

PENALTIES = SamplingParams(temperature=0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5)


@settings(max_examples=6, deadline=None)
@given(params=PARAM_LISTS, seed=st.integers(0, 10**6))
def test_streams_get_the_tokens_of_the_host_sampler(params: list[SamplingParams], seed: int) -> None:
    with installed(VirtualGpu(seed)) as gpu:
        with gpu.serving():
            compare_lives(params, seed, DeviceSampler(gpu.place), gpu.place)
        gpu.synchronize()
        assert not gpu.findings


def test_masks_of_steps_that_overlap(virtual_gpu: VirtualGpu) -> None:
    masks, rows = TokenMasks(), [SampleRow(SamplingParams(), 0, 0), SampleRow(PENALTIES, 0, 0, stream=1)]
    device = DeviceSampler(virtual_gpu.place)
    flights = []
    with virtual_gpu.serving():
        for number in range(4):
            step = masks.begin({"a": row(number, number + 40), "b": row(number + 9)})
            step.wait()
            there = device_of(virtual_gpu.place).upload(logits_for(2, number))
            flights.append(device.begin(there, rows, None, step.select(["a", "b"])))
    for number, flight in enumerate(flights):
        first, second = flight.result().tokens
        assert first in (number, number + 40) and second == number + 9


@pytest.mark.parametrize("after", range(0, 40, 3))
def test_a_lack_of_memory_at_any_allocation_can_be_repeated(after: int) -> None:
    """The counts are right afterwards, even for a token that is in flight, and for a beam in the same batch."""
    with installed(VirtualGpu(after)) as gpu:
        device = DeviceSampler(gpu.place)
        stream = Life(0, PENALTIES.but(logprobs=1), [1, 2, 2], 1)
        beam = Life(1, PENALTIES, [1, 2, 2], 1, candidates=3)
        logits = logits_for(2, 3)
        there = gpu.upload(logits)
        for step in range(3):
            batch = [stream, beam] if step != 1 else [stream]
            if step == 1 or after % 2:
                gpu.inject("allocation", after)
            expected = sample(logits[: len(batch)], [each.row(whole=True) for each in batch])
            rows, sources = [each.row() for each in batch], list(range(len(batch)))
            pending = None
            while pending is None:  # faults of two steps may meet in one
                with suppress(torch.OutOfMemoryError):
                    pending = device.begin(there, rows, sources)
            stream.land()
            stream.flying = expected.tokens[0]
            beam.tokens.append(step)
            assert pending.result() == expected
        assert not gpu.findings


def test_beams_and_drawn_streams_take_no_slot_from_each_other(virtual_gpu: VirtualGpu) -> None:
    """Each part of a batch is planned on its own; the second would take over the slots of the first."""
    counts = TokenCounts(virtual_gpu.place)
    device = DeviceSampler(virtual_gpu.place, counts=counts)
    lives = [Life(number, PENALTIES, [number, 7], 1, candidates=2 * (number % 2)) for number in range(12)]
    logits = logits_for(12, 3)
    there = virtual_gpu.upload(logits)
    for _ in range(3):
        expected = sample(logits, [each.row(whole=True) for each in lives])
        assert device.begin(there, [each.row() for each in lives]).result() == expected
        for each, token in zip(lives, expected.tokens, strict=True):
            each.tokens.append(token)
    filling = counts.plan([each.row() for each in lives], 150)
    assert not len(filling.cleared) and len(counts.table) == 16
