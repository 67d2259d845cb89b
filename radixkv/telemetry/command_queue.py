"""Execute the commands of a monitor: one at a time for each connection, on the engine's thread.

Commands are opt-in (`monitor="rw"`). Only a client on the Unix socket that runs as the user of this process may send
them. TCP clients may not, with or without a token, and root may not either.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from radixkv.errors import InvalidInput, ProtocolError, RadixKVError
from radixkv.telemetry.protocol import Command, Reply
from radixkv.telemetry.socket_paths import peer_process, peer_user

_log = logging.getLogger(__name__)

VERBS = ("cancel", "pin", "unpin", "demote", "clear")
"""The commands. The number is that of a request for `cancel`, the id of a namespace's root for `clear`, else the id of
a node.
"""

READ_ONLY = (
    "a monitor sends nothing but one attach frame: commands need an engine with monitor='rw' and its Unix socket"
)
"""The reason for which a client ends that sends more than its attach frame, and may not send commands."""

_MOST_WAITING = 8  # commands of one client
_LONGEST_TEXT = 1000  # characters of a reply


class Outcome(NamedTuple):
    """The result of a command: whether it was executed, and one sentence on what it did, or why it did nothing."""

    done: bool
    text: str


Execute = Callable[[Command, int | None], "Future[Outcome]"]
"""Schedules a command of a process (its number; None if unknown) on the engine's thread. May raise RadixKVError."""


class Control:
    """Makes a queue for each connection that may send commands.

    `execute` schedules a command. `encode` adds the number and the time to a reply. `wake` is called, on any thread,
    when a command has ended.
    """

    def __init__(self, execute: Execute, encode: Callable[[Reply], bytes], wake: Callable[[], None]) -> None:
        self._execute, self._encode, self._wake = execute, encode, wake

    def queue_for(self, connection: socket.socket) -> CommandQueue | None:
        """Return the queue of a connection; None if it may send no commands."""
        if not may_control(connection):
            return None
        return CommandQueue(self._execute, peer_process(connection), self._encode, self._wake)


def may_control(connection: socket.socket) -> bool:
    """Whether the other end of a connection may send commands: it is on a Unix socket, and this very user's."""
    return connection.family == socket.AF_UNIX and peer_user(connection) == os.geteuid()


class CommandQueue:
    """The commands of one client, in order: one is executed, and at most eight wait."""

    def __init__(
        self, execute: Execute, process: int | None, encode: Callable[[Reply], bytes], wake: Callable[[], None]
    ) -> None:
        """`process` is the number of the client's process; None if unknown. See Control for the others."""
        self._execute, self._process, self._encode, self._wake = execute, process, encode, wake
        self._waiting: deque[Command] = deque()
        self._running: tuple[Command, Future[Outcome]] | None = None

    def add(self, command: Command) -> None:
        """Queue a command. Raises ProtocolError if too many wait."""
        if len(self._waiting) >= _MOST_WAITING:
            raise ProtocolError(f"more than {_MOST_WAITING} commands wait: send one after the reply to the other")
        self._waiting.append(command)

    def poll(self) -> bytes | None:
        """Return the reply to the command that has ended, if there is one, and start the next command."""
        if self._running is None and self._waiting:
            self._start(self._waiting.popleft())
        if self._running is None or not self._running[1].done():
            return None
        (command, future), self._running = self._running, None
        if self._waiting:
            self._wake()  # for the next one
        outcome = _outcome_of(future)
        return self._encode(Reply(command.id, outcome.done, outcome.text[:_LONGEST_TEXT]))

    def close(self) -> None:
        """Drop the waiting commands, and the started one unless the engine's thread has begun it."""
        self._waiting.clear()
        if self._running is not None:
            self._running[1].cancel()

    def _start(self, command: Command) -> None:
        future: Future[Outcome] = Future()
        try:
            if command.verb not in VERBS:
                raise InvalidInput(f"this release of the engine has no command {command.verb!r}: {', '.join(VERBS)}")
            future = self._execute(command, self._process)
        except Exception as error:
            future.set_exception(error)
        self._running = command, future
        future.add_done_callback(lambda _: self._wake())


def _outcome_of(future: Future[Outcome]) -> Outcome:
    """Return the result of a command that has ended, with or without an error."""
    try:
        return future.result()
    except RadixKVError as error:
        return Outcome(False, str(error))
    except Exception:
        _log.exception("a monitor's command failed")
        return Outcome(False, "the command failed: the engine's log has the reason")
