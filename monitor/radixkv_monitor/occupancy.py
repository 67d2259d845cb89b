"""Count what an engine occupies: the blocks of its pool, recurrent states, the host tier, the disk, and its process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from radixkv_monitor.formatting import plural, share, size
from radixkv_monitor.history import MINUTE, LastMinute, grown, of_one_engine, per_second, sampled
from radixkv_monitor.state import Sample, State

_FAULTS = ("disk.failed_reads", "disk.failed_writes", "disk.damaged_records", "disk.abandoned_reads")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a whole."""

    part: float
    whole: float

    @property
    def share(self) -> float | None:
        """The share, 0 to 1; None if the whole is 0."""
        return min(1.0, self.part / self.whole) if self.whole > 0 else None

    @property
    def counts(self) -> str:
        """Both numbers."""
        return f"{self.part:,.0f}/{self.whole:,.0f}"

    def __str__(self) -> str:
        return share(min(self.part, self.whole), self.whole)


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks by state; the four add up to `total`. Sequences hold the active ones, pins the pinned ones."""

    free: int
    active: int
    cached: int
    pinned: int

    @property
    def total(self) -> int:
        """All blocks."""
        return self.free + self.active + self.cached + self.pinned


@dataclass(frozen=True, slots=True)
class States:
    """Recurrent states of a hybrid model: rows of open sequences, and slots of snapshots in the tree.

    `evicted` counts snapshots evicted to make room, and `copies` the copies from slot to slot. `bytes` is the memory of
    all slots. Copies and bytes are 0 if an older engine does not send them.
    """

    rows: Part
    snapshots: Part
    evicted: int
    copies: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.rows.counts} rows, {self.snapshots.counts} snapshots, {self.evicted:,} evicted"


@dataclass(frozen=True, slots=True)
class Host:
    """The host tier. `blocks` counts the used blocks of all host blocks, and `bytes` is the memory of all.

    `from_device`, `from_host` and `computed` divide the prompt tokens of the last minute. Rates are means over
    `Summary.rate_window`; None until a second was sampled. `evicted_blocks` were dropped to make room for others.
    `failed_minute` counts failed copies to and from the host in the last minute.
    """

    blocks: Part
    nodes: int
    bytes: int
    from_device: int
    from_host: int
    computed: int
    offloaded_blocks: int
    offloaded_per_second: float | None
    loaded_tokens: int
    loaded_per_second: float | None
    evicted_blocks: int
    failed_minute: int

    @property
    def sources(self) -> str:
        """The sources of the prompt tokens of the last minute, in percent."""
        whole = self.from_device + self.from_host + self.computed
        device, host, computed = (share(part, whole) for part in (self.from_device, self.from_host, self.computed))
        return f"{device} of the tokens from the device, {host} from the host, {computed} computed, in 1 min"

    def __str__(self) -> str:
        return f"{self.blocks.counts} blocks, {self.offloaded_blocks:,} offloaded, {self.loaded_tokens:,} tokens loaded"


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk cache. `blocks` counts the blocks on disk of all that fit there, and `bytes` is the size of all.

    `read_bytes_per_second` is measured by the engine. `faults` counts failed and late reads, failed writes and damaged
    records since load, and `faults_minute` the faults of the last minute.
    """

    blocks: Part
    bytes: int
    read_bytes_per_second: int
    faults: int
    faults_minute: int

    def __str__(self) -> str:
        speed = f"read at {self.read_bytes_per_second / 1e6:,.0f} MB/s"
        return f"{self.blocks.counts} blocks, {size(self.bytes)}, {speed}, {plural(self.faults, 'fault')}"


@dataclass(frozen=True, slots=True)
class Process:
    """The process of the engine: the mean share of a core over the last `cpu_window` seconds, at most ten, and bytes.

    The share is None until a second was sampled. `device_bytes` of `device_total_bytes` are reserved on the GPU; None
    on a CPU.
    """

    cpu_share: float | None
    cpu_window: float
    rss_bytes: int
    device_bytes: int | None
    device_total_bytes: int | None


