"""Compressed prefixes: entries of the cache that a call asks for, and that only requests with their handle read.

An entry's text is made of ids that no vocabulary has: no other prompt can match it, and nothing computes it. Its KV is
a part of the KV of an exact prefix. Requests find an entry while its pin is active: whatever releases pins drops it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from radixkv.cache import Pin
from radixkv.cache.tokens import FIRST_PSEUDO
from radixkv.device import refuse_fatal
from radixkv.engine.fault_isolation import failure
from radixkv.engine.request import Request, TokenIds
from radixkv.errors import EngineClosed, InvalidInput, OutOfBlocks, PrefixGone, RadixKVError, RequestTimedOut
from radixkv.models.compression import METHODS, num_slots

if TYPE_CHECKING:
    from radixkv.engine.core import Compressor, Core


@runtime_checkable
class Conversation(Protocol):
    """A conversation that can be compressed, such as a chat session."""

    def frozen(self) -> tuple[Sequence[int], Hashable, object]:
        """Return the ids with which all later prompts begin, the namespace, and the state of the conversation."""


@dataclass(frozen=True, eq=False)
class CompressedPrefix:
    """The handle of a compressed prefix: `slots` of the KV of its `tokens`, in `bytes`, chosen by `method` for `keep`.

    `name` identifies it in its `namespace`. `ids` int32 [slots] are its text in the cache, and `text` int32 [tokens]
    the exact prefix. `source` has the chat messages or the chat state that it was made from; None for a text and ids.
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

    def rest(self, ids: Any) -> TokenIds:
        """Return the token ids after the text of the prefix. Raises InvalidInput if `ids` do not begin with it."""
        given = np.asarray(ids, np.int32)
        if not np.array_equal(given[: self.tokens], self.text):
            reason = "its first messages, its tools and its date must be the prefix's own"
            raise InvalidInput(f"the prompt does not begin with the {self.tokens} tokens of {self.name}: {reason}")
        return given[self.tokens :]

    @property
    def gone(self) -> str:
        """The message of PrefixGone, which says how to make the prefix again."""
        again = f"engine.compress(..., keep={self.keep}, method={self.method!r})"
        return f"the compressed prefix {self.name} was released or dropped: make it again by {again}"


@dataclass(eq=False)
class CompressionJob:
    """A prefix to compress once `request` has computed its text. The exact text is pinned from then on."""

    prefix: CompressedPrefix
    request: Request
    future: Future[CompressedPrefix]
    pin: Pin | None = None
    compressor: Compressor | None = None
    remains: bool = True


