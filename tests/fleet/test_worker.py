"""Dynamo's interface of an engine, in process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from radixkv.chat import AsyncEngine, Engine
from radixkv.server_settings import Settings

core = pytest.importorskip("dynamo._core", reason="needs Dynamo: make fleet")
exceptions = pytest.importorskip("dynamo.llm.exceptions", reason="needs Dynamo: make fleet")


@pytest.fixture
def worker() -> Iterator[Any]:
    from radixkv.fleet.worker import Worker

    with Engine.load("tiny") as engine:
        yield Worker(AsyncEngine(engine), "folder", "tiny", Settings(max_running=1, max_waiting=1))


async def ask(worker: Any, context: Any = None, tokens: int = 3000, **more: Any) -> int:
    """Return the length of a reply."""
    request = {"token_ids": [5], "stop_conditions": {"max_tokens": tokens, "ignore_eos": True}, **more}
    return len([chunk async for chunk in worker.generate(request, context)])


def test_more_replies_than_the_worker_ever_takes_are_a_wrong_request(worker: Any) -> None:
    with pytest.raises(exceptions.InvalidArgument, match="n=3"):
        asyncio.run(ask(worker, sampling_options={"n": 3}))


def test_a_client_that_leaves_while_its_request_is_prepared_ends_it(worker: Any) -> None:
    async def leave() -> None:
        ready = threading.Event()
        preparing = asyncio.create_task(worker._engine._prepared(ready.wait))
        context = core.Context("one")
        reply = asyncio.create_task(ask(worker, context))
        await asyncio.sleep(0.1)
        context.stop_generating()
        ready.set()
        await preparing
        with pytest.raises(exceptions.Cancelled):
            await reply

    asyncio.run(leave())


def test_two_requests_of_one_name_end_apart(worker: Any) -> None:
    """A stream that moves keeps its name, and may come back to its first worker."""

    async def leave() -> None:
        first, second = core.Context("same"), core.Context("same")
        long = asyncio.create_task(ask(worker, first))
        await asyncio.sleep(0.1)
        assert await ask(worker, second, tokens=2) == 2
        first.stop_generating()
        with pytest.raises(exceptions.Cancelled):
            await long

    asyncio.run(leave())


def test_a_session_belongs_to_its_namespace(worker: Any, monkeypatch: Any) -> None:
    sessions: list[Any] = []
    begin = worker._begin

    async def noted(*args: Any, session: Any, **options: Any) -> Any:
        sessions.append(session)
        return await begin(*args, session=session, **options)

    monkeypatch.setattr(worker, "_begin", noted)

    async def talk() -> None:
        for salt in ("ann", "ben", "ann", None):
            request = {"routing": {"cache_salt": salt}, "agent_context": {"session_id": "one"}}
            assert await ask(worker, core.Context(), 2, **request) == 2

    asyncio.run(talk())
    assert sessions == [1, 2, 1, 3]
