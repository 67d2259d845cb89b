"""A conversation in asyncio: the verbs of `ChatSession`, awaited.

Knows: which of them think (render, encode, read a reply) and go to the engine's preparing thread, one after another,
and which wait for the model, on the event loop. Knows no template and no ids.

The engine that asyncio programs use: requests, and conversations on top of them.

Knows: how a session is made, or read from a file. Everything else is `radixkv.engine.AsyncRequestEngine`'s, which must
not know this package.
"""

from __future__ import annotations

import os
from asyncio import CancelledError, wrap_future
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from radixkv.chat.engine import Engine
from radixkv.chat.history_mode import HistoryMode
from radixkv.chat.messages import Message, Reply, ToolResult
from radixkv.chat.session import ChatSession, Overflow, ReplyStream
from radixkv.engine import AsyncRequestEngine, Chunk
from radixkv.engine.async_engine import AsyncChunks, AsyncHandle
from radixkv.sampling.params import SamplingParams

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class AsyncReplyStream:
    """The reply to one message while it is computed: `async for` over it for chunks; `await` its `wait` for the whole.

    Leaving the loop, or cancelling a task that is in it or waits, cancels the reply, and its turn is undone.
    """

    def __init__(self, stream: ReplyStream, preparing: Executor) -> None:
        """Follow a stream that has begun; `preparing` runs what the session does, in order."""
        self._stream = stream
        self._preparing = preparing

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they are computed; raises as `AsyncHandle` does. The session has the turn when this ends."""
        return AsyncChunks(self._stream.handle, self._seen)

    async def wait(self) -> Reply:
        """Wait for the whole reply.

        Raises as `AsyncHandle.result`, RequestCancelled if the stream was closed or left.
        """
        await AsyncHandle(self._stream.handle).result()
        return await wrap_future(self._preparing.submit(self._stream.wait))  # does not wait any more

    async def _seen(self) -> None:
        if self._stream.is_open:
            await self.wait()

    async def close(self) -> None:
        """Stop; unless the end of the reply was seen, its turn is undone."""
        self._stream.close()


class AsyncChatSession:
    """A conversation with the model. Not for two tasks at once; two sessions may be.

    Make one with `engine.chat()`. A call that raises, or whose task is cancelled, leaves the history as it was.
    """

    def __init__(self, session: ChatSession, preparing: Executor) -> None:
        """Wrap a session; `preparing` runs what it does on one thread, in order."""
        self._session = session
        self._preparing = preparing

    # ---- talking

    async def send(self, text: str, params: SamplingParams | None = None) -> Reply:
        """Say something and wait for the reply. Raises what `ChatSession.send` does."""
        return await (await self.stream(text, params)).wait()

    async def stream(self, text: str, params: SamplingParams | None = None) -> AsyncReplyStream:
        """Say something; iterate what comes back for chunks, or await its `wait`. See `ChatSession.stream`."""
        return await self._begun(self._session.stream, text, params)

    async def tool_results(self, results: Sequence[ToolResult], params: SamplingParams | None = None) -> Reply:
        """Answer each tool call of the last reply and wait for the next reply. Raises InvalidInput, or as `send`."""
        return await (await self.stream_tool_results(results, params)).wait()

    async def stream_tool_results(
        self, results: Sequence[ToolResult], params: SamplingParams | None = None
    ) -> AsyncReplyStream:
        """As `tool_results`, streaming as `stream` does."""
        return await self._begun(self._session.stream_tool_results, results, params)

    # ---- branching

    async def fork(self, n: int = 1) -> list[AsyncChatSession]:
        """`n` more sessions with this history; all share its cached prefix. O(tokens) each, no KV is copied."""
        twins = await self._done(self._session.fork, n)
        return [AsyncChatSession(twin, self._preparing) for twin in twins]

    async def rewind(self, turns: int = 1) -> None:
        """Forget the last turns; what the cache holds of them is the first to be evicted."""
        await self._done(self._session.rewind, turns)

    async def edit(self, turn: int, text: str, params: SamplingParams | None = None) -> Reply:
        """Say something else in turn `turn`, forget what came after, and wait for the new reply: `ChatSession.edit`."""
        return await (await self.stream_edit(turn, text, params)).wait()

    async def stream_edit(self, turn: int, text: str, params: SamplingParams | None = None) -> AsyncReplyStream:
        """As `edit`, streaming as `stream` does: the history is the old one until the stream has ended."""
        return await self._begun(self._session.stream_edit, turn, text, params)

    async def close(self) -> None:
        """End the conversation; what only it has cached is the first to be evicted. May be called twice."""
        await self._done(self._session.close)

    # ---- reading

    @property
    def history(self) -> list[Message]:
        """All messages, system and tool results included, as chat templates take them; a copy."""
        return self._session.history

    @property
    def token_ids(self) -> list[int]:
        """Ids of the conversation up to the end of the last reply; empty before the first one."""
        return self._session.token_ids

    @property
    def turns(self) -> int:
        """How many exchanges the history has; one is a user's message, or tool results, with the reply."""
        return self._session.turns

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session.closed

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation to a JSON file, which `engine.resume` reads. Raises InvalidInput, OSError."""
        await self._done(self._session.save, path)

    async def __aenter__(self) -> AsyncChatSession:
        """Use the session in an `async with` block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session."""
        await self.close()

    # ---- inside

    async def _done(
        self, verb: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        return await wrap_future(self._preparing.submit(verb, *args, **options))

    async def _begun(
        self, verb: Callable[Arguments, ReplyStream], *args: Arguments.args, **options: Arguments.kwargs
    ) -> AsyncReplyStream:
        beginning = self._preparing.submit(verb, *args, **options)
        try:
            return AsyncReplyStream(await wrap_future(beginning), self._preparing)
        except CancelledError:
            # What has begun by then is closed before the thread turns to the session's next verb.
            beginning.add_done_callback(_close)
            raise


def _close(beginning: Future[ReplyStream]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().close()


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
