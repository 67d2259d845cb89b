"""Offer engine and conversations to asyncio programs.

Rendering, encoding and parsing run on the engine's preparing thread, one call after another. Waiting for the model
happens on the event loop, so no call blocks it.
"""

from __future__ import annotations

import asyncio
import os
from asyncio import CancelledError, wrap_future
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

from radixkv.chat.engine import Engine
from radixkv.chat.history_mode import HistoryMode
from radixkv.chat.messages import Message, Reply, ToolResult
from radixkv.chat.reply_schema import Schema
from radixkv.chat.reply_stream import ReplyStream
from radixkv.chat.saved import Overflow, SessionState
from radixkv.chat.session import NOT_COPIED, ChatSession
from radixkv.chat.session_use import SessionUse
from radixkv.engine import AsyncRequestEngine, Chunk, CompressedPrefix
from radixkv.engine.async_engine import AsyncChunks, AsyncHandle
from radixkv.engine.engine import explained_methods
from radixkv.sampling.params import SamplingParams

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class AsyncReplyStream:
    """The reply to one message while it is computed: `async for` yields chunks, `await stream.reply` the whole reply.

    Leaving the loop, or cancelling the task that iterates or waits, cancels the reply and undoes its turn.

    handle       the request's `AsyncHandle`: its result is the completion, before it is parsed
    prompt       token ids of the request
    """

    def __init__(self, stream: ReplyStream, preparing: Executor, use: SessionUse) -> None:
        """Follow `stream`; `preparing` runs the session's calls in order. `use` is the session's."""
        self.handle, self.prompt = AsyncHandle(stream.handle), stream.prompt
        self._stream = stream
        self._preparing, self._use = preparing, use

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they are computed; raises as `AsyncHandle` does. The session has the turn when this ends."""
        return AsyncChunks(self._stream.handle, self._seen, self._use.reading, index=0)

    async def wait(self) -> Reply:
        """Wait for the whole reply.

        Raises as `AsyncHandle.result`, RequestCancelled if the stream was closed, and UnparsedReply.
        """
        with self._use.reading():
            await self.handle.result()
            return await wrap_future(self._preparing.submit(self._stream.wait))  # the result is there: parses the reply

    @property
    def reply(self) -> Coroutine[Any, Any, Reply]:
        """The whole reply, to be awaited: `await stream.reply`; waits until it is complete."""
        return self.wait()

    @property
    def is_open(self) -> bool:
        """Whether the turn is still undecided: neither recorded in the session nor undone."""
        return self._stream.is_open

    async def _seen(self) -> None:
        if self.is_open:
            await self.wait()

    async def close(self) -> None:
        """Cancel the request; the turn is undone unless its reply was recorded."""
        self._stream.close()


@explained_methods
class AsyncChatSession:
    """A conversation with the model. One task at a time may use it; several sessions may run at once.

    Make one with `engine.chat()`. A call that raises, or whose task is cancelled, leaves the history unchanged. A call
    while another task is in one, or reads a stream of the session, raises SessionInUse.
    """

    def __init__(self, session: ChatSession, preparing: Executor) -> None:
        """Wrap `session`; `preparing` runs its calls in order on one thread."""
        self._session = session
        self._preparing = preparing
        self._use = SessionUse()

    # ---- talking

    async def send(self, text: str, params: SamplingParams | None = None, *, schema: Schema | None = None) -> Reply:
        """Send a user message and wait for the reply. Raises the errors of `ChatSession.send`."""
        with self._use.call():
            return await (await self.stream(text, params, schema=schema)).wait()

    async def stream(
        self, text: str, params: SamplingParams | None = None, *, schema: Schema | None = None
    ) -> AsyncReplyStream:
        """Send a user message; iterate the returned stream, or await its `reply`. See `ChatSession.stream`."""
        return await self._start(self._session.stream, text, params, schema=schema)

    async def tool_results(
        self, results: Sequence[ToolResult], params: SamplingParams | None = None, *, schema: Schema | None = None
    ) -> Reply:
        """Answer each tool call of the last reply and wait for the next reply. Raises InvalidInput, or as `send`."""
        with self._use.call():
            return await (await self.stream_tool_results(results, params, schema=schema)).wait()

    async def stream_tool_results(
        self, results: Sequence[ToolResult], params: SamplingParams | None = None, *, schema: Schema | None = None
    ) -> AsyncReplyStream:
        """Answer each tool call of the last reply, and stream the next reply as `stream` does."""
        return await self._start(self._session.stream_tool_results, results, params, schema=schema)

    # ---- branching

    async def fork(self, n: int = 1) -> list[AsyncChatSession]:
        """Return `n` new sessions with this history, which share its cached prefix. O(tokens) each; copies no KV."""
        forks = await self._run(self._session.fork, n)
        return [AsyncChatSession(fork, self._preparing) for fork in forks]

    async def rewind(self, turns: int = 1) -> None:
        """Remove the last turns; their cached tokens are evicted first."""
        await self._run(self._session.rewind, turns)

    async def edit(
        self, turn: int, text: str, params: SamplingParams | None = None, *, schema: Schema | None = None
    ) -> Reply:
        """Replace the message of turn `turn`, counted from 1, and wait for the new reply. See `ChatSession.edit`."""
        with self._use.call():
            return await (await self.stream_edit(turn, text, params, schema=schema)).wait()

    async def stream_edit(
        self, turn: int, text: str, params: SamplingParams | None = None, *, schema: Schema | None = None
    ) -> AsyncReplyStream:
        """Do as `edit`, and stream the reply as `stream` does. The history changes when the stream ends."""
        return await self._start(self._session.stream_edit, turn, text, params, schema=schema)

    async def close(self) -> None:
        """End the conversation; cached tokens that only it uses are evicted first. May be called twice.

        Any task may call it: a call of another task, which waits for a reply, raises RequestCancelled.
        """
        await wrap_future(self._preparing.submit(self._session.close))

    # ---- reading

    @property
    def history(self) -> list[Message]:
        """A copy of all messages in the form that chat templates take, system message and tool results included."""
        return self._session.history

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the conversation up to the end of the last reply; empty before the first reply."""
        return self._session.token_ids

    @property
    def prefix(self) -> CompressedPrefix | None:
        """The compressed prefix with which the conversation begins, None without one."""
        return self._session.prefix

    def frozen(self) -> tuple[Sequence[int], Hashable, SessionState]:
        """Return what `engine.compress` needs: see `ChatSession.frozen`."""
        return self._session.frozen()

    @property
    def turns(self) -> int:
        """Number of turns. A turn is a user message, or tool results, with the reply to it."""
        return self._session.turns

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session.closed

    async def save(self, path: str | os.PathLike[str], *, kv: bool = False) -> None:
        """Write the conversation to a JSON file, which `engine.resume` reads: see `ChatSession.save`."""
        with self._use.call():
            await asyncio.to_thread(self._session.save, path, kv=kv)  # which may wait for the engine

    async def __aenter__(self) -> AsyncChatSession:
        """Use the session in an `async with` block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session."""
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self._session)[1:]}"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, as `ChatSession` does."""
        raise TypeError(NOT_COPIED)

    # ---- inside

    async def _run(
        self, verb: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        with self._use.call():
            return await wrap_future(self._preparing.submit(verb, *args, **options))

    async def _start(
        self, verb: Callable[Arguments, ReplyStream], *args: Arguments.args, **options: Arguments.kwargs
    ) -> AsyncReplyStream:
        with self._use.call():
            beginning = self._preparing.submit(verb, *args, **options)
            try:
                return AsyncReplyStream(await wrap_future(beginning), self._preparing, self._use)
            except CancelledError:
                # A stream that starts all the same is closed before the thread runs the next call of the session.
                beginning.add_done_callback(_close)
                raise


def _close(beginning: Future[ReplyStream]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().close()


@explained_methods
class AsyncEngine(AsyncRequestEngine):
    """Make one with `await AsyncEngine.load("tiny")`: an `Engine` that never blocks an event loop.

    Any number of loops and threads may use it. `AsyncEngine(engine)` wraps an existing engine. Then await `generate`,
    `submit`, or the methods of a `chat`. An async context manager: `close` ends running requests and frees the pool.
    """

    _kind = Engine
    _engine: Engine

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine, which may still be used directly."""
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
        prefix: CompressedPrefix | None = None,
    ) -> AsyncChatSession:
        """Begin a conversation; same arguments and errors as `Engine.chat`. Does not wait."""
        given: dict[str, Any] = {"messages": messages, "tools": tools, "namespace": namespace, "history": history}
        session = self._engine.chat(system, **given, overflow=overflow, prefix=prefix)
        return AsyncChatSession(session, self._preparing)

    async def resume(self, path: str | os.PathLike[str], *, namespace: Hashable = None) -> AsyncChatSession:
        """Return the conversation that was saved to `path`; see `Engine.resume`."""
        session = await asyncio.to_thread(
            self._engine.resume, path, namespace=namespace
        )  # which may wait for the engine
        return AsyncChatSession(session, self._preparing)
