"""Dynamo's interface of an engine, in process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from radixkv.chat import AsyncEngine, Engine
from radixkv.server_settings import Settings

exceptions = pytest.importorskip("dynamo.llm.exceptions", reason="needs Dynamo: make fleet")


@pytest.fixture
def worker() -> Iterator[Any]:
    from radixkv.fleet.worker import Worker

    with Engine.load("tiny", num_blocks=64) as engine:
        yield Worker(AsyncEngine(engine), "folder", "tiny", Settings(max_running=1, max_waiting=1))


def test_more_replies_than_the_worker_ever_takes_are_a_wrong_request(worker: Any) -> None:
    async def ask() -> None:
        request = {"token_ids": [5], "sampling_options": {"n": 3}}
        async for _ in worker.generate(request, None):
            pass

    with pytest.raises(exceptions.InvalidArgument, match="n=3"):
        asyncio.run(ask())
