"""The caller's end of a request in asyncio.

Knows: event loops, and how a chunk on the engine's thread wakes a task. Knows no thread pool and no polling: a task
sleeps on a future, which the engine's thread has its loop set.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from queue import Empty

from radixkv.engine.handle import Handle
from radixkv.engine.outputs import Chunk, Completion


class AsyncHandle:
    """A submitted request: `async for` over it for chunks as they are computed, or `await` its `result()`.

    It belongs to who awaits it: a task that is cancelled in either cancels the request, and so does leaving the loop.
    """

    def __init__(self, handle: Handle) -> None:
        """Wrap the handle of a request that was started."""
        self._handle = handle

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks in the order of the engine's steps; raises as `result`, but a cancelled request just ends.

        Each chunk is handed out once. The engine waits for a loop that falls far behind.
        """
        return AsyncChunks(self._handle)

    async def result(self) -> Completion:
        """Wait for the completion; may be awaited often, and beside iteration.

        Raises RequestCancelled, RequestTimedOut, RequestFailed or EngineClosed.
        """
        outlet = self._handle._outlet
        try:
            with outlet.waiting():
                while not outlet.ended:
                    await _news(self._handle, end=True)
        except BaseException:  # the task was cancelled, or destroyed with its loop
            self._handle.cancel()
            raise
        return outlet.wait(0)

    def cancel(self) -> None:
        """Ask the engine to stop at the next step boundary; what was computed stays cached. Does nothing at the end."""
        self._handle.cancel()

    @property
    def done(self) -> bool:
        """Whether the request finished, failed, ran out of time or was cancelled."""
        return self._handle.done


class AsyncChunks:
    """One `async for` over a request's chunks. No async generator: one of those is not closed without its loop."""

    def __init__(self, handle: Handle, at_end: Callable[[], Awaitable[object]] | None = None) -> None:
        """Take chunks from `handle`; `at_end` is awaited when the last one was taken."""
        self._handle = handle
        self._at_end = at_end
        self._reading = ExitStack()
        self._begun = self._left = False

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Itself."""
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk."""
        if self._left:
            raise StopAsyncIteration
        try:
            chunk = await self._take()
        except BaseException:
            self._leave()
            raise
        if chunk is not None:
            return chunk
        self._leave()
        if self._at_end is not None:
            await self._at_end()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Leave, and cancel the request if it has not ended."""
        self._leave()

    def __del__(self) -> None:
        if self._begun:
            self._leave()

    async def _take(self) -> Chunk | None:
        if not self._begun:
            self._begun = True
            self._reading.enter_context(self._handle._outlet.reading())
        while True:
            try:
                return self._handle._outlet.next_chunk(block=False)
            except Empty:
                await _news(self._handle)

    def _leave(self) -> None:
        self._left = True
        self._reading.close()
        self._handle.cancel()


async def _news(handle: Handle, *, end: bool = False) -> None:
    """Sleep until there is a chunk, or the end, to take."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    handle._outlet.listen(lambda: _wake(loop, future, handle), end=end)
    await future


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None], handle: Handle) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, future)
    except RuntimeError:  # the loop was closed: nobody will take what is computed
        handle.cancel()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # its task may have been cancelled
        future.set_result(None)
