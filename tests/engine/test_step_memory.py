"""The pool of a GPU leaves the memory of the largest step free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from radixkv import device
from radixkv.device import Device, Peak, device_of
from radixkv.errors import InvalidInput
from radixkv.models import adapter
from radixkv.models.loaded import LoadedModel
from radixkv.models.runner import Runner
from radixkv.models.step_batch import num_logit_rows
from radixkv.models.step_memory import step_memory
from radixkv.sampling import row_scores
from radixkv.sampling.params import SampleRow
from radixkv.sampling.sampler import HostPending, HostSampler
from radixkv.sizing import memory

STEP = {"block_size": 16, "max_batch_tokens": 300, "max_sequences": 5, "prefill_chunk": 100}
FREE, TOTAL, PEAK = 700_000, 1_000_000, 1000


class Gpu(Device):
    """A GPU in the place of the CPU, with memory of its own."""

    is_gpu: ClassVar[bool] = True

    def memory(self) -> tuple[int, int]:
        return FREE, TOTAL

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        found = Peak()
        yield found
        found.bytes = PEAK

    def release_cached(self) -> None:
        self.released = True


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return adapter.load("tiny")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu(torch.device("cpu"))
    monkeypatch.setitem(device._DEVICES, found.place, found)
    return found


@pytest.mark.parametrize(
    ("tokens", "max_length", "counts"),
    [(300, 4096, [100, 100, 98, 1, 1]), (300, 50, [50] * 5), (3, 4096, [1, 1, 1])],
)
def test_the_largest_step_has_all_tokens_and_samples_for_all_sequences(
    gpu: Gpu, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tokens: int, max_length: int, counts: list[int]
) -> None:
    steps: list[list[int]] = []
    rows: list[int] = []
    drawn: list[tuple[int, list[int]]] = []
    run = Runner.run

    def counted(self: Runner, inputs: Any, *rest: Any) -> torch.Tensor:
        steps.append([len(each.tokens) for each in inputs])
        rows.append(num_logit_rows(inputs) - len(inputs))
        assert self.store.num_blocks == sum(-(-count // 16) for count in counts)
        return run(self, inputs, *rest)

    class Recording(HostSampler):
        def begin(self, logits: torch.Tensor, rows: Sequence[SampleRow], *rest: Any) -> HostPending:
            drawn.append((len(logits), [row.candidates for row in rows]))
            return super().begin(logits, rows, *rest)

    monkeypatch.setattr(Runner, "run", counted)
    monkeypatch.setattr("radixkv.models.step_memory.sampler_of", lambda loaded: Recording())
    monkeypatch.setattr(row_scores, "MOST_LOGITS", 200 * loaded.vocab_size + 1)
    shorter = replace(loaded, max_length=max_length)
    assert step_memory(shorter, **{**STEP, "max_batch_tokens": tokens}) == 2 * PEAK
    assert steps == [counts[:1], counts, counts]
    assert rows == [0, 0, min(sum(counts) - len(counts), 200)]
    assert drawn == [(5, [0] * 5), (5, [20] * 5)]
    assert gpu.released, "the pool is sized by the free memory"


@pytest.mark.usefixtures("gpu")
def test_an_automatic_pool_leaves_that_memory_and_a_share_of_the_card() -> None:
    device = str(device_of("cpu").place)
    assert memory.pool_memory("auto", device, 2 * PEAK) == FREE - 2 * PEAK - 30_000
    assert memory.pool_memory("auto", device, 10 * TOTAL) == 0
    assert memory.pool_memory("1MB", device, 2 * PEAK) == 1_000_000


def test_a_step_with_all_rows_of_logits_takes_more_than_a_plain_one(
    gpu: Gpu, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second measurement is of the scored step, which is not recorded: it counts once."""
    peaks = iter((PEAK, 3 * PEAK))

    @contextmanager
    def peak() -> Iterator[Peak]:
        found = Peak()
        yield found
        found.bytes = next(peaks)

    monkeypatch.setattr(gpu, "peak", peak)
    assert step_memory(loaded, **STEP) == PEAK + 3 * PEAK


@pytest.mark.usefixtures("gpu")
def test_a_step_that_does_not_fit_is_refused_with_the_remedy(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(Runner, "run", out_of_memory)
    with pytest.raises(
        InvalidInput, match=r"max_batch_tokens=300: .* lower max_batch_tokens or max_sequences=5 .*20 GiB"
    ):
        step_memory(loaded, **STEP)


def test_a_cpu_runs_no_step_for_it(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Runner, "run")
    assert step_memory(loaded, **STEP) == 0
