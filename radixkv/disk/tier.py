"""Connect a prefix cache and a store: write the runs that leave the host, and find the records that continue a text.

A run that leaves the host is copied at that moment, with the blocks before it whose records may be missing. So no block
of a tier is held for the disk. All methods are called on the engine's thread, or where one caller owns the cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from random import Random
from typing import NamedTuple, Protocol

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.cache.events import Follower
from radixkv.cache.tokens import WIDTH, Tokens, as_bytes, is_compressed
from radixkv.cache.types import Node
from radixkv.disk import SCRATCH
from radixkv.disk.records import Record, decode_namespace, encode_namespace
from radixkv.disk.slabs import Image
from radixkv.disk.store import Run, Store

_log = logging.getLogger("radixkv.disk")


class Memory(Protocol):
    """Images in host memory, with SCRATCH blocks more than the cache has."""

    def offload(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (block of the pool, host block)."""

    def image(self, block: int) -> Image:
        """Return a copy of the image in a host block: all layers, keys and values, in one piece."""

    def put_image(self, block: int, image: Image) -> None:
        """Set the image of a host block. Any thread may call it for a block that it owns."""


class Found(NamedTuple):
    """The end of a text that is on disk and not in memory: the records of its blocks, from block `first` on."""

    tokens: bytes  # of the text up to the end of the last record
    first: int
    records: list[Record]


