"""Offload and load blocks in both memory layouts: an image has the bits of its block, and nothing else is written."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention import host_store
from radixkv.attention.host_store import HostStore, StagedTransfers
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.cache.types import WritePlan
from radixkv.device import CudaDevice, Device
from radixkv.errors import InvalidInput
from radixkv.sizing.kv_size import size_text
from tests.attention.batches import BlocksFirst
from tests.virtual_gpu import VirtualGpu, VirtualGpuError, installed

SIZE, BLOCKS, HOST = 4, 40, 30
SHAPES = {
    "grouped queries": [LayerShape(2, 8, 8), LayerShape(2, 8, 8)],
    "one head": [LayerShape(1, 6, 6)],
    "latent attention": [LayerShape(3, 7, 5), LayerShape(3, 7, 5)],  # keys and values of unequal sizes
    "layers of two kinds": [LayerShape(4, 4, 4), LayerShape(1, 16, 16)],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, "int8"]
KINDS = [(KVStore, False), (BlocksFirst, False), (BlocksFirst, True)]
NAMES = ["CPU", "blocks outermost", "through a stage"]


class Load(NamedTuple):
    """A load as the cache plans it."""

    plan: WritePlan
    sources: NDArray[np.int64]


def tensors(store: KVStore) -> list[Tensor]:
    return list(store.tensors)


def bits(store: KVStore) -> list[NDArray[np.uint8]]:
    """Copy the pool's bytes, each tensor as [heads, slots, bytes of a token]."""
    found = (pool.contiguous().view(torch.uint8).numpy().copy() for pool in tensors(store))
    return [each.reshape(each.shape[0], -1, each.shape[3]) for each in found]


def filled(kind: type[KVStore], shapes: list[LayerShape], dtype: torch.dtype | str, seed: int = 0) -> KVStore:
    """A store of random bits: NaN, infinities and denormals among them."""
    given: dict[str, Any] = {"kv_dtype": dtype} if isinstance(dtype, str) else {"dtype": dtype}
    store, rng = kind(shapes, BLOCKS, SIZE, **given), np.random.default_rng(seed)
    for pool in tensors(store):
        raw = rng.integers(0, 256, (*pool.shape[:3], pool.shape[3] * pool.itemsize), np.uint8)
        pool.copy_(torch.from_numpy(raw).view(pool.dtype))
    return store


