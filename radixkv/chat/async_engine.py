"""The engine that asyncio programs use: requests, and conversations on top of them.

Knows: how a session is made, or read from a file. Everything else is `radixkv.engine.AsyncRequestEngine`'s, which must
not know this package.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import Any

from radixkv.chat.appending import HistoryMode
from radixkv.chat.async_session import AsyncChatSession
from radixkv.chat.engine import Engine
from radixkv.chat.messages import Message
from radixkv.chat.session import Overflow
from radixkv.engine import AsyncRequestEngine


class AsyncEngine(AsyncRequestEngine):
    """What `Engine` does, without ever blocking an event loop; usable from any number of loops and threads.

    `await AsyncEngine.load(...)`, or wrap an engine that is there; then await `generate`, `submit`, or the verbs of a
    `chat`. An async context manager: `close` ends what still runs and frees the pool.
    """

    _kind = Engine
    _engine: Engine

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine, which may be used beside this."""
        super().__init__(engine)

    def chat(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Any] | None = None,
        namespace: Hashable = None,
        history: HistoryMode = "auto",
        overflow: Overflow = "error",
    ) -> AsyncChatSession:
        """Begin a conversation, at once; takes and raises what `Engine.chat` does."""
        session = self._engine.chat(
            system, messages=messages, tools=tools, namespace=namespace, history=history, overflow=overflow
        )
        return AsyncChatSession(session, self._preparing)

    async def resume(self, path: str | os.PathLike[str]) -> AsyncChatSession:
        """The conversation that was saved to `path`; raises what `Engine.resume` does."""
        return AsyncChatSession(await self._prepared(self._engine.resume, path), self._preparing)
