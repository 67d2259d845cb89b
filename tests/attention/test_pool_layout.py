"""The pool of a GPU and its block tables are in the paged layout that kernels of others read: pages of 16 tokens, HND.

So such kernels could attend over them without a copy: one paged call for each level of the tree.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from radixkv.attention import plan
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv_kernels import reference

PREFIX, BRANCHES, SIZE = [0, 1, 2], [[3, 4], [5, 6]], 16
TABLES = [[*PREFIX, *branch, 7 + 2 * place + member] for place, branch in enumerate(BRANCHES) for member in range(2)]
LENGTHS = [81, 96, 85, 90]
"""Four sequences in depth-first order: all share three blocks, two share two more, and each has a part of a block."""


def filled() -> KVStore:
    torch.manual_seed(0)
    store = KVStore([LayerShape(2, 8, 8)], 12, SIZE, blocks_first=True, dtype=torch.float64)
    store.write(0, torch.arange(12 * SIZE), *torch.randn(2, 2, 12 * SIZE, 8, dtype=torch.float64))
    return store


def test_pages_are_heads_by_tokens_by_numbers_in_one_piece() -> None:
    for pool in filled().tensors:
        pages = pool.transpose(0, 1)
        assert pages.shape == (12, 2, SIZE, 8) and pages.is_contiguous() and pages.data_ptr() == pool.data_ptr()


def test_shared_runs_are_whole_pages_and_their_rows_are_adjacent() -> None:
    work = plan.build([np.array(table, np.int32) for table in TABLES], LENGTHS, [1] * 4, block_size=SIZE, min_saving=1)
    shared = 0
    for item in range(len(work.tokens)):
        rows = work.row_ids[work.row_offset[item] :][: work.rows[item]]
        assert work.kv_start[item] % SIZE == 0
        if len(rows) > 1:
            shared += 1
            assert work.tokens[item] % SIZE == 0 and all(second - first == 1 for first, second in pairwise(rows))
    assert shared == 3


def test_a_paged_call_for_each_level_and_a_merge_of_states_are_the_attention() -> None:
    """Each level is a call over (indptr, indices, last page); its log-sum-exps merge the levels."""
    store = filled()
    keys, values = (part[0].tensors[0].transpose(0, 1) for part in (store.key_parts, store.value_parts))
    query = torch.randn(4, 4, 8, dtype=torch.float64)
    levels = [
        ([[0, 1, 2, 3]], [PREFIX], [48]),
        ([[0, 1], [2, 3]], BRANCHES, [32, 32]),
        ([[row] for row in range(4)], [table[5:] for table in TABLES], [length - 80 for length in LENGTHS]),
    ]
    outputs, sums = torch.zeros(3, 4, 4, 8, dtype=torch.float64), torch.zeros(3, 4, 4, dtype=torch.float64)
    for level, (groups, pages, tokens) in enumerate(levels):
        for rows, indices, count in zip(groups, pages, tokens, strict=True):
            key, value = (pool[indices].transpose(0, 1).flatten(1, 2)[:, :count] for pool in (keys, values))
            scores = torch.einsum("rhd,hkd->rhk", query[rows], key.repeat_interleave(2, 0))
            outputs[level, rows] = torch.einsum("rhk,hkd->rhd", scores.softmax(2), value.repeat_interleave(2, 0))
            sums[level, rows] = scores.logsumexp(2)
    merged = (sums.softmax(0)[..., None] * outputs).sum(0)
    pools = store.keys[0], store.values[0]
    expected = reference.attend(query.transpose(0, 1), *pools, TABLES, LENGTHS, [1] * 4, scale=1.0)
    torch.testing.assert_close(merged, expected)
