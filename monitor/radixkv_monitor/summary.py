"""Summarise an engine in a few numbers and one sentence, the worst fact first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Literal

from radixkv.telemetry.protocol import CRASHED
from radixkv.telemetry.records import RequestRecord
from radixkv_monitor import history as counters
from radixkv_monitor.formatting import clock, duration, plural, share
from radixkv_monitor.history import MINUTE, LastMinute, evicted_per_second, last_minute, per_second, samples_since_start
from radixkv_monitor.state import Sample, State
from radixkv_monitor.thresholds import DEFAULTS, Thresholds

Level = Literal["good", "idle", "warn", "bad"]


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
        return share(self.part, self.whole)


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

    `from_device`, `from_host` and `computed` divide the prompt tokens of the last minute. Rates are means over the last
    ten seconds; None until a second was sampled. `evicted_blocks` were dropped to make room for others. `failed_minute`
    counts failed copies to and from the host in the last minute.
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
class Percentiles:
    """Percentiles of `count` durations, in seconds; None without any."""

    count: int
    median: float | None
    p90: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of the Overview. `hit_run` counts from the baseline: since the monitor attached, or since the user
    set it.

    A request is a hit in `ttft_hit` if at least half of its prompt was cached, else a miss. Figures of the last minute
    include records from before the monitor attached; counters cover `watched` of its seconds. Rates are None until a
    second was sampled. `states` is None for a model without recurrent state, `host` for an engine without a host tier.
    """

    pool: Pool
    states: States | None
    host: Host | None
    hit_minute: Part
    hit_run: Part
    hit_lifetime: Part
    ttft_hit: Percentiles
    ttft_miss: Percentiles
    output_per_second: float | None
    computed_per_second: float | None
    cached_per_second: float | None
    seconds_per_step: float | None
    tokens_per_step: float | None
    waiting: int
    running: int
    finished: int
    failed: int
    failed_minute: int
    cancelled: int
    longest_wait: float
    requests_minute: int
    evicted_per_second: float
    regret_minute: Part
    regret_lifetime: Part
    preemptions: int
    preemptions_minute: int
    recomputed_tokens: int
    coalesced_requests: int
    audited_blocks: int
    differing_blocks: int
    telemetry_share: float
    watched: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, with a `share` next to each part and whole, and without absent fields."""
        plain = asdict(self)
        if self.host is None:
            del plain["host"]
        else:
            plain["host"]["blocks"]["share"] = self.host.blocks.share
        if self.states is None:
            del plain["states"]
        else:
            for name in ("rows", "snapshots"):
                plain["states"][name]["share"] = getattr(self.states, name).share
        for name in ("hit_minute", "hit_run", "hit_lifetime", "regret_minute", "regret_lifetime"):
            plain[name]["share"] = getattr(self, name).share
        return plain


@dataclass(frozen=True, slots=True)
class Reason:
    """A problem of a verdict: `name` is the crossed threshold, or "crashed", "differing", "stale",
    "silent" or "host"."""

    name: str
    level: Level
    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line on how the engine is doing, the worst fact first, and its problems, the bad ones first."""

    level: Level
    sentence: str
    reasons: tuple[Reason, ...] = ()


# ---- numbers


