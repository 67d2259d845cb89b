"""The interface of a prefix cache in `cache_ops.py`: four verbs of a request, and some untimed methods. A request goes

    open(prompt) -> reserve(full) -> [prepare] -> publish -> release

`open` finds the longest cached prefix, lists its slots (or blocks) and holds it. `reserve` makes room for the missing
tokens of `full`, by eviction if need be. `publish` makes them matchable. `release` ends the hold. `prepare`, `key` and
all checks are outside the clock.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]


class Ticket(Protocol):
    """One request in flight."""

    hit: int  # tokens found in the cache


class Engine(Protocol):
    """A prefix cache of `capacity` token slots in blocks (pages) of `page`."""

    freed_by_eviction: int  # tokens, counted when their slots are taken back

    def key(self, ids: Ids) -> Any:
        """The engine's own container of token ids."""

    def open(self, prompt: Any) -> Any: ...
    def reserve(self, ticket: Any, full: Any) -> None: ...
    def prepare(self, ticket: Any) -> tuple[int, Slots, list[tuple[Slots, Slots]]]:
        """Return the missing tokens' place: position of the first, slots, copies (from, to) to do first."""

    def publish(self, ticket: Any) -> None: ...
    def release(self, ticket: Any) -> None: ...
    def match(self, key: Any) -> Any:
        """Find the longest cached prefix and its slots, without holding it."""

    def found(self, match: Any) -> tuple[int, Slots]:
        """Length and slots of a result of `match`."""

    def held(self, ticket: Any) -> Slots:
        """The slots of the cached prefix of a request."""

    def check(self) -> None:
        """Every slot is free or in the tree; AssertionError if not. No request may be in flight."""
