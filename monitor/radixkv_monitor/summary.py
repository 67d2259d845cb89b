"""Summarise an engine in a few numbers and one sentence, the worst fact first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from radixkv.telemetry.protocol import CRASHED
from radixkv.telemetry.records import RequestRecord
from radixkv.telemetry.what_if import WhatIfReport
from radixkv_monitor import history as counters
from radixkv_monitor import occupancy
from radixkv_monitor.alert_settings import DEFAULTS, Thresholds
from radixkv_monitor.formatting import clock, count, duration, plural, share
from radixkv_monitor.history import (
    MINUTE,
    MOMENT,
    evicted_per_second,
    last_minute,
    per_second,
    sampled,
    samples_since_start,
)
from radixkv_monitor.latency import Percentiles, latencies, time_text
from radixkv_monitor.occupancy import Disk, Host, Part, Pool, Process, States
from radixkv_monitor.state import Sample, State

Level = Literal["good", "idle", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of the Overview. `hit_run` counts from the baseline: since the monitor attached, or since the user
    set it.

    A request is a hit in `ttft_hit` if at least half of its prompt was cached, else a miss. Latencies cover
    `latency_window`, the last minute or as much of it as the records cover; `itl_window` is the window of the samples.
    Figures of the last minute include records from before the monitor attached; counters cover `watched` of its
    seconds. Rates are means over `rate_window` seconds, ten or as many as were sampled. They are None, and it is 0,
    until a second was sampled; the times of prefill and decode are also None if an older engine does not count them.
    `stream_tokens_per_step` are the decoded tokens of a step of a stream that may draft; None if no stream may.
    `missed_tokens` are the last minute's computed prompt tokens by the reason of the miss, most first.
    `failed` requests exclude the `timed_out` ones, and `waiting` requests the `preempted` ones. `states` is None for a
    model without recurrent state, `host` and `disk` for an engine without that tier, and `itl` and `process` for
    an older engine.
    """

    pool: Pool
    states: States | None
    host: Host | None
    disk: Disk | None
    hit_minute: Part
    hit_run: Part
    hit_lifetime: Part
    ttft: Percentiles
    ttft_hit: Percentiles
    ttft_miss: Percentiles
    queue_time: Percentiles
    itl: Percentiles | None
    e2e: Percentiles
    latency_window: str
    itl_window: str
    rate_window: float
    output_per_second: float | None
    computed_per_second: float | None
    prefill_per_second: float | None
    decode_per_second: float | None
    cached_per_second: float | None
    seconds_per_step: float | None
    tokens_per_step: float | None
    waiting: int
    running: int
    preempted: int
    finished: int
    failed: int
    failed_minute: int
    timed_out: int
    timed_out_minute: int
    cancelled: int
    cancelled_minute: int
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
    covered: float
    process: Process | None
    missed_tokens: Mapping[str, int]
    stream_tokens_per_step: float | None = None
    waits_for: str | None = None
    turn_admissions: int = 0
    overdue_admissions: int = 0

    @property
    def minute(self) -> str:
        """The words for the window of the figures of the last minute; perhaps only a part of it is known."""
        return "the last minute" if self.minute_name == "1 min" else f"the last {self.minute_name}"

    @property
    def minute_name(self) -> str:
        """The short name of that window: "1 min", or the seconds that are known of it."""
        return "1 min" if self.covered >= MINUTE - 1 else duration(self.covered)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, with a `share` next to each part and whole, and without absent fields."""
        plain = asdict(self)
        for name, tier in (("host", self.host), ("disk", self.disk)):
            if tier is None:
                del plain[name]
            else:
                plain[name]["blocks"]["share"] = tier.blocks.share
        for name in ("ttft", "ttft_hit", "ttft_miss", "queue_time", "itl", "e2e"):
            times = getattr(self, name)
            plain[name] = None if times is None else times.as_dict()
        for name in ("itl", "process", "stream_tokens_per_step"):
            if plain[name] is None:
                del plain[name]
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
    """A problem of a verdict: `name` names the crossed threshold, or one of `thresholds.UNCONDITIONAL`."""

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
    history, moment = samples_since_start(state, MINUTE), samples_since_start(state, MOMENT)
    minute = last_minute(state, history)

    def total(name: str) -> int:
        return int(stats.get(name, 0))

    def rate(name: str) -> float | None:
        return per_second(state, moment, name)

    evicting, telemetry = rate("cache.evicted_tokens"), rate("monitor_ns")
    if telemetry is None:  # since the engine was loaded
        telemetry = stats.get("monitor_ns", 0.0) / max(1.0, now - state.facts.started)
    recent = latencies(state, MINUTE)
    preempted = sum(each.phase == "preempted" for each in state.live.values())
    seconds, steps, tokens = (_recent(history, name, now) for name in ("step_seconds", "steps", "step_tokens"))
    return Summary(
        pool=occupancy.pool(stats, state.facts.num_blocks),
        states=occupancy.states(stats),
        host=occupancy.host_of(state, history, moment, minute),
        disk=occupancy.disk_of(state, history),
        hit_minute=Part(minute.cached_tokens, minute.prompt_tokens),
        hit_run=Part(_since(state.baseline, stats, "cached_tokens"), _since(state.baseline, stats, "prompt_tokens")),
        hit_lifetime=Part(total("cached_tokens"), total("prompt_tokens")),
        ttft=recent.ttft.percentiles,
        ttft_hit=recent.ttft_hit.percentiles,
        ttft_miss=recent.ttft_miss.percentiles,
        queue_time=recent.queue_time.percentiles,
        itl=None if recent.itl.counts is None else recent.itl.percentiles,
        e2e=recent.e2e.percentiles,
        latency_window=recent.e2e.window,
        itl_window=recent.itl.window,
        rate_window=sampled(state, moment),
        output_per_second=rate("output_tokens"),
        computed_per_second=rate("computed_tokens"),
        prefill_per_second=rate("prefill_tokens") if "prefill_tokens" in stats else None,
        decode_per_second=rate("decode_tokens") if "decode_tokens" in stats else None,
        cached_per_second=rate("cached_tokens"),
        seconds_per_step=seconds / steps if steps >= 1 else None,
        tokens_per_step=tokens / steps if steps >= 1 else None,
        waiting=max(0, total("waiting") - preempted),
        running=total("running"),
        preempted=preempted,
        finished=total("finished"),
        failed=max(0, total("failed") - total("timed_out")),
        failed_minute=minute.failed,
        timed_out=total("timed_out"),
        timed_out_minute=minute.timed_out,
        cancelled=total("cancelled"),
        cancelled_minute=minute.cancelled,
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
        telemetry_share=telemetry / 1e9,
        watched=minute.watched,
        covered=minute.covered,
        process=occupancy.process_of(state),
        missed_tokens=missed_tokens(stats, lambda name: _recent(history, name, now)),
        stream_tokens_per_step=_stream_tokens_per_step(history, stats, now),
        waits_for=head_waits_for(state.live.values()),
        turn_admissions=total("turn_admissions"),
        overdue_admissions=total("overdue_admissions"),
    )


def _stream_tokens_per_step(history: Sequence[Sample], stats: Mapping[str, float], now: float) -> float | None:
    """Return the last minute's tokens per step of a stream that may draft: one, and the accepted ones."""
    steps = _recent(history, "drafting_steps", now)
    accepted = sum(_recent(history, name, now) for name in stats if name.startswith("accepted_from_"))
    return 1 + accepted / steps if steps >= 1 else None