def slots_of(blocks: list[int], start: int = 0, end: int | None = None) -> NDArray[np.int64]:
    """Slots of the tokens [start, end) of a text in these blocks."""
    positions = np.arange(start, len(blocks) * SIZE if end is None else end)
    return np.array(blocks, dtype=np.int64)[positions // SIZE] * SIZE + positions % SIZE


def load(images: list[int], blocks: list[int], start: int = 0, end: int | None = None, copies: Any = ()) -> Load:
    """Load the tokens [start, end) of a text whose images these are."""
    return Load(WritePlan(slots_of(blocks, start, end), list(copies)), slots_of(images, start, end))


@pytest.mark.parametrize(("kind", "staged"), KINDS, ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_loaded_run_has_the_bits_that_were_offloaded(
    kind: type[KVStore], staged: bool, dtype: torch.dtype | str, shapes: list[LayerShape]
) -> None:
    store = filled(kind, shapes, dtype)
    host = HostStore(store, HOST, staged=staged)
    before = bits(store)
    host.offload([(3, 7), (4, 8), (30, 0), (39, 29), (12, 11)])
    for pool in tensors(store):
        pool.zero_()
    host.load([load([7, 8, 0, 29, 11], [20, 6, 5, 31, 0], start=3, end=18)])
    now, source, target = bits(store), slots_of([3, 4, 30, 39, 12], 3, 18), slots_of([20, 6, 5, 31, 0], 3, 18)
    others = np.setdiff1d(np.arange(BLOCKS * SIZE), target)
    for old, new in zip(before, now, strict=True):
        np.testing.assert_array_equal(new[:, target], old[:, source])
        assert not new[:, others].any()


@pytest.mark.parametrize(("kind", "staged"), KINDS, ids=NAMES)
@pytest.mark.parametrize("stage_blocks", [1, 3, 100])
def test_many_batches_do_what_numpy_does(
    kind: type[KVStore], staged: bool, stage_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random moves and loads of several runs at once, in pieces of host memory and with stages of several sizes."""
    shapes, rng = [LayerShape(2, 3, 5), LayerShape(1, 4, 4)], random.Random(stage_blocks)
    store = filled(kind, shapes, torch.float32)
    monkeypatch.setattr(host_store, "STAGE", stage_blocks * store.bytes_per_block)
    monkeypatch.setattr(host_store, "PIECE", 7 * store.bytes_per_block)
    host = HostStore(store, HOST, staged=staged)
    model = bits(store)
    images = [np.zeros((each.shape[0], HOST * SIZE, each.shape[2]), np.uint8) for each in model]
    written: set[int] = set()
    for _ in range(60):
        count = rng.randint(0, 9)
        moves = list(zip(rng.choices(range(BLOCKS), k=count), rng.sample(range(HOST), count), strict=True))
        host.offload(moves)
        written.update(image for _, image in moves)
        for pool, image in zip(model, images, strict=True):
            image[:, slots_of([b for _, b in moves])] = pool[:, slots_of([a for a, _ in moves])]
        free, loads = rng.sample(range(BLOCKS), BLOCKS), []
        for _ in range(rng.randint(0, 3) if written else 0):
            length = rng.randint(1, 5)
            chosen, blocks = rng.choices(sorted(written), k=length), [free.pop() for _ in range(length)]
            start = rng.randint(0, SIZE - 1)
            end = rng.randint(max(start, (length - 1) * SIZE) + 1, length * SIZE)
            loads.append(load(chosen, blocks, start, end, [(free.pop(), blocks[0])] if start else []))
        host.load(loads)
        for pool, image in zip(model, images, strict=True):
            for source, target in [pair for each in loads for pair in each.plan.copies]:
                pool[:, slots_of([target])] = pool[:, slots_of([source])]
            for each in loads:
                pool[:, each.plan.slots] = image[:, each.sources]
        for expected, found in zip(model, bits(store), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("seed", "stage_blocks"), [(0, 4), (0, 1), (1, 2), (3, 1)])
def test_streams_of_copies_keep_the_order_of_the_calls(
    seed: int, stage_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the moves, forwards read and write all blocks; images are written again after loads have read them."""
    with installed(VirtualGpu(seed)) as gpu, torch.inference_mode():
        store, found = KVStore([LayerShape(2, 4, 4)], 8, SIZE, device=gpu.place), []
        monkeypatch.setattr(host_store, "STAGE", stage_blocks * store.bytes_per_block)
        host, keys = HostStore(store, 4), store.keys[0]
        with gpu.serving():
            for number in range(1, 4):
                keys.fill_(number)
                host.offload([(1, 0), (2, 1), (3, 2)])
                keys.fill_(-number)
                host.load([load([2, 0], [6, 5]), load([1], [4], end=3, copies=[(7, 4)])])
                found.append(gpu.download([keys[:, 4:7]]))
                host.offload([(5, 3), (6, 0)])
                host.load([load([3, 0], [4, 6]), load([1], [5], end=3)])
                found.append(gpu.download([keys[:, 4:7]]))
            arrays = [each.wait()[0] for each in found]
        assert not gpu.findings
    for place, array in enumerate(arrays):
        expected = np.full(array.shape, place // 2 + 1.0)
        if place % 2 == 0:
            expected[:, 0, 3] *= -1
        np.testing.assert_array_equal(array, expected)


def test_a_load_of_other_images_waits_for_no_step_and_no_offload_in_flight() -> None:
    with installed(VirtualGpu(0)) as gpu, torch.inference_mode():
        transfers = StagedTransfers(store := KVStore([LayerShape(2, 4, 4)], 8, SIZE, device=gpu.place), 4)
        transfers.offload(np.array([1, 2]), np.array([0, 1]))
        gpu.synchronize()
        store.keys[0].fill_(1)
        step, (offloads, loads) = gpu.current_stream().last, gpu.scheduler.streams[1:3]
        transfers.offload(np.array([3]), np.array([2]))
        offload = offloads.last
        assert step is not None and offload is not None
        for image in (1, 2):
            transfers.load_blocks(np.array([image]), np.array([4 + image]))
            gpu.finish(list(loads.pending)[-1:], {})
            assert step.done == offload.done == (image == 2)
        assert not gpu.findings


NEEDED: dict[str, tuple[str, list[str]]] = {
    "a copy to the host waits for its gather": ("leaving.filled", ["offload"]),
    "a gather waits for the last copy to the host": ("leaving.emptied", ["offload", "offload"]),
    "a load waits for an offload of its image": ("leaving.emptied", ["offload", "load"]),
    "a load waits for older offloads": ("before_latest", ["offload", "other offload", "load"]),
    "blocks are written after their images arrived": ("arriving.filled", ["offload", "load"]),
    "images arrive after the last ones were read": ("arriving.emptied", ["offload", "load", "load"]),
}


@pytest.mark.parametrize(("event", "calls"), NEEDED.values(), ids=NEEDED)
def test_moves_without_one_of_their_events_are_a_race(event: str, calls: list[str]) -> None:
    *owner, name = event.split(".")

    def moved(gpu: VirtualGpu, *, ordered: bool) -> None:
        transfers = StagedTransfers(KVStore([LayerShape(2, 4, 4)], 8, SIZE, device=gpu.place), 4)
        if not ordered:
            setattr(getattr(transfers, owner[0]) if owner else transfers, name, Device(torch.device("cpu")).event())
        for call in calls:
            if call == "load":
                transfers.load_blocks(np.array([0]), np.array([5]))
            else:
                transfers.offload(np.array([1]), np.array([int(call != "offload")]))

    with installed(VirtualGpu(0)) as gpu, torch.inference_mode():
        moved(gpu, ordered=True)
        gpu.synchronize()
        with pytest.raises(VirtualGpuError, match=r"^race: "):
            moved(gpu, ordered=False)


@pytest.mark.parametrize(("kind", "staged"), KINDS, ids=NAMES)
def test_a_block_in_which_two_cached_runs_meet_is_loaded_from_both_images(kind: type[KVStore], staged: bool) -> None:
    store = filled(kind, SHAPES["one head"], torch.float32)
    host, before = HostStore(store, HOST, staged=staged), bits(store)
    host.offload([(1, 5), (2, 7), (3, 9)])
    sources = np.concatenate([slots_of([5, 7], end=SIZE + 2), slots_of([0, 9], start=SIZE + 2)])
    host.load([Load(WritePlan(slots_of([20, 21]), []), sources)])
    for old, new in zip(before, bits(store), strict=True):
        expected = np.concatenate([old[:, slots_of([1, 2], end=SIZE + 2)], old[:, slots_of([0, 3], start=SIZE + 2)]], 1)
        assert (new[:, slots_of([20, 21])] == expected).all()


def test_a_step_without_moves_and_loads_does_nothing() -> None:
    store = filled(KVStore, [LayerShape(1, 2, 2)], torch.float32)
    host, before = HostStore(store, 2), bits(store)
    host.offload([])
    host.load([])
    host.load([Load(WritePlan(np.zeros(0, np.int64), []), np.zeros(0, np.int64))])
    for old, new in zip(before, bits(store), strict=True):
        np.testing.assert_array_equal(new, old)


def test_a_measured_bandwidth_leaves_the_pool_as_it_is() -> None:
    for kind, staged in KINDS:
        store = filled(kind, [LayerShape(2, 8, 8)], torch.bfloat16)
        host, before = HostStore(store, HOST, staged=staged), bits(store)
        assert (host.nbytes, host.bytes_per_block) == (HOST * 2 * 16 * SIZE * 2, 2 * 16 * SIZE * 2)
        assert 1e3 < host.measure() < 1e13
        for old, new in zip(before, bits(store), strict=True):
            np.testing.assert_array_equal(new, old)


def test_images_of_a_gpu_are_pinned_in_pieces_below_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds a pinned allocation up to a power of two, so one of 9 GiB would take 16."""
    made: list[tuple[int, str, bool]] = []
    empty = torch.empty

    def recorded(*shape: int, dtype: Any, device: Any = "cpu", pin_memory: bool = False) -> Tensor:
        found = empty(*shape, dtype=dtype)
        made.append((found.nbytes, torch.device(device).type, pin_memory))
        return found

    store = BlocksFirst([LayerShape(2, 3, 5)], 3, SIZE)  # 256 bytes a block
    store.device = torch.device("cuda")
    for name in ("current", "event", "on", "stream", "synchronize"):
        monkeypatch.setattr(CudaDevice, name, getattr(Device, name))
    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(host_store, "PIECE", 1 << 10)
    monkeypatch.setattr(host_store, "STAGE", 600)
    HostStore(store, 9)
    assert made == [*[(512, "cuda", False)] * 2, (1024, "cpu", True), (1024, "cpu", True), (256, "cpu", True)]


@pytest.mark.parametrize(("layers", "num_blocks"), [([LayerShape(1, 2, 2)], 0), ([], 3)])
def test_memory_without_kv_is_refused(layers: list[LayerShape], num_blocks: int) -> None:
    with pytest.raises(InvalidInput, match="holds no KV"):
        HostStore(KVStore(layers, 3, SIZE), num_blocks)


@pytest.mark.parametrize("num_blocks", [10**15, 2**62])
def test_memory_that_cannot_be_allocated_is_refused_with_its_size(num_blocks: int) -> None:
    with pytest.raises(InvalidInput, match=f"host memory of {size_text(64 * num_blocks)} cannot be allocated"):
        HostStore(KVStore([LayerShape(1, 2, 2)], 3, SIZE), num_blocks)
