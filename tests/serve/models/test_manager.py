"""The manager of models, with fake models and a clock of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.serve.models.manager import Manager, NotLoaded, Slot
from tests.serve.models.virtual_time import run

FAILS = -1.0
HANGS = 1e6


@dataclass(eq=False)
class FakeModel:
    """A model in memory. `users` are the requests that use it."""

    world: World
    memory: int
    users: int = 0
    closed: bool = False
    broken: bool = False

    async def close(self) -> None:
        self.world.faults += self.users + self.closed  # the manager logs what a close raises
        self.closed = True
        await asyncio.sleep(self.world.closing)
        self.world.living.remove(self)


@dataclass
class World:
    """What loads take: seconds, FAILS or HANGS, in turn."""

    loads: Sequence[float] = (1.0,)
    memory: Sequence[int] = (10, 10, 10)
    closing: float = 0.5
    begun: list[str] = field(default_factory=list)
    living: list[FakeModel] = field(default_factory=list)
    most_living: int = 0
    most_memory: int = 0
    faults: int = 0

    async def load(self, slot: Slot[FakeModel]) -> FakeModel:
        seconds = self.loads[len(self.begun) % len(self.loads)]
        self.begun.append(slot.name)
        model = FakeModel(self, self.memory[int(slot.name)])
        self.living.append(model)
        self.most_living = max(self.most_living, len(self.living))
        self.most_memory = max(self.most_memory, sum(each.memory for each in self.living))
        try:
            await asyncio.sleep(max(seconds, 0.25))
            if seconds == FAILS:
                raise OSError("the file is cut off")
        except BaseException:
            self.living.remove(model)
            raise
        return model

    def manager(self, *, keep_alive: float = 300.0, estimate: int = 10, **limits: Any) -> Manager[FakeModel]:
        slots: list[Slot[FakeModel]] = [Slot(str(number), estimate, keep_alive) for number in range(len(self.memory))]
        return Manager(slots, self.load, **{"load_timeout": 60.0, **limits})


async def use(manager: Manager[FakeModel], number: int, seconds: float = 1.0) -> FakeModel:
    async with manager.use(manager.slots[number]) as model:
        model.users += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            model.users -= 1
        return model


def test_two_requests_load_a_model_once_and_it_stays_for_its_time() -> None:
    async def test() -> None:
        world = World()
        manager = world.manager()
        first, second = await asyncio.gather(use(manager, 0), use(manager, 0, 2.0))
        assert first is second and world.begun == ["0"]
        assert manager.slots[0].idle_left == 300.0
        await asyncio.sleep(299)
        assert await use(manager, 0) is first  # and its time begins again
        await asyncio.sleep(299)
        assert manager.slots[0].state == "loaded"
        await asyncio.sleep(2)
        assert manager.slots[0].state == "unloaded" and not world.living
        assert await use(manager, 0) is not first and manager.slots[0].loads == 2

    run(test())


def test_the_least_recently_used_idle_model_makes_room() -> None:
    async def test() -> None:
        world = World()
        manager = world.manager(max_loaded=2)
        await use(manager, 0)
        await use(manager, 1)
        await use(manager, 0)
        await use(manager, 2)
        assert [each.state for each in manager.slots] == ["loaded", "unloaded", "loaded"]
        assert world.most_living == 2

    run(test())


def test_memory_is_a_limit_by_an_estimate_then_by_what_a_load_took() -> None:
    async def test() -> None:
        world = World(memory=(10, 60, 50))
        manager = world.manager(memory=100)
        for number in (0, 1, 2):
            await use(manager, number)
        assert [each.state for each in manager.slots] == ["unloaded", "unloaded", "loaded"]  # 60 + 50, then 10 + 50
        assert [each.needs for each in manager.slots] == [10, 60, 50]
        await use(manager, 0)
        assert [each.state for each in manager.slots] == ["loaded", "unloaded", "loaded"]
        world.memory = (10, 200, 50)
        manager.slots[1].needs = 200
        with pytest.raises(NotLoaded, match=r"could not be loaded: it takes 200 B, more than all models may: 100 B"):
            await use(manager, 1)

    run(test())


def test_a_request_waits_for_used_models_then_is_told_to_come_again() -> None:
    async def test() -> None:
        manager = World().manager(max_loaded=1)
        long, patient = asyncio.create_task(use(manager, 0, 100.0)), asyncio.create_task(use(manager, 1))
        with pytest.raises(NotLoaded, match="there is no room for it") as refused:
            await patient
        assert refused.value.wait and asyncio.get_running_loop().time() == 60.0
        again = asyncio.create_task(use(manager, 1))
        await long
        await again
        assert manager.slots[1].state == "loaded" and manager.slots[0].state == "unloaded"

    run(test())


def test_a_model_that_broke_is_loaded_again() -> None:
    async def test() -> None:
        world = World()
        manager = world.manager(max_loaded=1)
        first = await use(manager, 0)
        first.broken = True
        second, third = await asyncio.gather(use(manager, 0), use(manager, 0))
        assert second is third is not first and world.begun == ["0", "0"] and not world.faults

    run(test())


def test_a_model_whose_last_request_ends_during_a_shutdown_is_closed_once() -> None:
    async def test() -> None:
        world = World()
        manager = world.manager(keep_alive=0.0)
        used = asyncio.create_task(use(manager, 0, 1.2))
        await asyncio.sleep(2)
        assert manager.slots[0].users == 1
        await manager.close()
        await used
        await asyncio.sleep(1)
        assert (
            not world.living and manager.slots[0].state == "unloaded" and world.faults == 1
        )  # by `users`, at the close

    run(test())


def test_the_manager_needs_no_torch() -> None:
    code = "import sys, radixkv.serve.models.manager\nassert not {'torch', 'uvicorn'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


REQUESTS = st.tuples(
    st.integers(0, 100),  # when it comes
    st.integers(0, 2),  # for which model
    st.integers(0, 40),  # how long it runs
    st.sampled_from([1e9, 1e9, 0.1, 3.0]),  # how long it waits
    st.sampled_from([0.0, 5.0, 1e4]),  # how long the model stays after it
)


@given(
    st.lists(REQUESTS, min_size=1, max_size=12),
    st.lists(st.sampled_from([0.5, 2.0, 10.0, FAILS, HANGS]), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([20, 30, 40]),
)
def test_any_requests_and_loads(
    requests: list[tuple[int, int, int, float, float]], loads: list[float], most: int, memory: int
) -> None:
    """Each request is served or told why not within the timeout; the limits hold, and all is given back."""
    late: list[NotLoaded] = []

    async def one(manager: Manager[FakeModel], request: tuple[int, int, int, float, float]) -> None:
        at, number, seconds, patience, keep_alive = request
        await asyncio.sleep(at)
        clock, slot = asyncio.get_running_loop().time, manager.slots[number]
        came = clock()
        try:
            async with asyncio.timeout(patience):
                async with manager.use(slot) as model:
                    assert not model.closed and clock() - came <= 30.001
                    model.users += 1
                    try:
                        await asyncio.sleep(seconds)
                    finally:
                        model.users -= 1
                        slot.keep_alive = keep_alive
        except TimeoutError:
            pass
        except NotLoaded as error:
            if clock() - came > 30.001 or not (error.wait or FAILS in loads):
                late.append(error)

    async def test() -> None:
        world = World(loads, memory=(10, 10, 20))
        manager = world.manager(max_loaded=most, memory=memory, load_timeout=30.0)
        manager.slots[2].needs = 20
        await asyncio.gather(*(one(manager, each) for each in requests))
        await asyncio.sleep(2e4)
        hung = [each for each in manager.slots if each.state == "loading"]
        assert not late and not world.faults and world.most_living <= most and world.most_memory <= memory
        assert len(hung) == len(world.living) and not any(each.users for each in manager.slots)
        await manager.close()
        assert not world.living

    run(test())