def missed_tokens(stats: Mapping[str, float], grown: Callable[[str], float]) -> dict[str, int]:
    """Return the growth of the engine's counters of computed prompt tokens by miss reason, most first."""
    names = [name for name in stats if name.startswith("missed_") and name != "missed_full"]
    tokens = sorted(((round(grown(name)), name.removeprefix("missed_")) for name in names), reverse=True)
    return {reason: count for count, reason in tokens if count}


def longest_wait(requests: Iterable[RequestRecord], now: float) -> float:
    """Return the seconds since the oldest request that is not admitted was submitted; 0 without one."""
    return max((now - each.submitted for each in requests if each.phase == "waiting"), default=0.0)


def head_waits_for(requests: Iterable[RequestRecord]) -> str | None:
    """Return why the first request of the wait queue is not admitted; None if none waits, or if it is unknown."""
    return next((each.waits_for for each in requests if each.waits_for is not None), None)


_NOUNS = {
    "turn": "its group's turn",
    "shared prefix": "a shared prefix",
    "disk": "a read from disk",
    "slow reader": "its slow reader",
    "longer hits": "requests with longer hits",
    "next step": "the next step",
}


def head_sentence(reason: str | None) -> str:
    """Say why the first request of the wait queue is not admitted; empty without a reason."""
    return "" if reason is None else f"first in queue waits for {_NOUNS.get(reason, reason)}"


