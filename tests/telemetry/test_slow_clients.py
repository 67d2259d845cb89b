"""Slow clients lose frames and get a gap; their memory is bounded, and other clients are not affected."""

from __future__ import annotations

import socket

import pytest

from radixkv.telemetry.client_set import Client, ClientLimits
from radixkv.telemetry.protocol import Bye, Delta, encode
from tests.telemetry.served import Reader, many, serving, wait_until
from tests.telemetry.wire import node


def test_a_stalled_reader_costs_frames_and_bounded_memory():
    with serving(buffer=256 * 1024) as (publisher, engine):
        stalled, healthy = Reader(publisher.path), Reader(publisher.path)
        wait_until(lambda: publisher.attached == 2)
        most = 0
        for step in range(30):
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
        for step in range(40):
            engine.change(*many(1000, seed=step))
            wait_until(lambda: not engine.pending())
            slow.read(2000)
        slow.until_current(engine)
        assert slow.gaps > 0
        slow.close()


@pytest.mark.parametrize(("size", "dropped"), [(1000, 0), (1001, 1)])
def test_a_delta_that_would_go_over_the_buffer_is_dropped(size, dropped):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        client = Client(ours, 0.0, ClientLimits(buffer=2000), lambda dropped: iter([b"s" * 1_000_000]))
        client.start()  # the snapshot does not fit into the socket
        waiting = client.buffered
        assert waiting > 2000
        client._limits = ClientLimits(buffer=waiting + 2000)
        client.send_delta(b"a" * 1000)
        client.send_delta(b"b" * size)
        assert client.buffered == waiting + (0 if dropped else 2000)
        assert client._dropped == 2 * dropped


def test_a_client_closed_amid_a_frame_gets_its_rest_and_the_reason():
    whole = encode(Bye("x" * 900_000))  # a large frame, of which the socket takes a part
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.settimeout(20.0)
        client = Client(ours, 0.0, ClientLimits(), lambda dropped: iter([whole, b"never sent"]))
        client.start()
        client.send_delta(b"nor is this")
        assert client.wants_to_send
        client.say_bye(encode(Bye("enough")), 0.0)
        theirs.sendall(b"what now")  # must not lose the last frame
        assert not client.read()
        assert not client.closed
        data = b""
        while len(data) < len(whole) + len(encode(Bye("enough"))):
            client.flush()
            data += theirs.recv(65_536)
        assert data == whole + encode(Bye("enough"))
        assert client.closed
