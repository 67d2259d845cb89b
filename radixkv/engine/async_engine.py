"""The engine for asyncio: the same methods, awaited.

Prompts are prepared on one thread, in order; the model runs on the engine's thread. A task waits on a future, which the
engine's thread resolves through the task's own event loop. No event loop is stored, so one engine serves many.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from queue import Empty
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, ParamSpec, Self, TypeVar, Unpack
from weakref import WeakKeyDictionary, ref

from radixkv.cache import Explanation
from radixkv.config import EngineConfig, EngineConfigFields
from radixkv.engine.compressed import CompressedPrefix, Conversation
from radixkv.engine.engine import NOT_COPIED, RequestEngine, explained_methods
from radixkv.engine.input_processor import EncodedPrompt, Params, Prompt
from radixkv.engine.output import Chunk, Completion, Handle, Warmed
from radixkv.engine.request import Request
from radixkv.engine.request_facts import NO_ORIGIN, Origin
from radixkv.engine.runs import Run
from radixkv.engine.score_batch import Continuation, Score, ScoreBatch
from radixkv.engine.stats import AuditReport, EngineStats
from radixkv.errors import EngineClosed, InvalidInput
from radixkv.models.weights.fixed import State
from radixkv.sampling.params import SamplingParams
from radixkv.telemetry.tree_view import ALL, TreeView
from radixkv.telemetry.what_if import WhatIfReport

if TYPE_CHECKING:
    from radixkv.engine.core import Core
    from radixkv.models.adapter import LoadedModel


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@explained_methods
class AsyncRequestEngine:
    """`RequestEngine` for asyncio: it never blocks an event loop, and serves any number of loops and threads.

    An async context manager: `close` ends running requests and frees the pool.
    """

    _kind: ClassVar[type[RequestEngine]] = RequestEngine

    def __init__(self, engine: RequestEngine) -> None:
        """Wrap an engine, which may also be used directly; raises InvalidInput for a value that is no engine."""
        if not isinstance(engine, RequestEngine):
            name = type(self).__name__
            raise InvalidInput(f"{name} wraps an engine, got {engine!r}: write await {name}.load({engine!r})")
        self._engine = engine
        self.client = engine.client
        self._preparing = _PreparingThread()

    @classmethod
    async def load(
        cls,
        model: Any = "tiny",
        config: EngineConfig | None = None,
        *,
        tokenizer: Any | None = None,
        **fields: Unpack[EngineConfigFields],
    ) -> Self:
        """Load a model on a thread of its own; same arguments and errors as `Engine.load`."""
        return cls(await asyncio.to_thread(cls._kind.load, model, config, tokenizer=tokenizer, **fields))

    # ---- requests

    async def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: Params = None,
        *,
        namespace: Hashable = None,
        timeout: float | None = None,
        prefix: CompressedPrefix | None = None,
    ) -> list[Completion]:
        """Complete all prompts, batched; returns one Completion per prompt, in order.

        Cancelling the task cancels its requests. Same arguments and errors as `Engine.generate`.
        """
        several = [params] if isinstance(params, SamplingParams | None) else params
        options: dict[str, Any] = {"namespace": namespace, "timeout": timeout, "prefix": prefix}
        return await self._completions(
            await self._compiled(several, self.client.inputs.batch, prompts, params, **options)
        )

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Continuation],
        *,
        namespace: Hashable = None,
        timeout: float | None = None,
    ) -> list[Score]:
        """Return the log probability of each continuation after the prompt, in order: see `Engine.score`.

        Cancelling the task cancels its requests.
        """
        options: dict[str, Any] = {"namespace": namespace, "timeout": timeout}
        batch = await self._prepared(ScoreBatch, self.client.inputs, prompt, continuations, **options)
        return batch.scores(await self._completions(batch.requests))

    async def _completions(self, requests: list[Request]) -> list[Completion]:
        """Run requests together; cancel all if one of them raises, or if the task is cancelled."""
        handles: list[AsyncHandle] = []
        try:
            handles.extend(AsyncHandle(self.client.start(request)) for request in requests)
            return [await handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()  # no effect unless one of them raised, or the task was cancelled

    async def submit(
        self,
        prompt: Prompt | EncodedPrompt,
        params: SamplingParams | None = None,
        *,
        namespace: Hashable = None,
        priority: int = 0,
        timeout: float | None = None,
        session: int | None = None,
        sample: bool = True,
        origin: Origin = NO_ORIGIN,
        prefix: CompressedPrefix | None = None,
    ) -> AsyncHandle:
        """Start one request; iterate the handle for chunks, or await its result: see `Engine.submit`."""
        options: dict[str, Any] = {"namespace": namespace, "priority": priority, "timeout": timeout, "session": session}
        options |= {"sample": sample, "origin": origin, "prefix": prefix}
        request = await self._compiled([params], self.client.inputs.request, prompt, params, **options)
        return AsyncHandle(self.client.start(request))

    async def warm(
        self,
        prompt: Prompt,
        *,
        pin: bool = False,
        ttl: float | None = None,
        namespace: Hashable = None,
        timeout: float | None = None,
    ) -> Warmed:
        """Compute a prompt into the cache ahead of its use, and pin it if `pin`: see `Engine.warm`."""
        request = await self._prepared(self.client.warming, prompt, pin, ttl, namespace, timeout)
        usage = (await AsyncHandle(self.client.start(request)).result()).usage
        if not pin:
            return Warmed(usage)
        pinning = self.client.warmed(request, usage, ttl)
        try:
            return await asyncio.wrap_future(pinning)
        except asyncio.CancelledError:
            pinning.add_done_callback(_unpin)
            raise

    async def compress(
        self,
        prompt: Prompt | Conversation,
        keep: float = 0.75,
        *,
        method: str = "reconstruct",
        namespace: Hashable = None,
        timeout: float | None = None,
    ) -> CompressedPrefix:
        """Keep a share of the KV of a prompt as a compressed prefix: see `Engine.compress`."""
        prefixes, call = self.client.prefixes, self.client.thread.call
        planning = self._prepared(self.client.planned, prompt, keep, method, namespace, timeout)
        made, number, deadline = await planning
        if prefixes.find(made.name, number) is None:
            pieces = prefixes.pieces(made, number, deadline)
            await self.warm(made.text, namespace=made.namespace, timeout=timeout)
            try:
                while await asyncio.wrap_future(call(lambda: next(pieces, False))):
                    pass
            finally:
                self.client.thread.post(pieces.close)
        return await asyncio.wrap_future(call(lambda: prefixes.register(made, number)))

    async def release_prefix(self, prefix: CompressedPrefix) -> None:
        """Drop a compressed prefix: see `Engine.release_prefix`."""
        await asyncio.wrap_future(self.client.release_prefix(prefix))

    async def probe(
        self, prompt: Prompt, *, namespace: Hashable = None, prefix: CompressedPrefix | None = None
    ) -> Explanation:
        """Return how much of a prompt is cached, and why not more; changes nothing, not even recency."""
        return await asyncio.wrap_future(await self._prepared(self.client.probe, prompt, namespace, prefix))

    async def demote(self, prompt: Prompt, *, keep: int = 0, namespace: Hashable = None) -> None:
        """Mark a cached prompt as no longer needed after its first `keep` tokens: see `Engine.demote`."""
        await self._prepared(self._engine.demote, prompt, keep=keep, namespace=namespace)

    async def export_run(self, tokens: Prompt, namespace: Hashable = None) -> Run:
        """Return the longest cached prefix of a prompt and its KV: see `Engine.export_run`."""
        return await asyncio.to_thread(self._engine.export_run, tokens, namespace)

    async def import_run(self, run: Run, namespace: Hashable = None) -> int:
        """Cache the run of another engine; returns how many of its tokens are cached then: see `Engine.import_run`."""
        return await asyncio.to_thread(self._engine.import_run, run, namespace)

    async def stats(self) -> EngineStats:
        """Return counters and gauges of one moment between two steps."""
        return await asyncio.wrap_future(self.client.thread.call(self.client.stats))

    async def what_if(self) -> WhatIfReport | None:
        """Return the hit rates that LRU pools of other sizes would have; None with `what_if=False`."""
        return await asyncio.to_thread(self._engine.what_if)

    async def tree(self, namespace: Hashable = ALL) -> TreeView:
        """Return the cached tree of one moment, of one namespace if that is given: see `Engine.tree`."""
        return await asyncio.wrap_future(self.client.tree(namespace))

    async def flight_recording(self, path: str | os.PathLike[str]) -> None:
        """Write the engine's activity of the last ten minutes to a file: see `Engine.flight_recording`."""
        await asyncio.to_thread(self._engine.flight_recording, path)

    async def audit(self, blocks: int = 64) -> AuditReport:
        """Recompute at least `blocks` cached blocks, compare, and drop those that differ: see `Engine.audit`.

        Cancelling the task ends the audit.
        """
        return await asyncio.wrap_future(self.client.audit(blocks))

    async def clear_cache(self) -> None:
        """Drop every cached prefix that no request and no pin holds: see `Engine.clear_cache`."""
        cleared = await asyncio.wrap_future(self.client.clear_cache())
        await asyncio.wrap_future(cleared)

    async def reload_weights(self, state: State | None = None) -> None:
        """Use the model's present weights from now on, or the weights of `state`: see `Engine.reload_weights`."""
        await asyncio.wrap_future(self.client.reload_weights(state))

    async def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """End running requests with EngineClosed, stop, and free pool and model: see `Engine.close`. Calls may repeat.

        With `drain` no new request is taken, and present ones finish first, for at most `timeout` seconds; cancelling
        the task ends that at once.
        """
        try:
            await asyncio.to_thread(self._engine.close, drain, timeout)
        except asyncio.CancelledError:
            self.client.thread.stop()
            raise

    async def __aenter__(self) -> Self:
        """Use the engine in an `async with` block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine at once."""
        await self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, as `Engine` does."""
        raise TypeError(NOT_COPIED)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._engine!r}>"

    # ---- facts

    @property
    def model(self) -> LoadedModel:
        """The model, its tokenizer and its limits; read only."""
        return self._engine.model

    @property
    def config(self) -> EngineConfig:
        """The settings of the engine."""
        return self._engine.config

    @property
    def core(self) -> Core:
        """Cache, runner and scheduler, for tests and experiments: see `Engine.core`."""
        return self.client.core

    @property
    def context_limit(self) -> int:
        """The most tokens of prompt and reply together: the limit of the model, or the size of the pool."""
        return self._engine.context_limit

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that has none: defaults, and the suggestions of generation_config.json."""
        return self._engine.default_params

    # ---- inside

    async def _compiled(
        self,
        params: Iterable[object],
        call: Callable[Arguments, Result],
        *args: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Result:
        """Run `call` on the preparing thread once the constraints of `params` are compiled, and hold them meanwhile."""
        begun = [self.client.inputs.grammars.begin(each) for each in params if isinstance(each, SamplingParams)]
        for compiling in filter(None, begun):
            await asyncio.shield(asyncio.wrap_future(compiling))  # other requests may wait for it, too
        return await self._prepared(call, *args, **options)

    async def _prepared(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """Run `call` on the preparing thread; it does not wait for the model."""
        return await asyncio.wrap_future(self._preparing.submit(call, *args, **options))


class _PreparingThread(ThreadPoolExecutor):
    """One thread, so that requests come in, and draw their seeds, in the order in which they were submitted."""

    def __init__(self) -> None:
        super().__init__(1, "radixkv-prepare")
        self._pid = os.getpid()

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Queue a call. Raises EngineClosed in a forked process, which lacks the thread."""
        if os.getpid() != self._pid:
            raise EngineClosed(f"this engine belongs to process {self._pid}: load another one after the fork")
        return super().submit(fn, *args, **kwargs)


def _unpin(pinning: Future[Warmed]) -> None:
    """Release the pin of a cancelled `warm`, if there is one."""
    if not pinning.cancelled() and pinning.exception() is None:
        pinning.result().release()


class AsyncHandle:
    """A submitted request: `async for` over it for chunks as they are computed, or `await` its `result()`.

    The awaiting task owns the request: cancelling the task, or leaving the loop early, cancels the request.
    """

    def __init__(self, handle: Handle) -> None:
        """Wrap the handle of a request that was started."""
        self._handle = handle

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks in the order of the engine's steps; raises as `result`, but a cancelled request just ends.

        Each chunk is yielded once. The engine pauses the request for a slow loop.
        """
        return AsyncChunks(self._handle)

    async def result(self) -> Completion:
        """Wait for the completion; may be awaited repeatedly, and during iteration.

        Raises RequestCancelled, RequestTimedOut, RequestFailed or EngineClosed.
        """
        channel = self._handle.channel
        try:
            with channel.waiting():
                while not channel.ended:
                    await _notified(self._handle, end=True)
        except BaseException:  # the task was cancelled, or destroyed with its loop
            self._handle.cancel()
            raise
        return channel.wait(0)

    def __repr__(self) -> str:
        return f"<Async{repr(self._handle)[1:]}"

    def cancel(self) -> None:
        """Ask the engine to stop at the next step boundary; computed tokens stay cached. No effect after the end."""
        self._handle.cancel()

    @property
    def done(self) -> bool:
        """Whether the request finished, failed, timed out or was cancelled."""
        return self._handle.done


class AsyncChunks:
    """One `async for` over a request's chunks. Unlike an async generator, it is closed without its loop."""

    def __init__(
        self,
        handle: Handle,
        at_end: Callable[[], Awaitable[object]] | None = None,
        during: Callable[[], AbstractContextManager[object]] = nullcontext,
        index: int | None = None,
    ) -> None:
        """Take chunks from `handle` within the context `during`; `at_end` is awaited after the last one.

        With `index` the chunks of other streams are skipped.
        """
        self._handle, self._index = handle, index
        self._at_end, self._during = at_end, during
        self._reading = ExitStack()
        self._begun = self._left = False

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Return itself."""
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk."""
        if self._left:
            raise StopAsyncIteration
        try:
            while (chunk := await self._take()) is not None and self._index not in (None, chunk.index):
                continue
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
            with suppress(EngineClosed):  # in a forked process
                self._leave()

    async def _take(self) -> Chunk | None:
        if not self._begun:
            self._begun = True
            self._reading.enter_context(self._handle.channel.reading())
            self._reading.enter_context(self._during())
        while True:
            try:
                return self._handle.channel.next_chunk(block=False)
            except Empty:
                await _notified(self._handle)

    def _leave(self) -> None:
        self._left = True
        self._reading.close()
        self._handle.cancel()


async def _notified(handle: Handle, *, end: bool = False) -> None:
    """Sleep until there is a chunk or the end to take; with `end`, until the end."""
    loop = asyncio.get_running_loop()
    waker = _wakers.get(loop) or _wakers.setdefault(loop, _Waker())
    future: asyncio.Future[None] = loop.create_future()
    handle.channel.listen(lambda: waker.wake(loop, future, handle), end=end)
    await future


class _Waker:
    """Wake the tasks of one event loop that wait for chunks.

    Each call of `call_soon_threadsafe` writes to a socket. So one call wakes all tasks whose chunks arrived before the
    loop ran.
    """

    def __init__(self) -> None:
        self._ready: deque[ref[asyncio.Future[None]]] = deque()  # a future references its loop
        self._scheduled = False

    def wake(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None], handle: Handle) -> None:
        """Resolve a future of `loop` soon; any thread may call this. Cancels the request if the loop was closed."""
        self._ready.append(ref(future))
        if self._scheduled and not loop.is_closed():  # `_resolve` has not begun, and will find the future
            return
        self._scheduled = True
        try:
            loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:  # the loop was closed, so that no task reads the request any more
            handle.cancel()

    def _resolve(self) -> None:
        self._scheduled = False  # first, so that a future that is appended from now on is scheduled again
        while self._ready:
            future = self._ready.popleft()()
            if future is not None and not future.done():  # its task may have been cancelled
                future.set_result(None)


_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker] = WeakKeyDictionary()