def _recent(history: Sequence[Sample], name: str, now: float) -> float:
    return counters.grown(history, name, now, MINUTE)


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
        text = "; ".join((*(each.sentence for each in reasons), *facts))
        return Verdict(reasons[0].level, text[:1].upper() + text[1:], reasons)
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
        sentence = f"{plural(summary.failed_minute, 'request')} failed in {summary.minute}{state.until}"
        yield Reason("failed", "bad", sentence)


def _warnings(summary: Summary, thresholds: Thresholds, until: str) -> Iterable[Reason]:
    """List the warnings; `until` follows "the last minute", as `State.until` says."""
    minute = f"{summary.minute}{until}"
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
    if thresholds.timed_out is not None and summary.timed_out_minute > thresholds.timed_out:
        sentence = f"{plural(summary.timed_out_minute, 'request')} timed out in {minute}"
        yield Reason("timed_out", "warn", sentence)
    yield from _slow(summary, thresholds, until)
    hit_rate = summary.hit_minute.share
    if thresholds.hit_rate is not None and hit_rate is not None and hit_rate < thresholds.hit_rate:
        sentence = f"only {summary.hit_minute} of the prompt tokens of {minute} from cache"
        yield Reason("hit_rate", "warn", sentence)
    if thresholds.telemetry_share is not None and summary.telemetry_share >= thresholds.telemetry_share:
        yield Reason("telemetry_share", "warn", f"telemetry takes {100 * summary.telemetry_share:.1f}% of engine time")
    if summary.host is not None and summary.host.failed_minute:
        failed = plural(summary.host.failed_minute, "transfer")
        yield Reason("host", "warn", f"{failed} to or from the host failed in {minute}")
    if summary.disk is not None and summary.disk.faults_minute:
        yield Reason("disk", "warn", f"{plural(summary.disk.faults_minute, 'fault')} of the disk cache in {minute}")
    held = Part(summary.pool.active + summary.pool.pinned, summary.pool.total)
    if thresholds.held is not None and held.whole and (held.share or 0) >= thresholds.held:
        yield Reason("held", "warn", f"{held} of the pool is held")


def _slow(summary: Summary, thresholds: Thresholds, until: str) -> Iterable[Reason]:
    """List the percentiles that reach their threshold."""
    for kind, title, noun, times, window in (
        ("ttft", "TTFT", "request", summary.ttft, summary.latency_window),
        ("queue_time", "queue time", "request", summary.queue_time, summary.latency_window),
        ("itl", "ITL", "token", summary.itl, summary.itl_window),
    ):
        values = () if times is None else (("p50", times.median), ("p90", times.p90), ("p99", times.p99))
        for name, seconds in values:
            limit: float | None = getattr(thresholds, f"{kind}_{name}", None)
            if times is not None and limit is not None and seconds is not None and seconds >= limit:
                scope = f"of {plural(times.count, noun)}, {window}{until}"
                yield Reason(f"{kind}_{name}", "warn", f"{title} {name} {time_text(seconds)} {scope}")


def _facts(summary: Summary, until: str) -> Iterable[str]:
    minute, whole = summary.hit_minute, summary.hit_lifetime
    if minute.whole >= 1:
        calm = "" if summary.preemptions_minute else " and 0 preemptions"
        yield f"{minute} of {count(minute.whole)} prompt tokens from cache{calm} in {summary.minute}{until}"
    elif whole.whole >= 1:
        yield f"{whole} of {count(whole.whole)} prompt tokens from cache since load"
    yield f"pool {share(summary.pool.total - summary.pool.free, summary.pool.total)} full"
    if summary.cancelled_minute:
        yield f"{plural(summary.cancelled_minute, 'request')} cancelled in {summary.minute}{until}"


def _mood(summary: Summary) -> tuple[Level, str]:
    busy = summary.running or summary.waiting or summary.preempted
    if busy or summary.requests_minute or summary.hit_minute.whole >= 1:
        return "good", "Running"
    return "idle", "Idle" if summary.hit_lifetime.whole else "Ready, no request yet"


def what_if_sentence(report: WhatIfReport) -> str:
    """Return the sentence of a report, the measured hit rate, why it differs, and the number of dropped requests."""
    if not report.curve.requests:
        return report.sentence
    window = "last 10 min" if report.curve is report.recent else "since load"
    why = f" ({', '.join(report.reasons)})" if report.reasons else ""
    dropped = f" {plural(report.dropped, 'request')} came too fast to be counted." if report.dropped else ""
    return f"{report.sentence} Measured: {report.curve.measured:.0%}, {window}{why}.{dropped}"
