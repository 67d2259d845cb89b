"""Changes of a node caused by a neighbour are recorded: splits, merges, copies, pins and late observers."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
from hypothesis import given

from radixkv.cache import PrefixCache
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.recorder import Recorder, runs
from tests.cache.verbs import prompt, publish
from tests.telemetry.expected import OFFSET, collect_and_check, expand, watched


def branched() -> tuple[PrefixCache, Recorder, Mirror, list[float], list[int], list[int]]:
    """Two texts that differ inside a block: the first one shares the trunk's block, the second one has a copy."""
    cache, recorder, mirror, now = watched()
    one, other = prompt(1, 6) + [50] * 4, prompt(1, 6) + [60] * 4
    now[0] = 1.0
    publish(cache, one)
    now[0] = 2.0
    publish(cache, other)
    collect_and_check(cache, recorder, mirror)
    return cache, recorder, mirror, now, one, other


def test_what_a_cut_leaves_above_is_told() -> None:
    cache, recorder, mirror, _, one, _ = branched()
    cache.discard(one, start=8)
    collect_and_check(cache, recorder, mirror)
    assert sorted(record.tokens for record in mirror.nodes.values()) == [0, 2, 4, 6]


def test_a_trunk_that_takes_over_a_copy_is_told() -> None:
    cache, recorder, mirror, _, one, other = branched()
    cache.discard(one, start=6)
    collect_and_check(cache, recorder, mirror)
    trunk, branch = sorted((each for each in mirror.nodes.values() if each.tokens), key=lambda each: each.start)
    assert expand(trunk.blocks)[-1] == expand(branch.blocks)[0]
    assert (trunk.used, trunk.born) == (OFFSET + 2, OFFSET + 1)
    cache.discard(other, start=6)
    collect_and_check(cache, recorder, mirror)
    (trunk,) = (each for each in mirror.nodes.values() if each.tokens)
    assert (trunk.used, trunk.hits) == (OFFSET + 2, 1), "it inherits"


def test_pinned_blocks_follow_pins_and_blocks_that_change_under_them() -> None:
    cache, recorder, mirror, _, one, other = branched()
    pins = [cache.pin(one[:6])]
    collect_and_check(cache, recorder, mirror)
    pins.append(cache.pin(other))
    collect_and_check(cache, recorder, mirror)
    before = cache.stats().pinned_blocks
    cache.discard(one, start=6)
    collect_and_check(cache, recorder, mirror)
    assert cache.stats().pinned_blocks == before - 1, "the trunk shares the copy now"
    for pin in reversed(pins):
        pin.release()
        collect_and_check(cache, recorder, mirror)
    assert cache.stats().pinned_blocks == 0


def test_what_a_fork_alone_holds_is_told_although_a_node_has_it() -> None:
    cache, recorder, mirror, _ = watched()
    first = cache.open([])
    first.extend([1, 2, 3, 4, 5, 6])
    first.commit(publish=False)
    twin = first.fork()
    first.commit()
    first.close()
    collect_and_check(cache, recorder, mirror)
    assert expand(mirror.sequences[twin.id].blocks) == twin.block_table.tolist()


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9)), max_size=40))
def test_runs_are_the_blocks_again_in_as_few_runs_as_there_are(pieces: list[tuple[int, int]]) -> None:
    blocks = [block for first, count in pieces for block in range(first, first + count)]
    found = runs(array("i", blocks))
    assert expand(found) == blocks
    assert len(found) == 2 * sum(at == 0 or blocks[at] != blocks[at - 1] + 1 for at in range(len(blocks)))
