"""Measure the memory that this process may still allocate, and size a KV pool by it.

Linux's counters and control groups are read; on other systems half of the machine's memory counts as free.
"""

from __future__ import annotations

import os
from pathlib import Path

from radixkv.errors import InvalidInput
from radixkv.kv_size import parse_bytes

_CPU_SHARE = 4
_CPU_MOST = 4 * 2**30
_GPU_SHARE = 0.9


def blocks_for(kv_memory: str | int, bytes_per_block: int, device: str) -> int:
    """Return how many blocks of `bytes_per_block` fit into `kv_memory`; raises InvalidInput for less than one."""
    memory = _automatic(device) if kv_memory == "auto" else parse_bytes(kv_memory)
    if memory < bytes_per_block:
        raise InvalidInput(
            f"kv_memory of {memory} bytes holds no block: one block of this model takes {bytes_per_block} bytes"
        )
    return memory // bytes_per_block


def check_free(memory: int, device: str) -> None:
    """Raise InvalidInput if a pool of `memory` bytes is larger than a CPU's free memory; a GPU raises by itself."""
    if device == "cpu" and memory > (free := free_memory()):
        raise InvalidInput(f"a KV pool of {memory} bytes does not fit: {free} bytes are free here")


def _automatic(device: str) -> int:
    """Return a quarter of a CPU's free memory, at most 4 GiB, or the free memory below 90% of a GPU's."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()  # torch keeps the memory of freed pools
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - _GPU_SHARE) * total))
    return min(free_memory() // _CPU_SHARE, _CPU_MOST)


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
