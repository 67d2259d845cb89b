"""Check the cache and the contents of the pool between two steps, and change nothing.

The checks read the cache's internals and the history that the model stores in each slot.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv.engine.beams import BeamSearch
from radixkv.engine.request import Request
from tests.cache.fuzz.block_index import BlockIndex
from tests.cache.naive import Texts
from tests.simulation.host import HostSlotModel

if TYPE_CHECKING:
    from tests.simulation.world import World

READ_ALL = 0.1  # the share of checks that read back the whole cache


class Accounting:
    """The checks of one world; each raises AssertionError."""

    def __init__(self, world: World) -> None:
        self.world, self.core, self.cache = world, world.core, world.cache
        self._rng = random.Random(world.scenario.seed)
        self._router: BlockIndex | None = None
        self._routers = random.Random(world.scenario.seed)

    def check(self) -> None:
        """Check the cache's invariants; only running streams and pins hold blocks, and there are no open plans."""
        cache = self.cache
        cache.check()
        streams = [s for request in self.core.scheduler.running for s in request.streams if not s.sequence.closed]
        streams += [stream for stream in self.core.scheduler.closing if stream not in streams]
        opened = cache.state.open.values()
        assert {id(s.sequence) for s in streams} == {id(s) for s in opened}, f"open: {opened}, running: {streams}"
        assert all(not sequence.has_plan for sequence in opened), "a plan is left over"
        used = {block for sequence in opened for block in sequence._table.blocks} | self._locked()
        held = cache.num_blocks - cache.free_blocks - cache.evictable_blocks
        assert used.isdisjoint(cache.state.pool.free), "blocks are free and held"
        assert len(used) == held, f"{held} blocks are held, {len(used)} of them by streams and pins"
        for request in self.core.scheduler.running:
            if isinstance(request.replies, BeamSearch) and not request.scheduling.preemptions:
                self._beams(request)
        if self._rng.random() < READ_ALL:
            self.contents()
            self.core._reuse.kept_scores.check()
        if self._routers.random() < READ_ALL:
            self._read_blocks()

    def _read_blocks(self) -> None:
        """Compare a router's index with the tree; attach one, or detach it."""
        if self._router is None:
            self._router = BlockIndex(self.cache)
        self._router.read()
        if self._routers.random() < READ_ALL:
            self._router.events.disconnect()
            self._router = None

    def _beams(self, request: Request) -> None:
        """Beams hold the prompt once, private blocks after their last common ancestor, and at most one copy each.

        A full block is common to beams whose tokens are equal up to its end. After a preemption each computes its own.
        """
        sequences = [stream.sequence for stream in request.streams if stream.active]
        texts = Texts()
        for sequence in sequences:
            texts.add(sequence.tokens.tolist())
        held = {block for sequence in sequences for block in sequence.block_table.tolist()}
        most = texts.blocks(self.cache.block_size)
        assert len(held) <= most, f"{len(sequences)} beams hold {len(held)} blocks, not {most}"

    def _locked(self) -> set[int]:
        """Return the blocks of all nodes on the paths that sequences and pins lock."""
        cache = self.cache
        held = [*(sequence.node for sequence in cache.state.open.values()), *cache.state.pins.nodes()]
        return {block for end in held for node in cache.state.tree.path(end) for block in node.blocks}

    def contents(self) -> None:
        """Read the whole cache back along the tree: each block holds its own tokens, and belongs to one namespace."""
        self.world.model.flush()
        if isinstance(self.world.model, HostSlotModel):
            self.world.model.host.check(self.are_canonical)
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
                assert self.is_canonical(table, node.end, 1 << 30), f"node {node.id} was not computed in aligned chunks"
                for block in table.tolist():
                    assert owner.setdefault(block, namespace) == namespace, f"block {block} is in two namespaces"

    def is_canonical(self, table: Any, length: int, prompt_length: int) -> bool:
        """Return whether the first tokens were computed in the chunks of a deterministic engine, or it is not one."""
        return self.are_canonical(self.world.model.came_from(table, length), prompt_length)

    def are_canonical(self, origins: Any, prompt_length: int, start: int = 0) -> bool:
        """Return that of tokens [n, 3] from `start` on, by the chunks that computed them."""
        config = self.world.scenario.config
        if not config.deterministic:
            return True
        begins = np.arange(start, start + len(origins)) // config.prefill_chunk * config.prefill_chunk
        counts = np.minimum(config.prefill_chunk, prompt_length - begins)
        expected = np.stack([begins, counts, np.ones_like(begins)], axis=1)
        return bool((origins == expected).all())
