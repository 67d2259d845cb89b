"""Dynamo's own index in process: after any history of a cache, it finds for each prompt what the cache has."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from radixkv.cache import PrefixCache
from radixkv.cache.block_events import BlockEvents
from tests.cache.fuzz.block_index import announced, blocks_of, salt_of
from tests.cache.fuzz.machine import NAMESPACES, Machine, start_again
from tests.cache.fuzz.options import Options, covering

dynamo = pytest.importorskip("dynamo.llm", reason="needs Dynamo: make fleet")

STEPS = 200
WORKER = 7
UNWATCHED = [options for options in covering() if not options.watched]


class DynamoIndex:
    """The blocks of one cache in Dynamo's index, which refuses an event that it cannot apply."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache, self.events, self.tree = cache, BlockEvents(cache, salt_of), dynamo.RadixTree()
        self._numbers = itertools.count()

    def read(self) -> None:
        changes = self.events.take()
        if changes.removed:
            self._apply({"removed": {"block_hashes": [unsigned(number) for number in changes.removed]}})
        for run in changes.stored:
            hashes = self.hashes(run.tokens.tolist(), run.salt)
            pairs = zip(run.ids, hashes, strict=True)
            blocks = [{"block_hash": unsigned(number), "tokens_hash": each} for number, each in pairs]
            parent = None if run.parent is None else unsigned(run.parent)
            self._apply({"stored": {"parent_hash": parent, "blocks": blocks}})

    def hashes(self, tokens: list[int], salt: str | None) -> list[int]:
        """Dynamo's hash of each full block, which its router computes of a request too."""
        hashes: list[int] = dynamo.compute_block_hash_for_seq(tokens, self.cache.block_size, cache_namespace=salt)
        return hashes

    def overlap(self, tokens: list[int], namespace: str | None) -> int:
        """The number of leading blocks of a prompt that the router finds."""
        scores = self.tree.find_matches(self.hashes(tokens, salt_of(namespace))).scores
        return int(scores.get((WORKER, 0), 0))

    def known(self) -> int:
        """The number of blocks in the index."""
        dumped = [json.loads(each)["event"]["data"]["stored"] for each in self.tree.dump_tree_as_events()]
        return sum(len(each["blocks"]) for each in dumped)

    def _apply(self, data: dict[str, Any]) -> None:
        event = {"event_id": next(self._numbers), "dp_rank": 0, "data": data}
        self.tree.apply_event(WORKER, json.dumps(event).encode())


def unsigned(number: int) -> int:
    return number % (1 << 64)


@pytest.mark.parametrize(("seed", "options"), enumerate(UNWATCHED))
def test_any_history_gives_dynamo_the_blocks_of_the_cache(seed: int, options: Options) -> None:
    machine = Machine(options, seed)
    cache = machine.world.cache
    index, found = DynamoIndex(cache), 0
    for number in range(STEPS):
        machine.step(number)
        if number % 3:
            continue
        index.read()
        assert index.known() == len(blocks_of(cache))
        for said, namespace in itertools.product(machine.said, set(NAMESPACES)):
            blocks = announced(cache, said, namespace)
            assert index.overlap(said, namespace) == blocks
            found += blocks
    assert found
    start_again(machine)
    index.read()
    assert index.known() == 0
