"""Chunked attention: each row reads the keys of its own chunk up to itself, each once, and the lists know of none."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention import chunked, worklist
from radixkv.errors import InvalidInput
from radixkv_kernels.work_list import WorkList
from tests.attention.test_worklist import SETTINGS, batches, check_merge, covered


def slots_read(work: WorkList) -> Counter[tuple[int, int]]:
    """How often each (row, slot) stands in the list, visible pairs only."""
    pairs: Counter[tuple[int, int]] = Counter()
    for (row, _, slot), times in covered(work).items():
        pairs[row, slot] += times
    return pairs


@given(batches(), st.integers(1, 6), st.sampled_from([1, 256]))
@SETTINGS
def test_every_row_reads_its_own_chunk(
    batch: tuple[list[list[int]], list[int], list[int], int], blocks: int, worth: int
) -> None:
    _, _, _, size = batch
    chosen = [(np.array(table, np.int32), n, rows) for table, n, rows in zip(*batch[:3], strict=True) if rows]
    chunk, row, expected = blocks * size, 0, Counter[tuple[int, int]]()
    for table, length, rows in chosen:
        for position in range(length - rows, length):
            keys = range(position // chunk * chunk, position + 1)
            expected.update((row, int(table[key // size]) * size + key % size) for key in keys)
            row += 1
    if not chosen:
        return
    tables, lengths, queries = (list(part) for part in zip(*chosen, strict=True))
    sequences = chunked.cut(tables, lengths, queries, chunk, size)
    work = worklist.build(*sequences, block_size=size, worth=worth)
    assert slots_read(work) == expected
    check_merge(work)


def test_a_step_within_one_chunk_is_a_shorter_table() -> None:
    table = np.arange(10, 20, dtype=np.int32)
    tables, lengths, queries = chunked.cut([table], [36], [3], 16, 4)
    assert ([each.tolist() for each in tables], lengths, queries) == ([[18]], [4], [3])


def test_a_step_over_a_boundary_is_a_sequence_on_either_side() -> None:
    table = np.arange(10, 20, dtype=np.int32)
    tables, lengths, queries = chunked.cut([table], [34], [5], 16, 4)
    assert [each.tolist() for each in tables] == [[14, 15, 16, 17], [18]]
    assert (lengths, queries) == ([16, 2], [3, 2])


def test_chunks_are_whole_blocks() -> None:
    with pytest.raises(InvalidInput, match="chunks of 8192 tokens, which block_size=24 must divide"):
        chunked.check(8192, 24)
    chunked.check(8192, 16)
