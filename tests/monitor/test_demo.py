"""The demo tells of a cache that exists: what it says adds up, again and again, and the same seed says the same."""

from __future__ import annotations

from radixkv.telemetry.mirror import Mirror
from radixkv_monitor.demo import DemoSource


def played(seed: int, seconds: int) -> tuple[DemoSource, Mirror]:
    source, mirror = DemoSource(seed, num_blocks=1024, sessions=30), Mirror()
    for tick in range(1, seconds * 2 + 1):
        mirror.apply(source.step(tick / 2))
        source._cache.check()
        stats = mirror.stats
        pools = [stats[f"cache.{name}_blocks"] for name in ("free", "cached", "held")]
        assert sum(pools) == source.facts.num_blocks
        assert len(mirror.live) == stats["running"] + stats["waiting"]
        assert {each.request for each in mirror.sequences.values()} <= set(mirror.live)
        assert sum(each.live for each in mirror.sessions.values()) == len(mirror.live)
    return source, mirror


def test_a_minute_of_it_has_everything_that_there_is_to_see() -> None:
    _, mirror = played(7, 60)
    requests = [*mirror.ended.values(), *mirror.live.values()]
    assert {"evicted", "never_seen"} <= {each.miss_reason for each in requests}
    assert any(each.preemptions for each in requests)
    assert any(each.streams > 1 for each in requests)
    assert any(each.wanted_again is not None for each in mirror.evictions.values())
    assert any(node.namespace for node in mirror.nodes.values())
    for each in mirror.ended.values():
        assert each.cached_tokens + each.computed_tokens == each.prompt_tokens
        assert each.ttft is not None and each.ttft >= 0


def test_the_same_seed_tells_the_same_story() -> None:
    (_, one), (_, two), (_, other) = played(3, 10), played(3, 10), played(4, 10)
    assert one.nodes == two.nodes and one.live == two.live and one.evictions == two.evictions
    assert one.nodes != other.nodes


def test_a_leap_in_time_is_cut_to_a_minute() -> None:
    source = DemoSource(1, started=100.0)
    assert source.step(1e6).stats["steps"] <= 60 / 0.05 + 1
