"""The kinds of tile fit the processors of each GPU as often as they say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from radixkv_kernels import attention
from radixkv_kernels.attention import AMD, RESERVED, Kind, kinds, shared_bytes

GPUS = {"sm_80": (8, 164), "sm_89": (8, 100), "sm_90": (9, 228), "sm_100": (10, 228), "sm_120": (12, 100)}
HEADS = [(5, 5), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (64, 256)]
DTYPES = [torch.float32, torch.bfloat16]


def compiled_by(monkeypatch: pytest.MonkeyPatch, *, passes_weights: bool) -> None:
    """Let kinds be chosen anew, for Triton before 3.9 or since."""
    monkeypatch.setattr(attention, "PASSES_WEIGHTS", passes_weights)
    monkeypatch.setattr(attention, "kinds", kinds.__wrapped__)


def of(gpu: str, dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> tuple[Kind, ...]:
    generation, shared = GPUS[gpu]
    return attention.kinds(*dims, dtype, generation=generation, shared=shared << 10)


@pytest.mark.parametrize("passes_weights", [False, True])
@pytest.mark.parametrize("gpu", GPUS)
def test_programs_fit_a_processor_together_and_each_on_its_own(
    gpu: str, passes_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_by(monkeypatch, passes_weights=passes_weights)
    generation, shared = GPUS[gpu]
    for dims in HEADS:
        for dtype in DTYPES:
            for kind in of(gpu, dims, dtype):
                needed = shared_bytes(kind, *dims, dtype, generation) + RESERVED
                assert kind.resident * needed <= shared << 10, (gpu, dims, dtype, kind)
                assert kind.resident * kind.warps <= 16  # registers for eight warps of any kernel, and sixteen of some


def test_less_shared_memory_leaves_room_for_fewer_programs() -> None:
    tails = {gpu: of(gpu, (256, 256))[0] for gpu in GPUS}
    assert [tails[gpu].resident for gpu in GPUS] == [2, 1, 2, 2, 1]
    assert of("sm_80", (128, 128))[0].stages > of("sm_89", (128, 128))[0].stages
    assert all(of(gpu, (128, 128))[0].resident == 2 for gpu in GPUS)
    assert of("sm_89", (64, 64)) == of("sm_120", (64, 64))


def test_what_triton_before_3_9_passes_through_shared_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those of kernels that Triton 3.9.0 and 3.7.1 have compiled."""
    for passes, sharers, tails, resident in ((False, 49152, 24576, 2), (True, 53248, 25664, 1)):
        compiled_by(monkeypatch, passes_weights=passes)
        _, kind, _ = of("sm_89", (128, 128))
        assert shared_bytes(kind, 128, 128, torch.bfloat16, 8) == sharers and kind.resident == resident
        assert shared_bytes(of("sm_80", (128, 128), torch.float32)[0], 128, 128, torch.float32, 8) == tails


def test_tiles_of_128_rows_for_large_heads_need_products_that_read_shared_memory() -> None:
    assert {gpu: of(gpu, (256, 256))[-1].rows for gpu in GPUS} == {
        "sm_80": 64,
        "sm_89": 64,
        "sm_90": 128,
        "sm_100": 128,
        "sm_120": 64,
    }


def test_an_unknown_amount_of_shared_memory_follows_the_generation() -> None:
    for gpu in ("sm_80", "sm_90", "sm_100", "sm_120"):
        assert kinds(128, 128, torch.float16, generation=GPUS[gpu][0]) == of(gpu, (128, 128), torch.float16)


def test_gpus_of_amd_run_one_program_at_a_time() -> None:
    for dims in HEADS:
        for dtype in DTYPES:
            assert all(kind.resident == 1 for kind in kinds(*dims, dtype, generation=AMD, shared=64 << 10))
