"""Keep finished responses, so that a client can read, continue and delete them.

Each tenant has a store of its own with a limit in bytes. Beyond it, the least recently used responses are evicted. The
items of a conversation are shared by all responses that continue it, and count once.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, Protocol

from radixkv.serve.fields import JsonObject

_ENTRY_BYTES = 600  # of an entry without its items: the objects, and two places in dicts


class Items:
    """Items that some responses share: the input of one request, or the output of one response."""

    def __init__(self, items: Sequence[JsonObject]) -> None:
        """Keep `items`, which must not change any more."""
        self.items = tuple(items)

    @cached_property
    def size(self) -> int:
        """The approximate number of bytes; only counted for stored responses. O(bytes)."""
        return _size(self.items)


class StoredResponse:
    """A response as the client received it, and its conversation: inputs and outputs in turn, its output last.

    `size` is the approximate number of bytes without the conversation.
    """

    __slots__ = ("conversation", "response", "size")

    def __init__(self, response: JsonObject, conversation: Sequence[Items]) -> None:
        """Keep `response`, which must not change any more. Its output must be the last part of `conversation`."""
        self.response, self.conversation = response, tuple(conversation)
        echoed = {name: value for name, value in response.items() if name != "output"}
        self.size = _ENTRY_BYTES + 8 * len(self.conversation) + _size(echoed)

    @property
    def items(self) -> list[JsonObject]:
        """The whole conversation, for the next request. O(items)."""
        return [item for part in self.conversation for item in part.items]

    @property
    def input_items(self) -> list[JsonObject]:
        """The conversation without the response's own output."""
        return [item for part in self.conversation[:-1] for item in part.items]


class Running(Protocol):
    """A response that is being streamed."""

    def cancel(self) -> None:
        """Stop it; its stream ends with the text so far."""

    def response(self) -> JsonObject:
        """Return the response as it is now."""


class ResponseStore:
    """Map (owner, id) to responses; `owner` is a cache namespace, and so never another tenant's.

    `running` has the responses that are being streamed, by (owner, id); their endpoint adds and removes them on the
    event loop. The methods are thread-safe. Each takes O(turns of the conversation), and O(bytes) to add.
    """

    def __init__(self, capacity: int) -> None:
        """Start empty. `capacity` is in bytes for each tenant; 0 stores nothing."""
        self.capacity = capacity
        self.running: dict[tuple[Hashable, str], Running] = {}
        self._lock = threading.Lock()
        self._tenants: defaultdict[str | None, _TenantStore] = defaultdict(lambda: _TenantStore(capacity))

    def add(self, tenant: str | None, owner: Hashable, stored: StoredResponse) -> None:
        """Store a response under its id, unless it alone exceeds the capacity."""
        if self.capacity:
            with self._lock:
                self._tenants[tenant].add((owner, stored.response["id"]), stored)

    def get(self, tenant: str | None, owner: Hashable, number: str) -> StoredResponse | None:
        """Return a response, which is now the most recently used one; None if it is not stored."""
        with self._lock:
            return self._tenants[tenant].get((owner, number))

    def delete(self, tenant: str | None, owner: Hashable, number: str) -> StoredResponse | None:
        """Remove a response and return it; None if it is not stored. Responses that continue it stay."""
        with self._lock:
            return self._tenants[tenant].remove((owner, number))

    def longest_continued(self, tenant: str | None, owner: Hashable, stored: StoredResponse) -> StoredResponse | None:
        """Return the longest response in the store that `stored` continues. O(responses of the tenant)."""
        with self._lock:
            return self._tenants[tenant].longest_continued(owner, set(stored.conversation[:-1]))

    def size(self, tenant: str | None) -> int:
        """Return the approximate number of bytes that a tenant's responses take."""
        with self._lock:
            return self._tenants[tenant].size

    def check(self) -> None:
        """Raise AssertionError if a counter is wrong or a limit is exceeded. O(everything stored)."""
        with self._lock:
            for own in self._tenants.values():
                own.check()


class _TenantStore:
    """The responses of one tenant, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.size = 0
        self._capacity = capacity
        self._stored: OrderedDict[tuple[Hashable, str], StoredResponse] = OrderedDict()
        self._uses: Counter[Items] = Counter()

    def add(self, key: tuple[Hashable, str], stored: StoredResponse) -> None:
        self.remove(key)
        self._stored[key] = stored
        self.size += stored.size
        for part in stored.conversation:
            self.size += 0 if self._uses[part] else part.size
            self._uses[part] += 1
        while self.size > self._capacity:
            self.remove(next(iter(self._stored)))

    def get(self, key: tuple[Hashable, str]) -> StoredResponse | None:
        stored = self._stored.get(key)
        if stored is not None:
            self._stored.move_to_end(key)
        return stored

    def longest_continued(self, owner: Hashable, parts: set[Items]) -> StoredResponse | None:
        found = (each for key, each in self._stored.items() if each.conversation[-1] in parts and key[0] == owner)
        return max(found, key=lambda each: len(each.conversation), default=None)

    def remove(self, key: tuple[Hashable, str]) -> StoredResponse | None:
        stored = self._stored.pop(key, None)
        if stored is None:
            return None
        self.size -= stored.size
        for part in stored.conversation:
            self._uses[part] -= 1
            if not self._uses[part]:
                del self._uses[part]
                self.size -= part.size
        return stored

    def check(self) -> None:
        uses = Counter(part for stored in self._stored.values() for part in stored.conversation)
        assert uses == self._uses, "the uses of shared items were miscounted"
        size = sum(stored.size for stored in self._stored.values()) + sum(part.size for part in uses)
        assert self.size == size <= self._capacity, "too many bytes, or miscounted"


def _size(value: Any) -> int:
    """Return the approximate number of bytes of a JSON value in memory."""
    inside = 0
    if isinstance(value, dict):
        inside = sum(_size(name) + _size(each) for name, each in value.items())
    elif isinstance(value, list | tuple):
        inside = sum(map(_size, value))
    return sys.getsizeof(value) + inside
