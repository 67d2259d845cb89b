"""The measured shapes: heads, batches as block tables, and the least bytes and operations of each."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BLOCK = 16
"""Tokens of a block."""

GUARD = 1
"""Blocks that no table names: they hold NaN and must not be read."""

Table = NDArray[np.int32]


@dataclass(frozen=True)
class HeadShape:
    """The heads of one layer, on one GPU."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    itemsize: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that a token has in one layer.

        >>> LLAMA_8B.token_bytes, LLAMA_70B_RANK.token_bytes
        (4096, 512)
        """
        return self.kv_heads * self.dim * 2 * self.itemsize

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float(self.dim**-0.5)


LLAMA_8B = HeadShape("Llama-3-8B", 32, 8, 128)
LLAMA_70B_RANK = HeadShape("Llama-3-70B, 1 of 8 GPUs", 8, 1, 128)


@dataclass(frozen=True)
class Batch:
    """Sequences that decode, or compute a chunk: their block tables, all their keys, their query rows.

    `levels` are the runs of a cascade: for each level (sequences, blocks) of its runs, in the order of sequences.
    """

    name: str
    tables: tuple[Table, ...]
    kv: tuple[int, ...]
    queries: tuple[int, ...]
    levels: tuple[tuple[tuple[int, Table], ...], ...] = field(default=(), repr=False)

    @property
    def num_blocks(self) -> int:
        """Blocks that a pool needs for it, guards included."""
        return GUARD + 1 + max(int(table.max()) for table in self.tables)

    @property
    def rows(self) -> int:
        """Query rows of all sequences."""
        return sum(self.queries)

    @property
    def flat_tokens(self) -> int:
        """Keys that are read if each sequence reads alone."""
        return sum(self.kv)

    @property
    def unique_tokens(self) -> int:
        """Distinct keys, which have to be read at least once."""
        used = np.zeros(self.num_blocks, dtype=np.int64)
        for table, length in zip(self.tables, self.kv, strict=True):
            full, rest = divmod(length, BLOCK)
            used[table[:full]] = BLOCK
            if rest:
                used[table[full]] = max(used[table[full]], rest)
        return int(used.sum())

    @property
    def visible(self) -> int:
        """Pairs of a row and a key that it sees."""
        return sum(n * (kv - n) + n * (n + 1) // 2 for kv, n in zip(self.kv, self.queries, strict=True))


def kv_bytes(shape: HeadShape, tokens: int) -> int:
    """Return the bytes of these keys and their values in one layer."""
    return tokens * shape.token_bytes


def row_bytes(shape: HeadShape, rows: int) -> int:
    """Return the bytes of these rows of queries, read, and of outputs, written."""
    return 2 * rows * shape.heads * shape.dim * shape.itemsize


def flops(shape: HeadShape, batch: Batch) -> int:
    """Operations of both products, those of masked pairs left out."""
    return 4 * shape.heads * shape.dim * batch.visible


def tb_s(nbytes: float, us: float) -> float:
    """Terabytes a second.

    >>> tb_s(4.3e9, 1000)
    4.3
    """
    return nbytes / us / 1e6


def tflop_s(operations: float, us: float) -> float:
    """Tera-operations a second."""
    return operations / us / 1e6


class _Blocks:
    """Hands out block ids: in order, or as a long life of the pool leaves them. The first GUARD ids stay unused."""

    def __init__(self, count: int, *, scattered: bool) -> None:
        ids = np.arange(GUARD, GUARD + count, dtype=np.int32)
        self._ids = np.random.default_rng(0).permutation(ids) if scattered else ids
        self._next = 0

    def take(self, tokens: int) -> Table:
        start, self._next = self._next, self._next - (-tokens // BLOCK)
        return self._ids[start : self._next]


def _count(tokens: int) -> int:
    return -(-tokens // BLOCK)


def private(count: int, length: int, *, scattered: bool = True) -> Batch:
    """`count` sequences of `length` tokens that share nothing, a query row each."""
    blocks = _Blocks(count * _count(length), scattered=scattered)
    tables = tuple(blocks.take(length) for _ in range(count))
    return Batch(f"{count} x {words(length)}", tables, (length,) * count, (1,) * count)


def shared(count: int, prefix: int, own: int) -> Batch:
    """Return `count` sequences after one `prefix` of whole blocks, each with `own` tokens of its own."""
    assert prefix % BLOCK == 0
    blocks = _Blocks(_count(prefix) + count * _count(own), scattered=True)
    root = blocks.take(prefix)
    tails = [blocks.take(own) for _ in range(count)]
    return Batch(
        f"{count} x ({words(prefix)} shared + {words(own)})",
        tuple(np.concatenate([root, tail]) for tail in tails),
        (prefix + own,) * count,
        (1,) * count,
        (((count, root),), tuple((1, tail) for tail in tails)),
    )


def two_level(groups: int, members: int, root: int, branch: int, own: int) -> Batch:
    """Agents: all share `root`, the `members` of a group share `branch` too, each has `own` tokens of its own."""
    assert root % BLOCK == branch % BLOCK == 0
    total = _count(root) + groups * (_count(branch) + members * _count(own))
    blocks = _Blocks(total, scattered=True)
    top = blocks.take(root)
    tables, middle, leaves = [], [], []
    for _ in range(groups):
        middle.append(blocks.take(branch))
        for _ in range(members):
            leaves.append(blocks.take(own))
            tables.append(np.concatenate([top, middle[-1], leaves[-1]]))
    count = groups * members
    return Batch(
        f"{groups} x {members} agents ({words(root)} + {words(branch)} + {words(own)})",
        tuple(tables),
        (root + branch + own,) * count,
        (1,) * count,
        (((count, top),), tuple((members, run) for run in middle), tuple((1, leaf) for leaf in leaves)),
    )


def comb(levels: int, run: int, members: int, own: int) -> Batch:
    """Branches of a comb: each level extends the prefix by `run` tokens, and `members` sequences leave it there.

    Each has `own` tokens of its own. The deepest sequences share `levels` runs, one after the other.
    """
    assert run % BLOCK == 0
    blocks = _Blocks(levels * _count(run) + levels * members * _count(own), scattered=True)
    path, tables = np.empty(0, np.int32), list[Table]()
    for _ in range(levels):
        path = np.concatenate([path, blocks.take(run)])
        tables += [np.concatenate([path, blocks.take(own)]) for _ in range(members)]
    lengths = tuple((level + 1) * run + own for level in range(levels) for _ in range(members))
    return Batch(
        f"comb of {levels} x {words(run)}, {levels * members} x {words(own)}",
        tuple(tables),
        lengths,
        (1,) * (levels * members),
    )


def chunk(new: int, cached: int) -> Batch:
    """Return one sequence that computes `new` tokens after `cached` ones."""
    table = _Blocks(_count(new + cached), scattered=True).take(new + cached)
    return Batch(f"{words(new)} over {words(cached)}", (table,), (new + cached,), (new,))


def words(tokens: int) -> str:
    """8192 as 8k, 512 as it is.

    >>> words(8192), words(512), words(0), words(1536)
    ('8k', '512', '0', '1536')
    """
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


@dataclass(frozen=True)
class Sizes:
    """How large everything is: FULL for a GPU, SMOKE for the interpreter, which takes milliseconds a tile."""

    shapes: tuple[HeadShape, ...]
    rotate: int  # bytes that a rotation of pools has at least
    copies: int  # pools that it has at most
    copy: int  # bytes of the copied and of the read tensor
    matmul: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    trees: tuple[tuple[int, int, int], ...]  # sequences, shared, own
    agents: tuple[tuple[int, int, int, int, int], ...]
    combs: tuple[tuple[int, int, int, int], ...]  # levels, tokens of a level, sequences of a level, own
    new: tuple[int, ...]
    cached: tuple[int, ...]
    peers: tuple[tuple[int, int], ...]  # sequences, context
    seconds: float  # that a timing should take

    def decodes(self) -> list[tuple[HeadShape, int, int]]:
        """All (heads, batch, context), those of the bar first: a spent budget leaves the others unmeasured."""
        cases = [(s, b, c) for s in self.shapes for b in self.batches for c in self.contexts]
        return sorted(cases, key=lambda case: case[1:] != (BAR_BATCH, BAR_CONTEXT))


BAR_BATCH, BAR_CONTEXT = 64, 8192
"""The decode whose bandwidth has a bar."""

BAR_TREE = (64, 8192, 512)
"""The tree decode that has bars: sequences, shared tokens, tokens of their own."""

FULL = Sizes(
    shapes=(LLAMA_8B, LLAMA_70B_RANK),
    rotate=2 << 30,
    copies=512,
    copy=4 << 30,
    matmul=8192,
    batches=(1, 8, 64),
    contexts=(1024, 8192, 32768, 131072),
    trees=(BAR_TREE, (64, 32768, 512), (8, 8192, 512)),
    agents=((8, 8, 8192, 2048, 512), (16, 4, 2048, 1024, 256)),
    combs=((5, 2048, 12, 512),),
    new=(512, 2048, 8192),
    cached=(0, 8192, 32768),
    peers=((64, 8192), (8, 8192), (64, 1024), (1, 32768)),
    seconds=0.15,
)

SMOKE = Sizes(
    shapes=(HeadShape("4 heads of 16", 4, 2, 16),),
    rotate=1 << 14,
    copies=2,
    copy=1 << 16,
    matmul=32,
    batches=(1, 2),
    contexts=(40,),
    trees=((4, 96, 20),),
    agents=((2, 2, 96, 16, 16),),
    combs=((5, 64, 1, 5),),
    new=(20,),
    cached=(0, 40),
    peers=((2, 48),),
    seconds=0.0,
)
