"""What the cache's books and the pool must say between two steps.

Knows: the cache's insides, who runs, and what the model remembers of each slot. Changes nothing.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.simulation.world import World

READ_ALL = 0.1  # of the times, everything that is cached is read back


class Accounting:
    """Of one world; each method raises AssertionError if what it looks at is broken."""

    def __init__(self, world: World) -> None:
        self.world, self.core, self.cache = world, world.core, world.cache
        self._rng = random.Random(world.scenario.seed)

    def check(self) -> None:
        """The cache's own invariants; only streams under way and pins hold blocks; nothing is planned."""
        cache = self.cache
        cache.check()
        streams = [s for request in self.core.scheduler.running for s in request.streams if not s.sequence.closed]
        opened = cache.state.open.values()
        assert {id(s.sequence) for s in streams} == {id(s) for s in opened}, f"open: {opened}, running: {streams}"
        assert all(not sequence.has_plan for sequence in opened), "a plan is left over"
        used = {block for sequence in opened for block in sequence._table} | self._locked()
        held = cache.num_blocks - cache.free_blocks - cache.evictable_blocks
        assert used.isdisjoint(cache.state.pool.free), "blocks are free and held"
        assert len(used) == held, f"{held} blocks are held, {len(used)} by somebody we know"
        if self._rng.random() < READ_ALL:
            self.contents()

    def _locked(self) -> set[int]:
        """The blocks of the nodes on the way to what sequences and pins hold."""
        cache = self.cache
        held = [*(sequence.node for sequence in cache.state.open.values()), *cache.state.pins.nodes()]
        return {block for end in held for node in cache.state.tree.path(end) for block in node.blocks}

    def contents(self) -> None:
        """Everything that is cached, read back along the tree: the very tokens, and nobody else's in that namespace."""
        model, tree = self.world.model, self.cache.state.tree
        owner: dict[int, Any] = {}
        for namespace, root in tree.roots.items():
            nodes = list(root.children.values())
            while nodes:
                node = nodes.pop()
                nodes.extend(node.children.values())
                table = np.array(tree.table(node), np.int32)
                keys = b"".join(bytes(each.key) for each in tree.path(node))
                assert model.holds(table, node.end), f"node {node.id} holds a broken history"
                assert (model.tokens_along(table, node.end) == np.frombuffer(keys, np.int32)).all(), "other tokens"
                assert self.is_common(table, node.end, 1 << 30), f"node {node.id} was not computed on the grid"
                for block in table.tolist():
                    assert owner.setdefault(block, namespace) == namespace, f"block {block} is in two namespaces"

    def is_common(self, table: Any, length: int, prompt_length: int) -> bool:
        """Whether the first tokens were computed as by anybody who has this prompt, if that is promised."""
        config = self.world.scenario.config
        if not config.deterministic:
            return True
        begins = np.arange(length) // config.prefill_chunk * config.prefill_chunk
        counts = np.minimum(config.prefill_chunk, prompt_length - begins)
        expected = np.stack([begins, counts, np.ones_like(begins)], axis=1)
        return bool((self.world.model.came_from(table, length) == expected).all())
