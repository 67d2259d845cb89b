"""The replay with a host tier, compared with two plain LRU lists, with bounds, and as a command."""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from itertools import islice
from typing import Any

import pytest

from radixkv.cache import POLICIES, PrefixCache
from radixkv.errors import InvalidInput
from radixkv_traces import cli, simulate
from radixkv_traces.formats import TraceRequest, read, sample
from radixkv_traces.simulate import replay
from radixkv_traces.workload import Workload, prepare


def agents(count: int = 60) -> Workload:
    return prepare(islice(read(sample("cc_agent")), count), 64)


def workload(chains: list[list[int]]) -> Workload:
    return prepare([TraceRequest(0.0, 10 * len(chain), 1, array("q", chain)) for chain in chains], 10)


class TwoLists:
    """An exclusive cache of two LRU lists of blocks, least recently used first; loads `piece` blocks at a time."""

    def __init__(self, device: int, host: int, piece: int) -> None:
        self.sizes, self.piece = (device, host), piece
        self.device: OrderedDict[int, None] = OrderedDict()
        self.host: OrderedDict[int, None] = OrderedDict()
        self.read = self.written = self.evicted = 0

    def serve(self, blocks: array[int]) -> tuple[int, int]:
        """Return the hits on the device, and of both tiers."""
        chain = list(blocks[: self.sizes[0]])
        found = next((i for i, block in enumerate(chain) if block not in self.device), len(chain))
        hit = self.arrive(chain, next((i for i in range(found, len(chain)) if chain[i] not in self.host), len(chain)))
        for block in reversed(chain[:hit]):
            (self.device if block in self.device else self.host).move_to_end(block)
        for start in range(found, hit, self.piece):
            sources = chain[start : min(start + self.piece, hit)]
            self.insert(chain[: start + len(sources)], set(sources))
            for block in sources:
                del self.host[block]
            self.read += len(sources)
        self.insert(chain, set())
        return found, hit

    def arrive(self, chain: list[int], hit: int) -> int:
        """Return the hit of all tiers, of which the host then has the end."""
        return hit

    def evict(self, block: int) -> None:
        del self.host[block]
        self.evicted += 1

    def insert(self, path: list[int], sources: set[int]) -> None:
        """Make room for a path, which is then the most recently used; `sources` stay on the host."""
        kept = set(path)
        excess = len(self.device) + sum(block not in self.device for block in path) - self.sizes[0]
        leaving = [block for block in self.device if block not in kept][: max(0, excess)]
        for block in leaving:
            del self.device[block]
        while len(self.host) + len(leaving) > self.sizes[1]:
            self.evict(next(block for block in self.host if block not in sources))
        self.host.update(dict.fromkeys(leaving))
        self.written += len(leaving)
        for block in reversed(path):
            self.device[block] = None
            self.device.move_to_end(block)


