"""Count the open connections, so that one tenant cannot take all of them.

A connection belongs to the tenant of its latest request. With two or more keys, each tenant has a share. A connection
that carries no request is closed first: the oldest one of the tenant, or of all at the limit of the server.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from radixkv.serve.errors import too_many
from radixkv.server_settings import Settings


class Connection(Protocol):
    """A connection of the HTTP parser."""

    @property
    def is_idle(self) -> bool:
        """Whether it carries no request whose head is complete."""

    def close(self) -> None:
        """Close it after the data that was written."""


class Connections:
    """The open connections and their tenants. For one event loop."""

    def __init__(self, settings: Settings) -> None:
        """Begin without connections."""
        self._most, self._most_per_key = settings.connection_limit, settings.connections_per_key
        self._retry_after = settings.retry_after
        self._tenants: dict[Connection, str | None] = {}  # the oldest first; None before the first request
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """The number of open connections."""
        return len(self._tenants)

    def opened(self, connection: Connection) -> None:
        """Count a new connection; at the limit, close the oldest idle one in place of it, or the new one. O(open)."""
        if len(self._tenants) >= self._most:
            idle = next((each for each in self._tenants if each.is_idle), connection)
            self.closed(idle)
            idle.close()
            if idle is connection:
                return
        self._tenants[connection] = None

    def closed(self, connection: Connection) -> None:
        """Count a connection no longer. May be called twice."""
        tenant = self._tenants.pop(connection, None)
        if tenant is not None:
            self._counts[tenant] -= 1

    def claim(self, connection: Connection | None, tenant: str | None) -> None:
        """Count a connection for the tenant of its request. Raises ApiError 429 if the tenant has used its share. O(1).

        At the share it first closes the oldest idle connection of the tenant, which is O(open).
        """
        if self._most_per_key is None or tenant is None or connection not in self._tenants:
            return
        before = self._tenants[connection]
        if before == tenant:
            return
        if self._counts[tenant] >= self._most_per_key:
            idle = next((each for each, owner in self._tenants.items() if owner == tenant and each.is_idle), None)
            if idle is None:
                raise too_many("too many connections of this API key are open", self._retry_after, Connection="close")
            self.closed(idle)
            idle.close()
        if before is not None:
            self._counts[before] -= 1
        self._tenants[connection] = tenant
        self._counts[tenant] += 1