def summarise(state: State) -> Summary:
    """Compute the numbers of a state. O(requests + log samples)."""
    stats, now = state.stats, state.now
    history = samples_since_start(state)
    minute = last_minute(state, history)

    def total(name: str) -> int:
        return int(stats.get(name, 0))

    def rate(name: str) -> float | None:
        return per_second(state, history, name)

    evicting, telemetry = rate("cache.evicted_tokens"), rate("monitor_ns")
    hits = [each for each in (*state.ended.values(), *state.live.values()) if each.ttft is not None]
    seconds, steps, tokens = (_recent(history, name, now) for name in ("step_seconds", "steps", "step_tokens"))
    return Summary(
        pool=pool(stats, state.facts.num_blocks),
        states=states(stats),
        host=_host(state, history, minute),
        hit_minute=Part(minute.cached_tokens, minute.prompt_tokens),
        hit_run=Part(_since(state.baseline, stats, "cached_tokens"), _since(state.baseline, stats, "prompt_tokens")),
        hit_lifetime=Part(total("cached_tokens"), total("prompt_tokens")),
        ttft_hit=percentiles(each.ttft for each in hits if is_hit(each)),
        ttft_miss=percentiles(each.ttft for each in hits if not is_hit(each)),
        output_per_second=rate("output_tokens"),
        computed_per_second=rate("computed_tokens"),
        cached_per_second=rate("cached_tokens"),
        seconds_per_step=seconds / steps if steps >= 1 else None,
        tokens_per_step=tokens / steps if steps >= 1 else None,
        waiting=total("waiting"),
        running=total("running"),
        finished=total("finished"),
        failed=total("failed"),
        failed_minute=minute.failed,
        cancelled=total("cancelled"),
        longest_wait=longest_wait(state.live.values(), now),
        requests_minute=minute.ended,
        evicted_per_second=evicted_per_second(state) if evicting is None else evicting,
        regret_minute=Part(minute.regret_tokens, minute.query_tokens),
        regret_lifetime=Part(total("cache.regret_tokens"), total("cache.query_tokens")),
        preemptions=total("preemptions"),
        preemptions_minute=minute.preemptions,
        recomputed_tokens=total("recomputed_tokens"),
        coalesced_requests=total("coalesced_requests"),
        audited_blocks=total("audited_blocks"),
        differing_blocks=total("differing_blocks"),
        telemetry_share=_of_life(state, "monitor_ns") / 1e9 if telemetry is None else telemetry / 1e9,
        watched=minute.watched,
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


def _host(state: State, history: Sequence[Sample], minute: LastMinute) -> Host | None:
    """Count the blocks of the host tier, and its traffic; None for an engine without one."""
    stats, whole = state.stats, state.facts.host_blocks
    if not whole:
        return None

    def total(name: str) -> int:
        return int(stats.get(name, 0))

    failed = (_recent(history, name, state.now) for name in ("failed_loads", "failed_offloads"))
    return Host(
        blocks=Part(whole - min(whole, total("cache.host_free_blocks")), whole),
        nodes=total("cache.host_nodes"),
        bytes=whole * state.facts.bytes_per_block,
        from_device=round(minute.cached_tokens - minute.host_tokens),
        from_host=round(minute.host_tokens),
        computed=round(max(0.0, minute.prompt_tokens - minute.cached_tokens)),
        offloaded_blocks=total("cache.offloaded_blocks"),
        offloaded_per_second=per_second(state, history, "cache.offloaded_blocks"),
        loaded_tokens=total("cache.loaded_tokens"),
        loaded_per_second=per_second(state, history, "cache.loaded_tokens"),
        evicted_blocks=total("cache.host_evicted_blocks"),
        failed_minute=round(sum(failed)),
    )


def percentiles(durations: Iterable[float | None]) -> Percentiles:
    """Compute median and p90 by nearest rank, so both are measured values."""
    values = sorted(each for each in durations if each is not None)
    return Percentiles(len(values), percentile(values, 0.5), percentile(values, 0.9))


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the least of the sorted `values` that is not exceeded by `share` of them; None without values."""
    return values[max(0, ceil(share * len(values)) - 1)] if values else None


def is_hit(request: RequestRecord) -> bool:
    """Return whether at least half of the prompt was cached."""
    return 0 < request.prompt_tokens <= 2 * request.cached_tokens


def longest_wait(requests: Iterable[RequestRecord], now: float) -> float:
    """Return the seconds since the oldest request that is not admitted was submitted; 0 without one."""
    return max((now - each.submitted for each in requests if each.phase == "waiting"), default=0.0)


def _recent(history: Sequence[Sample], name: str, now: float) -> float:
    return counters.grown(history, name, now, MINUTE)


def _of_life(state: State, name: str) -> float:
    """Return a counter's growth per second since the engine was loaded."""
    return state.stats.get(name, 0.0) / max(1.0, state.now - state.facts.started)


def _since(baseline: Sample | None, stats: Mapping[str, float], name: str) -> float:
    return max(0.0, stats.get(name, 0.0) - (baseline.stats.get(name, 0.0) if baseline else 0.0))


# ---- the sentence


def verdict(state: State, summary: Summary, thresholds: Thresholds = DEFAULTS) -> Verdict:
    """Judge how the engine is doing. Problems come before plain facts."""
    reasons = (*_bad(state, summary, thresholds), *_warnings(summary, thresholds, state.until))
    facts = list(_facts(summary, state.until))
    level, opening = _mood(summary)
    if state.stale or state.silence:
        if not reasons:
            facts = [f"was {opening.lower()}: {facts[0]}", *facts[1:]]
        reasons = (_absence(state), *reasons)
    reasons = tuple(sorted(reasons, key=lambda each: each.level != "bad"))
    if reasons:
        sentences = (*(each.sentence for each in reasons), *facts)
        return Verdict(reasons[0].level, _capital("; ".join(sentences)), reasons)
    if state.end_reason:
        level, opening = "idle", f"Ended ({state.end_reason})"
    return Verdict(level, f"{opening}: {'; '.join(facts)}")


def _absence(state: State) -> Reason:
    """State that the engine cannot be reached, or for how long it has been silent."""
    if state.stale:
        return Reason("stale", "bad", f"not connected since {clock(state.now)}")
    return Reason("silent", "warn", f"no news for {state.silence:.0f} s")


def _bad(state: State, summary: Summary, thresholds: Thresholds) -> Iterable[Reason]:
    if state.end_reason.startswith(CRASHED):
        yield Reason("crashed", "bad", state.end_reason)
    if summary.differing_blocks:
        audited = plural(summary.audited_blocks, "audited block")
        yield Reason("differing", "bad", f"{summary.differing_blocks:,} of {audited} differ when recomputed")
    if thresholds.failed is not None and summary.failed_minute > thresholds.failed:
        sentence = f"{plural(summary.failed_minute, 'request')} failed in the last minute{state.until}"
        yield Reason("failed", "bad", sentence)


def _warnings(summary: Summary, thresholds: Thresholds, until: str) -> Iterable[Reason]:
    """List the warnings; `until` follows "the last minute", as `State.until` says."""
    minute = f"the last minute{until}"
    if thresholds.longest_wait is not None and summary.longest_wait >= thresholds.longest_wait:
        sentence = f"{plural(summary.waiting, 'request')} waiting, the longest for {duration(summary.longest_wait)}"
        yield Reason("longest_wait", "warn", sentence)
    if thresholds.preemptions is not None and summary.preemptions_minute > thresholds.preemptions:
        when = f"in {minute}" if summary.watched >= MINUTE else f"of requests of {minute}"
        preempted = plural(summary.preemptions_minute, "preemption")
        yield Reason("preemptions", "warn", f"{preempted} {when}: the pool is too small for this load")
    if thresholds.regret is not None and (summary.regret_minute.share or 0) >= thresholds.regret:
        sentence = f"{summary.regret_minute} of the tokens requested in {minute} had been evicted"
        yield Reason("regret", "warn", sentence)
    if summary.host is not None and summary.host.failed_minute:
        failed = plural(summary.host.failed_minute, "transfer")
        yield Reason("host", "warn", f"{failed} to or from the host failed in {minute}")
    held = Part(summary.pool.active + summary.pool.pinned, summary.pool.total)
    if thresholds.held is not None and held.whole and (held.share or 0) >= thresholds.held:
        yield Reason("held", "warn", f"{held} of the pool is held")


def _facts(summary: Summary, until: str) -> Iterable[str]:
    recent = summary.hit_minute if summary.hit_minute.whole >= 1 else summary.hit_lifetime
    if recent.whole >= 1:
        yield f"{recent} of prompt tokens served from cache"
    preemptions = "" if summary.preemptions_minute else f", 0 preemptions in the last minute{until}"
    yield f"pool {share(summary.pool.total - summary.pool.free, summary.pool.total)} full{preemptions}"


def _mood(summary: Summary) -> tuple[Level, str]:
    if summary.running or summary.waiting or summary.requests_minute or summary.hit_minute.whole >= 1:
        return "good", "Healthy"
    return "idle", "Idle" if summary.hit_lifetime.whole else "Ready, no request yet"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
