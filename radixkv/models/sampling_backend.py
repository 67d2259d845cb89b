"""Choose the sampler of a model's logits: on a GPU, the one that works there, with a kernel that was proven at load."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.attention import triton_backend
from radixkv.device import device_of, refuse_fatal
from radixkv.models.loaded import LoadedModel
from radixkv.sampling import batch_draw
from radixkv.sampling.batch_draw import DrawRows
from radixkv.sampling.device_sampler import DeviceSampler, Draw
from radixkv.sampling.logits_processors import LogitsProcessor
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import HostSampler, Sampler

_log = logging.getLogger("radixkv")
_KINDS = (
    SamplingParams(),
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=50, top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, logit_bias={0: 1.0}, min_tokens=1, logprobs=1),
    SamplingParams(beam_width=2),
)
"""Rows that launch all operators of a sampler."""


def sampler_of(loaded: LoadedModel, processors: Sequence[LogitsProcessor] = ()) -> Sampler:
    """Return a new sampler for a model's logits, which applies custom `processors`.

    On a GPU it has run once, so that serving compiles nothing. The draws use a kernel, or torch's operators, with a
    warning, if the kernel cannot run or draws other tokens. Costs a few batches of `len(_KINDS)` rows.
    """
    if not device_of(loaded.device).is_gpu:
        return HostSampler(processors)
    reason = triton_backend.device_obstacle(loaded.device)
    if reason is None:
        try:
            reference, _ = _tried(loaded, batch_draw.draw, ())
            tokens, sampler = _tried(loaded, draw_by_kernel, processors)
            if tokens == reference:
                return sampler
            reason = "the kernel draws other tokens"
        except Exception as error:  # compilers raise exceptions of any type
            refuse_fatal(error)
            reason = f"{type(error).__name__}: {error}"
    _log.warning("tokens are drawn by torch, not by Triton: %.200s", reason)
    return _tried(loaded, batch_draw.draw, processors)[1]


def draw_by_kernel(logits: Tensor, best: Tensor, rows: DrawRows) -> Tensor:
    """Draw with the Triton kernel."""
    from radixkv_kernels import sampling  # imports Triton

    return sampling.draw(logits, best, *rows.tensors(logits))


def _tried(loaded: LoadedModel, draw: Draw, processors: Sequence[LogitsProcessor]) -> tuple[list[int], Sampler]:
    """Return the tokens of a batch, and the sampler that has sampled it."""
    device = device_of(loaded.device)
    sampler = DeviceSampler(loaded.device, draw, processors=processors)
    rows = [
        SampleRow(params, 0, 1, [0, 1], 1, frozenset([1]), candidates=params.beam_width // 2 * 3) for params in _KINDS
    ]
    generator = torch.Generator().manual_seed(0)
    logits = device.upload(torch.randn(len(rows), loaded.vocab_size, generator=generator) * 4)
    return sampler.begin(logits, rows).result().tokens, sampler
