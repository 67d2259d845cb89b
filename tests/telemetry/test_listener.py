"""Trusted connections over TCP, and a socket that is restored after its files were removed."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil

import pytest

from radixkv.errors import InvalidInput
from radixkv.telemetry import listener
from radixkv.telemetry.discovery import engines
from radixkv.telemetry.publisher import Publisher
from tests.telemetry.served import Engine, Reader, serving, threads_and_files, wait_until
from tests.telemetry.wire import FACTS, node


def test_tcp_asks_for_the_token():
    with serving("tcp://127.0.0.1:0") as (publisher, engine):
        engine.change(node(1))
        address = f"tcp://{publisher.tcp}"
        for token in ("wrong", "wröng", publisher.token[:-1], publisher.token + "x"):
            reader = Reader(address, token)
            assert "wrong token" in (reader.until_the_end() or "")
            assert len(reader.frames) == 1  # it received nothing else
            reader.close()
        for token in (publisher.token, ""):  # the token is looked up, because the engine runs here
            reader = Reader(address, token)
            reader.until_current(engine)
            reader.close()
        reader = Reader(publisher.path)  # and the Unix socket serves as before
        reader.until_current(engine)
        reader.close()


def test_tokens_are_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda *both: compared.append(both) or False)
    with serving("tcp://127.0.0.1:0") as (publisher, _):
        reader = Reader(f"tcp://{publisher.tcp}", "guess")
        reader.until_the_end()
        reader.close()
        assert compared == [(b"guess", publisher.token.encode())]


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("tcp://0.0.0.0:7000", "other machines"),
        ("tcp://192.168.1.7:7000", "other machines"),
        ("tcp://example.org:7000", "other machines"),
        ("tcp://[::]:7000", "other machines"),
        ("tcp://127.0.0.1", "write tcp://127.0.0.1:PORT"),
        ("tcp://127.0.0.1:99999", "write tcp://127.0.0.1:PORT"),
        ("tcp://:7000", "write tcp://127.0.0.1:PORT"),
        ("http://127.0.0.1:7000", "write tcp://127.0.0.1:PORT"),
        ("7000", "write tcp://127.0.0.1:PORT"),
        ("tcp://127.0.0.1:7000?allow=everything", "allow=remote"),
    ],
)
def test_addresses_that_are_none_or_that_others_reach_are_refused(listen, said):
    with pytest.raises(InvalidInput, match=said):
        Publisher(FACTS, Engine().collect, Engine().pending, listen)


# ---- removed files


@pytest.fixture
def rounds(monkeypatch):
    """Let the listener check its files all the time."""
    monkeypatch.setattr(listener, "_CHECK_INTERVAL", 0.001)


def obstruct(folder):
    """Put a file in the place of a folder, even if that is created again at once."""
    while not folder.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.touch()


def found_at(publisher):
    return publisher.path is not None and [each.socket for each in engines()] == [str(publisher.path)]


def test_a_removed_folder_is_made_again_and_clients_stay(rounds):
    with serving() as (publisher, engine):
        engine.change(node(1))
        old = Reader(publisher.path)
        old.until_current(engine)
        folder = publisher.path.parent
        shutil.rmtree(folder.rename(folder.with_name("removed")))  # at once: it is made again meanwhile
        wait_until(lambda: found_at(publisher))
        fresh = Reader(publisher.path)
        engine.change(node(2))
        for reader in (fresh, old):
            reader.until_current(engine)
            reader.close()


@pytest.mark.parametrize("kind", [".sock", ".json"])
def test_a_file_that_is_removed_comes_back(rounds, kind):
    with serving() as (publisher, _):
        publisher.path.with_suffix(kind).unlink()
        wait_until(lambda: publisher.path and publisher.path.with_suffix(kind).exists() and found_at(publisher))


def test_no_place_is_one_warning_and_a_place_that_comes_is_taken(rounds, caplog):
    before = threads_and_files()
    with serving() as (publisher, _):
        folder = publisher.path.parent
        (folder.parent / f"radixkv-{os.geteuid()}").touch()
        obstruct(folder)
        wait_until(lambda: caplog.records)
        wait_until(lambda: publisher.path is None)
        folder.unlink()
        wait_until(lambda: found_at(publisher))
        obstruct(folder)
        wait_until(lambda: len(caplog.records) == 2)
    assert ["there is no place for another" in record.getMessage() for record in caplog.records] == [True, True]
    assert threads_and_files() == before


def test_what_others_put_in_the_place_of_a_socket_stays():
    with serving() as (publisher, _):
        path = publisher.path
        path.unlink()
        path.write_text("somebody else's")
        publisher.close()
        assert path.read_text() == "somebody else's"


def test_no_file_descriptors_left_is_a_rest_and_not_the_end(monkeypatch, caplog):
    async def exhausted(self, listener):
        monkeypatch.undo()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(listener, "_PAUSE_S", 0.01)
    with serving() as (publisher, engine), caplog.at_level(logging.WARNING):
        Reader(publisher.path).close()  # the present wait for a connection has begun
        monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", exhausted)
        readers = [Reader(publisher.path) for _ in range(2)]
        engine.change(node(1))
        for reader in readers:
            reader.until_current(engine)
            reader.close()
    assert caplog.text.count("Too many open files") == 1
