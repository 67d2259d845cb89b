"""What a router is told about full blocks, case by case; the fuzz compares all histories with the tree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from radixkv.cache import PrefixCache
from radixkv.cache.block_events import BlockEvents
from radixkv.cache.events import EVENTS
from tests.cache.fuzz.block_index import BlockIndex, salt_of

TEXT = list(range(100, 120))


def publish(cache: PrefixCache, tokens: Sequence[int], namespace: str | None = None) -> None:
    with cache.open(tokens, namespace) as sequence:
        sequence.extend(tokens[sequence.length :])
        if cache.host_blocks:
            cache.moves()
            cache.moves_done()
        sequence.commit()
    cache.check()


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex(PrefixCache(16, 4, host_blocks=8))


def test_a_text_is_told_by_its_full_blocks_with_their_tokens(index: BlockIndex) -> None:
    publish(index.cache, TEXT[:10])
    (run,) = index.read().stored
    assert (run.parent, run.salt, list(run.tokens), len(run.ids)) == (None, None, TEXT[:8], 2)


def test_only_a_token_that_fills_a_block_is_told(index: BlockIndex) -> None:
    with index.cache.open(TEXT[:3]) as sequence:
        told = []
        for end in range(3, 9):
            sequence.extend(TEXT[sequence.length : end])
            sequence.commit()
            told.append([list(run.tokens) for run in index.read().stored])
    assert told == [[], [TEXT[:4]], [], [], [], [TEXT[4:8]]]


def test_a_split_inside_a_block_tells_only_the_new_branch(index: BlockIndex) -> None:
    publish(index.cache, TEXT[:12])
    first = index.read().stored[0].ids
    publish(index.cache, [*TEXT[:6], 1, 2, 3])
    (run,) = index.read().stored
    assert (run.parent, list(run.tokens)) == (first[0], [*TEXT[4:6], 1, 2])


def test_a_merge_tells_nothing_but_what_was_evicted(index: BlockIndex) -> None:
    cache = PrefixCache(16, 4)
    index = BlockIndex(cache)
    publish(cache, TEXT[:12])
    publish(cache, [*TEXT[:8], 1, 2, 3, 4])
    index.read()
    cache.discard([*TEXT[:8], 1, 2, 3, 4], start=8)  # the two halves of the other text are one node again
    cache.check()
    changes = index.read()
    assert len(changes.removed) == 1
    assert not changes.stored


def test_a_move_between_the_tiers_tells_nothing(index: BlockIndex) -> None:
    cache = index.cache
    publish(cache, TEXT[:12])
    index.read()
    publish(cache, [7] * 60)  # takes the device
    assert cache.match(TEXT[:12]).host == 8
    assert not index.read().removed
    with cache.open(TEXT[:12]) as sequence:  # and back
        sequence.load(TEXT[sequence.length : sequence.length + cache.match(TEXT[:12]).loadable])
        cache.moves()
        cache.moves_done()
        sequence.commit()
    cache.check()
    changes = index.read()
    assert not changes.removed
    assert not changes.stored


def test_what_leaves_both_tiers_is_removed_and_clear_removes_all(index: BlockIndex) -> None:
    cache = index.cache
    publish(cache, TEXT)
    told = set(index.read().stored[0].ids)
    for token in range(8):
        publish(cache, [token] * 60)
    assert told <= set(index.read().removed)
    cache.clear()
    assert len(index.events) > 0
    index.read()
    assert not index.blocks


def test_text_that_arrives_from_a_disk_is_stored_again(index: BlockIndex) -> None:
    cache = index.cache
    blocks = cache.take_host_blocks(TEXT, None, 5)
    assert cache.arrive(TEXT, None, blocks, 5) == 20
    assert len(index.read().stored[0].ids) == 5


def test_equal_tokens_of_two_namespaces_have_other_ids_and_salts(index: BlockIndex) -> None:
    publish(index.cache, TEXT[:4])
    publish(index.cache, TEXT[:4], "ann")
    plain, salted = sorted(index.read().stored, key=lambda run: run.salt or "")
    assert plain.tokens == salted.tokens
    assert plain.ids != salted.ids
    assert (plain.salt, salted.salt) == (None, salt_of("ann"))


def test_what_came_and_went_between_two_looks_is_not_told(index: BlockIndex) -> None:
    publish(index.cache, TEXT)
    index.cache.clear()
    assert index.events.take() == ([], [])


def test_two_caches_with_one_text_tell_one_id() -> None:
    told = []
    for blocks in (8, 16):
        index = BlockIndex(PrefixCache(blocks, 4))
        publish(index.cache, TEXT[: 8 if blocks == 8 else 12])
        told.append(index.read().stored[0].ids[:2])
    assert told[0] == told[1]


def test_a_cache_without_a_reader_makes_no_call_for_it() -> None:
    cache = PrefixCache(8, 4)
    events = cache.state.events
    before = {name: len(getattr(events, name)) for name in EVENTS}
    reader = BlockEvents(cache, salt_of)
    more = {name: len(getattr(events, name)) - count for name, count in before.items()}
    assert more == {name: int(name in vars(BlockEvents)) for name in EVENTS}
    reader.disconnect()
    assert {name: len(getattr(events, name)) for name in EVENTS} == before
