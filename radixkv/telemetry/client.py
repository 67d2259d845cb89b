"""One client of a publisher: what it said, what it still has to be sent, and when it has to leave.

Knows a connection, frames as bytes, and limits. Does not know where frames come from, nor when, nor other clients.
Nothing here waits, and what a client costs in memory is bounded whatever it does or does not do.
"""

from __future__ import annotations

import hmac
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from radixkv.errors import ProtocolError
from radixkv.telemetry.frames import WRONG_TOKEN, Attach
from radixkv.telemetry.protocol import Decoder

_CHUNK = 4096
_ATTACH_BYTES = 4096  # the cap of the one frame that a client sends


@dataclass(frozen=True, slots=True)
class Limits:
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
        limits: Limits,
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
