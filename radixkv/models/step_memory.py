"""Measure the memory that the largest step of an engine takes in addition to the weights and the pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from radixkv.device import device_of
from radixkv.errors import InvalidInput
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from radixkv.models.sampling_backend import sampler_of
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.row_scores import begin_scores, max_logit_rows
from radixkv.sampling.sampler import Sampler
from radixkv.sizing.recurrent_state import StateRow, StateStep

_STATE_ROWS = 8  # of a model with recurrent state, whose rows are a part of the pool's memory
_ALTERNATIVES = 20  # of each scored token, and candidates of each beam
_TIMES = 2  # the tensors of a step that is launched, and of recorded steps, which share their memory


def step_memory(
    loaded: LoadedModel,
    *,
    block_size: int,
    max_batch_tokens: int,
    max_sequences: int,
    prefill_chunk: int,
) -> int:
    """Return the bytes to keep free for the tensors of steps: about twice the peak of the largest one. 0 on a CPU.

    The second half is for recorded steps. It is a choice: their memory has not been measured on a GPU.

    Runs one step of max_batch_tokens tokens over a small pool, in chunks of up to prefill_chunk and of up to
    max_sequences sequences, and samples from logits of max_sequences rows, once for beams. Runs it again with as many
    additional rows of logits as a step may have, and scores them; such a step is not recorded. The sequences are short:
    the partial results of attention over long contexts are not among these bytes. Raises InvalidInput, with the remedy,
    if a step does not fit. Costs two such steps, and a pool for their tokens.
    """
    device = device_of(loaded.device)
    if not device.is_gpu:
        return 0
    inputs = _largest_step(loaded, block_size, max_batch_tokens, max_sequences, prefill_chunk)
    try:
        sampled, scored = _peaks(loaded, inputs, block_size, max_sequences)
    except torch.OutOfMemoryError as error:
        raise InvalidInput(
            f"max_batch_tokens={max_batch_tokens}: a step of that many tokens does not fit into the memory that the "
            f"weights leave: lower max_batch_tokens or max_sequences={max_sequences} ({error})"
        ) from error
    device.release_cached()
    return max(_TIMES * sampled, sampled + scored)


def _peaks(loaded: LoadedModel, inputs: list[SequenceInput], block_size: int, max_sequences: int) -> tuple[int, int]:
    """Return the peak of a step that samples, and of a step that scores, in bytes."""
    device, blocks = device_of(loaded.device), sum(len(each.block_table) for each in inputs)
    runner = Runner(loaded, blocks, block_size, state_slots=len(inputs) if loaded.state else 0)
    sampler = sampler_of(loaded)
    with device.current(), torch.inference_mode():
        runner.run(inputs[:1])  # libraries allocate their workspaces, and kernels are compiled
        with device.peak() as sampled:
            logits = runner.run(inputs)
            _sample_all(sampler, logits[:1].expand(max_sequences, -1).contiguous())
        del logits
        with device.peak() as scored:
            logits = runner.run(_with_all_rows(inputs, loaded.vocab_size))
            begin_scores(logits, [0] * len(logits), _ALTERNATIVES, range(len(logits))).result()
        device.synchronize()
    return sampled.bytes, scored.bytes


def _largest_step(
    loaded: LoadedModel, block_size: int, max_batch_tokens: int, max_sequences: int, prefill_chunk: int
) -> list[SequenceInput]:
    """Return inputs of max_batch_tokens tokens, or of as many as the sequences may have, the longest first."""
    longest = min(prefill_chunk, loaded.max_length)
    rows = min(max_sequences, max_batch_tokens, _STATE_ROWS if loaded.state else max_sequences)
    left, inputs, block = max_batch_tokens, list[SequenceInput](), 0
    for later in reversed(range(rows)):
        count = min(longest, left - later)
        table = np.arange(block, block - (-count // block_size), dtype=np.int32)
        slots = block * block_size + np.arange(count)
        state = StateStep(StateRow(len(inputs))) if loaded.state else None
        inputs.append(SequenceInput(np.zeros(count, np.int32), 0, slots, table, state=state))
        left, block = left - count, block + len(table)
    return inputs


def _with_all_rows(inputs: list[SequenceInput], vocab: int) -> list[SequenceInput]:
    """Return inputs that want as many additional rows of logits as one step may have."""
    left, found = max_logit_rows(vocab), list[SequenceInput]()
    for each in inputs:
        rows = min(left, len(each.tokens) - 1)
        found.append(each._replace(logit_rows=1 + rows))
        left -= rows
    return found


def _sample_all(sampler: Sampler, logits: Tensor) -> None:
    """Sample a token from each row with parameters that take the most memory, then find candidates of each row."""
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)
    rows = [SampleRow(params, seed, 1, [0], 1) for seed in range(len(logits))]
    for candidates in (0, _ALTERNATIVES):
        sampler.begin(logits, [replace(row, candidates=candidates) for row in rows]).result()
