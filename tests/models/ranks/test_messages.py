"""A step that was written to a buffer and read back is the same step."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.models.loaded import SequenceInput
from radixkv.models.ranks.messages import RankLoad, Step, decode, encode

LARGEST = 2**63 - 1
NUMBERS, PAIRS = st.integers(-LARGEST, LARGEST), st.lists(st.tuples(*[st.integers(0, LARGEST)] * 2), max_size=4)


def arrays(length: int, dtype: Any) -> st.SearchStrategy[Any]:
    values = st.integers(0, int(np.iinfo(dtype).max))
    return st.lists(values, min_size=length, max_size=length).map(lambda found: np.array(found, dtype))


def load_of(length: int) -> st.SearchStrategy[Any]:
    slots = sources = arrays(length, np.int64)
    return st.builds(RankLoad, slots=slots, copies=PAIRS, sources=sources)


def input_of(length: int) -> st.SearchStrategy[Any]:
    return st.builds(
        SequenceInput, tokens=arrays(length, np.int32), start=NUMBERS, slots=arrays(length, np.int64),
        block_table=st.integers(0, 5).flatmap(lambda blocks: arrays(blocks, np.int32)), isolated=st.booleans(),
        state=st.none(), sampled_row=NUMBERS, logit_rows=NUMBERS, offset=NUMBERS,
    )  # fmt: skip


LENGTHS = st.integers(0, 5)
LOADS, INPUTS = (st.lists(LENGTHS.flatmap(each), max_size=3) for each in (load_of, input_of))
STEPS = st.builds(Step, moves=PAIRS, loads=LOADS, copies=PAIRS, inputs=INPUTS, sampled=NUMBERS)


def facts(step: Step) -> list[object]:
    """Return all fields of a step: arrays as dtype and numbers."""
    arrays = [(each.tokens, each.slots, each.block_table) for each in step.inputs]
    arrays += [(each.plan.slots, each.sources) for each in step.loads]  # type: ignore[misc]
    numbers = [(each.start, each.isolated, each.sampled_row, each.logit_rows, each.offset) for each in step.inputs]
    pairs = [list(each) for each in (step.moves, step.copies, *(load.plan.copies for load in step.loads))]
    return [[(each.dtype, each.tolist()) for each in chain(*arrays)], numbers, pairs, step.sampled]


@given(STEPS)
@example(Step())
def test_a_step_is_read_as_it_was_written(step: Step) -> None:
    buffer = encode(step)
    found = decode(np.frombuffer(buffer.tobytes(), np.int64))
    assert (buffer.dtype, facts(found)) == (np.int64, facts(step))
    assert all(type(each.isolated) is bool for each in found.inputs)
