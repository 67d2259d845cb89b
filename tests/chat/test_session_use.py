"""A session that two threads or two tasks use at once: the second call is refused, and the first goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv import SamplingParams
from radixkv.chat import AsyncEngine, ChatSession, Engine
from radixkv.errors import RequestCancelled, SessionClosed, SessionInUse
from tests.chat.worlds import chat_engine

GREEDY = SamplingParams(temperature=0)


def gated() -> tuple[Engine, threading.Semaphore]:
    """An engine whose steps wait for permits."""
    engine = chat_engine()
    gate = engine.core.runner.gate = threading.Semaphore(0)  # type: ignore[attr-defined]
    return engine, gate


def is_awaited(chat: ChatSession) -> bool:
    """Whether a thread or task waits for the open stream of a session."""
    channel = None if chat._open_stream is None else chat._open_stream.handle.channel
    return channel is not None and channel._readers + channel._waiters > 0


class Other:
    """A call on another thread, which has begun to wait for the model."""

    def __init__(self, chat: ChatSession, call: Callable[[], Any]) -> None:
        self.results: list[Any] = []
        self.thread = threading.Thread(target=self._run, args=(call,), name="first")
        self.thread.start()
        while not is_awaited(chat) and not self.results:
            pass

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.results.append(call())
        except Exception as error:
            self.results.append(error)

    def result(self) -> Any:
        self.thread.join(30)
        return self.results[0]


VERBS: dict[str, Callable[[Any, Path], object]] = {
    "send": lambda chat, _: chat.send("b", GREEDY),
    "stream": lambda chat, _: chat.stream("b", GREEDY),
    "edit": lambda chat, _: chat.edit(1, "b", GREEDY),
    "fork": lambda chat, _: chat.fork(),
    "rewind": lambda chat, _: chat.rewind(),
    "save": lambda chat, path: chat.save(path / "chat.json"),
    "tool_results": lambda chat, _: chat.tool_results([]),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("waits", ["send", "iterates", "waits"])
def test_the_second_call_is_refused_and_the_first_goes_on(verb: str, waits: str, tmp_path: Path) -> None:
    engine, gate = gated()
    with engine, engine.chat() as chat:
        gate.release(100)
        chat.send("zero", GREEDY)
        while gate.acquire(blocking=False):
            pass
        first = Other(
            chat,
            {
                "send": lambda: chat.send("a", GREEDY).text,
                "iterates": lambda: "".join(chunk.text for chunk in chat.stream("a", GREEDY)),
                "waits": lambda: chat.stream("a", GREEDY).wait().text,
            }[waits],
        )
        with pytest.raises(SessionInUse, match="used by the thread 'first'"):
            VERBS[verb](chat, tmp_path)
        gate.release(100)
        assert first.result() == "You said a!"
        assert chat.turns == 2
        assert chat.send("c", GREEDY).text == "You said c!"


def test_threads_may_take_turns_and_read_one_stream_in_turn() -> None:
    with chat_engine() as engine, engine.chat() as chat:
        for text in "abc":
            assert Other(chat, lambda text=text: chat.send(text, GREEDY).text).result() == f"You said {text}!"
        chunks = iter(chat.stream("d", GREEDY))
        texts: list[str] = []
        while True:  # as a web framework reads an iterator, with any thread of a pool
            before = len(texts)
            thread = threading.Thread(
                target=lambda: texts.extend(chunk.text for chunk in [next(chunks, None)] if chunk)
            )
            thread.start()
            thread.join()
            if len(texts) == before:
                break
        assert "".join(texts) == "You said d!" and chat.turns == 4


def test_close_ends_the_call_of_another_thread() -> None:
    engine, gate = gated()
    with engine:
        chat = engine.chat()
        first = Other(chat, lambda: chat.send("a", GREEDY))
        chat.close()
        gate.release(100)
        assert isinstance(first.result(), RequestCancelled)
        with pytest.raises(SessionClosed):
            chat.send("b")


# ---- asyncio


@pytest.mark.parametrize("verb", ["send", "stream", "fork", "rewind"])
def test_the_second_call_of_a_task_is_refused(verb: str, tmp_path: Path) -> None:
    plain, gate = gated()

    async def main() -> None:
        async with AsyncEngine(plain) as engine, engine.chat() as chat:
            first = asyncio.create_task(chat.send("a", GREEDY), name="first")
            while not is_awaited(chat._session):
                await asyncio.sleep(0)
            with pytest.raises(SessionInUse, match="used by the task 'first'"):
                await VERBS[verb](chat, tmp_path)  # type: ignore[misc]
            gate.release(200)
            assert (await first).text == "You said a!"
            assert (await chat.send("b", GREEDY)).text == "You said b!"
            assert chat.turns == 2

    asyncio.run(asyncio.wait_for(main(), 60))
