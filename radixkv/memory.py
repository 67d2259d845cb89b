"""Measure the memory that this process may still allocate.

Linux's counters and control groups are read; on other systems half of the machine's memory counts as free.
"""

from __future__ import annotations

import os
from pathlib import Path


def free_memory() -> int:
    """Return the bytes that this process may still allocate: the machine's, within the control group's limit."""
    return min(_available(), left_in_cgroup())


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def left_in_cgroup(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes up to the limit of the control group that `folder` describes; 2**63 without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int((folder / limit).read_text()) - int((folder / used).read_text()) + _files(folder, used))
        except (OSError, ValueError):  # another version of control groups, or "max"
            continue
    return 2**63


def _files(folder: Path, used: str) -> int:
    """Return the bytes of cached files that `used` counts; Linux drops them when memory is needed."""
    try:
        lines = (folder / used).with_name("memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines)
    prefix = "total_" if "total_inactive_file" in stat else ""  # version 1: with the groups below this one
    return sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