@pytest.mark.parametrize("piece", [1, 16])
@pytest.mark.parametrize(("name", "count", "share", "times"), [("cc_agent", 25, 0.3, 2), ("conversation", 150, 0.1, 3)])
def test_lru_equals_two_lists(
    name: str, count: int, share: float, times: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = prepare(islice(read(sample(name)), count), 64)
    monkeypatch.setattr(simulate, "LOAD_TOKENS", 64 * piece)
    device = int(trace.unique_blocks * share)
    lists = TwoLists(device, times * device, piece)
    expected = [lists.serve(request.blocks) for request in trace.requests]
    result = replay(trace, device, host_blocks=times * device)
    assert result.host is not None
    assert list(result.host.hits_above) == [found for found, _ in expected]
    assert list(result.hits) == [hit for _, hit in expected]
    traffic = (result.host.read_blocks, result.host.written_blocks, result.evicted_blocks)
    assert traffic == (lists.read, lists.written, lists.evicted)
    assert min(traffic) > 0


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[PrefixCache]:
    """The caches of the replays, each of which checks itself after each move."""
    caches: list[PrefixCache] = []

    class Checked(PrefixCache):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            caches.append(self)

        def moves_done(self) -> None:
            super().moves_done()
            self.check()

    monkeypatch.setattr(simulate, "PrefixCache", Checked)
    return caches


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_keeps_its_books(policy: str, checked: list[PrefixCache]) -> None:
    trace = prepare(islice(read(sample("conversation")), 120), 512)
    device = trace.unique_blocks // 10
    result = replay(trace, device, policy, host_blocks=3 * device)
    bound = replay(trace, device, "clairvoyant", host_blocks=3 * device)
    assert result.host is not None and result.host.read_blocks > 0
    assert replay(trace, device, policy).hit_tokens < result.hit_tokens <= bound.hit_tokens
    stats = checked[0].stats()
    resident = stats.host_blocks - stats.host_free_blocks
    left_the_host = result.host.written_blocks - result.host.read_blocks - resident
    assert 0 <= left_the_host <= result.evicted_blocks


def test_the_bound_is_one_pool_of_both_sizes_with_prompts_cut_to_the_device() -> None:
    trace = agents()
    device = 200
    assert any(len(request.blocks) > device for request in trace.requests)
    bound = replay(trace, device, "clairvoyant", host_blocks=3 * device)
    cut = [TraceRequest(0.0, each.input_length, 1, each.blocks[:device]) for each in trace.requests]
    assert bound.hits == replay(prepare(cut, 64), 4 * device, "clairvoyant").hits
    assert bound.host is None and bound.host_blocks == 600
    assert replay(trace, device, "clairvoyant").hit_tokens < bound.hit_tokens


@pytest.mark.parametrize("blocks", [-1, True, 1.5])
def test_wrong_sizes_are_refused(blocks: Any) -> None:
    with pytest.raises(InvalidInput, match="host_blocks"):
        replay([], 1, host_blocks=blocks)


# ---- the command

SIMULATE = ("simulate", "sample:cc_agent", "--limit", "60", "--capacity", "1000")


def test_rows_with_tiers_follow_the_device_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SIMULATE, "--host", "2x,500", "--policy", "lru,clairvoyant", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(row["host"], row["host_blocks"], row["policy"]) for row in said["rows"]] == [
        (None, 0, "lru"), (None, 0, "clairvoyant"), ("2x", 2000, "lru"), ("2x", 2000, "clairvoyant"),
        ("500", 500, "lru"), ("500", 500, "clairvoyant"),
    ]  # fmt: skip
    alone, tiered, bound = (said["rows"][i] for i in (0, 2, 3))
    result = replay(agents(), 1000, host_blocks=2000)
    assert result.host is not None
    assert [tiered[name] for name in ("hit_tokens", "host_hit_tokens", "written_blocks", "read_blocks")] == [
        result.hit_tokens, result.host_hit_tokens, result.host.written_blocks, result.host.read_blocks,
    ]  # fmt: skip
    assert [alone[name] for name in ("host_hit_tokens", "written_blocks", "read_blocks")] == [0, 0, 0]
    assert [bound[name] for name in ("host_hit_tokens", "written_blocks", "read_blocks")] == [None] * 3
    assert (tiered["gap_closed"], bound["gap_closed"]) == (0, 1)
    assert said["finished"] and {row["token_hit_rate_twice"] for row in said["rows"]} == {None}


@pytest.mark.parametrize(
    ("size", "complaint"),
    [
        ("0x", "--host '0x': 0 blocks for a capacity of 1,000"),
        ("9999999x", "allowed are 1 to 67,108,864"),
        ("large", "or a multiple of the capacity (2x)"),
        ("0", "not even one block"),
        ("1GB", "--model"),
        ("2x,", "--host: capacity ''"),
    ],
)
def test_wrong_sizes_are_named(size: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SIMULATE, "--host", size]) == 2
    said = capsys.readouterr()
    assert said.out == "" and complaint in said.err
