"""Who is attached to a publisher: who may come in, who has to go, and what they can take now.

Knows clients, the selector that watches their connections, and limits. Does not know what they are told, nor when.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterator

from radixkv.errors import ProtocolError
from radixkv.telemetry.client import Client, Limits

_log = logging.getLogger(__name__)


class Audience:
    """The clients of one publisher, on its thread; only `attached` and `buffered` may be asked from anywhere.

    `snapshot` gives the frames of everything for one client, `bye` the last frame. `welcomed` is called when somebody
    is attached who was not.
    """

    def __init__(
        self,
        limits: Limits,
        snapshot: Callable[[int | None], Iterator[bytes]],
        bye: Callable[[str], bytes],
        welcomed: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._snapshot, self._bye, self._welcomed = snapshot, bye, welcomed
        self._clients: set[Client] = set()

    def open(self, selector: selectors.BaseSelector) -> None:
        """Have connections watched by `selector` from now on."""
        self._selector = selector

    @property
    def attached(self) -> int:
        """How many clients are attached."""
        return sum(client.attached for client in tuple(self._clients))

    @property
    def buffered(self) -> int:
        """Bytes that clients have not taken yet, of all of them."""
        return sum(client.buffered for client in tuple(self._clients))

    @property
    def hz(self) -> float | None:
        """How often the fastest of the attached wants to be told; None if nobody is."""
        return max((client.hz for client in self._clients if client.attached), default=None)

    def __bool__(self) -> bool:
        """Whether there is a connection, attached or not."""
        return bool(self._clients)

    # ---- coming

    def meet(self, connection: socket.socket, token: str | None) -> None:
        """A connection that may come in: it has some seconds to say what it wants, and the token if there is one."""
        waiting = [client for client in self._clients if client.deadline is not None]
        if len(waiting) >= self._limits.waiting:
            min(waiting, key=lambda client: client.deadline or 0.0).quit()
            self.tidy()
        client = Client(connection, time.monotonic() + self._limits.attach_s, self._limits, self._snapshot, token)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda mask: self._serve(client, mask))

    def _serve(self, client: Client, mask: int) -> None:
        """Read and write what can be; whatever is wrong with this client ends this client."""
        try:
            if mask & selectors.EVENT_WRITE:
                client.send()
            if mask & selectors.EVENT_READ and not client.gone and client.read():
                self._welcome(client)
        except ProtocolError as error:
            self._dismiss(client, str(error))
        except Exception:
            _log.exception("a client of the monitor's publisher was dropped")
            client.quit()

    def _welcome(self, client: Client) -> None:
        if self.attached >= self._limits.clients:
            self._dismiss(client, f"busy: {self._limits.clients} monitors are attached already")
            return
        client.welcome()
        self._welcomed()

    # ---- being told

    def give(self, delta: bytes) -> None:
        """A frame for everybody who is attached."""
        for client in self._clients:
            client.give(delta)

    # ---- going

    def dismiss(self, reason: str) -> None:
        """Tell everybody why it is the end; they are gone when they have taken it."""
        for client in self._clients:
            self._dismiss(client, reason)

    def _dismiss(self, client: Client, reason: str) -> None:
        client.leave(self._bye(reason), time.monotonic() + self._limits.leave_s)

    def expire(self, now: float) -> None:
        """Hang up on who neither attached nor left in time."""
        for client in self._clients:
            if client.deadline is not None and now >= client.deadline:
                client.quit()

    def tidy(self) -> None:
        """Forget who is gone, and watch for room where something waits for it."""
        for client in tuple(self._clients):
            if client.gone:
                self._clients.discard(client)
                self._selector.unregister(client.connection)
                client.connection.close()
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.wants_to_send else 0)
            watched = self._selector.get_key(client.connection)
            if watched.events != wanted:
                self._selector.modify(client.connection, wanted, watched.data)

    def close(self) -> None:
        """Hang up on everybody; the selector is not told."""
        for client in self._clients:
            client.quit()
            client.connection.close()
        self._clients.clear()
