"""Decide which models are in memory: load one at its first request, unload idle ones. Needs neither HTTP nor torch.

Invariants: a model that is used is never unloaded, one load serves all that wait for it, and loaded models keep to the
limits as far as no used one would have to go. For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from radixkv.errors import InvalidInput, RadixKVError
from radixkv.sizing.kv_size import size_text

_log = logging.getLogger("radixkv.serve")

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


class Loaded(Protocol):
    """A model in memory. `memory` is in bytes."""

    @property
    def memory(self) -> int:
        """The bytes that its load took."""

    @property
    def broken(self) -> bool:
        """Whether it has ended by itself; then it is loaded again."""

    async def close(self) -> None:
        """Give them back."""


AnyLoaded = TypeVar("AnyLoaded", bound=Loaded)


class NotLoaded(RadixKVError):
    """A model could not be loaded, or not yet: then `wait` is true, and it may be asked for again soon."""

    def __init__(self, message: str, *, wait: bool = False) -> None:
        """Keep the reason."""
        super().__init__(message)
        self.wait = wait


@dataclass(eq=False)
class Slot(Generic[AnyLoaded]):
    """The place of one model. `needs` is the bytes of a load: an estimate, then what the latest load took.

    `users` are the requests that wait for it or use it, and `idle_since` is when the last one ended, in the event
    loop's time. `keep_alive` is the seconds for which it stays after that.
    """

    name: str
    needs: int
    keep_alive: float
    state: State = "unloaded"
    loaded: AnyLoaded | None = None
    error: str | None = None
    loads: int = 0
    users: int = 0
    idle_since: float = 0.0
    task: asyncio.Task[NotLoaded | None] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def in_memory(self) -> bool:
        """Whether it is in memory, or on its way."""
        return self.state in ("loading", "loaded", "unloading")

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and not used."""
        return self.state == "loaded" and not self.users

    @property
    def idle_left(self) -> float | None:
        """The seconds until it is unloaded, None if it is used or stays."""
        return None if self.timer is None else max(0.0, self.timer.when() - asyncio.get_running_loop().time())


