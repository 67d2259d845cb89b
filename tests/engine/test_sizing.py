from __future__ import annotations

import pytest

from radixkv.engine import sizing
from radixkv.errors import InvalidInput


def test_sizes_in_words():
    assert sizing.parse_bytes(4096) == 4096
    assert sizing.parse_bytes("2g") == 2 * 10**9
    assert sizing.parse_bytes(" 0.5 MiB ") == 2**19
    for bad in ("", "much", "-1", "3 apples", True, "1e9"):
        with pytest.raises(InvalidInput, match="kv_memory"):
            sizing.parse_bytes(bad)


def test_blocks_are_what_fits():
    assert sizing.blocks_for("1MB", 300_000, "cpu") == 3
    with pytest.raises(InvalidInput, match="one block of this model takes 2000 bytes"):
        sizing.blocks_for(1999, 2000, "cpu")


def test_auto_is_a_quarter_of_what_is_free_and_at_most_four_gib(monkeypatch):
    for free, expected in ((2**30, 2**28), (2**40, 2**32)):
        monkeypatch.setattr(sizing, "free_memory", lambda free=free: free)
        assert sizing.blocks_for("auto", 2**10, "cpu") == expected // 2**10


def test_free_memory_keeps_within_the_control_group(tmp_path):
    assert 0 < sizing.free_memory() < 2**50
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert sizing._left_in_cgroup(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert sizing._left_in_cgroup(tmp_path) == 2**63
