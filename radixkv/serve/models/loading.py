"""Load one model of several while streams of others run, and free its memory."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from radixkv.chat import AsyncEngine, Engine
from radixkv.models.weights.size import weight_bytes
from radixkv.serve.gate import Gate
from radixkv.serve.models.specs import ModelSpec
from radixkv.serve.served_models import prepare
from radixkv.serve.service import Kept, Service
from radixkv.sizing.memory import trim

Result = TypeVar("Result")
_THREAD = "radixkv-load"


@dataclass
class LoadedService:
    """A model in memory. `memory` is the bytes of its weights, its pool and its host memory."""

    engine: AsyncEngine
    service: Service
    memory: int

    @property
    def broken(self) -> bool:
        """Whether an error ended the engine."""
        return self.engine.client.thread.closed

    async def close(self) -> None:
        """Close the engine after its running requests, for at most the server's `drain_timeout`."""
        drain = self.service.settings.drain_timeout
        await self.engine.close(drain > 0, drain or None)
        del self.engine, self.service
        await on_thread(forget)


async def load(spec: ModelSpec, gate: Gate, kept: Kept, *, again: bool) -> LoadedService:
    """Load a model on a thread of its own. `again`: this process had it before. Raises the errors of `Engine.load`."""
    return await serve(await on_thread(lambda: load_engine(spec)), spec, gate, kept, again=again)


def load_engine(spec: ModelSpec) -> Engine:
    """Load the engine of a model."""
    return Engine.load(spec.source, spec.config, tokenizer=spec.tokenizer)


async def serve(engine: Engine, spec: ModelSpec, gate: Gate, kept: Kept, *, again: bool = False) -> LoadedService:
    """Return the model of an engine that was loaded. If it cannot be served, the engine is closed."""
    try:
        served = AsyncEngine(engine)
        engine.client.loaded_again = again
        service = await on_thread(lambda: Service(served, gate, spec.name, spec.names, kept))
        await prepare(served)
        await service.metrics.watch()
        stats = await served.stats()
        host = stats.kv_bytes * stats.cache.host_blocks // stats.cache.num_blocks
        return LoadedService(served, service, weight_bytes(engine.model) + stats.kv_bytes + host)
    except BaseException:
        await on_thread(engine.close)
        raise
    finally:
        await on_thread(remember)


def remember() -> None:
    """Exempt all objects from full collections, which would visit those of a model again and again."""
    gc.collect()
    gc.freeze()


def forget() -> None:
    """Free the objects of a model that is gone, and return their memory to the system."""
    gc.unfreeze()
    remember()
    trim()


async def on_thread(call: Callable[[], Result]) -> Result:
    """Return the result of `call`, on a thread that the process does not wait for at its end."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled: the thread sets its result in any case

    def answer() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=answer, name=_THREAD, daemon=True).start()
    return await asyncio.wrap_future(future)


def is_loading() -> bool:
    """Return whether a call of `on_thread` still runs. A regular end of the process would then abort it."""
    return any(each.name == _THREAD for each in threading.enumerate())
