"""Measure the memory that this process may still allocate, and size a KV pool, slots of states and host memory by it.

Linux's counters and control groups are read; on other systems half of the machine's memory counts as free.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from radixkv.disk import BATCH, slots_in
from radixkv.errors import InvalidInput
from radixkv.sizing.kv_size import parse_bytes, size_text

_log = logging.getLogger(__name__)
_CPU_SHARE = 4
_CPU_MOST = 4 * 2**30
_GPU_SLACK = 0.03  # of a GPU's memory: partial results over long contexts, workspaces of libraries, fragments
_M_ARENA_MAX = -8  # a parameter of mallopt, in malloc.h


_FREE_BLOCKS = 1 << 16  # of a model without attention, whose blocks take no memory
_DISK_HOST = 256 << 20
_LEAST_HOST_BLOCKS = 2  # no load takes fewer
_STATE_SHARE = 3
_STATES_PER_ROW = 16


def pool_memory(kv_memory: str | int, device: str, reserved: int = 0) -> int:
    """Return the bytes that `kv_memory` stands for; raises InvalidInput if it is no size.

    "auto" leaves `reserved` bytes of a GPU's memory free, which its steps take.
    """
    return _automatic(device, reserved) if kv_memory == "auto" else parse_bytes(kv_memory)


class StateSlots(NamedTuple):
    """The slots of a state arena: `rows` for running sequences, and snapshots."""

    rows: int
    snapshots: int

    @property
    def total(self) -> int:
        """The number of all slots."""
        return self.rows + self.snapshots


def state_slots(memory: int, bytes_per_state: int, max_sequences: int, state_memory: str | int = "auto") -> StateSlots:
    """Divide `memory`, of KV and states together: return the slots for states of `bytes_per_state`.

    "auto" takes up to a third of the memory, for at most 16 states per sequence, and at most half of them are rows. So
    fewer than `max_sequences` sequences may run at once. A given size holds `max_sequences` rows and a snapshot, or
    more. Raises InvalidInput with the numbers if the slots are too few, or leave no memory for KV.

    >>> state_slots(4 << 30, 52 << 20, max_sequences=64), state_slots(4 << 30, 120 << 10, max_sequences=8)
    (StateSlots(rows=13, snapshots=13), StateSlots(rows=8, snapshots=120))
    """
    each = f"one recurrent state of this model takes {size_text(bytes_per_state)}"
    if state_memory == "auto":
        slots = min(memory // _STATE_SHARE // bytes_per_state, _STATES_PER_ROW * max_sequences)
        if slots < 2:
            raise InvalidInput(
                f"a third of the kv_memory of {size_text(memory)} holds {slots} states, and two are needed, a row and "
                f"a snapshot: {each}; give at least {size_text(2 * _STATE_SHARE * bytes_per_state, up=True)}, or set "
                "state_memory"
            )
        rows = min(max_sequences, slots // 2)
        return StateSlots(rows, slots - rows)
    given = parse_bytes(state_memory, "state_memory")
    slots = given // bytes_per_state
    if slots <= max_sequences:
        raise InvalidInput(
            f"state_memory of {size_text(given)} holds {slots} states, and max_sequences={max_sequences} needs a row "
            f"each and one snapshot: {each}; give {size_text((max_sequences + 1) * bytes_per_state, up=True)}, or "
            "lower max_sequences"
        )
    if given >= memory:
        sizes = f"state_memory of {size_text(given)} leaves nothing of the kv_memory of {size_text(memory)} for KV"
        raise InvalidInput(sizes)
    return StateSlots(max_sequences, slots - max_sequences)


def blocks_for(kv_memory: str | int, bytes_per_block: int, device: str) -> int:
    """Return how many blocks of `bytes_per_block` fit into `kv_memory`; raises InvalidInput for less than one."""
    memory = pool_memory(kv_memory, device)
    if not bytes_per_block:
        return _FREE_BLOCKS
    if memory < bytes_per_block:
        raise InvalidInput(
            f"kv_memory of {size_text(memory)} holds no block: one block of this model takes "
            f"{size_text(bytes_per_block, up=True)}"
        )
    return memory // bytes_per_block


class HostSize(NamedTuple):
    """What fits into host memory: offloaded blocks, and snapshots of recurrent state."""

    blocks: int
    snapshots: int = 0


def host_size(
    host_memory: str | int | None,
    bytes_per_block: int,
    bytes_per_state: int = 0,
    max_sequences: int = 64,
    *,
    pool: int = 0,
) -> HostSize:
    """Divide `host_memory` between offloaded blocks and snapshots; both are 0 if it is None or 0.

    "auto" is a quarter of the free memory, without the `pool` bytes that will be taken from it first, and is logged.
    Snapshots of states of `bytes_per_state` take up to a third of it, for at most 16 a sequence. Raises InvalidInput
    with the numbers for less than two blocks, for less than one snapshot of a model with recurrent state, and for a
    model without KV.

    >>> host_size("1GiB", 96 * 1024), host_size("1GiB", 96 * 1024, 52 << 20), host_size(None, 96 * 1024)
    (HostSize(blocks=10922, snapshots=0), HostSize(blocks=7594, snapshots=6), HostSize(blocks=0, snapshots=0))
    """
    given = _host_bytes(host_memory, pool)
    if not given:
        return HostSize(0)
    if not bytes_per_block:
        raise InvalidInput(f"host_memory={host_memory!r}: this model has no KV that could be offloaded; leave it out")
    snapshots = 0
    if bytes_per_state:
        snapshots = min(given // _STATE_SHARE // bytes_per_state, _STATES_PER_ROW * max_sequences)
        if not snapshots:
            least = size_text(_STATE_SHARE * bytes_per_state, up=True)
            raise InvalidInput(
                f"a third of the host_memory of {size_text(given)} holds no recurrent state of this model, which takes "
                f"{size_text(bytes_per_state)}; give at least {least}, or 0 for none"
            )
    blocks = (given - snapshots * bytes_per_state) // bytes_per_block
    if blocks < _LEAST_HOST_BLOCKS:
        block, least = size_text(bytes_per_block), size_text(_LEAST_HOST_BLOCKS * bytes_per_block, up=True)
        raise InvalidInput(
            f"host_memory of {size_text(given)} is less than the two blocks of the smallest load: one block of this "
            f"model takes {block}; give at least {least}, or 0 for none"
        )
    return HostSize(blocks, snapshots)


def _host_bytes(host_memory: str | int | None, pool: int) -> int:
    if host_memory != "auto":
        return 0 if host_memory is None else parse_bytes(host_memory, "host_memory")
    given = max(0, free_memory() - pool) // _CPU_SHARE
    _log.info("host_memory: %s, a quarter of the free memory beside the pool", size_text(given))
    return given


def host_for_disk(host_memory: str | int | None, pool: int, bytes_per_block: int) -> str | int:
    """Return `host_memory`; if it is None or 0, the memory that a disk needs, which is logged.

    That is half of the `pool` bytes, at most 256 MiB, or an eighth if that is more: one read must fit into it.
    """
    if host_memory == "auto" or (host_memory is not None and parse_bytes(host_memory, "host_memory")):
        return host_memory
    given = max(min(pool // 2, _DISK_HOST), pool // 8, _LEAST_HOST_BLOCKS * bytes_per_block)
    _log.info("host_memory: %s, for the disk cache", size_text(given))
    return given


def disk_blocks(memory: str | int, bytes_per_block: int, block_size: int, bytes_per_state: int = 0) -> int:
    """Return how many blocks fit into `disk_memory`; raises InvalidInput for too few, and for recurrent states."""
    given = parse_bytes(memory, "disk_memory", automatic=False)
    blocks = slots_in(given, bytes_per_block, block_size)
    if bytes_per_state:
        raise InvalidInput(
            "disk_cache: this model has recurrent state. Snapshots stay in memory, and KV without one cannot be used"
        )
    if blocks < BATCH:
        raise InvalidInput(
            f"disk_memory of {size_text(given)} has room for {blocks} blocks, and {BATCH} are the least: "
            f"one of this model takes {size_text(bytes_per_block)}"
        )
    return blocks


class PoolSize(NamedTuple):
    """The blocks of a pool and the slots of recurrent states, and the bytes of both; and what host memory holds."""

    num_blocks: int
    slots: StateSlots
    memory: int
    host_blocks: int = 0
    host_snapshots: int = 0


def pool_size(
    kv_memory: str | int,
    device: str,
    *,
    bytes_per_block: int,
    num_blocks: int | None = None,
    bytes_per_state: int = 0,
    max_sequences: int = 64,
    state_memory: str | int = "auto",
    host_memory: str | int | None = None,
    reserved: int = 0,
    disk: bool = False,
) -> PoolSize:
    """Return the size of the pool, of the states and of the host memory that an engine with these settings allocates.

    `reserved` as in `pool_memory`. With a `disk` and without `host_memory`, see `host_for_disk`.
    Raises InvalidInput with the numbers if the memory is too small, or is not free.
    """
    slots = StateSlots(0, 0)
    memory = pool_memory(kv_memory, device, reserved) if bytes_per_state or num_blocks is None else 0
    if bytes_per_state:
        slots = state_slots(memory, bytes_per_state, max_sequences, state_memory)
    states = slots.total * bytes_per_state
    if num_blocks is None:
        num_blocks = blocks_for(memory - states, bytes_per_block, device)
    memory = num_blocks * bytes_per_block + states
    if disk:
        host_memory = host_for_disk(host_memory, memory, bytes_per_block)
    beside = memory if device.partition(":")[0] == "cpu" else 0
    host = host_size(host_memory, bytes_per_block, bytes_per_state, max_sequences, pool=beside)
    if host.blocks:
        _release_pinned(device)
    offloaded = host.blocks * bytes_per_block + host.snapshots * bytes_per_state
    check_free(memory, device.partition(":")[0], offloaded)
    return PoolSize(num_blocks, slots, memory, host.blocks, host.snapshots)


def check_free(memory: int, device: str, host: int = 0) -> None:
    """Raise InvalidInput if a pool of `memory` bytes and `host` bytes for offloaded blocks exceed a CPU's free memory.

    Only a pool on a CPU takes a part of that; a GPU raises by itself.
    """
    parts = [f"a KV pool of {size_text(memory)}"] if device == "cpu" else []
    parts += [f"host_memory of {size_text(host)}"] if host else []
    if (memory if device == "cpu" else 0) + host > (free := free_memory()):
        fits = "do not fit together" if len(parts) > 1 else "does not fit"
        raise InvalidInput(f"{' and '.join(parts)} {fits}: {size_text(free)} are free here")


def _release_pinned(device: str) -> None:
    """Release the pinned memory that torch keeps of closed engines."""
    from radixkv.device import device_of

    device_of(device).release_pinned()


def _automatic(device: str, reserved: int) -> int:
    """Return a quarter of a CPU's free memory, at most 4 GiB, or a GPU's without `reserved` bytes and 3%."""
    from radixkv.device import device_of

    gpu = device_of(device)
    if not gpu.is_gpu:
        return min(free_memory() // _CPU_SHARE, _CPU_MOST)
    gpu.release_cached()  # torch keeps the memory of freed pools
    free, total = gpu.memory()
    return max(0, free - reserved - int(_GPU_SLACK * total))


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


def limit_arenas(count: int = 2) -> bool:
    """Let malloc use `count` arenas from now on; return whether it can: glibc only.

    glibc gives each thread an arena, up to eight per core. Memory that one thread allocates and another one frees
    stays in the arena of the first, so that the resident memory of a server grows for hours. `MALLOC_ARENA_MAX` in the
    environment takes precedence. For processes that radixkv owns; call it before threads start.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, count))
    except (OSError, AttributeError):  # no glibc
        return False


def trim() -> None:
    """Return freed memory to the system: glibc only, elsewhere without effect. Costs milliseconds."""
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)
