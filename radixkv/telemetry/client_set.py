"""The clients of a publisher: their connections, their send queues, and when each must leave.

No call waits, and the memory of a client is bounded by `ClientLimits`.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from radixkv.errors import ProtocolError
from radixkv.telemetry.protocol import WRONG_TOKEN, Attach, Decoder

_log = logging.getLogger(__name__)

_CHUNK = 4096
_ATTACH_BYTES = 4096  # the cap of the one frame that a client sends


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Of a publisher. `buffer` is in bytes for each client, times are in seconds, `hz` is the fastest."""

    clients: int = 8
    waiting: int = 32  # connections that have not said what they want
    buffer: int = 1024 * 1024
    attach_s: float = 5.0
    leave_s: float = 1.0
    hz: float = 10.0


class Client:
    """One connection. Frames go in encoded; a slow reader loses deltas, and is told so by a gap and a snapshot."""

    def __init__(
        self,
        connection: socket.socket,
        deadline: float,
        limits: ClientLimits,
        snapshot: Callable[[int | None], Iterator[bytes]],
        token: str | None = None,
    ) -> None:
        """It has until `deadline` to attach, with the `token` if there is one.

        `snapshot` gives the frames of everything, behind a gap if deltas were dropped, behind a hello if not (None).
        """
        self.connection = connection
        self.deadline: float | None = deadline
        self.attached = self.gone = False
        self.hz = 0.0
        self._limits, self._snapshot, self._token = limits, snapshot, token
        self._decoder = Decoder(_ATTACH_BYTES)
        self._queue: deque[memoryview] = deque()
        self._behind: deque[bytes] = deque()  # deltas that follow the snapshot that is being sent
        self._pages: Iterator[bytes] | None = None
        self._bytes = 0  # in the queue and behind it
        self._dropped = 0
        self._leaving = False

    @property
    def wants_to_send(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._queue) and not self.gone

    @property
    def buffered(self) -> int:
        """Bytes that it has not taken yet."""
        return self._bytes

    # ---- what it says

    def read(self) -> bool:
        """Take what it sent; True if that was all of a right Attach, just now. Anything else ends it.

        Raises ProtocolError, which says what to tell it.
        """
        try:
            data = self.connection.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.quit()
            return False
        if self._leaving:
            return False  # so that its last words do not reset the connection before it has read ours
        if self.attached:
            raise ProtocolError("a monitor sends nothing but one attach frame")
        return self._reads(data)

    def _reads(self, data: bytes) -> bool:
        frame = next(self._decoder.feed(data), None)
        if frame is None:
            return False
        if not isinstance(frame, Attach) or self._decoder.pending:
            raise ProtocolError("a monitor sends one attach frame, and nothing else")
        # Bytes, as compare_digest takes no other texts than ASCII.
        if self._token is not None and not hmac.compare_digest(frame.token.encode(), self._token.encode()):
            raise ProtocolError(f"{WRONG_TOKEN}: it stands in the json file beside the engine's socket")
        self.hz = min(frame.hz, self._limits.hz)
        return True

    # ---- what it is told

    def welcome(self) -> None:
        """From now on it gets everything: a hello and a snapshot first."""
        self.attached, self.deadline = True, None
        self._pages = self._snapshot(None)
        self.send()

    def give(self, data: bytes) -> None:
        """A delta for it, dropped if it has not taken what came before."""
        if self._leaving or not self.attached:
            return
        if self._dropped or self._bytes + len(data) > self._limits.buffer:
            self._dropped += 1 + len(self._behind)
            self._bytes -= sum(map(len, self._behind))
            self._behind.clear()
            return
        self._bytes += len(data)
        if self._pages is None:
            self._queue.append(memoryview(data))
        else:
            self._behind.append(data)
        self.send()

    def leave(self, bye: bytes, deadline: float) -> None:
        """Say goodbye and go, at the latest at the deadline; what else waited is not sent."""
        if self._leaving:
            return
        self._leaving, self.deadline, self._pages = True, deadline, None
        self._behind.clear()
        begun = self._queue[0] if self._queue and len(self._queue[0]) < len(self._queue[0].obj) else None  # type: ignore[arg-type]  # bytes have a length
        self._queue = deque([memoryview(bye)] if begun is None else [begun, memoryview(bye)])
        self._bytes = sum(map(len, self._queue))
        self.send()

    def send(self) -> None:
        """Hand the socket what it takes now."""
        try:
            while not self.gone and self._fill():
                sent = self.connection.send(self._queue[0])
                self._bytes -= sent
                if sent == len(self._queue[0]):
                    self._queue.popleft()
                else:
                    self._queue[0] = self._queue[0][sent:]
        except BlockingIOError:
            return
        except OSError:
            self.quit()
            return
        if self._leaving:
            self.quit()

    def _fill(self) -> bool:
        """Whether something is to be sent: queued frames, else more of a snapshot, else what came meanwhile."""
        if self._pages is not None and not self._queue:
            self._next_page()
        if not self._queue and self._pages is None and self._dropped and not self._leaving:
            self._pages, self._dropped = self._snapshot(self._dropped), 0
            self._next_page()
        return bool(self._queue)

    def _next_page(self) -> None:
        assert self._pages is not None
        page = next(self._pages, None)
        if page is not None:
            self._queue.append(memoryview(page))
            self._bytes += len(page)
            return
        self._pages = None
        self._queue.extend(map(memoryview, self._behind))
        self._behind.clear()

    def quit(self) -> None:
        """Send it nothing more. Whoever watches its connection closes that."""
        self.gone = True
        self._queue.clear()
        self._behind.clear()
        self._pages = None
        self._bytes = 0


class ClientSet:
    """The clients of one publisher, on its thread; only `attached` and `buffered` may be asked from anywhere.

    `snapshot` gives the frames of everything for one client, `bye` the last frame. `welcomed` is called when somebody
    is attached who was not.
    """

    def __init__(
        self,
        limits: ClientLimits,
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