class Manager(Generic[AnyLoaded]):
    """The models of one server, each in a slot."""

    def __init__(
        self,
        slots: Sequence[Slot[AnyLoaded]],
        load: Callable[[Slot[AnyLoaded]], Awaitable[AnyLoaded]],
        *,
        load_timeout: float,
        max_loaded: int | None = None,
        memory: int | None = None,
    ) -> None:
        """Load by `load`; a request waits for at most `load_timeout` seconds.

        At most `max_loaded` models, and `memory` bytes of models, are loaded at once.
        """
        self.slots = tuple(slots)
        self._load_one, self._timeout = load, load_timeout
        self._most, self._memory = max_loaded or len(slots), math.inf if memory is None else memory
        self._making_room = asyncio.Lock()
        self._changed = asyncio.Event()  # a model was released, loaded or unloaded

    @asynccontextmanager
    async def use(self, slot: Slot[AnyLoaded]) -> AsyncIterator[AnyLoaded]:
        """Load a model if necessary, and keep it loaded while the block runs. Raises NotLoaded."""
        slot.users += 1
        self._stop_timer(slot)
        try:
            try:
                async with asyncio.timeout(self._timeout):
                    loaded = await self._wait(slot)
            except TimeoutError as error:
                why = "it is still being loaded" if slot.state == "loading" else "there is no room for it"
                raise NotLoaded(f"the model {slot.name!r} is not loaded yet: {why}", wait=True) from error
            yield loaded
        finally:
            slot.users -= 1
            slot.idle_since = asyncio.get_running_loop().time()
            self._begin_idle(slot)
            self._changed.set()

    async def unload(self, slot: Slot[AnyLoaded]) -> None:
        """Unload a model, and wait for that; no effect on one that is not loaded. Raises InvalidInput if it is used."""
        while slot.loaded is not None or slot.task is not None:  # perhaps a load that no request waits for any more
            if slot.users:
                raise InvalidInput(
                    f"the model {slot.name!r} has {slot.users} running requests: it cannot be unloaded now"
                )
            await asyncio.shield(slot.task or self._begin_unload(slot))

    async def close(self) -> None:
        """Stop the loads that wait, and close all models at once."""
        for slot in self.slots:
            if slot.loaded is not None:
                self._begin_unload(slot)  # else the last request's end would begin it during the close
            elif slot.task is not None and slot.state != "unloading":
                slot.task.cancel()
        await asyncio.gather(*(slot.task for slot in self.slots if slot.task is not None), return_exceptions=True)

    # ---- loads

    async def _wait(self, slot: Slot[AnyLoaded]) -> AnyLoaded:
        """Wait until a model is loaded. A load goes on if the requests that wait for it are cancelled."""
        while (loaded := slot.loaded) is None or loaded.broken:
            if loaded is not None:
                self._begin_unload(slot)
            elif slot.task is None:
                slot.task = asyncio.create_task(self._load(slot))
            assert slot.task is not None
            failed = await asyncio.shield(slot.task)
            if failed is not None:
                raise failed
        return loaded

    async def _load(self, slot: Slot[AnyLoaded]) -> NotLoaded | None:
        """Make room and load; return why it failed. Does nothing if no request is left when there is room."""
        try:
            async with self._making_room:
                await self._make_room(slot)
                if not slot.users:
                    return None
                slot.state, slot.error = "loading", None
            self.adopt(slot, await self._load_one(slot))
        except Exception as error:
            slot.state, slot.error = "failed", str(error) or type(error).__name__
            _log.error("the model %s could not be loaded: %s", slot.name, slot.error)
            return NotLoaded(f"the model {slot.name!r} could not be loaded: {slot.error}")
        else:
            return None
        finally:
            slot.task = None
            self._changed.set()

    def adopt(self, slot: Slot[AnyLoaded], loaded: AnyLoaded) -> None:
        """Take a model that was loaded, perhaps before the server began."""
        slot.loaded, slot.state, slot.needs = loaded, "loaded", loaded.memory
        slot.loads += 1
        slot.idle_since = asyncio.get_running_loop().time()
        self._begin_idle(slot)
        # The load may have taken more than was estimated.
        while self._taken() > self._memory and (victim := self._idle_longest(but=slot)) is not None:
            self._begin_unload(victim)

    # ---- room

    async def _make_room(self, slot: Slot[AnyLoaded]) -> None:
        """Unload idle models, the least recently used first, until another one fits. Waits for used ones."""
        if slot.needs > self._memory:
            limit = size_text(int(self._memory))
            raise InvalidInput(f"it takes {size_text(slot.needs)}, more than all models may: {limit}")
        while slot.users and not self._fits(slot):
            if (victim := self._idle_longest()) is not None:
                await self._begin_unload(victim)
            else:
                self._changed.clear()
                await self._changed.wait()

    def _fits(self, slot: Slot[AnyLoaded]) -> bool:
        return sum(it.in_memory for it in self.slots) < self._most and self._taken() + slot.needs <= self._memory

    def _taken(self) -> int:
        return sum(each.needs for each in self.slots if each.in_memory)

    def _idle_longest(self, but: Slot[AnyLoaded] | None = None) -> Slot[AnyLoaded] | None:
        idle = [each for each in self.slots if each.is_idle and each is not but]
        return min(idle, key=lambda each: each.idle_since, default=None)

    # ---- idle models

    def _begin_idle(self, slot: Slot[AnyLoaded]) -> None:
        """Start the time after which an idle model is unloaded."""
        self._stop_timer(slot)
        if slot.is_idle and slot.keep_alive < math.inf:
            slot.timer = asyncio.get_running_loop().call_later(slot.keep_alive, self._begin_unload, slot)

    def _stop_timer(self, slot: Slot[AnyLoaded]) -> None:
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None

    def _begin_unload(self, slot: Slot[AnyLoaded]) -> asyncio.Task[NotLoaded | None]:
        self._stop_timer(slot)
        loaded, slot.loaded, slot.state = slot.loaded, None, "unloading"
        assert loaded is not None
        slot.task = asyncio.create_task(self._unload(slot, loaded))
        return slot.task

    async def _unload(self, slot: Slot[AnyLoaded], loaded: AnyLoaded) -> None:
        try:
            await loaded.close()
        except Exception as error:  # what it held is not known to be free, but its engine is gone
            _log.error("the model %s was not unloaded without a fault", slot.name, exc_info=error)
        finally:
            slot.state, slot.task = "unloaded", None
            self._changed.set()
