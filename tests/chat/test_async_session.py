"""Conversations in asyncio behave as those in threads, and a cancelled task leaves them unchanged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from radixkv import AsyncEngine, SamplingParams
from radixkv.errors import SessionClosed
from tests.chat.worlds import chat_engine, rendered
from tests.engine.fakes import check

Result = TypeVar("Result")
PARAMS = SamplingParams(temperature=0, max_tokens=100)
LONG = "1 2 3 4 5 6 7 8 9 " * 100  # too long to be answered before it is cancelled


def run(main: Callable[..., Coroutine[Any, Any, Result]], *args: Any) -> Result:
    return asyncio.run(asyncio.wait_for(main(*args), timeout=30))


def gated() -> tuple[AsyncEngine, threading.Semaphore]:
    engine = chat_engine()
    gate = engine.core.runner.gate = threading.Semaphore(0)  # type: ignore[attr-defined]
    return AsyncEngine(engine), gate


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_every_verb_does_what_the_plain_one_does(tmp_path):
    plain = chat_engine()

    async def main() -> tuple[Any, ...]:
        async with AsyncEngine(chat_engine()) as engine, engine.chat("Be kind.") as chat:
            seen = [(await chat.send("one", PARAMS)).text]
            stream = await chat.stream("two", PARAMS)
            seen.append("".join([chunk.text async for chunk in stream]))
            assert chat.turns == 2  # the end was seen
            assert (await stream.wait()).text == seen[-1]
            [branch] = await chat.fork()
            await branch.rewind()
            seen.append((await branch.edit(1, "zero", PARAMS)).text)
            await chat.save(tmp_path / "chat.json")
            again = await engine.resume(tmp_path / "chat.json")
            seen.append((await again.send("three", PARAMS)).text)
            await branch.close()
            assert branch.closed and not chat.closed
            with pytest.raises(SessionClosed):
                await branch.send("x")
            return seen, chat.history, chat.token_ids, again.history, again.token_ids

    with plain:
        chat = plain.chat("Be kind.")
        seen = [chat.send(text, PARAMS).text for text in ("one", "two")]
        [branch] = chat.fork()
        branch.rewind()
        seen.append(branch.edit(1, "zero", PARAMS).text)
        again = chat.fork()[0]
        seen.append(again.send("three", PARAMS).text)
        assert run(main) == (seen, chat.history, chat.token_ids, again.history, again.token_ids)
        assert again.token_ids == rendered(plain, again.history)


@pytest.mark.parametrize("verb", ["send", "edit", "stream", "wait"])
def test_a_cancelled_task_undoes_its_turn_and_the_next_one_goes_through(verb):
    async def main() -> None:
        engine, gate = gated()
        gate.release(1000)
        async with engine:
            chat = engine.chat()
            await chat.send("one", PARAMS)
            await engine.stats()  # after the last step
            while gate.acquire(blocking=False):
                pass
            before = (chat.history, chat.token_ids)

            async def work() -> object:
                if verb == "send":
                    return await chat.send("two", PARAMS)
                if verb == "edit":
                    return await chat.edit(1, "zwei", PARAMS)
                stream = await chat.stream("two", PARAMS)
                return await stream.wait() if verb == "wait" else [chunk async for chunk in stream]

            task = asyncio.create_task(work())
            while not engine.client.core.scheduler.running:
                await asyncio.sleep(0.001)
            await cancelled(task)
            gate.release(1000)
            assert (chat.history, chat.token_ids) == before
            assert (await chat.send("three", PARAMS)).text == "You said three!"
            assert chat.turns == 2
            stats = await engine.stats()
            assert (stats.cancelled, stats.finished) == (1, 2)
            check(engine._engine)

    run(main)


def test_a_task_that_is_cancelled_while_its_message_is_rendered_leaves_no_request(monkeypatch):
    async def main() -> None:
        engine = AsyncEngine(chat_engine())
        renders, go_on = threading.Event(), threading.Event()
        async with engine:
            chat = engine.chat()
            submit = engine._engine.submit

            def slowly(*args: Any, **options: Any) -> Any:
                renders.set()
                assert go_on.wait(timeout=10)
                return submit(*args, **options)

            monkeypatch.setattr(engine._engine, "submit", slowly)
            task = asyncio.create_task(chat.send(LONG, PARAMS.but(max_tokens=2000)))
            await asyncio.to_thread(renders.wait, 10)
            await cancelled(task)
            unstarted = asyncio.create_task(chat.send("never", PARAMS))
            await asyncio.sleep(0)
            await cancelled(unstarted)
            go_on.set()
            while (stats := await engine.stats()).cancelled + stats.finished == 0:
                await asyncio.sleep(0.001)
            assert (stats.requests, stats.cancelled) == (1, 1)
            assert (await chat.send("two", PARAMS)).text == "You said two!"
            assert chat.turns == 1

    run(main)


def test_both_kinds_of_streams_have_the_same_names():
    async def talk(engine):
        stream = await AsyncEngine(engine).chat().stream("one", PARAMS)
        assert stream.is_open
        assert await stream.reply is await stream.wait()
        assert (stream.is_open, stream.handle.done) == (False, True)
        return stream

    with chat_engine() as engine, engine.chat() as chat:
        streams = [chat.stream("one", PARAMS), asyncio.run(talk(engine))]
        names, others = ([name for name in dir(each) if not name.startswith("_")] for each in streams)
        assert names == others and "reply" in names
        assert streams[0].reply is streams[0].wait() and streams[0].prompt == streams[1].prompt
