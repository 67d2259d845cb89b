"""Compressed prefixes: entries of the cache that a call asks for, and that only requests with their handle read.

An entry's text is made of ids that no vocabulary has: no other prompt can match it, and nothing computes it. Its KV is
a part of the KV of an exact prefix. Requests find an entry while its pin is active: releasing the pin drops it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from radixkv.cache import Pin
from radixkv.cache.tokens import FIRST_PSEUDO
from radixkv.engine.request import TokenIds
from radixkv.errors import InvalidInput, OutOfBlocks, PrefixGone, RequestTimedOut

if TYPE_CHECKING:
    from radixkv.engine.core import Core
    from radixkv.models.compression import Compression


@runtime_checkable
class Conversation(Protocol):
    """A conversation that can be compressed, such as a chat session."""

    def frozen(self) -> tuple[Sequence[int], Hashable, object]:
        """Return the ids with which all later prompts begin, the namespace, and the state of the conversation."""


@dataclass(frozen=True, eq=False)
class CompressedPrefix:
    """The handle of a compressed prefix: `slots` of the KV of its `tokens`, in `bytes`, chosen by `method` for `keep`.

    `name` identifies it in its `namespace`. `ids` int32 [slots] are its text in the cache, and `text` int32 [tokens]
    the exact prefix. `source` is the state of the chat that it was made from; None for a text and ids.
    """

    name: str
    tokens: int
    slots: int
    bytes: int
    method: str
    keep: float
    ids: TokenIds = field(repr=False)
    text: TokenIds = field(repr=False)
    namespace: Hashable = None
    source: Any = field(default=None, repr=False)

    @property
    def offset(self) -> int:
        """The number of tokens without a slot."""
        return self.tokens - self.slots

    @property
    def gone(self) -> str:
        """The message of PrefixGone, which says how to make the prefix again."""
        again = f"engine.compress(prefix.text, keep={self.keep}, method={self.method!r}, namespace=...)"
        return f"the engine has no {self.name}: it was released or dropped, or is of another engine; make it by {again}"

    def __str__(self) -> str:
        """Return its size in words."""
        return f"{self.slots:,} slots of a compressed prefix of {self.tokens:,} tokens"


def rest(prefix: CompressedPrefix | None, ids: Any) -> Any:
    """Return the token ids after the text of a prefix, if there is one. Raises InvalidInput if they begin otherwise."""
    if prefix is None:
        return ids
    if not np.array_equal(ids[: prefix.tokens], prefix.text):
        reason = "its first messages, its tools and its date must be the prefix's own"
        raise InvalidInput(f"the prompt does not begin with the {prefix.tokens} tokens of {prefix.name}: {reason}")
    return ids[prefix.tokens :]


class CompressedPrefixes:
    """The compressed prefixes of an engine. Any thread may call `plan` and `find`, the engine's the rest."""

    def __init__(self, core: Core, bytes_per_block: int, engine: str) -> None:
        """Compress prefixes in the cache of `core`; the id of its `engine` makes their names its own."""
        self._core, self._block_bytes, self._block_size = core, bytes_per_block, core.cache.block_size
        self._engine = engine
        self._obstacle = _obstacle(core)
        self._entries: dict[tuple[Hashable, str], tuple[CompressedPrefix, Pin]] = {}

    def plan(self, text: TokenIds, method: str, keep: float, namespace: Hashable, source: Any) -> CompressedPrefix:
        """Describe the compressed prefix of a text. Raises InvalidInput if it cannot be made."""
        from radixkv.models.compression import METHODS, num_slots  # imports attention, which few engines need here

        if self._obstacle is not None:
            raise InvalidInput(f"no prefix can be compressed: {self._obstacle}")
        if not isinstance(method, str) or method not in METHODS:
            raise InvalidInput(f"method={method!r}: allowed are {', '.join(METHODS)}")
        if isinstance(keep, bool) or not isinstance(keep, Real) or not 0 < keep <= 1:
            raise InvalidInput(f"keep={keep!r}: allowed is the share of tokens to keep, above 0 and at most 1")
        if len(text) < 2 * self._block_size:
            raise InvalidInput(f"a prefix of {len(text)} tokens is too short: {2 * self._block_size} are two blocks")
        slots, size = num_slots(len(text), keep), self._block_size
        text = text.copy()  # it may be the caller's array
        name, ids = _pseudo_text(text, f"{method} {float(keep)!r} {self._engine}", slots)
        text.flags.writeable = False
        about = len(text), slots, self._block_bytes * slots // size, method, float(keep), ids, text
        return CompressedPrefix(name, *about, namespace, source)

    def find(self, name: str, number: Hashable) -> CompressedPrefix | None:
        """Return a prefix of the namespace with this number; None if there is none of this name."""
        prefix, pin = self._entries.get((number, name), (None, None))
        return prefix if pin is not None and pin.active else None

    def pieces(self, prefix: CompressedPrefix, number: Hashable, deadline: float) -> Generator[bool]:
        """Compress and register a cached text, which is pinned meanwhile: yield after each piece.

        The generator belongs to the engine's thread. Raises as `register`, PrefixGone and RequestTimedOut.
        """
        core, cache = self._core, self._core.cache
        with core.admission.pin(prefix.text, number):
            compressor = core.runner.compression(prefix.text, prefix.method)
            while cache.match(prefix.ids, number).length < prefix.slots:  # an earlier or equal entry may be cached
                core.finish_step()
                exact = cache.match(prefix.text, number)
                if exact.length < prefix.tokens:
                    raise PrefixGone("the exact prefix was dropped before it was compressed: compress it again")
                if time.perf_counter() > deadline:
                    raise RequestTimedOut("the prefix was not compressed in time")
                if compressor.step(exact.blocks):
                    yield True
                else:
                    self._write(compressor, prefix, number, exact.blocks)
        self.register(prefix, number)

    def _write(self, compressor: Compression, prefix: CompressedPrefix, number: Hashable, table: TokenIds) -> None:
        """Copy the chosen KV into blocks of its own, and publish them."""
        core = self._core
        core.cache.discard(prefix.ids, number)  # the rest of an earlier entry
        with closing(core.cache.open(prefix.ids, number, purpose="resume")) as sequence:
            plan = sequence.extend(prefix.ids)
            if core.host is not None:
                core.host.offload()
            compressor.write(table, plan.slots)
            sequence.commit()

    def register(self, prefix: CompressedPrefix, number: Hashable) -> CompressedPrefix:
        """Pin a prefix, and return it, or an equal one that is there. Raises PinBudgetExceeded, OutOfBlocks."""
        entries = self._entries = {key: each for key, each in self._entries.items() if each[1].active}
        found, pin = entries.get((number, prefix.name), (prefix, None))
        if pin is None or not np.array_equal(found.text, prefix.text):
            pin = self._core.admission.pin(prefix.ids, number)
            if not pin.complete:
                pin.release()
                raise OutOfBlocks("the prefix was evicted before it was pinned: try again when fewer requests run")
            found = prefix
        elif prefix.source is not None:
            found = prefix  # of these messages, for later chats
        entries[number, prefix.name] = found, pin
        return found

    def release(self, prefix: CompressedPrefix, number: Hashable) -> None:
        """Drop a prefix, if it is there. Requests that have begun go on, unless they are preempted."""
        _, pin = self._entries.pop((number, prefix.name), (None, None))
        if pin is not None:
            pin.release()
            self._core.cache.demote(prefix.ids, number)


def _obstacle(core: Core) -> str | None:
    """Return why no prefix can be compressed."""
    if not core.config.prefix_cache:
        return "with prefix_cache=False there are no prefixes"
    if core.config.deterministic:
        return "a deterministic engine gives the answers of the exact prefix only"
    return core.runner.compression_obstacle


def _pseudo_text(text: TokenIds, recipe: str, slots: int) -> tuple[str, TokenIds]:
    """Return the name of a compressed prefix and its ids, int32 [slots]: words of 30 bits of a digest."""
    digest = blake2b(text.astype("<i4").tobytes() + recipe.encode())
    words = b"".join(blake2b(digest.digest() + number.to_bytes(8)).digest() for number in range(-(-slots // 16)))
    ids = (np.frombuffer(words, "<u4")[:slots] % FIRST_PSEUDO + FIRST_PSEUDO).astype(np.int32)
    return f"prefix-{digest.hexdigest()[:32]}", ids
