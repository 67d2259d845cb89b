"""Where Triton is missing, or cannot run, torch attends, and says so once."""

from __future__ import annotations

import pytest
import torch

from radixkv.attention import triton_backend, worklist
from radixkv.attention.kv_store import KVStore, LayerShape
from tests.attention.batches import random_batch


@pytest.fixture(autouse=True)
def _nothing_was_said() -> None:
    triton_backend._warn.cache_clear()


def test_without_triton_torch_attends_writes_and_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_backend, "TRITON", False)
    case = random_batch(3, block_size=4, shape=LayerShape(2, 8, 8), group=2, sequences=4, decode=True, adjacent=True)
    work = worklist.build(case.tables, case.kv_lengths, case.query_lengths, block_size=4)
    for _ in range(3):
        output = triton_backend.attend(case.store, 0, case.query, work, scale=0.4)
    torch.testing.assert_close(output, case.truth(scale=0.4), rtol=0, atol=1e-12)
    store = KVStore([LayerShape(1, 2, 2)], 2, 4)
    triton_backend.write(store, 0, torch.tensor([1]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    triton_backend.copy(store, [(0, 1)])
    assert store.keys[0][0, 1, 1].tolist() == [1, 1]
    assert caplog.messages == ["attention runs in torch, not in Triton: Triton is not installed"]


def test_a_cpu_is_no_place_for_triton() -> None:
    pytest.importorskip("triton")
    assert triton_backend.unavailable(KVStore([LayerShape(1, 2, 2)], 2, 4), 1) == "Triton does not run on cpu"
