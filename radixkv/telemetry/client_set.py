"""The clients of a publisher: each is one task on its event loop, with a bounded memory and deadlines.

A slow reader loses deltas, then gets a gap frame and a new snapshot.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from radixkv.errors import ProtocolError
from radixkv.telemetry.command_queue import READ_ONLY, CommandQueue, Execute, may_control
from radixkv.telemetry.frame_log import FrameLog
from radixkv.telemetry.protocol import WRONG_TOKEN, Attach, Command, Decoder, Frame
from radixkv.telemetry.socket_paths import peer_process

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
    """One connection, from `run` to its end."""

    def __init__(
        self,
        connection: socket.socket,
        token: str | None,
        limits: ClientLimits,
        log: FrameLog,
        commands: CommandQueue | None,
    ) -> None:
        """The client must send the `token` if there is one. Without `commands` it may send none."""
        self.connection = connection
        self.attached = self.closing = False
        self.hz = 0.0
        self.buffered = 0  # bytes of the queued frames, and of the one that is being sent
        self._token, self._limits, self._log, self._commands = token, limits, log, commands
        self._frames: deque[bytes] = deque()  # deltas and replies after the present snapshot
        self._fresh = asyncio.Event()  # there are queued frames, or dropped deltas
        self._dropped = 0
        self.task: asyncio.Task[None] | None = None  # that runs `run`
        self._reason = ""  # of an end by the publisher

    async def run(self, admit: Callable[[Client], None]) -> None:
        """Serve the connection until its end, and close it. `admit` may raise ProtocolError for an attached client."""
        reader, writer = await asyncio.open_connection(sock=self.connection)
        writer.transport.set_write_buffer_limits(high=0)  # `drain` waits until the frame was sent
        reason = ""
        try:
            await self._serve(reader, writer, admit)
        except* ProtocolError as errors:
            reason = str(errors.exceptions[0])
        except* asyncio.CancelledError:
            reason = self._reason
        except* OSError:  # it hung up, or did not attach in time
            pass
        except* Exception:
            _log.exception("a client of the monitor's publisher was dropped")
        await self._close(writer, reason)

    def end(self, reason: str = "") -> None:
        """End the connection, with a bye frame if there is a reason."""
        if self.task is not None and not self.closing:
            self.closing, self._reason = True, reason
            self.task.cancel()

    def send_delta(self, data: bytes) -> None:
        """Queue a delta, or drop it if the client's buffer is full, and all deltas until the next snapshot."""
        if self.attached and (self._dropped or self.buffered + len(data) > self._limits.buffer):
            self._dropped += 1
            self._fresh.set()
        elif self.attached:
            self._queue(data)

    # ---- inside

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admit: Callable[[Client], None]
    ) -> None:
        decoder = Decoder(_MOST_BYTES)
        async with asyncio.timeout(self._limits.attach_s):
            frames = await _frames(reader, decoder)
            while not frames:
                frames = await _frames(reader, decoder)
        self._check(frames, decoder)
        admit(self)
        self.attached = True  # deltas from now on follow the snapshot
        snapshot = self._log.snapshot(None, self._commands is not None)
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._receive(reader, decoder))
            parts.create_task(self._send(writer, snapshot))
            if self._commands is not None:
                parts.create_task(self._reply(self._commands))

    def _check(self, frames: list[Frame], decoder: Decoder) -> None:
        """Take the rate of the attach frame. Raises ProtocolError if it is none, or has a wrong token."""
        attach, *more = frames
        if not isinstance(attach, Attach) or more or decoder.pending:
            raise ProtocolError("a monitor sends one attach frame, and nothing else")
        # Bytes, because compare_digest accepts only ASCII text.
        if self._token is not None and not hmac.compare_digest(attach.token.encode(), self._token.encode()):
            raise ProtocolError(f"{WRONG_TOKEN}: it stands in the json file beside the engine's socket")
        self.hz = min(attach.hz, self._limits.hz)

    async def _receive(self, reader: asyncio.StreamReader, decoder: Decoder) -> None:
        while True:
            data = await _data(reader)
            if self._commands is None:
                raise ProtocolError(READ_ONLY)
            for frame in decoder.feed(data):
                if not isinstance(frame, Command):
                    raise ProtocolError("a monitor sends nothing but commands after its attach frame")
                self._commands.add(frame)

    async def _reply(self, commands: CommandQueue) -> None:
        """Execute commands, and send their replies. A client that reads no replies is dropped."""
        while self.buffered <= self._limits.buffer + _REPLY_BYTES:
            self._queue(self._log.reply(await commands.next_reply()))
        raise ConnectionResetError

    def _queue(self, data: bytes) -> None:
        self._frames.append(data)
        self.buffered += len(data)
        self._fresh.set()

    async def _send(self, writer: asyncio.StreamWriter, snapshot: Iterator[bytes]) -> None:
        """Send the snapshot and the queued frames; then, if deltas were dropped, the next snapshot, and so on."""
        while True:
            for page in snapshot:
                self.buffered += len(page)
                await self._write(writer, page)
            while self._frames or not self._dropped:
                await self._fresh.wait()
                self._fresh.clear()
                while self._frames:
                    await self._write(writer, self._frames.popleft())
            dropped, self._dropped = self._dropped, 0
            snapshot = self._log.snapshot(dropped, self._commands is not None)

    async def _write(self, writer: asyncio.StreamWriter, frame: bytes) -> None:
        writer.write(frame)
        await writer.drain()
        self.buffered -= len(frame)

    async def _close(self, writer: asyncio.StreamWriter, reason: str) -> None:
        """Send the reason after the frame that is being sent, if there is a reason, and close the connection."""
        self.closing, self.attached, self.buffered = True, False, 0
        self._frames.clear()
        try:
            if reason:
                async with asyncio.timeout(self._limits.leave_s):
                    writer.write(self._log.bye(reason))
                    await writer.drain()
        except OSError:
            return
        finally:
            writer.transport.abort()


