from __future__ import annotations

import pytest

from radixkv import memory
from radixkv.engine import RequestEngine
from radixkv.errors import InvalidInput


def test_blocks_are_what_fits():
    assert memory.blocks_for("1MB", 300_000, "cpu") == 3
    with pytest.raises(InvalidInput, match="one block of this model takes 2000 bytes"):
        memory.blocks_for(1999, 2000, "cpu")


def test_auto_is_a_quarter_of_what_is_free_and_at_most_four_gib(monkeypatch):
    for free, expected in ((2**30, 2**28), (2**40, 2**32)):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        assert memory.blocks_for("auto", 2**10, "cpu") == expected // 2**10


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
        {"seed": "x"},
        {"seed": None},
        {"max_sequences": "8"},
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_reason(wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong)) + "|bytes are free"):
        RequestEngine.load("tiny", device="cpu", **wrong)
