"""Execute the commands of a monitor: one at a time for each connection, on the engine's thread.

Commands are opt-in (`monitor="rw"`). Only a client on the Unix socket that runs as the user of this process may send
them. TCP clients may not, with or without a token, and root may not either.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from radixkv.errors import InvalidInput, ProtocolError, RadixKVError
from radixkv.telemetry.protocol import Command, Reply
from radixkv.telemetry.socket_paths import peer_user

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
    """The result of a command: whether it was executed, and one sentence on its effect, or on why it had none."""

    done: bool
    text: str


Execute = Callable[[Command, int | None], "Future[Outcome]"]
"""Schedules a command of a process (its number; None if unknown) on the engine's thread. May raise RadixKVError."""


def may_control(connection: socket.socket) -> bool:
    """Whether the other end of a connection may send commands: it is on a Unix socket, and this very user's."""
    return connection.family == socket.AF_UNIX and peer_user(connection) == os.geteuid()


class CommandQueue:
    """The commands of one client, in order: one is executed, and at most eight wait."""

    def __init__(self, execute: Execute, process: int | None) -> None:
        """`execute` schedules a command of the client's process; None if that is unknown."""
        self._execute, self._process = execute, process
        self._waiting: asyncio.Queue[Command] = asyncio.Queue(_MOST_WAITING)

    def add(self, command: Command) -> None:
        """Queue a command. Raises ProtocolError if too many wait."""
        try:
            self._waiting.put_nowait(command)
        except asyncio.QueueFull:
            message = f"more than {_MOST_WAITING} commands wait: send one after the reply to the other"
            raise ProtocolError(message) from None

    async def next_reply(self) -> Reply:
        """Execute the next command. A cancelled caller cancels it, unless the engine's thread has begun it."""
        command = await self._waiting.get()
        try:
            if command.verb not in VERBS:
                raise InvalidInput(f"this release of the engine has no command {command.verb!r}: {', '.join(VERBS)}")
            outcome = await asyncio.wrap_future(self._execute(command, self._process))
        except RadixKVError as error:
            outcome = Outcome(False, str(error))
        except Exception:
            _log.exception("a monitor's command failed")
            outcome = Outcome(False, "the command failed: the engine's log has the reason")
        return Reply(command.id, outcome.done, outcome.text[:_LONGEST_TEXT])