class DiskTier(Follower):
    """The disk's part of a cache with a host tier."""

    order = 4

    def __init__(
        self, cache: PrefixCache, store: Store, memory: Memory, value_of: Callable[[Hashable], Hashable] = lambda v: v
    ) -> None:
        """Follow the cache. `value_of` returns the value that a caller gave for a namespace of the cache."""
        assert cache.state.host is not None
        self.store, self._memory = store, memory
        self._cache, self._host, self._value_of = cache, cache.state.host, value_of
        self._size = cache.block_size * WIDTH
        self._scratch = range(cache.host_blocks, cache.host_blocks + SCRATCH)
        self._kept: dict[Node, int] = {}  # full blocks of a node's text that have records, or will
        self._losses = 0  # of the store when that was known
        self._unnamed = False
        cache.state.events.connect(self)

    # ---- events

    def leaving(self, node: Node, blocks: int) -> None:
        """Write a run that leaves memory, unless its records are there."""
        self.write(node, time.time(), leaving=blocks)

    def removed(self, node: Node, blocks: int) -> None:
        """Forget a node."""
        self._kept.pop(node, None)

    def joined(self, node: Node, upper: Node) -> None:
        """Forget a node."""
        self._kept.pop(upper, None)

    # ---- to the disk

    def write(self, node: Node, used: float, most: int = 1 << 31, *, leaving: int = 0) -> int:
        """Queue the text that ends with a node to be written; returns how many of its blocks were copied for that.

        They are the first `most` without records. None are copied if the disk cannot take them now, or the copy fails:
        the blocks that are `leaving` are dropped then, and counted. `used` is the time of the last use of the text.
        O(blocks of the text).
        """
        self._forget_losses()
        end = node.end * WIDTH // self._size
        if self._kept.get(node, -1) >= end or not self.store.ready:
            return 0
        path = self._cache.state.tree.path(node)
        namespace = self.encoded(self._cache.state.tree.namespace(node))
        if namespace is None or is_compressed(path[0].key):
            return 0
        places = self._host.places(path)
        blocks = self._blocks(b"".join([each.key for each in path]))[: len(places)]
        records = self.store.find(namespace, blocks)
        self.store.touch(records, used)
        first = max(len(records), self._kept.get(node, 0))  # the writer may not have come to the blocks before
        missing, images = places[first:], list[Image]()
        try:
            images += self._images(missing[: min(most, self.store.room)])
        except Exception:
            _log.exception("cached text could not be copied for the disk")
            images.clear()
        self._kept[node] = first + len(images)
        if images:
            self.store.offer(Run(namespace, blocks[: first + len(images)], images, used))
        elif missing and leaving:
            self.store.count("dropped_blocks", min(len(missing), leaving))
        return len(images)

    def unwritten(self) -> list[Node]:
        """The nodes at whose ends cached texts end and whose records may be missing, last used first. O(nodes)."""
        self._forget_losses()
        tree = self._cache.state.tree
        ends = [node for node in tree.residents() if not node.children and not node.below and node.parent is not None]
        ends = [node for node in ends if self._kept.get(node, -1) < node.end * WIDTH // self._size]
        return sorted(ends, key=lambda node: -node.tick)

    def _forget_losses(self) -> None:
        if self._losses != self.store.losses:
            self._losses = self.store.losses
            self._kept.clear()

    def _images(self, places: list[tuple[bool, int]]) -> Iterator[Image]:
        """Yield a copy of each image; those on the device are copied through the scratch blocks."""
        for at in range(0, len(places), SCRATCH):
            some = places[at : at + SCRATCH]
            moves = [(block, self._scratch[n]) for n, (is_device, block) in enumerate(some) if is_device]
            if moves:
                self._memory.offload(moves)
            for number, (is_device, block) in enumerate(some):
                yield self._memory.image(self._scratch[number] if is_device else block)

    # ---- from the disk

    def find(self, tokens: Tokens, namespace: Hashable) -> Found | None:
        """Return the records that continue a text where device and host end; None if there are none.

        O(blocks of the text that are on disk), which each take a lookup.
        """
        encoded = self.encoded(namespace)
        if encoded is None or not self.store.ready:
            return None
        raw = as_bytes(tokens)
        match = self._cache.match(tokens, namespace)
        first = (match.matched + match.host) * WIDTH // self._size
        if first >= len(raw) // self._size:
            return None
        records = self.store.find(encoded, self._blocks(raw))
        if len(records) <= first:
            return None
        return Found(raw[: len(records) * self._size], first, records[first:])

    def random_text(
        self, rng: Random, most: int, number: Callable[[Hashable], Hashable]
    ) -> tuple[Found, Hashable] | None:
        """Return a random text of up to `most` blocks whose end is not in memory, and its namespace in the cache.

        `number` returns the namespace of the cache for the value of a caller.
        """
        text = self.store.random_text(rng)
        if not text:
            return None
        numbered, blocks = number(decode_namespace(text[0])), text[1:]
        found = self.find(np.frombuffer(b"".join(blocks[:most]), np.int32), numbered)
        return None if found is None else (found, numbered)

    def lend(self, found: Found, namespace: Hashable, count: int | None = None) -> list[int]:
        """Take host blocks for the first `count` records of a text, or for all, as far as there is room."""
        count = len(found.records) if count is None else count
        return self._cache.take_host_blocks(np.frombuffer(found.tokens, np.int32), namespace, count).tolist()

    def drop(self, tokens: Tokens, namespace: Hashable, start: int) -> None:
        """Delete the records of a text from the block of token `start` on, and all after them."""
        self._kept.clear()
        if (encoded := self.encoded(namespace)) is not None:
            blocks = self._blocks(as_bytes(tokens))
            first = start * WIDTH // self._size
            if first < len(blocks):
                self.store.drop(encoded, blocks[: first + 1])

    def drop_namespace(self, namespace: Hashable) -> None:
        """Delete all records of a namespace."""
        self._kept.clear()
        if (encoded := self.encoded(namespace)) is not None:
            self.store.drop(encoded)

    def clear(self) -> Future[None]:
        """Delete all records; the future ends when that is durable."""
        self._kept.clear()
        return self.store.clear()

    def use(self, store: Store) -> None:
        """Use another store from now on."""
        self._kept.clear()
        self.store = store

    def disconnect(self) -> None:
        """Follow the cache no more."""
        self._kept.clear()
        self._cache.state.events.disconnect(self)

    def encoded(self, namespace: Hashable) -> bytes | None:
        """Encode a namespace; None, which the log says once, if its text stays in memory."""
        encoded = encode_namespace(self._value_of(namespace))
        if encoded is None and not self._unnamed:
            self._unnamed = True
            _log.warning("a namespace that is no str, int, bytes, None, nor a tuple of them, stays in memory")
        return encoded

    def _blocks(self, raw: bytes | bytearray) -> list[bytes]:
        """Cut a text into its full blocks."""
        size = self._size
        return [bytes(raw[at : at + size]) for at in range(0, len(raw) - size + 1, size)]
