"""Dynamo's own index, fed with the events of a cache, finds what the cache finds."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from radixkv.cache import PrefixCache
from radixkv.cache.block_events import BlockChanges, BlockEvents

llm = pytest.importorskip("dynamo.llm", reason="needs Dynamo: make fleet")
SIZE, WORKER = 4, 7


def apply(index: Any, changes: BlockChanges, number: int) -> int:
    """Feed changes to Dynamo's tree as its workers do; return the number of the next event."""
    events: list[dict[str, Any]] = []
    if changes.removed:
        events.append({"removed": {"block_hashes": [_unsigned(each) for each in changes.removed]}})
    for run in changes.stored:
        local = llm.compute_block_hash_for_seq(run.tokens.tolist(), SIZE)
        blocks = [
            {"block_hash": _unsigned(each), "tokens_hash": hashed} for each, hashed in zip(run.ids, local, strict=True)
        ]
        parent = None if run.parent is None else _unsigned(run.parent)
        events.append({"stored": {"parent_hash": parent, "blocks": blocks}})
    for event in events:
        data = {"event_id": number, "data": event, "dp_rank": 0}
        index.apply_event(WORKER, json.dumps(data).encode())
        number += 1
    return number


def _unsigned(number: int) -> int:
    return number % (1 << 64)


@pytest.mark.parametrize("seed", range(20))
def test_its_overlap_is_the_match_of_the_cache(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(24, SIZE, host_blocks=rng.choice((0, 12)))
    events, index, number = BlockEvents(cache, lambda _: None), llm.RadixTree(), 0
    said: list[list[int]] = [[]]
    for _ in range(80):
        before = rng.choice(said)
        text = [*before[: rng.randrange(len(before) + 1)], *(rng.randrange(3) for _ in range(rng.randrange(14)))][:60]
        said.append(text)
        with cache.open(text) as sequence:
            sequence.extend(text[sequence.length :])
            cache.moves()
            cache.moves_done()
            sequence.commit()
        if rng.random() < 0.05:
            cache.clear()
        cache.check()
        number = apply(index, events.take(), number)
        for each in said[-20:]:
            match = cache.match(each)
            hashes = llm.compute_block_hash_for_seq(each, SIZE)
            scores = index.find_matches(hashes).scores if hashes else {}
            found = max(scores.values(), default=0)
            assert found == (match.matched + match.host) // SIZE