async def _data(reader: asyncio.StreamReader) -> bytes:
    """Read some bytes. Raises ConnectionResetError at the end."""
    data = await reader.read(_CHUNK)
    if not data:
        raise ConnectionResetError
    return data


async def _frames(reader: asyncio.StreamReader, decoder: Decoder) -> list[Frame]:
    return list(decoder.feed(await _data(reader)))


class ClientSet:
    """The clients of one publisher, on its event loop; `attached` and `buffered` may be read from any thread.

    `on_attach` is called when a client has attached. Without `execute` no client may send commands.
    """

    def __init__(
        self, limits: ClientLimits, log: FrameLog, on_attach: Callable[[], None], execute: Execute | None = None
    ) -> None:
        self._limits, self._log, self._on_attach, self._execute = limits, log, on_attach, execute
        self._clients: dict[Client, None] = {}  # in the order of their arrival

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

    def add(self, connection: socket.socket, token: str | None) -> None:
        """Serve an accepted connection. It has some seconds to attach, with the token if one is required."""
        waiting = [client for client in self._clients if not (client.attached or client.closing)]
        if len(waiting) >= self._limits.waiting:
            waiting[0].end()
        commands = None
        if self._execute is not None and may_control(connection):
            commands = CommandQueue(self._execute, peer_process(connection))
        client = Client(connection, token, self._limits, self._log, commands)
        self._clients[client] = None
        client.task = asyncio.create_task(client.run(self._admit))
        client.task.add_done_callback(lambda _: self._forget(client))

    def _admit(self, client: Client) -> None:
        if self.attached >= self._limits.clients:
            raise ProtocolError(f"busy: {self._limits.clients} monitors are attached already")
        self._on_attach()

    def _forget(self, client: Client) -> None:
        del self._clients[client]
        client.connection.close()

    def send(self, delta: bytes) -> None:
        """Send a delta to all attached clients."""
        for client in self._clients:
            client.send_delta(delta)

    async def close(self, reason: str, timeout: float) -> None:
        """Send all clients the reason of the end, and give them `timeout` seconds to read it."""
        for client in self._clients:
            client.end(reason)
        if tasks := [client.task for client in self._clients if client.task is not None]:
            await asyncio.wait(tasks, timeout=timeout)

    def abandon(self) -> None:
        """Close the connections in a forked child, where no task runs."""
        for client in self._clients:
            client.connection.close()
