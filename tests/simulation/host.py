"""A simulated model with host memory: its blocks hold digests and tokens as those of the pool do.

A block of the pool keeps its content after it was taken for other tokens, until the step's offload has run. A load that
raises leaves garbage in the slots of its plan, and an offload in its host blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from radixkv.attention.host_store import HostCosts
from radixkv.cache import PrefixCache
from radixkv.cache.types import Load
from radixkv.disk import SCRATCH
from tests.simulation.model import SlotModel, digest_of, follow

_GARBAGE = 0xBAD_0FF10AD
Pairs = Sequence[tuple[int, int]]


class HostSlotModel(SlotModel):
    """A SlotModel with host memory, from which a token loads `speed` times as fast as it is computed."""

    speed = 1.0

    def __init__(self, cache: PrefixCache, seed: int) -> None:
        self._taken: list[array[int]] = []  # blocks that were taken since the last offload
        super().__init__(cache, seed)
        self.host = HostSlots(self, cache)

    def host_costs(self, chunk: int) -> HostCosts:
        assert not self.runs, "measured while KV may be cached"
        return HostCosts(1.0, self.speed)

    def run(self, *args: Any) -> Any:
        self.poison_taken()
        return super().run(*args)

    def poison_taken(self) -> None:
        """Poison the blocks that were taken since the last step."""
        for taken in self._taken:
            self.poison(taken)
        self._taken.clear()

    def copy_late(self, copies: Pairs) -> None:
        """Launch the copies of plans."""
        self.launch(partial(self._copy, list(copies)))

    def _poison_allocated_blocks(self) -> None:
        taken = self._taken

        class Noted(type(self._pool)):  # type: ignore[misc]
            __slots__ = ()

            def take(self, *args: Any):  # type: ignore[no-untyped-def]
                blocks = super().take(*args)
                taken.append(array("i", blocks))
                return blocks

        self._pool.__class__ = Noted


class HostSlots:
    """The host memory; `fault(kind, part)` is called at part 0 and 1 of 1 of a transfer and may raise."""

    def __init__(self, model: HostSlotModel, cache: PrefixCache) -> None:
        shape = (cache.host_blocks + SCRATCH, cache.block_size)  # with the blocks of a disk
        self.digests, self.tokens = np.full(shape, _GARBAGE, np.uint64), np.full(shape, -3, np.int64)
        self.origins = np.full((*shape, 3), -3, np.int64)
        self.fault: Callable[[str, int], None] = lambda kind, part: None
        self.offloads = 0
        self._model, self._cache = model, cache

    @property
    def _contents(self) -> list[tuple[Any, Any]]:
        model = self._model
        return [(self.digests, model.digests), (self.tokens, model.tokens), (self.origins, model.origins)]

    def offload(self, moves: Pairs) -> None:
        with self._model.watched():
            self._offload(list(moves))

    def _offload(self, moves: list[tuple[int, int]]) -> None:
        targets = [target for _, target in moves]
        assert moves and len(set(targets)) == len(targets), f"moves {moves} write a host block twice"
        self.offloads += 1
        self.fault("offload", 0)
        for number, (source, target) in enumerate(self._model.shuffled(moves)):
            self._model.launch(partial(self._move, source, target))
            if number == len(moves) // 2:
                self._break_off("offload", lambda: self._spoil(targets))

    def _move(self, source: int, target: int) -> None:
        for image, pool in self._contents:
            image[target] = pool[source]

    def load(self, loads: Sequence[Load]) -> None:
        with self._model.watched():
            self._load(list(loads))

    def _load(self, loads: list[Load]) -> None:
        model, free = self._model, set(self._cache.state.pool.free)
        model.runs += 1
        written = [slot for each in loads for slot in each.plan.slots.tolist()]
        copies = [pair for each in loads for pair in each.plan.copies]
        assert len(set(written)) == len(written) > 0, "two loads write one slot"
        assert free.isdisjoint(slot // model.size for slot in written), "a load writes free blocks"
        assert free.isdisjoint(block for pair in copies for block in pair), f"copies {copies} touch free blocks"
        self.fault("load", 0)
        model.poison_taken()
        model.copy_late(copies)
        for each in model.shuffled(loads):
            assert len(each.sources) == len(each.plan.slots), "slots without a source"
            assert (each.sources % model.size == each.plan.slots % model.size).all(), (
                "a load moves tokens inside blocks"
            )
            model.launch(partial(self._fill, each))
            self._break_off("load", partial(self._spoil_slots, written))

    def _fill(self, load: Load) -> None:
        for image, pool in self._contents:
            flat, loaded = pool.reshape(-1, *pool.shape[2:]), image.reshape(-1, *image.shape[2:])
            flat[load.plan.slots] = loaded[load.sources]

    def check(self, are_canonical: Callable[[Any, int, int], bool]) -> None:
        """Read all images back: each holds its own run, and the tokens before it in its first block."""
        tree, size = self._cache.state.tree, self._model.size
        for node in tree.lower.nodes():
            if not tree.lower.is_resident(node):
                continue
            text = np.frombuffer(b"".join(bytes(each.key) for each in tree.path(node)), np.int32).tolist()
            first, digest, expected = node.start // size * size, digest_of(text[: node.start // size * size]), []
            for token in text[first:]:
                digest = follow(digest, token)
                expected.append(digest)
            images = list(node.blocks)
            assert self.digests[images].reshape(-1)[: len(expected)].tolist() == expected, f"host node {node.id}"
            assert self.tokens[images].reshape(-1)[: len(expected)].tolist() == text[first:], f"host node {node.id}"
            origins = self.origins[images].reshape(-1, 3)[node.start - first : len(expected)]
            assert are_canonical(origins, 1 << 30, node.start), f"host node {node.id} is not of aligned chunks"

    def _break_off(self, kind: str, spoil: Callable[[], None]) -> None:
        try:
            self.fault(kind, 1)
        except Exception:
            self._model.launch(spoil)
            raise

    def _spoil(self, blocks: list[int]) -> None:
        self.digests[blocks], self.tokens[blocks], self.origins[blocks] = _GARBAGE, -3, -3

    def _spoil_slots(self, slots: list[int]) -> None:
        self._model.digests.reshape(-1)[slots] = _GARBAGE
