from __future__ import annotations

import pytest
import torch

from radixkv.cache import PrefixCache
from radixkv.engine import RequestEngine
from radixkv.errors import InvalidInput
from radixkv.sizing import memory


def test_blocks_are_what_fits():
    assert memory.blocks_for("1MB", 300_000, "cpu") == 3
    with pytest.raises(InvalidInput, match=r"one block of this model takes 1\.954 KiB"):
        memory.blocks_for(1999, 2000, "cpu")


def test_auto_is_a_quarter_of_what_is_free_and_at_most_four_gib(monkeypatch):
    for free, expected in ((2**30, 2**28), (2**40, 2**32)):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        assert memory.blocks_for("auto", 2**10, "cpu") == expected // 2**10


def test_host_memory_holds_whole_blocks_and_at_least_two():
    assert memory.host_size("1MB", 300_000).blocks == 3
    assert memory.host_size(600_000, 300_000).blocks == 2
    assert [memory.host_size(off, 300_000).blocks for off in (None, 0, "0", "0GiB")] == [0] * 4
    with pytest.raises(InvalidInput, match="one block of this model takes 293 KiB; give at least 586 KiB"):
        memory.host_size(599_999, 300_000)


def test_host_memory_comes_in_addition_to_the_pool(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    size = memory.pool_size(700, "cpu", bytes_per_block=100, host_memory=320)
    assert (size.num_blocks, size.memory, size.host_blocks) == (7, 700, 3)
    together = "a KV pool of 800 B and host_memory of 300 B do not fit together: 1000 B are free here"
    with pytest.raises(InvalidInput, match=together):
        memory.pool_size(800, "cpu", bytes_per_block=100, host_memory=320)


def test_automatic_host_memory_is_a_quarter_of_what_the_pool_leaves(monkeypatch, caplog):
    monkeypatch.setattr(memory, "free_memory", lambda: 1500)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: None, raising=False)
    with caplog.at_level("INFO"):
        assert memory.pool_size(700, "cpu", bytes_per_block=100, host_memory="auto").host_blocks == 2
        assert memory.pool_size(700, "cuda:1", bytes_per_block=100, host_memory="auto").host_blocks == 3
    assert "host_memory: 200 B, a quarter of the free memory beside the pool" in caplog.text


def test_host_memory_of_a_gpu_is_compared_with_the_free_memory_of_the_host(monkeypatch):
    released = []
    monkeypatch.setattr(memory, "free_memory", lambda: 1000 if released else 0)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: released.append(True), raising=False)
    assert memory.pool_size(9000, "cuda:1", bytes_per_block=100, host_memory=1000).host_blocks == 10
    with pytest.raises(InvalidInput, match=r"^host_memory of 1.074 KiB does not fit: 1000 B are free here$"):
        memory.pool_size(9000, "cuda:1", bytes_per_block=100, host_memory=1100)


def test_an_engine_allocates_its_host_memory():
    with RequestEngine.load("tiny", device="cpu", num_blocks=64, host_memory="1MiB", monitor=False) as engine:
        host = engine.core.runner.host
        assert (host.num_blocks, host.bytes_per_block) == (10, 98304)
        assert engine.stats().cache.host_blocks == 10
    for off in (None, 0):
        with RequestEngine.load("tiny", device="cpu", num_blocks=64, host_memory=off, monitor=False) as engine:
            assert engine.core.runner.host is None
            assert type(engine.core.cache) is PrefixCache


def test_host_memory_without_a_prefix_cache_is_not_allocated(caplog):
    options = {"num_blocks": 64, "host_memory": "1MiB", "prefix_cache": False, "monitor": False}
    with RequestEngine.load("tiny", device="cpu", **options) as engine:
        assert engine.core.runner.host is None
    assert "host_memory has no effect: prefix_cache=False" in caplog.text


def test_free_memory_keeps_within_the_control_group(tmp_path):
    assert 0 < memory.free_memory() < 2**50
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert memory.left_in_cgroup(tmp_path) == 600
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50\nactive_file 200\n")
    assert memory.left_in_cgroup(tmp_path) == 850  # Linux drops file pages when memory is needed
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.left_in_cgroup(tmp_path) == 2**63


def test_a_group_of_version_one_counts_what_is_below_it(tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("1000\n")
    (folder / "memory.usage_in_bytes").write_text("900\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 200\n")
    assert memory.left_in_cgroup(tmp_path) == 600


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"block_size": "x"},
        {"num_blocks": 0},
        {"num_blocks": 1.5},
        {"num_blocks": 10**12},
        {"kv_memory": "100TB"},
        {"host_memory": "100TB"},
        {"host_memory": "1kB"},
        {"seed": "x"},
        {"seed": None},
        {"max_sequences": "8"},
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_reason(wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong)) + "| are free"):
        RequestEngine.load("tiny", device="cpu", **wrong)
