"""The replay with a disk, compared with plain lists and a dict of texts, with bounds, and as a command."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from radixkv.errors import InvalidInput
from radixkv_traces import cli, simulate
from radixkv_traces.formats import read, sample
from radixkv_traces.simulate import replay
from radixkv_traces.workload import Workload, prepare
from tests.traces.test_simulate_host import SIMULATE, TwoLists, workload

DEVICE, HOST = 60, 120


def sessions(seed: int) -> Workload:
    """Sessions in turns, whose texts grow and share nothing."""
    rng, lengths = Random(seed), [0] * 24
    chains = []
    for _ in range(300):
        number = rng.randrange(len(lengths))
        lengths[number] += rng.randint(0, 3)
        chains.append([1000 * number + i for i in range(lengths[number] + 1)])
    return workload(chains)


class ThreeTiers(TwoLists):
    """Two lists and a dict of blocks on disk, each with the time of its last use."""

    def __init__(self, slots: int) -> None:
        super().__init__(DEVICE, HOST, simulate.LOAD_TOKENS // 10)
        self.slots = slots
        self.texts: dict[int, list[int]] = {}
        self.disk: dict[int, int] = {}
        self.noted: set[int] = set()
        self.time = self.disk_read = self.disk_written = 0
        self.in_memory: list[int] = []
        self.lost = False  # blocks of the disk since the last write

    def arrive(self, chain: list[int], hit: int) -> int:
        self.texts.update((block, chain[: i + 1]) for i, block in enumerate(chain))
        self.in_memory.append(hit)
        end = next((i for i in range(hit, len(chain)) if chain[i] not in self.disk), len(chain))
        self.touch(chain[hit:end])
        while len(self.host) + end - hit > self.sizes[1]:
            self.evict(next(block for block in self.host if block not in chain))
        self.host.update(dict.fromkeys(reversed(chain[hit:end])))
        self.noted.difference_update(chain)
        self.disk_read += end - hit
        return end

    def evict(self, block: int) -> None:
        super().evict(block)
        if self.lost:
            self.noted.clear()
            self.lost = False
        if block not in self.noted:  # else its text was written when its end left
            self.noted.update(self.texts[block])
            self.write(self.texts[block])

    def write(self, text: list[int]) -> None:
        known = [block for block in text if block in self.disk]
        self.touch(known)
        self.time += 1
        for block in text[len(known) :]:
            if len(self.disk) == self.slots:
                parents = {self.texts[each][-2] for each in self.disk if len(self.texts[each]) > 1}
                leaves = self.disk.keys() - parents - set(text)
                del self.disk[min(leaves, key=self.disk.__getitem__)]
                self.lost = True
            self.disk[block] = self.time
            self.disk_written += 1

    def touch(self, blocks: list[int]) -> None:
        self.time += 1
        self.disk.update(dict.fromkeys(blocks, self.time))


@pytest.mark.parametrize("seed", range(4))
def test_a_small_disk_comes_close_to_lists_and_a_dict(seed: int) -> None:
    """Runs leave in pieces of several blocks, and those of the lists one by one, which differs once the disk evicts."""
    trace, tiers = sessions(seed), ThreeTiers(100)
    expected = sum(hit for _, hit in [tiers.serve(request.blocks) for request in trace.requests])
    result = replay(trace, DEVICE, host_blocks=HOST, disk_blocks=100)
    assert result.disk is not None
    assert sum(result.hits) == pytest.approx(expected, rel=0.01)
    assert result.disk.written_blocks == pytest.approx(tiers.disk_written, rel=0.03)
    assert result.disk.read_blocks == pytest.approx(tiers.disk_read, rel=0.1)


@pytest.mark.parametrize("slots", [250, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_lru_equals_lists_and_a_dict(seed: int, slots: int) -> None:
    trace, tiers = sessions(seed), ThreeTiers(slots)
    expected = [tiers.serve(request.blocks) for request in trace.requests]
    result = replay(trace, DEVICE, host_blocks=HOST, disk_blocks=slots)
    assert result.host is not None and result.disk is not None
    assert list(result.host.hits_above) == [found for found, _ in expected]
    assert list(result.disk.hits_above) == tiers.in_memory
    assert list(result.hits) == [hit for _, hit in expected]
    assert (result.disk.read_blocks, result.disk.written_blocks) == (tiers.disk_read, tiers.disk_written)


def test_the_bounds() -> None:
    trace = prepare(islice(read(sample("conversation")), 200), 512)
    device = max(len(request.blocks) for request in trace.requests)
    without, small, large = (replay(trace, device, host_blocks=device, disk_blocks=n) for n in (0, 300, 9999))
    bound = replay(trace, device, "clairvoyant", host_blocks=device, disk_blocks=300)
    infinite = replay(trace, device, "infinite")
    assert without.hit_tokens < small.hit_tokens < large.hit_tokens <= infinite.hit_tokens
    assert small.hit_tokens < bound.hit_tokens == replay(trace, 2 * device + 300, "clairvoyant").hit_tokens
    assert without.disk is bound.disk is None and (without.disk_hit_tokens, bound.disk_blocks) == (0, 300)


def test_a_disk_needs_a_host() -> None:
    with pytest.raises(InvalidInput, match="host_blocks"):
        replay([], 1, disk_blocks=1)


def test_the_table_has_columns_for_each_tier(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SIMULATE, "--host", "500", "--disk", "2x"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[2:]
    assert "host blocks  disk blocks  policy" in head and "from disk  disk written  disk read  w/hit" in head
    assert [line.split()[:4] for line in lines][4] == ["1000", "1,000", "500", "2,000"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["--disk", "2x"], "--host"), (["--host", "2x", "--disk", "0x"], "--disk '0x'"),
     (["--host", "2x", "--disk", "2x", "--order", "fcfs"], "without a queue")],
)  # fmt: skip
def test_wrong_options_are_named(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SIMULATE, *options]) == 2
    assert complaint in capsys.readouterr().err
