"""A process that forks while requests run: the child's handles raise, and the parent's go on. And no copies."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv import SamplingParams
from radixkv.chat import AsyncEngine
from radixkv.engine.output import OutputChannel
from radixkv.errors import EngineClosed
from tests.chat.worlds import chat_engine

ROOT = Path(__file__).parents[2]


def in_child(check: Callable[[], object]) -> None:
    """Run `check` in a fork, for ten seconds at most. Only code without other threads may do so."""
    child = os.fork()
    if not child:
        import signal

        signal.alarm(10)
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_channel_raises_in_the_child_until_it_has_ended() -> None:
    channel = OutputChannel()
    chunks = channel.reading()
    chunks.__enter__()

    def unfinished() -> None:
        for call in (
            channel.wait,
            lambda: channel.wait(0.1),
            channel.next_chunk,
            lambda: channel.next_chunk(block=False),
            lambda: channel.listen(lambda: None),
            lambda: channel.reading().__enter__(),
            lambda: channel.waiting().__enter__(),
        ):
            with pytest.raises(EngineClosed, match=f"process {os.getppid()}"):
                call()
        chunks.__exit__(None, None, None)  # entered before the fork

    with channel._lock:  # as another thread may hold it
        in_child(unfinished)

    channel.fail(ValueError("its end"))

    def finished() -> None:
        with pytest.raises(ValueError, match="its end"):
            channel.wait()
        with pytest.raises(ValueError, match="its end"):
            channel.next_chunk()
        chunks.__exit__(None, None, None)

    with channel._lock:
        in_child(finished)


FORKED = """
import asyncio, os, signal, sys, threading, warnings
from radixkv import SamplingParams
from radixkv.chat import AsyncEngine
from radixkv.engine.async_engine import AsyncHandle
from radixkv.errors import EngineClosed
from tests.chat.worlds import chat_engine

engine = chat_engine()
gate = engine.core.runner.gate = threading.Semaphore(0)
both = AsyncEngine(engine)
asyncio.run(both.probe([1]))  # its thread has begun
params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
gate.release(100)
over = engine.submit([1, 2, 3], params)
over.result()
while gate.acquire(blocking=False):
    pass
chat = engine.chat()
twin = both.chat()
handle, iterated = engine.submit([1, 2, 3], params), engine.submit([1, 2, 4], params)
chunks = iter(iterated)
stream = chat.stream("hi", params)
child = os.fork()
if not child:
    signal.alarm(20)
    calls = {
        "result": handle.result,
        "result for a time": lambda: handle.result(1),
        "iterate": lambda: list(handle),
        "go on iterating": lambda: next(chunks),
        "cancel": handle.cancel,
        "await": lambda: asyncio.run(AsyncHandle(handle).result()),
        "wait for a reply": stream.wait,
        "iterate over a reply": lambda: list(stream),
        "send": lambda: chat.send("x", params),
        "submit": lambda: engine.submit([1], params),
        "submit, constrained": lambda: engine.submit([1], params.but(choice=("a", "b"))),
        "submit, async": lambda: asyncio.run(both.submit([1], params)),
        "send, async": lambda: asyncio.run(twin.send("x", params)),
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
            wrong.append(f"{name} returned")
        except EngineClosed as error:
            if f"process {os.getppid()}" not in str(error):
                wrong.append(f"{name}: {error}")
        except BaseException as error:
            wrong.append(f"{name}: {error!r}")
    if len(over.result().token_ids) != 4 or len(list(over)) != 4:
        wrong.append("a request that was over")
    over.cancel()
    stream.close()
    chat.close()
    engine.close()
    print(*wrong, sep="\\n", flush=True)
    os._exit(len(wrong))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
gate.release(1000)
assert len(handle.result().token_ids) == len(list(chunks)) == 4
stream.wait()
engine.close()
sys.exit(status)
"""


@pytest.mark.long
def test_calls_raise_in_the_child_and_the_parents_requests_go_on() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_engines_and_sessions_say_that_they_cannot_be_copied(copies: Callable[[object], object]) -> None:
    async def close(engine: AsyncEngine) -> None:
        await engine.close()

    engine = chat_engine()
    both = AsyncEngine(engine)
    for each in (engine, both):
        with pytest.raises(TypeError, match="an engine cannot be pickled or copied: its thread"):
            copies(each)
    for session in (engine.chat(), both.chat()):
        with pytest.raises(TypeError, match=r"a chat session cannot be pickled or copied.*fork\(\).*save\(\)"):
            copies({"session": session}) if copies is not copy.copy else copies(session)
    assert engine.generate([[1, 2]], SamplingParams(max_tokens=1))
    asyncio.run(close(both))