class CompressedPrefixes:
    """The compressed prefixes of an engine, and a background task of its core that makes them, a piece after each step.

    `plan` and `find` may be called by any thread, the rest by the engine's.
    """

    def __init__(self, core: Core, bytes_per_block: int) -> None:
        """Compress prefixes in the cache of `core`."""
        self._core, self._block_bytes, self._block_size = core, bytes_per_block, core.cache.block_size
        self._obstacle = _obstacle(core)
        self._jobs: list[CompressionJob] = []
        self._entries: dict[tuple[Hashable, str], tuple[CompressedPrefix, Pin]] = {}

    def plan(self, text: TokenIds, method: str, keep: float, namespace: Hashable, source: Any) -> CompressedPrefix:
        """Describe the compressed prefix of a text. Raises InvalidInput if it cannot be made."""
        if self._obstacle is not None:
            raise InvalidInput(f"no prefix can be compressed: {self._obstacle}")
        if not isinstance(method, str) or method not in METHODS:
            raise InvalidInput(f"method={method!r}: allowed are {', '.join(METHODS)}")
        if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
            raise InvalidInput(f"keep={keep!r}: allowed is the share of tokens to keep, above 0 and at most 1")
        if len(text) < 2 * self._block_size:
            raise InvalidInput(f"a prefix of {len(text)} tokens is too short: {2 * self._block_size} are two blocks")
        slots, size = num_slots(len(text), keep), self._block_size
        name, ids = _pseudo_text(text, f"{method} {float(keep)!r}", slots)
        about = len(text), slots, self._block_bytes * slots // size, method, float(keep), ids, text
        return CompressedPrefix(name, *about, namespace, source)

    def find(self, name: str, number: Hashable) -> CompressedPrefix | None:
        """Return a prefix of the namespace with this number; None if there is none of this name."""
        prefix, pin = self._entries.get((number, name), (None, None))
        return prefix if pin is not None and pin.active else None

    def release(self, prefix: CompressedPrefix, number: Hashable) -> None:
        """Drop a prefix, if it is there; requests that have begun go on."""
        _, pin = self._entries.pop((number, prefix.name), (None, None))
        if pin is not None:
            pin.release()
            self._core.cache.demote(prefix.ids, number)

    def add(self, job: CompressionJob) -> None:
        """Compress a prefix when its request has ended."""
        if self not in self._core.background:
            self._core.background.append(self)
        self._jobs.append(job)

    # ---- as a background task

    def due_in(self, *, busy: bool) -> float | None:
        """Return 0 if a prefix can be compressed, else None."""
        return 0.0 if any(job.request.channel.ended for job in self._jobs) else None

    def step(self, *, busy: bool) -> None:
        """Score one piece, or write; a new text is pinned first. An error goes to the job's future."""
        ready = [job for job in self._jobs if job.request.channel.ended]
        job = min(ready, key=lambda each: each.pin is not None)
        try:
            if job.future.cancelled() or self._advance(job):
                self._end(job)
        except Exception as error:
            refuse_fatal(error)
            self._end(job, error if isinstance(error, RadixKVError) else failure(error))

    def close(self) -> None:
        """Fail the jobs that have not ended."""
        for job in self._jobs[:]:
            self._end(job, EngineClosed("the engine was closed before the prefix was compressed"))
        self._entries.clear()

    def _end(self, job: CompressionJob, error: Exception | None = None) -> None:
        self._jobs.remove(job)
        if job.pin is not None:
            job.pin.release()
        if error is not None and job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)

    def _advance(self, job: CompressionJob) -> bool:
        """Do the next piece of a job; returns whether its future has the prefix."""
        prefix, number = job.prefix, job.request.namespace
        found = self.find(prefix.name, number)
        if found is None and self._is_cached(job):
            found = self._register(job)
        if found is not None and job.future.set_running_or_notify_cancel():
            job.future.set_result(found)
        return found is not None

    def _is_cached(self, job: CompressionJob) -> bool:
        """Do the next piece; returns whether the compressed KV is cached then."""
        prefix, number, cache, deadline = job.prefix, job.request.namespace, self._core.cache, job.request.deadline
        if job.pin is None:
            job.request.channel.wait(0)  # raises the error with which the request ended
            job.pin = self._core.admission.pin(prefix.text, number)
            if not job.pin.complete:
                raise OutOfBlocks("the prefix was evicted before it could be pinned: try again when fewer requests run")
        elif not job.pin.active:
            raise PrefixGone("the exact prefix was dropped before it was compressed: compress it again")
        elif deadline is not None and time.perf_counter() > deadline:
            raise RequestTimedOut("the prefix was not compressed in time")
        elif job.compressor is None:
            job.compressor = self._core.runner.compression(prefix.text, prefix.method)
        elif job.remains:
            job.remains = job.compressor.step(cache.match(prefix.text, number).blocks)
        else:
            self._write(job.compressor, prefix, number)
        return cache.match(prefix.ids, number).length == prefix.slots

    def _register(self, job: CompressionJob) -> CompressedPrefix:
        """Pin the compressed prefix in place of the exact one. Raises PinBudgetExceeded."""
        prefix, number = job.prefix, job.request.namespace
        for each in self._jobs:  # jobs for the same prefix have the same text
            if each.pin is not None and each.prefix.name == prefix.name and each.request.namespace == number:
                each.pin.release()
        pin = self._core.admission.pin(prefix.ids, number)
        self._entries = {key: each for key, each in self._entries.items() if each[1].active}
        self._entries[number, prefix.name] = prefix, pin
        return prefix

    def _write(self, compressor: Compressor, prefix: CompressedPrefix, number: Hashable) -> None:
        """Copy the chosen KV into blocks of its own, and publish them. Raises OutOfBlocks."""
        core = self._core
        core.cache.discard(prefix.ids, number)  # the rest of an earlier entry
        with closing(core.cache.open(prefix.ids, number, purpose="resume")) as sequence:
            plan = sequence.extend(prefix.ids)
            if core.host is not None:
                core.host.offload()
            compressor.write(core.cache.match(prefix.text, number).blocks, plan.slots)
            sequence.commit()


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
    return f"prefix-{digest.hexdigest()[:16]}", ids
