"""One summary of an engine, for scripts and for terminals that cannot be drawn on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from radixkv.errors import EngineNotFound
from radixkv_monitor.alert_settings import DEFAULTS, Thresholds
from radixkv_monitor.feed import CUT, Ending, Feed
from radixkv_monitor.formatting import count, duration, plural, share, short, size
from radixkv_monitor.latency import Percentiles, time_text
from radixkv_monitor.live import SocketFeed
from radixkv_monitor.occupancy import Process
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.state import State
from radixkv_monitor.summary import Summary, head_sentence, missed_tokens, summarise, verdict, what_if_sentence

NAMES = 12
"""The columns of the names in `to_text`."""


def first_state(
    feed: Feed, patience: float, watched: float = 0.0, report: Callable[[float], None] = lambda share: None
) -> State:
    """Start the feed, wait for a state (of a recording: for its last), and close the feed.

    A live engine is then watched for `watched` seconds, unless it ends; a rate needs two samples. A recording is read
    whole, however long that takes. `report` is called with the share that was read or watched. Raises EngineNotFound
    after `patience` seconds in which nothing arrived before a state was whole, and if a recording has none.
    """
    feed.start()
    try:
        if isinstance(feed, FileFeed):
            _go_to_end(feed, report)
        else:
            _watch(feed, patience, watched, report)
        state = feed.current
        if state is None:
            why = feed.status.sentence or "no state was received"
            raise EngineNotFound(why if feed.title in why else f"{feed.title}: {why}")
        return state
    finally:
        feed.close()


def _go_to_end(feed: FileFeed, report: Callable[[float], None]) -> None:
    """Wait until the recording was read and its last state is shown."""
    feed.pause(False)
    while not feed.wait_until_loaded(0.1):
        report(feed.progress)
    if feed.span is not None:
        feed.seek(feed.span[1])
    while feed.status.link != "ended":
        time.sleep(0.01)


def _watch(feed: Feed, patience: float, watched: float, report: Callable[[float], None]) -> None:
    """Wait for a first state, and then for `watched` seconds while the engine is connected."""
    received, until = feed.traffic, time.monotonic() + patience
    while time.monotonic() < until and feed.status.link != "ended":
        if feed.traffic != received:
            received, until = feed.traffic, time.monotonic() + patience
        if feed.latest is not None and feed.status.link != "connecting":
            break
        status = feed.status
        if isinstance(feed, SocketFeed) and feed.latest is None and status.sentence and not status.silence:
            break  # the first attempt failed, and a script does not wait for an engine to start
        time.sleep(0.02)
    until = time.monotonic() + watched
    while (left := until - time.monotonic()) > 0 and feed.status.link in ("live", "silent"):
        report(1 - left / watched)
        time.sleep(0.02)


def damage(feed: Feed) -> str:
    """Describe the damage of a recording in full; empty if it is whole."""
    ending = feed.ending
    if ending.damaged_at is None:
        return ""
    fault = f"{feed.title} is cut after byte {ending.damaged_at:,}" if ending.reason == CUT else ending.reason
    return f"{fault}; the summary is of the part before"


def to_dict(state: State, feed: Feed | None = None, thresholds: Thresholds = DEFAULTS) -> dict[str, Any]:
    """Return the verdict, the summary, the engine's facts, and all counters, for scripts; of a recording, its end."""
    ending = feed.ending if feed is not None else Ending()
    summary, report = summarise(state), state.what_if
    return {
        "verdict": asdict(verdict(state, summary, thresholds)),
        "time": state.time,
        "now": state.now,
        "up_seconds": max(0.0, state.now - state.facts.started),
        "window_seconds": summary.rate_window,
        "step_seconds": state.step_seconds,
        "recording": feed.title if isinstance(feed, FileFeed) else None,
        "damaged_at": ending.damaged_at,
        "ends": ending.reason or None,
        "engine": asdict(state.facts) | {"control": state.control},
        "summary": summary.as_dict(),
        "nodes": int(state.stats.get("cache.nodes", 0)),
        "sequences": len(state.sequences),
        "sessions": len(state.sessions),
        "stats": dict(state.stats),
        "what_if": None if report is None else {**report.as_fields(), "sentence": report.sentence},
    }


