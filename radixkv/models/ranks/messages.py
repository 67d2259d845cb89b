"""A step as one buffer of int64, which rank 0 sends to the other ranks.

The buffer starts with the lengths of its parts. Block ids, slots and tokens are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.attention.host_store import HostLoad
from radixkv.models.loaded import SequenceInput

Buffer = NDArray[np.int64]
Pairs = Sequence[tuple[int, int]]
_HEAD, _PER_INPUT, _PER_LOAD = 5, 7, 2


class RankLoad(NamedTuple):
    """A load as sent to other ranks: the slots and copies of its plan, and its sources."""

    slots: Buffer
    copies: Pairs
    sources: Buffer

    @property
    def plan(self) -> RankLoad:
        """The part of a plan that a load reads."""
        return self


class Step(NamedTuple):
    """The work of all ranks, in this order: offloads (moves), loads, copies, and one forward of the inputs.

    `sampled` is the number of sampled tokens that the forward takes from rank 0's device.
    """

    moves: Pairs = ()
    loads: Sequence[HostLoad] = ()
    copies: Pairs = ()
    inputs: Sequence[SequenceInput] = ()
    sampled: int = 0


def encode(step: Step) -> Buffer:
    """Return a step as one buffer [n]. Inputs with recurrent state are not supported.

    >>> decode(encode(Step(moves=[(3, 0)], copies=[(1, 2)]))).copies
    [(1, 2)]
    """
    assert all(each.state is None for each in step.inputs)
    head = [len(step.moves), len(step.loads), len(step.copies), len(step.inputs), step.sampled]
    parts: list[Sequence[int] | NDArray[np.signedinteger]] = [_flat(step.moves)]
    for load in step.loads:
        parts += [(len(load.plan.copies), len(load.plan.slots)), _flat(load.plan.copies), load.plan.slots, load.sources]
    parts.append(_flat(step.copies))
    for each in step.inputs:
        lengths = (len(each.tokens), len(each.block_table))
        parts.append((*lengths, each.start, each.isolated, each.sampled_row, each.logit_rows, each.offset))
        parts += [each.tokens, each.slots, each.block_table]
    return np.concatenate([head, *(part for part in parts if len(part))], dtype=np.int64)


def decode(buffer: Buffer) -> Step:
    """Return the step of a buffer that `encode` made."""
    read = _Reader(buffer)
    moves, loads, copies, inputs, sampled = read.numbers(_HEAD)
    return Step(read.pairs(moves), [_load(read) for _ in range(loads)], read.pairs(copies),
                [_input(read) for _ in range(inputs)], sampled)  # fmt: skip


class _Reader:
    """Reads the parts of a buffer one after the other."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer, self._at = buffer, 0

    def array(self, count: int) -> Buffer:
        self._at += count
        return self._buffer[self._at - count : self._at]

    def numbers(self, count: int) -> list[int]:
        found: list[int] = self.array(count).tolist()
        return found

    def pairs(self, count: int) -> list[tuple[int, int]]:
        return [(first, second) for first, second in self.array(2 * count).reshape(-1, 2).tolist()]


def _load(read: _Reader) -> RankLoad:
    copies, slots = read.numbers(_PER_LOAD)
    return RankLoad(copies=read.pairs(copies), slots=read.array(slots), sources=read.array(slots))


def _input(read: _Reader) -> SequenceInput:
    tokens, blocks, start, isolated, sampled_row, logit_rows, offset = read.numbers(_PER_INPUT)
    return SequenceInput(
        tokens=read.array(tokens).astype(np.int32),
        slots=read.array(tokens),
        block_table=read.array(blocks).astype(np.int32),
        start=start,
        isolated=bool(isolated),
        sampled_row=sampled_row,
        logit_rows=logit_rows,
        offset=offset,
    )


def _flat(pairs: Pairs) -> list[int]:
    return [number for pair in pairs for number in pair]
