"""Commands reach the engine from this user's Unix socket only; all other frames do nothing and end their client."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import EngineClosed, PinBudgetExceeded, ProtocolError
from radixkv.telemetry.client_set import ClientLimits
from radixkv.telemetry.command_queue import VERBS, CommandQueue, Outcome, may_control
from radixkv.telemetry.protocol import Attach, Command, Frame, Hello, Reply, encode
from radixkv.telemetry.publisher import Publisher
from tests.telemetry.served import Engine, Reader, runtime_folder, wait_until
from tests.telemetry.wire import FACTS, node


@dataclass
class Executor:
    """Notes commands, and finishes each at once; while it is `stuck`, `finish` finishes them."""

    stuck: bool = False
    commands: list[Command] = field(default_factory=list)
    processes: list[int | None] = field(default_factory=list)
    futures: list[Future[Outcome]] = field(default_factory=list)
    error: Exception | None = None

    def execute(self, command: Command, process: int | None) -> Future[Outcome]:
        if isinstance(self.error, EngineClosed):
            raise self.error
        future: Future[Outcome] = Future()
        self.commands.append(command)
        self.processes.append(process)
        self.futures.append(future)
        if not self.stuck:
            self.finish()
        return future

    def finish(self) -> None:
        for command, future in list(zip(self.commands, self.futures, strict=False)):  # not those that this starts
            if not future.done() and future.set_running_or_notify_cancel():
                if self.error is not None:
                    future.set_exception(self.error)
                else:
                    future.set_result(Outcome(True, f"did {command.verb} {command.number}"))


@contextmanager
def controlled(
    listen: str | None = None, *, writable: bool = True, buffer: int = 2**20
) -> Iterator[tuple[Publisher, Engine, Executor]]:
    engine, executor = Engine(), Executor()
    with runtime_folder():
        execute = executor.execute if writable else None
        limits = ClientLimits(hz=500.0, buffer=buffer)
        publisher = Publisher(FACTS, engine.collect, engine.pending, listen, limits=limits, execute=execute)
        publisher.start()
        try:
            yield publisher, engine, executor
        finally:
            publisher.close()


def attached(publisher: Publisher) -> Reader:
    reader = Reader(publisher.path)
    reader.until(lambda: reader.frames)
    return reader


def hello(reader: Reader) -> Hello:
    reader.until(lambda: reader.frames)
    first = reader.frames[0]
    assert isinstance(first, Hello)
    return first


def replies(reader: Reader) -> list[Reply]:
    return [frame for frame in reader.frames if isinstance(frame, Reply)]


def send(reader: Reader, *frames: Frame) -> None:
    reader.socket.sendall(b"".join(map(encode, frames)))


def test_a_command_is_executed_and_its_reply_goes_to_its_client_alone():
    with controlled() as (publisher, engine, executor):
        reader, other = attached(publisher), attached(publisher)
        assert hello(reader).facts.control and hello(other).facts.control
        send(reader, Command(7, "cancel", 12))
        reader.until(lambda: replies(reader))
        (reply,) = replies(reader)
        assert (reply.id, reply.done, reply.text) == (7, True, "did cancel 12")
        assert [(each.verb, each.number) for each in executor.commands] == [("cancel", 12)]
        assert executor.processes == [os.getpid()]
        engine.change(node(1))
        for each in (reader, other):
            each.until_current(engine)
        assert not replies(other)
        reader.close()
        other.close()


def test_commands_are_executed_one_at_a_time_in_order():
    with controlled() as (publisher, _, executor):
        executor.stuck = True
        reader = attached(publisher)
        send(reader, *(Command(number, "pin", number) for number in range(5)))
        wait_until(lambda: len(executor.commands) == 1)
        for count in range(1, 6):
            executor.finish()
            reader.until(lambda count=count: len(replies(reader)) == count)
            wait_until(lambda count=count: len(executor.commands) == min(count + 1, 5))
        assert [each.id for each in replies(reader)] == [0, 1, 2, 3, 4]
        reader.close()


def test_too_many_commands_end_the_client_and_those_that_wait_are_not_executed():
    with controlled() as (publisher, engine, executor):
        executor.stuck = True
        healthy, reader = attached(publisher), attached(publisher)
        send(reader, *(Command(number, "clear", number) for number in range(40)))
        assert "commands wait" in (reader.until_the_end() or "")
        executor.finish()
        send(healthy, Command(1, "demote", 99))
        wait_until(lambda: executor.commands and executor.commands[-1].number == 99)
        executor.finish()
        healthy.until(lambda: replies(healthy))
        assert len(executor.commands) <= 2
        engine.change(node(1))
        healthy.until_current(engine)
        healthy.close()
        reader.close()


@pytest.mark.parametrize("writable", [False, True])
def test_tcp_never_controls(writable: bool):
    with controlled("tcp://127.0.0.1:0", writable=writable) as (publisher, _, executor):
        reader = Reader(f"tcp://{publisher.tcp}", token=publisher.token or "")
        assert not hello(reader).facts.control
        send(reader, Command(1, "clear", 1))
        assert "monitor='rw'" in (reader.until_the_end() or "")
        assert executor.commands == []
        local = attached(publisher)
        assert hello(local).facts.control == writable
        local.close()
        reader.close()


@pytest.mark.parametrize("user", [None, 0, os.geteuid() + 1])
def test_only_the_engines_own_user_controls(user: int | None, monkeypatch: pytest.MonkeyPatch):
    ends = socket.socketpair()
    try:
        assert may_control(ends[0])
        monkeypatch.setattr("radixkv.telemetry.command_queue.peer_user", lambda connection: user)
        monkeypatch.setattr("radixkv.telemetry.command_queue.os.geteuid", lambda: 4711)
        assert not may_control(ends[0])
    finally:
        for end in ends:
            end.close()


GARBAGE = {
    "an attach": encode(Attach()),
    "a reply": encode(Reply(1, True, "x")),
    "http": b"POST /cancel HTTP/1.1\r\n\r\n",
    "oversize": (8192).to_bytes(4, "big") + b"x" * 100,
    "another version": (10).to_bytes(4, "big") + msgpack.packb({"v": 9, "t": "command"})[:10],
}


def packed(**fields: object) -> bytes:
    body = msgpack.packb({"v": 1, "t": "command", "seq": 0, "ts": 0.0, "id": 1, "verb": "pin", "number": 1, **fields})
    return len(body).to_bytes(4, "big") + body


GARBAGE |= {
    "a negative number": packed(number=-1),
    "a fraction": packed(number=1.5),
    "a long verb": packed(verb="x" * 33),
    "bytes": packed(verb=b"pin"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_after_the_attach_executes_nothing_and_ends_its_client_alone(name: str):
    with controlled() as (publisher, engine, executor):
        healthy, reader = attached(publisher), attached(publisher)
        reader.socket.sendall(GARBAGE[name])
        assert reader.until_the_end()
        assert executor.commands == []
        engine.change(node(1))
        healthy.until_current(engine)
        assert healthy.gaps == 0 and not replies(healthy)
        healthy.close()
        reader.close()


def test_an_unknown_verb_is_answered_and_not_executed():
    with controlled() as (publisher, _, executor):
        reader = attached(publisher)
        send(reader, Command(3, "shutdown\x1b[2J", 1), Command(4, "pin", 1))
        reader.until(lambda: len(replies(reader)) == 2)
        first, second = replies(reader)
        assert (first.id, first.done, second.done) == (3, False, True)
        assert "no command" in first.text and "\x1b" not in first.text
        assert [each.verb for each in executor.commands] == ["pin"]
        reader.close()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (EngineClosed("the engine was closed"), "the engine was closed"),
        (PinBudgetExceeded("5 blocks would be pinned"), "5 blocks would be pinned"),
        (ZeroDivisionError("secret"), "the command failed: the engine's log has the reason"),
    ],
)
def test_a_command_that_raises_is_answered(error: Exception, text: str, caplog: pytest.LogCaptureFixture):
    with controlled() as (publisher, _, executor):
        executor.error = error
        reader = attached(publisher)
        send(reader, Command(1, "pin", 1))
        reader.until(lambda: replies(reader))
        assert (replies(reader)[0].done, replies(reader)[0].text) == (False, text)
        assert ("secret" in caplog.text) == isinstance(error, ZeroDivisionError)
        reader.close()


FRAMES = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda fields: packed(**fields),
        st.dictionaries(
            st.sampled_from(["v", "t", "id", "verb", "number", "seq", "ts", "x"]),
            st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=40)),
        ),
    ),
    st.builds(lambda verb, number: encode(Command(1, verb, number)), st.sampled_from(VERBS), st.integers(0, 2**62)),
)


def test_the_queue_of_a_client_is_bounded_and_its_end_cancels_the_command():
    async def run() -> None:
        queue = CommandQueue(executor.execute, None)
        for number in range(8):
            queue.add(Command(number, "pin", number))
        with pytest.raises(ProtocolError, match="wait"):
            queue.add(Command(9, "pin", 9))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.next_reply(), 0.01)
        assert len(executor.commands) == 1 and executor.futures[0].cancelled()

    executor = Executor(stuck=True)
    asyncio.run(run())


def test_no_sequence_of_frames_ends_the_publisher_or_disturbs_another_client():
    with controlled() as (publisher, engine, executor):
        healthy = attached(publisher)

        @settings(max_examples=60, deadline=None)
        @given(st.lists(FRAMES, max_size=6), st.integers(0, 2**20))
        def attack(frames: list[bytes], cut: int) -> None:
            reader = attached(publisher)
            data = b"".join(frames)
            try:
                reader.socket.sendall(data[: cut % (len(data) + 1)])
                reader.socket.shutdown(socket.SHUT_WR)
                reader.until_the_end()
            except (BrokenPipeError, ConnectionResetError):
                pass
            reader.close()

        attack()
        assert all(each.verb in VERBS and 0 <= each.number < 2**63 for each in executor.commands)
        engine.change(node(1))
        healthy.until_current(engine)
        assert not replies(healthy) and healthy.gaps == 0
        healthy.close()
