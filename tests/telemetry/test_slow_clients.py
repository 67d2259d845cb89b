"""Slow clients lose frames and get a gap; their memory is bounded, and other clients are not affected."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from radixkv.telemetry.client_set import Client, ClientLimits
from radixkv.telemetry.protocol import Attach, Delta, encode
from tests.telemetry.served import Reader, many, serving, wait_until
from tests.telemetry.wire import node


def test_a_stalled_reader_costs_frames_and_bounded_memory():
    with serving(buffer=256 * 1024) as (publisher, engine):
        stalled, healthy = Reader(publisher.path), Reader(publisher.path)
        wait_until(lambda: publisher.attached == 2)
        most = 0
        for step in range(10):
            engine.change(*many(1000, seed=step))
            healthy.until_current(engine)
            most = max(most, publisher.buffered)
        assert healthy.gaps == 0
        assert (
            most <= (256 + 256 + 256) * 1024
        )  # the buffer, a page, and the bytes that the healthy client had not read yet
        stalled.until_current(engine)
        assert stalled.gaps > 0
        engine.change(node(1, blocks=(5, 5)))
        stalled.until_current(engine)  # and it gets deltas again
        assert isinstance(stalled.frames[-1], Delta)
        for reader in (stalled, healthy):
            reader.close()


def test_a_slow_reader_of_a_moving_target_ends_up_with_the_truth():
    with serving(buffer=64 * 1024) as (publisher, engine):
        slow = Reader(publisher.path)
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for step in range(15):
            engine.change(*many(1000, seed=step))
            wait_until(lambda: not engine.pending())
            slow.read(2000)
        slow.until_current(engine)
        assert slow.gaps > 0
        slow.close()


class Log:
    """Frames that need no engine."""

    def __init__(self, *pages: bytes) -> None:
        self.pages = pages

    def snapshot(self, dropped: int | None, control: bool) -> Iterator[bytes]:
        return iter([b"gap %d" % dropped] if dropped else self.pages)

    def bye(self, reason: str) -> bytes:
        return f"bye: {reason}".encode()


async def attached(client: Client, theirs: socket.socket) -> None:
    """Run the client until it has begun to send its snapshot."""
    theirs.sendall(encode(Attach()))
    client.task = asyncio.create_task(client.run(lambda client: None))
    while not client.buffered:
        await asyncio.sleep(0)


async def received(theirs: socket.socket) -> bytes:
    data = b""
    while piece := await asyncio.get_running_loop().sock_recv(theirs, 65_536):
        data += piece
    return data


PAGE = b"p" * 1_000_000  # a socket takes a part of it


@pytest.mark.parametrize(("size", "dropped"), [(1000, 0), (1001, 1)])
def test_a_delta_that_would_go_over_the_buffer_is_dropped(size: int, dropped: int) -> None:
    async def run() -> None:
        limits = ClientLimits(buffer=len(PAGE) + 2000)
        client = Client(ours, None, limits, Log(PAGE), None)
        await attached(client, theirs)
        client.send_delta(b"a" * 1000)
        client.send_delta(b"b" * size)
        assert client.buffered == len(PAGE) + (1000 if dropped else 2000)
        expected = PAGE + b"a" * 1000 + (b"gap 1" if dropped else b"b" * size)
        reading = asyncio.create_task(received(theirs))
        while client.buffered:
            await asyncio.sleep(0)
        client.end()
        assert await reading == expected

    with pair() as (ours, theirs):
        asyncio.run(run())


def test_a_client_closed_amid_a_frame_gets_its_rest_and_the_reason() -> None:
    async def run() -> None:
        client = Client(ours, None, ClientLimits(), Log(PAGE, b"never sent"), None)
        await attached(client, theirs)
        client.send_delta(b"nor is this")
        client.end("enough")
        theirs.sendall(b"what now")  # must not lose the last frame
        await asyncio.sleep(0.01)
        client.end("once more")
        assert await received(theirs) == PAGE + b"bye: enough"
        await client.task

    with pair() as (ours, theirs):
        asyncio.run(run())


def test_a_client_that_does_not_read_its_last_frame_is_closed_in_time() -> None:
    async def run() -> None:
        client = Client(ours, None, ClientLimits(leave_s=0.01), Log(PAGE), None)
        await attached(client, theirs)
        client.end("enough")
        await asyncio.wait_for(client.task, 20)
        assert len(await received(theirs)) < len(PAGE)

    with pair() as (ours, theirs):
        asyncio.run(run())


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        yield ours, theirs
