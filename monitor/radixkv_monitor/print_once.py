"""One summary of an engine, for scripts and for terminals that cannot be drawn on."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from radixkv.errors import EngineNotFound
from radixkv_monitor.feed import Feed
from radixkv_monitor.formatting import count, duration, share
from radixkv_monitor.live import SocketFeed
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.state import State, age_time
from radixkv_monitor.summary import summarise, verdict


def first_state(feed: Feed, patience: float, watched: float = 0.0) -> State:
    """Start the feed, wait for a state (of a recording: for its last), and close the feed.

    A live engine is then watched for `watched` seconds, unless it ends; a rate needs two samples. Raises EngineNotFound
    after `patience` seconds without a state.
    """
    feed.start()
    try:
        until = time.monotonic() + patience
        while time.monotonic() < until and feed.status.link != "ended":
            if isinstance(feed, FileFeed) and feed.span is not None:
                until = time.monotonic() + patience  # the recording is still being read
                feed.seek(feed.span[1])
            elif feed.latest is not None and feed.status.link != "connecting":
                break
            elif isinstance(feed, SocketFeed) and feed.latest is None and feed.status.sentence:
                break  # the first attempt failed, and a script does not wait for an engine to start
            time.sleep(0.02)
        until = time.monotonic() + watched
        while time.monotonic() < until and feed.status.link == "live":
            time.sleep(0.02)
        state = feed.latest
        if state is None:
            why = feed.status.sentence or "no state was received"
            raise EngineNotFound(why if feed.title in why else f"{feed.title}: {why}")
        return replace(state, now=age_time(state, feed.now), stale=feed.status.link == "stale")
    finally:
        feed.close()


def to_dict(state: State) -> dict[str, Any]:
    """Return the verdict, the summary, the engine's facts, and all counters, for scripts."""
    summary = summarise(state)
    judgement = verdict(state, summary)
    return {
        "verdict": {"level": judgement.level, "sentence": judgement.sentence},
        "time": state.time,
        "engine": asdict(state.facts),
        "summary": summary.as_dict(),
        "nodes": int(state.stats.get("cache.nodes", 0)),
        "sequences": len(state.sequences),
        "sessions": len(state.sessions),
        "stats": dict(state.stats),
    }


def to_text(state: State) -> str:
    """Return a few lines for people."""
    summary, facts = summarise(state), state.facts
    up = state.now - facts.started
    device = " ".join(each for each in (facts.device, facts.dtype) if each != "none") or "no model"
    pool, hit, miss = summary.pool, summary.ttft_hit, summary.ttft_miss
    parts = (("active", pool.active), ("pinned", pool.pinned), ("cached", pool.cached), ("free", pool.free))
    lines = [
        verdict(state, summary).sentence,
        f"engine      {facts.model}, {device}, pid {facts.pid}, up {duration(up)}",
        f"pool        {count(pool.total)} blocks: {', '.join(f'{name} {share(n, pool.total)}' for name, n in parts)}",
        f"hit rate    {summary.hit_lifetime} of {count(summary.hit_lifetime.whole)} prompt tokens",
        f"first token {duration(hit.median)} if half of the prompt was cached ({hit.count} requests), "
        f"{duration(miss.median)} otherwise ({miss.count} requests); medians",
        f"requests    {summary.running} running, {summary.waiting} waiting, {count(summary.finished)} finished, "
        f"{count(summary.failed)} failed, {count(summary.preemptions)} preemptions",
        f"regret      {count(summary.regret_lifetime.part)} tokens were requested again after they were evicted",
    ]
    if summary.states is not None:
        lines.insert(3, f"states      {summary.states}, {count(summary.states.copies)} copies between slots")
    if summary.host is not None:
        lines[3:3] = [f"host        {summary.host}", f"prompts     {summary.host.sources}"]
    return "\n".join(lines)
