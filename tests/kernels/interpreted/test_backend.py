"""The Triton backend equals the torch backend, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from radixkv.attention import plan, torch_backend, triton_backend
from radixkv.attention.kv_store import KVStore, LayerShape
from tests.attention.batches import Batch, BlocksFirst, fill, random_batch

SHAPES = [LayerShape(2, 16, 16), LayerShape(1, 20, 8), LayerShape(2, 16, 16)]


def batch(kind: type[KVStore] = BlocksFirst) -> Batch:
    """Return a store of three layers in float32 and a query for the first."""
    one = random_batch(5, block_size=16, shape=SHAPES[0], group=2, sequences=4, decode=True, adjacent=False)
    store = kind(SHAPES, one.store.num_blocks, 16)
    fill(store, one.tables, one.kv_lengths)
    return Batch(store, one.tables, one.kv_lengths, one.query_lengths, one.query.float())


@pytest.mark.parametrize("kind", [KVStore, BlocksFirst])
def test_equals_the_torch_backend_in_every_layer(kind: type[KVStore]) -> None:
    case = batch(kind)
    lists = [case.tables, case.kv_lengths, case.query_lengths]
    for window in (None, 5):
        work = plan.build(*lists, window, block_size=16, min_saving=1)
        for layer, shape in enumerate(SHAPES):
            query = torch.randn(4, shape.key_dim, case.query.shape[1]).transpose(1, 2)  # its last stride is not 1
            options = {"scale": 0.3, "softcap": 2.0, "sinks": torch.randn(4)}
            ours = triton_backend.attend(case.store, layer, query, work, **options)  # type: ignore[arg-type]
            theirs = torch_backend.attend(case.store, layer, query, work, **options)  # type: ignore[arg-type]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert len(triton_backend._PLANS[work]) == 2  # one for each shape of heads


def test_writes_and_copies_as_the_store_does() -> None:
    ours, theirs = (BlocksFirst(SHAPES, 6, 16) for _ in range(2))
    slots = torch.tensor([3, 40, 17, 0])
    for layer, shape in enumerate(SHAPES):
        new = [torch.randn(shape.kv_heads, dim, 4).transpose(1, 2) for dim in (shape.key_dim, shape.value_dim)]
        triton_backend.write(ours, layer, slots, *new)
        theirs.write(layer, slots, *new)
    for pairs in ([(0, 4), (2, 5), (0, 3)], [], [(0, 1), (1, 2)]):  # the last is a chain
        triton_backend.copy(ours, pairs)
        theirs.copy(pairs)
        pools = zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True)
        assert all(torch.equal(a, b) for a, b in pools)
    assert ours.keys[0].any()


def test_what_the_kernels_do_not_serve_goes_to_torch_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    case = random_batch(5, block_size=16, shape=SHAPES[0], group=2, sequences=4, decode=True, adjacent=False)
    work = plan.build(case.tables, case.kv_lengths, case.query_lengths, block_size=16)
    for _ in range(2):
        output = triton_backend.attend(case.store, 0, case.query, work, scale=0.3)
    torch.testing.assert_close(output, case.expected_output(scale=0.3), rtol=0, atol=1e-12)
    assert caplog.messages == ["attention runs in torch, not in Triton: the kernels do not store torch.float64"]
    assert "at most 32 fit" in str(triton_backend.layer_obstacle(batch().store, 2 * 33))
