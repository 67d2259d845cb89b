"""Test the demo: its records agree with its cache at all times, and the same seed gives the same records."""

from __future__ import annotations

import pytest

from radixkv.telemetry.mirror import Mirror
from radixkv_monitor.demo import DemoSource

BEGAN = 1_790_000_000.0  # a float of this size resolves a quarter of a microsecond


def played(
    seed: int, seconds: int, every: float = 1.0, num_blocks: int = 1024, sessions: int = 30, host_blocks: int = 0
) -> Mirror:
    sizes = {"num_blocks": num_blocks, "host_blocks": host_blocks}
    source, mirror = DemoSource(seed, **sizes, sessions=sessions, started=BEGAN), Mirror()
    for tick in range(1, int(seconds / every) + 1):
        mirror.apply(source.step(BEGAN + tick * every))
        source._cache.check()
        stats = mirror.stats
        pools = [stats[f"cache.{name}_blocks"] for name in ("free", "cached", "held")]
        assert sum(pools) == source.facts.num_blocks
        assert len(mirror.live) == stats["running"] + stats["waiting"]
        assert {each.request for each in mirror.sequences.values()} <= set(mirror.live)
        assert sum(each.live for each in mirror.sessions.values()) == len(mirror.live)
        assert stats["step_seconds"] <= stats["uptime_s"] + 1e-6, "it computes no faster than time goes by"
        assert "monitor_ns" not in stats, "there is no engine's thread of which that would be a share"
    return mirror


@pytest.fixture(scope="module")
def minute() -> Mirror:
    return played(7, 60, num_blocks=1200)


def test_a_minute_of_it_has_everything_that_there_is_to_see(minute: Mirror) -> None:
    requests = [*minute.ended.values(), *minute.live.values()]
    assert {"evicted", "never_seen", "diverged", "full"} <= {each.miss_reason for each in requests}
    assert {"finished", "cancelled"} <= {each.phase for each in requests}
    assert any(each.streams > 1 for each in requests)
    assert any(each.wanted_again is not None for each in minute.evictions.values())
    assert any(node.namespace for node in minute.nodes.values())
    assert any(node.pins for node in minute.nodes.values()) and minute.stats["cache.pinned_blocks"] > 0


@pytest.fixture(scope="module")
def crowd() -> Mirror:
    """Return the demo with more sessions than the pool can hold."""
    return played(7, 25, num_blocks=640)


def test_where_the_pool_is_too_small_requests_give_way_and_come_back(crowd: Mirror) -> None:
    ended = crowd.ended.values()
    assert any(each.preemptions and each.recomputed_tokens and each.phase == "finished" for each in ended)
    assert crowd.stats["preemptions"] == sum(each.preemptions for each in (*ended, *crowd.live.values()))


@pytest.mark.parametrize("name", ["minute", "crowd"])
def test_what_it_says_of_its_requests_adds_up(name: str, request: pytest.FixtureRequest) -> None:
    mirror: Mirror = request.getfixturevalue(name)
    for each in mirror.ended.values():
        assert each.cached_tokens + each.computed_tokens == each.prompt_tokens + each.output_tokens - each.streams
        assert each.submitted <= (each.admitted or 0) < (each.first_token or 0) <= (each.ended or 0)
        assert 0 < each.output_tokens <= each.streams * each.max_tokens
        assert (each.finish == "RequestCancelled") == (each.phase == "cancelled")
    requests = [*mirror.ended.values(), *mirror.live.values()]
    assert mirror.stats["finished"] + mirror.stats["cancelled"] == len(mirror.ended)
    assert {each.number for each in requests} == set(range(1, len(requests) + 1))
    for name in ("cached_tokens", "computed_tokens", "recomputed_tokens", "output_tokens"):
        assert mirror.stats.get(name, 0) == sum(getattr(each, name) for each in requests), name


def test_the_same_seed_tells_the_same_story_however_often_one_looks() -> None:
    one, two, other = played(3, 12, every=0.5), played(3, 12, every=3.0), played(4, 12)
    for name in ("nodes", "live", "ended", "sessions", "evictions", "stats"):
        assert dict(getattr(one, name)) == dict(getattr(two, name)), name
    assert one.nodes != other.nodes
    one, two = (played(3, 12, every=every, num_blocks=480, host_blocks=640) for every in (0.5, 3.0))
    assert dict(one.nodes) == dict(two.nodes) and dict(one.ended) == dict(two.ended) and one.stats["host_tokens"]
