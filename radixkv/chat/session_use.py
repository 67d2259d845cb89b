"""Refuse a call of a chat session while another thread or task uses it.

A session continues one history, and its next call undoes an open stream. Without this check, a second thread would
cancel the reply for which the first one waits. A stream that no thread reads or waits for is not in use. A thread or
task that has ended uses nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

from radixkv.errors import SessionInUse

User: TypeAlias = "threading.Thread | asyncio.Task[Any]"


class SessionUse:
    """The threads that are in a call of one session or of its streams; tasks for a session of asyncio."""

    def __init__(self) -> None:
        """Begin without users."""
        self._users: list[User] = []
        self._lock = threading.RLock()  # reentrant: the garbage collector may close an iterator while it is held

    def call(self) -> AbstractContextManager[None]:
        """Enter a call of the session. Raises SessionInUse if another user is in one, or reads its stream."""
        return self._entered(alone=True)

    def reading(self) -> AbstractContextManager[None]:
        """Enter a stream of the session, to read it or to wait for its end. Refuses no other user."""
        return self._entered(alone=False)

    @contextmanager
    def _entered(self, *, alone: bool) -> Iterator[None]:
        user = _current()
        with self._lock:
            others = (each for each in self._users if alone and each is not user and _is_alive(each))
            if (other := next(others, None)) is not None:
                raise SessionInUse(
                    f"this chat session is used by {_name(other)}: one at a time may use a session; wait for that "
                    "call, cancel it with stream.close(), or use a fork() of the session"
                )
            self._users.append(user)
        try:
            yield
        finally:
            with self._lock:
                self._users.remove(user)


def _current() -> User:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs on this thread
        task = None
    return threading.current_thread() if task is None else task


def _is_alive(user: User) -> bool:
    return user.is_alive() if isinstance(user, threading.Thread) else not user.done()


def _name(user: User) -> str:
    return f"the thread {user.name!r}" if isinstance(user, threading.Thread) else f"the task {user.get_name()!r}"
