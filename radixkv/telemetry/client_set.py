"""The clients of a publisher: their connections, their send queues, and their deadlines.

No call blocks, and the memory of a client is bounded by `ClientLimits`.
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
from functools import partial

from radixkv.errors import ProtocolError
from radixkv.telemetry.command_queue import READ_ONLY, CommandQueue, Control
from radixkv.telemetry.protocol import WRONG_TOKEN, Attach, Command, Decoder

_log = logging.getLogger(__name__)

_CHUNK = 4096
_MOST_BYTES = 4096  # limit of a frame that a client sends
_REPLY_BYTES = 64 * 1024  # unread replies beyond `ClientLimits.buffer` after which a client is dropped


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of a publisher's clients: `buffer` in bytes for each, times in seconds, `hz` the highest rate."""

    clients: int = 8
    waiting: int = 32  # connections that have not sent an attach frame
    buffer: int = 1024 * 1024
    attach_s: float = 5.0
    leave_s: float = 1.0
    hz: float = 10.0


class Client:
    """One connection. Frames come encoded; a slow reader loses deltas, then gets a gap frame and a new snapshot."""

    def __init__(
        self,
        connection: socket.socket,
        deadline: float,
        limits: ClientLimits,
        snapshot: Callable[[int | None], Iterator[bytes]],
        token: str | None = None,
        commands: CommandQueue | None = None,
    ) -> None:
        """Give the client until `deadline` to attach, with the `token` if one is required.

        `snapshot` returns the frames of a whole snapshot, after a gap frame for that many dropped deltas, or after a
        hello for None. Without `commands` the client may send none.
        """
        self.connection = connection
        self.deadline: float | None = deadline
        self.attached = self.closed = False
        self.hz = 0.0
        self._limits, self._snapshot, self._token, self._commands = limits, snapshot, token, commands
        self._decoder = Decoder(_MOST_BYTES)
        self._queue: deque[memoryview] = deque()
        self._after_snapshot: deque[bytes] = deque()  # deltas to send after the present snapshot
        self._pages: Iterator[bytes] | None = None
        self.buffered = 0  # bytes in both queues
        self._dropped = 0
        self._closing = False

    @property
    def wants_to_send(self) -> bool:
        """Whether a frame waits for room in the socket."""
        return bool(self._queue) and not self.closed

    # ---- receiving

    def read(self) -> bool:
        """Read from the socket; return True if that completed a valid attach frame.

        Commands of a client that may send them are queued. Any other data ends the connection: raises ProtocolError
        with the reason for the client.
        """
        try:
            data = self.connection.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.drop()
            return False
        if self._closing:
            return False  # unread data would reset the connection before the client has read the bye frame
        if self.attached:
            self._read_commands(data)
            return False
        return self._read_attach(data)

    def _read_attach(self, data: bytes) -> bool:
        frame = next(self._decoder.feed(data), None)
        if frame is None:
            return False
        if not isinstance(frame, Attach) or self._decoder.pending:
            raise ProtocolError("a monitor sends one attach frame, and nothing else")
        # Bytes, because compare_digest accepts only ASCII text.
        if self._token is not None and not hmac.compare_digest(frame.token.encode(), self._token.encode()):
            raise ProtocolError(f"{WRONG_TOKEN}: it stands in the json file beside the engine's socket")
        self.hz = min(frame.hz, self._limits.hz)
        return True

    # ---- commands

    def _read_commands(self, data: bytes) -> None:
        if self._commands is None:
            raise ProtocolError(READ_ONLY)
        for frame in self._decoder.feed(data):
            if not isinstance(frame, Command):
                raise ProtocolError("a monitor sends nothing but commands after its attach frame")
            self._commands.add(frame)

    def run_commands(self) -> None:
        """Send the reply to a command that has ended, and start the next one. Drop a client that reads no replies."""
        reply = None if self._commands is None or self._closing or self.closed else self._commands.poll()
        if reply is None:
            return
        self.buffered += len(reply)
        self._queue.append(memoryview(reply))
        if self.buffered > self._limits.buffer + _REPLY_BYTES:
            self.drop()
        else:
            self.flush()

    def _drop_commands(self) -> None:
        if self._commands is not None:
            self._commands.close()

    # ---- sending

    def start(self) -> None:
        """Attach the client: send a hello, a snapshot, and then every delta."""
        self.attached, self.deadline = True, None
        self._pages = self._snapshot(None)
        self.flush()

    def send_delta(self, data: bytes) -> None:
        """Queue a delta, or drop it if the client's buffer is full."""
        if self._closing or not self.attached:
            return
        if self._dropped or self.buffered + len(data) > self._limits.buffer:
            self._dropped += 1 + len(self._after_snapshot)
            self.buffered -= sum(map(len, self._after_snapshot))
            self._after_snapshot.clear()
            return
        self.buffered += len(data)
        if self._pages is None:
            self._queue.append(memoryview(data))
        else:
            self._after_snapshot.append(data)
        self.flush()

    def say_bye(self, bye: bytes, deadline: float) -> None:
        """Send a bye frame in place of all queued frames, and close the connection by the deadline."""
        if self._closing:
            return
        self._closing, self.deadline, self._pages = True, deadline, None
        self._drop_commands()
        self._after_snapshot.clear()
        partial = self._queue[0] if self._queue and len(self._queue[0]) < len(self._queue[0].obj) else None  # type: ignore[arg-type]  # bytes have a length
        self._queue = deque([memoryview(bye)] if partial is None else [partial, memoryview(bye)])
        self.buffered = sum(map(len, self._queue))
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes without blocking."""
        try:
            while not self.closed and self._refill():
                sent = self.connection.send(self._queue[0])
                self.buffered -= sent
                if sent == len(self._queue[0]):
                    self._queue.popleft()
                else:
                    self._queue[0] = self._queue[0][sent:]
        except BlockingIOError:
            return
        except OSError:
            self.drop()
            return
        if self._closing:
            self.drop()

    def _refill(self) -> bool:
        """Fill the queue from the snapshot, then from the deltas after it; return whether there is anything to send."""
        if self._pages is not None and not self._queue:
            self._next_page()
        if not self._queue and self._pages is None and self._dropped and not self._closing:
            self._pages, self._dropped = self._snapshot(self._dropped), 0
            self._next_page()
        return bool(self._queue)

    def _next_page(self) -> None:
        assert self._pages is not None
        page = next(self._pages, None)
        if page is not None:
            self._queue.append(memoryview(page))
            self.buffered += len(page)
            return
        self._pages = None
        self._queue.extend(map(memoryview, self._after_snapshot))
        self._after_snapshot.clear()

    def drop(self) -> None:
        """Send nothing more. The client set closes the connection."""
        self.closed = True
        self._drop_commands()
        self._queue.clear()
        self._after_snapshot.clear()
        self._pages = None
        self.buffered = 0


class ClientSet:
    """The clients of one publisher, on its thread; `attached` and `buffered` may be read from any thread.

    `snapshot` returns the frames of a whole snapshot for one client, which may send commands or not; `bye` returns the
    last frame. `on_attach` is called when a client has attached. Without `control` no client may send commands.
    """

    def __init__(
        self,
        limits: ClientLimits,
        snapshot: Callable[..., Iterator[bytes]],
        bye: Callable[[str], bytes],
        on_attach: Callable[[], None],
        control: Control | None = None,
    ) -> None:
        self._limits, self._control = limits, control
        self._snapshot, self._bye, self._on_attach = snapshot, bye, on_attach
        self._clients: set[Client] = set()

    def open(self, selector: selectors.BaseSelector) -> None:
        """Watch connections with `selector` from now on."""
        self._selector = selector

    @property
    def attached(self) -> int:
        """The number of attached clients."""
        return sum(client.attached for client in tuple(self._clients))

    @property
    def buffered(self) -> int:
        """Bytes that wait to be sent to all clients."""
        return sum(client.buffered for client in tuple(self._clients))

    @property
    def hz(self) -> float | None:
        """The highest delta rate that an attached client asked for; None without clients."""
        return max((client.hz for client in self._clients if client.attached), default=None)

    def __bool__(self) -> bool:
        """Whether there is a connection, attached or not."""
        return bool(self._clients)

    # ---- coming

    def add(self, connection: socket.socket, token: str | None) -> None:
        """Add an accepted connection. It has some seconds to attach, with the token if one is required."""
        waiting = [client for client in self._clients if client.deadline is not None]
        if len(waiting) >= self._limits.waiting:
            min(waiting, key=lambda client: client.deadline or 0.0).drop()
            self.update()
        commands = None if self._control is None else self._control.queue_for(connection)
        deadline = time.monotonic() + self._limits.attach_s
        snapshot = partial(self._snapshot, control=commands is not None)
        client = Client(connection, deadline, self._limits, snapshot, token, commands)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda mask: self._serve(client, mask))

    def _serve(self, client: Client, mask: int) -> None:
        """Read and write without blocking; an error ends this client only."""
        try:
            if mask & selectors.EVENT_WRITE:
                client.flush()
            if mask & selectors.EVENT_READ and not client.closed and client.read():
                self._attach(client)
        except ProtocolError as error:
            self._say_bye(client, str(error))
        except Exception:
            _log.exception("a client of the monitor's publisher was dropped")
            client.drop()

    def _attach(self, client: Client) -> None:
        if self.attached >= self._limits.clients:
            self._say_bye(client, f"busy: {self._limits.clients} monitors are attached already")
            return
        client.start()
        self._on_attach()

    def run_commands(self) -> None:
        """Send replies to the commands that have ended, and start the next ones."""
        for client in self._clients:
            client.run_commands()

    # ---- deltas

    def send(self, delta: bytes) -> None:
        """Send a delta to all attached clients."""
        for client in self._clients:
            client.send_delta(delta)

    # ---- going

    def say_bye(self, reason: str) -> None:
        """Send all clients the reason of the end; each is closed once it has read it."""
        for client in self._clients:
            self._say_bye(client, reason)

    def _say_bye(self, client: Client, reason: str) -> None:
        client.say_bye(self._bye(reason), time.monotonic() + self._limits.leave_s)

    def drop_expired(self, now: float) -> None:
        """Drop clients that did not attach, or did not read their bye frame, in time."""
        for client in self._clients:
            if client.deadline is not None and now >= client.deadline:
                client.drop()

    def update(self) -> None:
        """Remove closed clients, and watch for room in the sockets that have frames to send."""
        for client in tuple(self._clients):
            if client.closed:
                self._clients.discard(client)
                self._selector.unregister(client.connection)
                client.connection.close()
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.wants_to_send else 0)
            watched = self._selector.get_key(client.connection)
            if watched.events != wanted:
                self._selector.modify(client.connection, wanted, watched.data)

    def close(self) -> None:
        """Close all connections; the selector is left as it is."""
        for client in self._clients:
            client.drop()
            client.connection.close()
        self._clients.clear()
