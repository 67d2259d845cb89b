"""Garbage, crowds, silence and killed processes end at most one client, and do not affect the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgpack
import pytest

from radixkv.telemetry.protocol import Attach, Hello, encode
from tests.telemetry.served import Reader, remaining_text, serving, unix, wait_until
from tests.telemetry.wire import FACTS, node

GARBAGE = {
    "nonsense": b"\x00\x00\x00\x05hello",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "oversize": (2**31).to_bytes(4, "big"),
    "above the cap of an attach": (8192).to_bytes(4, "big") + b"x" * 100,
    "a frame that only publishers send": encode(Hello(FACTS)),
    "two frames at once": encode(Attach()) * 2,
    "an attach and more": encode(Attach()) + b"\x00",
    "another version": (10).to_bytes(4, "big") + msgpack.packb({"v": 9, "t": "attach"})[:10],
    "a rate of nothing": encode(Attach(hz=-1.0)),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_answered_with_a_reason_and_the_end(name):
    with serving() as (publisher, engine):
        healthy = Reader(publisher.path)
        connection = unix(publisher.path)
        connection.sendall(GARBAGE[name])
        assert "bye" in remaining_text(connection)
        engine.change(node(1))
        healthy.until_current(engine)
        assert healthy.gaps == 0
        assert publisher.attached == 1
        healthy.close()


def test_an_attached_client_that_says_more_is_hung_up_on():
    with serving() as (publisher, _):
        reader = Reader(publisher.path)
        reader.until(lambda: reader.frames)
        reader.socket.sendall(encode(Attach()))
        assert "nothing but one attach" in (reader.until_the_end() or "")
        reader.close()


def test_a_hundred_connections_at_once_leave_the_healthy_alone():
    with serving() as (publisher, engine):
        healthy = Reader(publisher.path)
        for turn in range(100):
            with unix(publisher.path) as connection:
                if turn % 3 == 0:
                    connection.sendall(encode(Attach()))
                elif turn % 3 == 1:
                    connection.sendall(b"\xff")
            engine.change(node(1, blocks=(turn, 1)))
        healthy.until_current(engine)
        assert healthy.gaps == 0
        wait_until(lambda: len(publisher._clients._clients) == 1, "all others are forgotten")
        healthy.close()


def test_half_open_connections_end_in_time_and_take_nobodys_place():
    with serving(attach_s=0.2, waiting=4) as (publisher, _):
        silent = [unix(publisher.path) for _ in range(10)]
        wait_until(lambda: 0 < len(publisher._clients._clients) <= 4)
        silent[-1].sendall(encode(Attach())[:7])
        reader = Reader(publisher.path)
        reader.until(lambda: len(reader.frames) >= 2)
        for connection in silent:
            assert remaining_text(connection) == ""
        assert publisher.attached == 1
        reader.close()


def test_of_silent_clients_the_first_is_closed():
    with serving(waiting=2) as (publisher, _):
        silent = [unix(publisher.path) for _ in range(3)]
        assert remaining_text(silent.pop(0)) == ""
        for connection in silent:
            connection.sendall(encode(Attach()))
        wait_until(lambda: publisher.attached == 2)
        for connection in silent:
            connection.close()


def test_eight_are_served_and_the_ninth_is_told_so():
    with serving() as (publisher, engine):
        readers = [Reader(publisher.path) for _ in range(8)]
        wait_until(lambda: publisher.attached == 8)
        ninth = Reader(publisher.path)
        assert (ninth.until_the_end() or "").startswith("busy: 8 monitors")
        engine.change(node(1))
        for reader in readers:
            reader.until_current(engine)
        readers.pop().close()
        wait_until(lambda: publisher.attached == 7)
        readers.append(Reader(publisher.path))
        readers[-1].until_current(engine)
        for reader in readers:
            reader.close()


def test_a_killed_client_is_forgotten():
    code = (
        "import sys, time\nfrom radixkv.telemetry.discovery import connect\n"
        "c = connect(sys.argv[1])\nprint(len(c.recv(9)), flush=True)\ntime.sleep(60)"
    )
    with serving() as (publisher, engine):
        child = subprocess.Popen([sys.executable, "-c", code, str(publisher.path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        assert publisher.attached == 1
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        engine.change(node(1))
        wait_until(lambda: publisher.attached == 0)


def test_other_users_are_turned_away(monkeypatch):
    with serving() as (publisher, _):
        monkeypatch.setattr("radixkv.telemetry.socket_paths.peer_user", lambda connection: os.geteuid() + 1)
        assert remaining_text(unix(publisher.path)) == ""
        assert publisher.attached == 0
        monkeypatch.undo()
        reader = Reader(publisher.path)
        reader.until(lambda: reader.frames)
        reader.close()
