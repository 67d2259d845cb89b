"""The table of policies: one entry makes a policy, and `next_victims` is the order of any of them."""

import ast
import random
from array import array
from pathlib import Path

import pytest

from radixkv import EngineConfig
from radixkv.cache import POLICIES, Hint, Observer, PrefixCache
from radixkv.cache.policies import by_rank
from radixkv.errors import UnknownPolicy
from radixkv.telemetry.recorder import Recorder
from radixkv_traces.cli import main
from radixkv_traces.formats import TraceRequest
from radixkv_traces.simulate import replay
from tests.cache.verbs import publish
from tests.cache.workloads import WORKLOADS
from tests.cache.workloads import replay as serve

ROOT = Path(__file__).resolve().parents[2]


class Evictions(Observer):
    """Notes the node of each eviction."""

    def __init__(self) -> None:
        self.nodes: list[int] = []

    def evicted(self, number, node, *facts):
        self.nodes.append(node)


def evict_all(cache: PrefixCache) -> None:
    with cache.open([1 << 30], "another") as sequence:
        sequence.extend(range(cache.block_size * (cache.free_blocks + cache.evictable_blocks)))


class TestAnEntryIsAPolicy:
    @pytest.fixture(autouse=True)
    def mru(self, monkeypatch):
        """Most recently used first."""
        monkeypatch.setitem(POLICIES, "mru", by_rank(lambda node: -node.tick))

    def test_the_cache_evicts_by_it(self):
        evictions = Evictions()
        cache = PrefixCache(8, 1, "mru", observer=evictions)
        assert cache.eviction == "mru"
        for text in ([1, 2], [3, 4], [5, 6], [7, 8]):
            publish(cache, text)
            cache.check()
        cache.open([3, 4]).close()
        cache.check()
        newest, *_ = order = cache.next_victims()
        with cache.open([9]) as sequence:
            sequence.extend([9, 10, 11])
            cache.check()
        assert [cache.match(text).length for text in ([1, 2], [3, 4], [5, 6], [7, 8])] == [2, 0, 2, 1]
        assert evictions.nodes == order[:2] and evictions.nodes[0] == newest
        stats = cache.stats()
        assert (stats.evicted_blocks, stats.evicted_tokens, stats.leaves) == (3, 3, 3)
        cache.clear()
        cache.check()

    def test_engines_commands_and_frames_accept_it(self, capsys):
        assert EngineConfig(eviction="mru").eviction == "mru"
        with pytest.raises(UnknownPolicy, match="lru, mru, predictive"):
            EngineConfig(eviction="none of them")
        with pytest.raises(SystemExit):
            main(["simulate", "--help"])
        assert "mru" in capsys.readouterr().out
        recorder, cache = Recorder(), PrefixCache(8, 1, "mru")
        publish(cache, [1, 2])
        recorder.attach(cache)
        assert recorder.collect().next_victims == tuple(cache.next_victims())

    def test_the_simulator_replays_it(self):
        requests = [TraceRequest(0.0, 1, 1, array("q", [block])) for block in (1, 2, 3, 1, 2)]
        hits = {policy: replay(requests, 2, policy, 1).hit_blocks for policy in ("lru", "mru")}
        assert hits == {"lru": 0, "mru": 1}

    def test_without_the_entry_it_is_unknown(self, monkeypatch):
        monkeypatch.delitem(POLICIES, "mru")
        for make in (lambda: PrefixCache(8, eviction="mru"), lambda: EngineConfig(eviction="mru")):
            with pytest.raises(UnknownPolicy):
                make()


def test_no_other_module_lists_the_policies():
    """A module with two of these names in its code has its own list."""
    names = {"fifo", "lfu", "slru"}
    for folder in ("radixkv", "kernels", "monitor", "traces", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != ROOT / "radixkv" / "cache" / "policies.py":
                text = path.read_text()
                if sum(name in text for name in names) > 1:
                    constants = [each.value for each in ast.walk(ast.parse(text)) if type(each) is ast.Constant]
                    assert sum(name in constants for name in names) < 2, path


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_next_victims_are_evicted_in_that_order(policy, seed):
    rng = random.Random(seed)
    time = [0.0]
    evictions = Evictions()
    cache = PrefixCache(64, 4, policy, clock=lambda: time[0], observer=evictions)
    for _ in range(200):
        time[0] += rng.choice((0.1, 5.0))
        text = [rng.randrange(8), *range(rng.randrange(1, 12))]
        with cache.open(text, priority=rng.randrange(2)) as sequence:
            sequence.extend(text[sequence.length :])
            sequence.commit()
            sequence.close(Hint(done=rng.random() < 0.2, returns_in=rng.choice((None, 20.0))))
    before = cache.stats()
    order = cache.next_victims(1000)
    assert cache.stats() == before and len(order) == len(set(order)) == before.leaves
    assert cache.next_victims(3) == order[:3] and cache.next_victims(0) == []
    cache.check()
    evictions.nodes.clear()
    evict_all(cache)
    assert [node for node in dict.fromkeys(evictions.nodes) if node in order] == order


def test_next_victims_of_a_policy_that_learns_and_leads():
    """The order holds while the learner decides and nothing else changes."""
    now = [0.0]
    evictions = Evictions()
    cache = PrefixCache(150, 1, "predictive", clock=lambda: now[0], observer=evictions)
    for _ in serve(cache, WORKLOADS["scan"](random.Random(1), 600), now):
        pass
    index = cache.state.index
    assert not index.baseline.leads
    lru, order = [node.id for node in super(type(index), index).next_victims(1000)], cache.next_victims(1000)
    assert sorted(order) == sorted(lru) and order != lru
    with cache.open([1 << 30], "another") as sequence:
        evictions.nodes.clear()
        sequence.extend(range(cache.free_blocks + 60))
    victims = list(dict.fromkeys(node for node in evictions.nodes if node in order))
    assert len(victims) > 9 and victims == order[: len(victims)]
