"""The kernels in the tiles in use: any two settings of heads, dtypes, blocks and masks meet in a test.

Each run has a decode, a shared prefix and a chunk after it; 18 runs instead of 4,374.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv_kernels.attention import kinds
from tests.attention.batches import Batch, BlocksFirst, fill
from tests.kernels.interpreted.attending import attend, cast, close, expected_output

HEADS = [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128)]
LEVELS = {
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "sharing": ((2, 1), (1, 4), (2, 3)),  # kv heads and the query heads of each
    "block_size": (16, 32, 64),
    "window": (None, 20, 80),
    "softcap": (None, 1.5, 30.0),
    "sinks": (None, 0.0, 4.0),
}
DIFFERENCES = ("000000", "001122", "010212", "012021", "021201", "022110")
"""Between any two columns, each difference modulo 3 comes twice: so shifted three times, each pair of levels does."""


@dataclass(frozen=True)
class Run:
    """One run: a size of heads, and a level of each setting."""

    number: int
    dims: tuple[int, int]
    levels: tuple[int, ...]

    def __getitem__(self, setting: str) -> object:
        return LEVELS[setting][self.levels[list(LEVELS).index(setting)]]

    def __str__(self) -> str:
        return f"{self.dims[0]}/{self.dims[1]}-{''.join(map(str, self.levels))}"


RUNS = [
    Run(3 * row + shift, HEADS[row], tuple((int(level) + shift) % 3 for level in DIFFERENCES[row]))
    for row in range(6)
    for shift in range(3)
]


def test_any_two_settings_meet() -> None:
    columns = [[run.dims for run in RUNS], *zip(*(run.levels for run in RUNS), strict=True)]
    for a, b in itertools.combinations(columns, 2):
        assert len(set(zip(a, b, strict=True))) == len(set(a)) * len(set(b))


def batch(run: Run) -> Batch:
    """Return two decodes and a chunk after 64 shared tokens, and a first token, in either order of memory."""
    size: int = run["block_size"]  # type: ignore[assignment]
    kv_heads, group = run["sharing"]  # type: ignore[misc]
    prefix = list(range(1, 64 // size + 1))
    tables = [[*prefix, 17], [*prefix, 10], [*prefix, 11, 9], [12]]
    kv_lengths, query_lengths = [64 + 1, 64 + size, 64 + 20, 1], [1, 1, 20, 1]
    store = (KVStore, BlocksFirst)[run.number % 2]([LayerShape(kv_heads, *run.dims)], 18, size, dtype=torch.float64)
    fill(store, tables, kv_lengths, run.number)
    generator = torch.Generator().manual_seed(run.number)
    query = torch.randn(kv_heads * group, sum(query_lengths), run.dims[0], generator=generator)
    return cast(Batch(store, tables, kv_lengths, query_lengths, query), run["dtype"])  # type: ignore[arg-type]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_equals_the_reference(run: Run) -> None:
    case, dtype = batch(run), run["dtype"]
    chosen = kinds(*run.dims, dtype, generation=(8, 9)[run.number // 3 % 2])  # type: ignore[arg-type]
    sinks = None if run["sinks"] is None else run["sinks"] + torch.arange(len(case.query)) / 4  # type: ignore[operator]
    options = {"scale": run.dims[0] ** -0.5, "softcap": run["softcap"]}
    own = None if sinks is None else sinks.to(case.query.dtype)
    output = attend(case, run["window"], kinds=chosen, sinks=own, **options)  # type: ignore[arg-type]
    expected = expected_output(case, window=run["window"], sinks=None if own is None else own.double(), **options)
    close(output, expected, dtype)  # type: ignore[arg-type]
