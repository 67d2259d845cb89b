"""The sampler of a model: the host's on a CPU, the device's on a GPU, with torch where the kernel does not run."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.device import device_of
from radixkv.models.sampling_backend import sampler_of
from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import HostSampler, sample
from tests.sampling.test_sampler import logits_for
from tests.virtual_gpu import VirtualGpu


def model(device: Any) -> Any:
    return SimpleNamespace(device=device, vocab_size=150)


def test_a_cpu_samples_on_the_host() -> None:
    assert isinstance(sampler_of(model(device_of("cpu").place)), HostSampler)


def test_a_gpu_without_a_kernel_draws_by_torch(virtual_gpu: VirtualGpu, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "radixkv"):
        sampler = sampler_of(model(virtual_gpu.place))
    assert isinstance(sampler, DeviceSampler)
    assert "tokens are drawn by torch, not by Triton" in caplog.text
    logits, rows = logits_for(3, 1), [SampleRow(SamplingParams(top_p=0.8), 0, position) for position in range(3)]
    with virtual_gpu.serving():
        found = sampler.begin(virtual_gpu.upload(logits), rows).result()
    assert found == sample(logits, rows)
