"""Test the demo: the shipped recording has what the views show, and begins again at its end."""

from __future__ import annotations

from radixkv.telemetry.recording import read_recording
from radixkv_monitor.feed_factory import DEMO, demo
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.state_builder import StateBuilder
from tests.serve.served import until


def test_the_recording_is_small_and_has_hits_evictions_and_both_tiers() -> None:
    assert DEMO.stat().st_size < 300 * 1024
    state = StateBuilder().take(*read_recording(DEMO))
    assert state is not None and state.facts.host_blocks > 0
    ended = state.ended.values()
    assert {"full", "never_seen", "diverged", "evicted"} <= {each.miss_reason for each in ended}
    assert {node.residence for node in state.nodes.values()} == {"device", "host"}
    assert sum(node.parent == 0 for node in state.nodes.values()) >= 2
    assert state.stats["cache.loaded_tokens"] > 0 and state.evictions


def test_the_demo_begins_again_at_its_end() -> None:
    feed = demo()
    assert isinstance(feed, FileFeed)
    feed.start()
    try:
        assert feed.wait_until_loaded(30)
        begin, end = feed.span or (0.0, 0.0)
        feed.seek(end - 0.5)
        until(lambda: begin <= feed.now < end - 1)
        assert feed.playing and feed.status.link == "replay"
    finally:
        feed.close()