def process_of(state: State) -> Process | None:
    """Return the figures of the engine's process; None if they were not sent.

    The process had used CPU time before it loaded the engine, so only samples of this time count for the share.
    """
    stats, name = state.stats, "process_cpu_seconds"
    if "process_rss_bytes" not in stats:
        return None
    history = [each for each in of_one_engine(state.history) if name in each.stats]
    used, whole = (stats.get(name) for name in ("device_memory_bytes", "device_memory_total_bytes"))
    return Process(
        cpu_share=per_second(state, history, name),
        cpu_window=sampled(state, history),
        rss_bytes=int(stats["process_rss_bytes"]),
        device_bytes=None if used is None else int(used),
        device_total_bytes=None if whole is None else int(whole),
    )


def pool(stats: Mapping[str, float], num_blocks: int) -> Pool:
    """Count the blocks by state, from the gauges; the rest is free."""
    cached = min(num_blocks, int(stats.get("cache.cached_blocks", 0)))
    held = min(num_blocks - cached, int(stats.get("cache.held_blocks", 0)))
    pinned = min(held, int(stats.get("cache.pinned_blocks", 0)))
    return Pool(free=num_blocks - cached - held, active=held - pinned, cached=cached, pinned=pinned)


def states(stats: Mapping[str, float]) -> States | None:
    """Count the slots of recurrent states; None for a model without recurrent state."""
    if not stats.get("cache.state_rows"):
        return None
    rows, slots = (
        Part(stats.get(f"cache.{name}_used", 0.0), stats.get(f"cache.{name}", 0.0))
        for name in ("state_rows", "state_slots")
    )
    evicted, copies, memory = (
        int(stats.get(name, 0)) for name in ("cache.evicted_states", "state_copies", "state_bytes")
    )
    return States(rows, slots, evicted, copies, memory)


def host_of(state: State, history: Sequence[Sample], moment: Sequence[Sample], minute: LastMinute) -> Host | None:
    """Count the blocks of the host tier, and its traffic; None for an engine without one.

    `history` are the samples of sums over a minute, and `moment` the samples of rates.
    """
    stats, whole = state.stats, state.facts.host_blocks
    if not whole:
        return None

    def total(name: str) -> int:
        return int(stats.get(name, 0))

    failed = (grown(history, name, state.now, MINUTE) for name in ("failed_loads", "failed_offloads"))
    return Host(
        blocks=Part(whole - min(whole, total("cache.host_free_blocks")), whole),
        nodes=total("cache.host_nodes"),
        bytes=whole * state.facts.bytes_per_block,
        from_device=round(minute.cached_tokens - minute.host_tokens),
        from_host=round(minute.host_tokens),
        computed=round(max(0.0, minute.prompt_tokens - minute.cached_tokens)),
        offloaded_blocks=total("cache.offloaded_blocks"),
        offloaded_per_second=per_second(state, moment, "cache.offloaded_blocks"),
        loaded_tokens=total("cache.loaded_tokens"),
        loaded_per_second=per_second(state, moment, "cache.loaded_tokens"),
        evicted_blocks=total("cache.host_evicted_blocks"),
        failed_minute=round(sum(failed)),
    )


def disk_of(state: State, history: Sequence[Sample]) -> Disk | None:
    """Count the blocks of the disk cache, and its faults; None for an engine without one.

    `history` are the samples of sums over a minute.
    """
    stats, slots = state.stats, int(state.stats.get("disk.slots", 0))
    if not slots:
        return None
    return Disk(
        blocks=Part(stats.get("disk.records", 0.0), slots),
        bytes=slots * state.facts.bytes_per_block,
        read_bytes_per_second=int(stats.get("disk.read_bytes_per_s", 0)),
        faults=int(sum(stats.get(name, 0) for name in _FAULTS)),
        faults_minute=round(sum(grown(history, name, state.now, MINUTE) for name in _FAULTS)),
    )
