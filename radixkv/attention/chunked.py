"""Chunked attention as plain attention: a token sees those before it in its own chunk of absolute positions.

Where chunks are whole blocks, what a step computes of one of them is a sequence that begins there: a shorter table, and
lengths counted from it. No mask and no kernel has to know of chunks. Knows lengths and tables. Does not know layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import InvalidInput

Table = NDArray[np.int32]


def check(chunk: int, block_size: int) -> None:
    """Raise InvalidInput if a chunk is no whole number of blocks: it would begin inside one, behind others' keys."""
    if chunk % block_size:
        raise InvalidInput(f"this model attends in chunks of {chunk} tokens, which block_size={block_size} must divide")


def cut(
    tables: Sequence[Table], kv_lengths: Sequence[int], query_lengths: Sequence[int], chunk: int, block_size: int
) -> tuple[list[Table], list[int], list[int]]:
    """Tables, kv lengths and query lengths of the same rows in the same order, a sequence for each chunk they lie in.

    Sequence `s` has rows for its last `query_lengths[s]` positions, at least one. Costs nothing per token.
    """
    check(chunk, block_size)
    pieces = []
    for table, end, rows in zip(tables, kv_lengths, query_lengths, strict=True):
        first = end - rows
        for start in range(first // chunk * chunk, end, chunk):
            stop = min(start + chunk, end)
            pieces.append((table[start // block_size : -(-stop // block_size)], stop - start, stop - max(start, first)))
    cut_tables, lengths, queries = zip(*pieces, strict=True)
    return list(cut_tables), list(lengths), list(queries)
