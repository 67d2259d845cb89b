"""Compare the reference with torch's own attention and with results computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from radixkv_kernels import reference


def pools(blocks: int, block_size: int, kv_heads: int = 2, dim: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, kv_heads, blocks, block_size, dim, generator=generator, dtype=torch.float64)
    return key, value


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("group", [1, 3])
def test_equals_torchs_own_attention(window: int | None, group: int) -> None:
    key, value = pools(6, 4)
    query = torch.randn(2 * group, 8, 4, dtype=torch.float64)
    tables, kv, queries = [[5, 0, 2], [1, 3], [4]], [11, 8, 2], [5, 1, 2]
    output = reference.attend(query, key, value, tables, kv, queries, scale=0.3, window=window)
    row = 0
    for table, length, count in zip(tables, kv, queries, strict=True):
        k, v = (pool[:, table].flatten(1, 2)[:, :length] for pool in (key, value))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask = mask if window is None else mask.triu(1 - window)
        rows = query[:, row : row + count]
        expected = F.scaled_dot_product_attention(rows, k, v, mask[length - count :], scale=0.3, enable_gqa=True)
        torch.testing.assert_close(output[row : row + count], expected.transpose(0, 1))
        row += count


def test_softcap_bounds_the_scores() -> None:
    key = torch.tensor([0.0, 1000.0], dtype=torch.float64).view(1, 1, 2, 1)
    value = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 2, 1)
    output = reference.attend(
        torch.ones(1, 1, 1, dtype=torch.float64), key, value, [[0]], [2], [1], scale=1.0, softcap=2.0
    )
    assert output.item() == pytest.approx(math.exp(2) / (1 + math.exp(2)))


def test_sinks_take_weight_and_give_nothing() -> None:
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    query, sinks = torch.zeros(1, 1, 1, dtype=torch.float64), torch.tensor([math.log(3.0)], dtype=torch.float64)
    output = reference.attend(query, one, one, [[0]], [1], [1], scale=1.0, sinks=sinks)
    assert output.item() == pytest.approx(1 / 4)


def test_what_lies_after_a_sequences_end_does_not_matter() -> None:
    key, value = pools(2, 4)
    query = torch.randn(2, 1, 4, dtype=torch.float64)
    before = reference.attend(query, key, value, [[1, 0]], [6], [1], scale=1.0)
    key[:, 0, 2:] = value[:, 0, 2:] = torch.nan
    assert torch.equal(before, reference.attend(query, key, value, [[1, 0]], [6], [1], scale=1.0))


def test_no_sequences_give_no_rows() -> None:
    key, value = pools(1, 4)
    output = reference.attend(torch.empty(2, 0, 4, dtype=torch.float64), key, value, [], [], [], scale=1.0)
    assert output.shape == (0, 2, 4)
