"""Kinds of tile in streams of their own, on a simulated GPU: what runs side by side, and what must wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixkv.attention import plan, triton_backend
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.device import Device, device_of
from radixkv_kernels import attention
from tests.kernels.interpreted.attending import SMALL
from tests.virtual_gpu import VirtualGpu, installed

SHAPE, HEADS, BLOCK = LayerShape(1, 16, 16), 8, 16
LENGTHS = [(40, 1), (3, 3), (5, 5)]
"""Keys and new tokens of a decode, which is cut into parts, and of two prompts: three kinds of tile, and a merge."""

SLOTS = np.array([2 * BLOCK + 7, *range(3 * BLOCK, 3 * BLOCK + 3), *range(4 * BLOCK, 4 * BLOCK + 5)], dtype=np.int64)


def planned(device: Device) -> attention.TilePlan:
    """Return the tiles of a step."""
    work = plan.build([[0, 1, 2], [3], [4]], *zip(*LENGTHS, strict=True), block_size=BLOCK)
    return attention.plan(
        work, heads=HEADS, kv_heads=1, chosen=SMALL, device=device.place, processors=2, split=16, pinned=device.pinned
    )


@dataclass
class Model:
    """Two layers that store their KV in the same slots of one pool, so that each order of their launches shows."""

    store: KVStore
    rows: list[Tensor]  # of each layer: query, key, value
    slots: Tensor
    step: attention.TilePlan

    @classmethod
    def on(cls, device: Device) -> Model:
        """Return the same model on any device, with the same numbers."""
        generator = torch.Generator().manual_seed(0)
        store = KVStore([SHAPE], 5, BLOCK, device=device.place, blocks_first=True)
        for pool in (*store.keys, *store.values):
            pool.copy_(device.upload(torch.randn(pool.shape, generator=generator)))
        rows = [torch.randn(len(SLOTS), heads, 16, generator=generator) for heads in (HEADS, 1, 1) * 2]
        step = planned(device)
        assert all(step.counts) and step.num_merges
        there = [device.upload(each).transpose(0, 1) for each in rows]
        return cls(store, there, device.upload(SLOTS), step)

    def run(self, order: Any = None) -> Tensor:
        """Return the outputs of both layers [2, T, heads, 16]."""
        outputs = []
        for query, key, value in (self.rows[:3], self.rows[3:]):
            triton_backend.write(self.store, 0, self.slots, key, value)
            outputs.append(triton_backend.follow(self.store, 0, query, self.step, scale=0.3, order=order))
        return torch.stack(outputs)


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return Model.on(device_of("cpu")).run()


@pytest.fixture(params=range(2))
def gpu(request: pytest.FixtureRequest) -> Iterator[VirtualGpu]:
    with torch.inference_mode(), installed(VirtualGpu(request.param)) as gpu, gpu.current():
        yield gpu
    assert not gpu.findings


def in_order(one: Any, other: Any) -> bool:
    """Return whether node `other` runs after `one` in every run."""
    return other.clock.get(one.stream, 0) >= one.number


def test_a_recorded_layer_runs_its_kinds_side_by_side_and_nothing_else(gpu: VirtualGpu, expected: Tensor) -> None:
    """The merge waits for all kinds of its layer, and so does the next layer's write, which replaces what they read."""
    model = Model.on(gpu)
    order = triton_backend.ForkedStreams(gpu)
    graph: Any = gpu.capture(lambda: model.run(order), stream=gpu.stream(), pool=gpu.graph_pool())
    names = ["write_slots", *["attend_tiles"] * 3, "merge_partials"] * 2
    nodes = [node for node in graph.nodes if "the launch of" in node.name]
    assert [node.name.split()[-1] for node in nodes] == names
    unordered = {
        (names[a], names[b], b - a) for a, b in combinations(range(len(nodes)), 2) if not in_order(nodes[a], nodes[b])
    }
    assert unordered == {("attend_tiles", "attend_tiles", 1), ("attend_tiles", "attend_tiles", 2)}
    (found,) = gpu.download([graph.replay()]).wait()
    assert np.array_equal(found, expected.numpy())


def test_a_step_without_partial_results_launches_no_merge(gpu: VirtualGpu) -> None:
    model = Model.on(gpu)
    work = plan.build([[3], [4]], [3, 5], [3, 5], block_size=BLOCK)
    model.step = attention.plan(work, heads=HEADS, kv_heads=1, chosen=SMALL, device=gpu.place, processors=2)
    assert not model.step.num_merges
    query = model.rows[0][:, :8]
    graph: Any = gpu.capture(
        lambda: triton_backend.follow(model.store, 0, query, model.step, scale=0.3),
        stream=gpu.stream(),
        pool=gpu.graph_pool(),
    )
    names = [node.name.split()[-1] for node in graph.nodes if "the launch of" in node.name]
    assert set(names) == {"attend_tiles"}


def test_outside_of_a_capture_the_host_never_waits(gpu: VirtualGpu, expected: Tensor) -> None:
    """The plan's staging memory is dropped at once, and a later plan may use it again."""
    model = Model.on(gpu)
    order = triton_backend.ForkedStreams(gpu)
    with gpu.serving():
        model.step = planned(gpu)
        planned(gpu)
        download = gpu.download([model.run(order)])
        assert np.array_equal(download.wait()[0], expected.numpy())


def test_a_kind_that_fails_to_launch_leaves_no_stream(gpu: VirtualGpu) -> None:
    """After the error, the present stream is after the launches that were made."""
    numbers = torch.zeros(4, device=gpu.place)

    def add() -> None:
        numbers.add_(1)

    def fail() -> None:
        raise ValueError("it does not compile")

    kinds: list[Callable[[], None]] = [fail, add]
    with pytest.raises(ValueError, match="does not compile"):
        triton_backend.ForkedStreams(gpu)(kinds)
    numbers.mul_(3)  # a race, if this stream did not wait
    assert numbers.tolist() == [3] * 4


def test_copies_of_blocks_do_not_make_the_host_wait(gpu: VirtualGpu) -> None:
    stores = [Model.on(device).store for device in (gpu, device_of("cpu"))]
    with gpu.serving():
        for pairs in ([(0, 4), (1, 3)], [(2, 0)]):
            for store in stores:
                triton_backend.copy(store, pairs)
        (found,) = gpu.download([stores[0].keys[0]]).wait()
    assert np.array_equal(found, stores[1].keys[0].numpy())