def to_text(state: State, feed: Feed | None = None, thresholds: Thresholds = DEFAULTS) -> str:
    """Return a few lines for people; of a recording, also its name and time."""
    summary, facts = summarise(state), state.facts
    up = state.now - facts.started
    device = " ".join(each for each in (facts.device, facts.dtype) if each != "none") or "no model"
    pool = summary.pool
    parts = (("active", pool.active), ("pinned", pool.pinned), ("cached", pool.cached), ("free", pool.free))
    lines = [
        verdict(state, summary, thresholds).sentence,
        f"engine      {facts.model}, {device}, pid {facts.pid}, up {duration(up)}",
        f"pool        {count(pool.total)} blocks: {', '.join(f'{name} {share(n, pool.total)}' for name, n in parts)}",
        f"hit rate    {summary.hit_lifetime} of {count(summary.hit_lifetime.whole)} prompt tokens since load",
        f"misses      {_misses(state.stats)}",
        f"tokens      {_rates(summary)} per second, over {duration(summary.rate_window)}",
        f"TTFT hit    {_percentiles(summary.ttft_hit)}, {summary.latency_window}",
        f"TTFT miss   {_percentiles(summary.ttft_miss)}, {summary.latency_window}",
        f"queue time  {_percentiles(summary.queue_time)}, {summary.latency_window}",
        f"ITL         {_percentiles(summary.itl, 'token')}" + (f", {summary.itl_window}" if summary.itl else ""),
        f"E2E         {_percentiles(summary.e2e)}, {summary.latency_window}",
        f"requests    {_requests(summary)}",
        f"regret      {count(summary.regret_lifetime.part)} of {count(summary.regret_lifetime.whole)} requested tokens "
        "had been evicted, since load",
    ]
    if state.what_if is not None:
        lines.append(f"what if     {what_if_sentence(state.what_if)}")
    if summary.process is not None:
        lines.append(f"process     {_process(summary.process)}")
    if isinstance(feed, FileFeed):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.now))
        lines.insert(1, f"recording   {feed.title}, as of {when}")
    if state.step_seconds is not None:
        lines.insert(1, f"state       as of the start of a step that has run for {duration(state.step_seconds)}")
    place = 1 + next(at for at, line in enumerate(lines) if line.startswith("pool "))
    if summary.states is not None:
        lines.insert(place, f"states      {summary.states}, {count(summary.states.copies)} copies between slots")
    if summary.host is not None:
        lines[place:place] = [f"host        {summary.host}", f"prompts     {summary.host.sources}"]
    if summary.disk is not None:
        lines.insert(place + 2 * (summary.host is not None), f"disk        {summary.disk}")
    return "\n".join(lines)


def _requests(summary: Summary) -> str:
    """Count the requests by phase and outcome, and say why the first waiting one waits."""
    head, counts = head_sentence(summary.waits_for), (summary.turn_admissions, summary.overdue_admissions)
    more = f", {count(counts[0])} admitted in turn, {count(counts[1])} overdue" * any(counts)
    return (
        f"{summary.running} running, {summary.waiting} waiting{head and f', {head}'}; since load "
        f"{count(summary.finished)} finished, {count(summary.failed)} failed, {count(summary.timed_out)} timed out, "
        f"{count(summary.cancelled)} cancelled, {count(summary.preemptions)} preemptions{more}"
    )


def _misses(stats: Mapping[str, float]) -> str:
    """Name the computed prompt tokens by the reason of the miss."""
    if "missed_never_seen" not in stats:
        return "not sent by this engine"
    found = missed_tokens(stats, lambda name: stats[name]).items()
    named = ", ".join(f"{count(tokens)} {reason.replace('_', ' ')}" for reason, tokens in found)
    return f"{named or 'no'} tokens, since load"


def _percentiles(times: Percentiles | None, noun: str = "request") -> str:
    """Write three percentiles and the number of measured times."""
    if times is None:
        return "not sent by this engine"
    values = (("p50", times.median), ("p90", times.p90), ("p99", times.p99))
    return f"{', '.join(f'{name} {time_text(value)}' for name, value in values)} of {plural(times.count, noun)}"


def _process(process: Process) -> str:
    """Write the CPU time and the memory of the engine's process."""
    cpu = "-" if process.cpu_share is None else f"{100 * process.cpu_share:.0f}%"
    text = f"{cpu} of a core over {duration(process.cpu_window)}, {size(process.rss_bytes)} resident"
    if process.device_bytes is None:
        return text
    whole = "" if process.device_total_bytes is None else f" of {size(process.device_total_bytes)}"
    return f"{text}, {size(process.device_bytes)}{whole} of device memory"


def figures(state: State) -> list[tuple[str, str]]:
    """Return the lines of `to_text` after the verdict, each as a name and a text."""
    return [(line[:NAMES].strip(), line[NAMES:]) for line in to_text(state).splitlines()[1:]]


def _rates(summary: Summary) -> str:
    """Name the rates of tokens."""
    rates = (
        (summary.output_per_second, "output"),
        (summary.decode_per_second, "decode"),
        (summary.prefill_per_second, "prefill"),
        (summary.cached_per_second, "cached"),
    )
    return ", ".join(f"{short(rate)} {name}" for rate, name in rates)
