"""Everybody gets the whole truth, or is told that it is not whole; nobody can hold up, bloat or stop the publisher."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import msgpack
import pytest

from radixkv.errors import EngineClosed, InvalidInput, UnsafeFolder
from radixkv.telemetry import door
from radixkv.telemetry import publisher as module
from radixkv.telemetry.audience import Client, Limits
from radixkv.telemetry.discovery import connect, engines
from radixkv.telemetry.door import Door
from radixkv.telemetry.frames import Attach, Bye, Delta, Hello, Snapshot
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import encode
from radixkv.telemetry.publisher import Publisher
from radixkv.telemetry.recording import read_recording
from radixkv.telemetry.records import Changes
from tests.telemetry.served import Engine, Reader, many, runtime_folder, serving, wait_until
from tests.telemetry.wire import FACTS, node


def unix(path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20.0)
    connection.connect(str(path))
    return connection


def last_words(connection: socket.socket) -> str:
    """What the publisher says before it hangs up."""
    data = b""
    try:
        while piece := connection.recv(65_536):
            data += piece
    except ConnectionResetError:
        pass
    connection.close()
    return data.decode("latin-1")


# ---- what a healthy client gets


def test_hello_a_snapshot_and_every_delta():
    with serving() as (publisher, engine):
        engine.change(*many(50))
        reader = Reader(publisher.path)
        reader.until(lambda: len(reader.frames) >= 2)
        assert reader.frames[0] == Hello(FACTS, seq=reader.frames[0].seq, ts=reader.frames[0].ts)
        assert isinstance(reader.frames[1], Snapshot)
        for step in range(5):
            engine.change(node(step + 1, blocks=(1000 + step, 1)))
            reader.until_it_knows(engine)
        assert reader.gaps == 0
        reader.close()


def test_a_delta_carries_only_stats_that_changed_and_are_numbers():
    known = Mirror()
    known.apply(Changes(1.0, stats={"a": 1.0, "b": 2.0}))
    changes = Changes(2.0, stats={"a": 1.0, "b": 3.0, "c": float("nan")})
    assert module._news(changes, known).stats == {"b": 3.0}
    reset = Changes(2.0, reset=True, stats={"a": 1.0, "b": 3.0})
    assert module._news(reset, known) == reset


def test_a_quiet_engine_gives_signs_of_life_and_is_not_asked():
    with serving() as (publisher, engine):
        reader = Reader(publisher.path)
        reader.until(lambda: sum(isinstance(frame, Delta) for frame in reader.frames) >= 2)
        assert engine.collected == 0
        reader.close()


def test_large_snapshots_come_in_pages_and_deltas_behind_them():
    with serving() as (publisher, engine):
        engine.change(*many(6000))
        first = Reader(publisher.path)
        first.until_it_knows(engine)
        first.close()
        readers = [Reader(publisher.path) for _ in range(3)]
        for step in range(20):
            engine.change(node(step + 1, blocks=(7, step + 1)))
            for reader in readers:
                reader.read()
        for reader in readers:
            reader.until_it_knows(engine)
            assert max(frame.pages for frame in reader.frames if isinstance(frame, Snapshot)) > 1
            reader.close()


def test_a_large_tree_is_packed_in_pieces_with_rests_between(monkeypatch):
    rests = []
    monkeypatch.setattr(module, "_rest", lambda: rests.append(1))
    with serving() as (publisher, engine):
        engine.change(*many(6000))
        for _ in range(2):  # the second one finds it all there
            reader = Reader(publisher.path)
            reader.until_it_knows(engine)
            reader.close()
    pages = max(frame.pages for frame in reader.frames if isinstance(frame, Snapshot))
    assert len(rests) >= 2 * (pages - 1) > 10  # cutting them, and encoding them
    assert max(len(encode(frame)) for frame in reader.frames if isinstance(frame, Snapshot)) < 64 * 1024


def test_who_comes_while_a_step_takes_long_gets_the_last_state_at_once():
    with serving() as (publisher, engine):
        first = Reader(publisher.path)
        engine.change(node(1))
        first.until_it_knows(engine)
        engine.stuck = True
        engine.change(node(2))
        wait_until(lambda: engine.waiting, "the publisher asked")
        second = Reader(publisher.path)
        second.until(lambda: len(second.frames) >= 2)
        assert list(second.mirror.nodes) == [1]
        second.until(lambda: len(second.frames) >= 4)  # signs of life, meanwhile
        assert engine.waiting
        assert len(engine.waiting) == 1  # not asked again
        engine.answer()
        for reader in (first, second):
            reader.until_it_knows(engine)
            reader.close()


# ---- slow clients


def test_a_stalled_reader_costs_frames_and_bounded_memory_and_hurts_nobody():
    with serving(buffer=256 * 1024) as (publisher, engine):
        stalled, healthy = Reader(publisher.path), Reader(publisher.path)
        wait_until(lambda: publisher.attached == 2)
        most = 0
        for step in range(30):
            engine.change(*many(1000, seed=step))
            healthy.until_it_knows(engine)
            most = max(most, publisher.buffered)
        assert healthy.gaps == 0
        assert most <= (256 + 256 + 256) * 1024  # the buffer, a page, and what the healthy one had not taken yet
        stalled.until_it_knows(engine)
        assert stalled.gaps > 0
        engine.change(node(1, blocks=(5, 5)))
        stalled.until_it_knows(engine)  # and it gets deltas again
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
        slow.until_it_knows(engine)
        assert slow.gaps > 0
        slow.close()


def test_deltas_that_waited_behind_a_snapshot_are_counted_when_they_are_dropped():
    asked = []

    def snapshot(dropped):
        asked.append(dropped)
        return iter([b"x" * 1_000_000, b"y"])

    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    client = Client(ours, 0.0, Limits(buffer=2_000_000), snapshot)
    client.welcome()
    for _ in range(6):
        client.give(b"d" * 400_000)
    assert client.buffered <= 1_000_000
    while asked == [None] or client.wants_to_send:
        theirs.recv(100_000)
        client.send()
    assert asked == [None, 6]
    ours.close()
    theirs.close()


def test_a_stalled_reader_delays_no_end():
    with serving() as (publisher, engine):
        stalled, healthy = Reader(publisher.path), Reader(publisher.path)
        engine.change(*many(6000))
        healthy.until_it_knows(engine)
        publisher.close("enough")
        assert healthy.until_the_end() == "enough"
        assert not publisher._thread.is_alive()
        stalled.close()
        healthy.close()


@pytest.mark.parametrize(("size", "dropped"), [(1000, 0), (1001, 1)])
def test_a_delta_that_would_go_over_the_buffer_is_dropped(size, dropped):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        client = Client(ours, 0.0, Limits(buffer=2000), lambda dropped: iter([b"s" * 1_000_000]))
        client.welcome()  # the snapshot does not fit into the socket
        waiting = client.buffered
        assert waiting > 2000
        client._limits = Limits(buffer=waiting + 2000)
        client.give(b"a" * 1000)
        client.give(b"b" * size)
        assert client.buffered == waiting + (0 if dropped else 2000)
        assert client._dropped == 2 * dropped


def test_who_comes_makes_the_publisher_ask_at_once():
    with serving() as (publisher, engine):
        engine.change(node(1))
        first = Reader(publisher.path, hz=0.001)
        first.until_it_knows(engine)
        engine.change(node(2))
        second = Reader(publisher.path, hz=0.001)
        for reader in (second, first):
            reader.until_it_knows(engine)
            reader.close()


def test_nobody_is_told_oftener_than_the_limit():
    with serving(hz=5.0) as (publisher, _):
        reader = Reader(publisher.path, hz=1e9)
        wait_until(lambda: publisher.attached == 1)
        assert [client.hz for client in publisher._clients] == [5.0]
        reader.close()


def test_who_is_sent_away_in_the_middle_of_a_frame_gets_the_rest_of_it_and_then_the_reason():
    whole = encode(Bye("x" * 900_000))  # some large frame, of which the socket takes a part
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.settimeout(20.0)
        client = Client(ours, 0.0, Limits(), lambda dropped: iter([whole, b"never sent"]))
        client.welcome()
        client.give(b"nor is this")
        assert client.wants_to_send
        client.leave(encode(Bye("enough")), 0.0)
        theirs.sendall(b"what now")  # must not cost it the last words
        assert not client.read()
        assert not client.gone
        data = b""
        while len(data) < len(whole) + len(encode(Bye("enough"))):
            client.send()
            data += theirs.recv(65_536)
        assert data == whole + encode(Bye("enough"))
        assert client.gone


# ---- malicious clients


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
        assert "bye" in last_words(connection)
        engine.change(node(1))
        healthy.until_it_knows(engine)
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
        healthy.until_it_knows(engine)
        assert healthy.gaps == 0
        wait_until(lambda: len(publisher._clients) == 1, "all others are forgotten")
        healthy.close()


def test_half_open_connections_end_in_time_and_take_nobodys_place():
    with serving(attach_s=0.2, waiting=4) as (publisher, _):
        silent = [unix(publisher.path) for _ in range(10)]
        wait_until(lambda: 0 < len(publisher._clients) <= 4)
        silent[-1].sendall(encode(Attach())[:7])
        reader = Reader(publisher.path)
        reader.until(lambda: len(reader.frames) >= 2)
        for connection in silent:
            assert last_words(connection) == ""
        assert publisher.attached == 1
        reader.close()


def test_of_those_who_say_nothing_the_first_has_to_go():
    with serving(waiting=2) as (publisher, _):
        silent = []
        for count in (1, 2, 2):
            before = set(publisher._clients)
            silent.append(unix(publisher.path))
            wait_until(
                lambda count=count, before=before: publisher._clients - before and len(publisher._clients) == count
            )
        assert last_words(silent.pop(0)) == ""
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
            reader.until_it_knows(engine)
        readers.pop().close()
        wait_until(lambda: publisher.attached == 7)
        readers.append(Reader(publisher.path))
        readers[-1].until_it_knows(engine)
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
        monkeypatch.setattr("radixkv.telemetry.places.peer_user", lambda connection: os.geteuid() + 1)
        assert last_words(unix(publisher.path)) == ""
        assert publisher.attached == 0
        monkeypatch.undo()
        reader = Reader(publisher.path)
        reader.until(lambda: reader.frames)
        reader.close()


# ---- TCP


def test_tcp_asks_for_the_token():
    with serving("tcp://127.0.0.1:0") as (publisher, engine):
        engine.change(node(1))
        address = f"tcp://{publisher.tcp}"
        for token in ("wrong", "wröng", publisher.token[:-1], publisher.token + "x"):
            reader = Reader(address, token)
            assert "wrong token" in (reader.until_the_end() or "")
            assert len(reader.frames) == 1  # it learnt nothing else
            reader.close()
        for token in (publisher.token, ""):  # which is looked up, as the engine runs here
            reader = Reader(address, token)
            reader.until_it_knows(engine)
            reader.close()
        reader = Reader(publisher.path)  # and the Unix socket serves as before
        reader.until_it_knows(engine)
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


def test_remote_is_allowed_to_who_says_so():
    with serving("tcp://0.0.0.0:0?allow=remote") as (publisher, _):
        assert publisher.tcp.startswith("0.0.0.0:")


# ---- beginning and end


def threads_and_files() -> tuple[set[str], int]:
    return {thread.name for thread in threading.enumerate()}, len(os.listdir("/dev/fd"))


def test_nothing_is_left_behind_the_end():
    with serving() as (publisher, _):  # what is made once a process is made now
        Reader(publisher.path).close()
    before = threads_and_files()
    with serving("tcp://127.0.0.1:0") as (publisher, _):
        readers = [Reader(publisher.path), Reader(f"tcp://{publisher.tcp}", publisher.token)]
        half_open = unix(publisher.path)
        folder = publisher.path.parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {path.name for path in folder.iterdir()} == {f"{os.getpid()}.sock", f"{os.getpid()}.json"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
        publisher.close()
        publisher.close()
        assert list(folder.iterdir()) == []
        for reader in readers:
            reader.close()
        half_open.close()
    assert threads_and_files() == before


def test_engines_of_one_process_have_names_of_their_own():
    with serving() as (first, engine):
        second = Publisher(FACTS, engine.collect, engine.pending)
        second.start()
        assert [first.path.name, second.path.name] == [f"{os.getpid()}.sock", f"{os.getpid()}-2.sock"]
        assert len(engines()) == 2
        first.close()
        reader = Reader(second.path)
        reader.until(lambda: reader.frames)
        reader.close()
        second.close()
        assert engines() == []


def test_a_publisher_that_cannot_start_leaves_nothing():
    before = threads_and_files()
    with runtime_folder() as folder:
        folder.touch()  # neither here nor in the temporary folder, which others can write to
        (folder.parent / f"radixkv-{os.geteuid()}").touch()
        engine = Engine()
        publisher = Publisher(FACTS, engine.collect, engine.pending, "tcp://127.0.0.1:0")
        with pytest.raises(UnsafeFolder):
            publisher.start()
        publisher.close()
    assert threads_and_files() == before


def test_a_port_that_is_taken_is_one_warning_and_the_socket_is_there(caplog, tmp_path):
    with serving("tcp://127.0.0.1:0") as (first, engine):
        second = Publisher(FACTS, engine.collect, engine.pending, f"tcp://{first.tcp}")
        second.start()
        try:
            assert [first.tcp in record.getMessage() for record in caplog.records] == [True]
            assert (second.tcp, second.token) == (None, None)
            reader = Reader(second.path)
            reader.until(lambda: reader.frames)
            reader.close()
            assert second.flight(tmp_path / "a.rec") > 0
        finally:
            second.close()


# ---- whoever cleans up


@pytest.fixture
def rounds(monkeypatch):
    """The door looks after itself at every turn."""
    monkeypatch.setattr(door, "_ROUND", 0.0)


def turned(publisher, true):
    wait_until(lambda: publisher._wake() or true())


def obstruct(folder):
    """A file in the place of a folder, however fast that is made again."""
    while not folder.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.touch()


def found_at(publisher):
    return publisher.path is not None and [each.socket for each in engines()] == [str(publisher.path)]


def test_a_folder_that_is_removed_is_made_again_and_who_was_attached_stays(rounds):
    with serving() as (publisher, engine):
        engine.change(node(1))
        old = Reader(publisher.path)
        old.until_it_knows(engine)
        shutil.rmtree(publisher.path.parent)
        turned(publisher, lambda: found_at(publisher))
        fresh = Reader(publisher.path)
        engine.change(node(2))
        for reader in (fresh, old):
            reader.until_it_knows(engine)
            reader.close()


@pytest.mark.parametrize("kind", [".sock", ".json"])
def test_a_file_that_is_removed_comes_back(rounds, kind):
    with serving() as (publisher, _):
        publisher.path.with_suffix(kind).unlink()
        turned(publisher, lambda: publisher.path and publisher.path.with_suffix(kind).exists() and found_at(publisher))


def test_no_place_is_one_warning_and_a_place_that_comes_is_taken(rounds, caplog):
    before = threads_and_files()
    with serving() as (publisher, _):
        folder = publisher.path.parent
        (folder.parent / f"radixkv-{os.geteuid()}").touch()
        obstruct(folder)
        turned(publisher, lambda: caplog.records)
        turned(publisher, lambda: publisher.path is None)
        folder.unlink()
        turned(publisher, lambda: found_at(publisher))
        obstruct(folder)
        turned(publisher, lambda: len(caplog.records) == 2)
    assert ["there is no place for another" in record.getMessage() for record in caplog.records] == [True, True]
    assert threads_and_files() == before


def test_what_others_put_in_the_place_of_a_socket_stays():
    with serving() as (publisher, _):
        path = publisher.path
        path.unlink()
        path.write_text("somebody else's")
        publisher.close()
        assert path.read_text() == "somebody else's"


def test_a_child_process_neither_serves_nor_removes_the_parents_socket():
    with serving() as (publisher, engine):
        reader = Reader(publisher.path)
        reader.until(lambda: reader.frames)
        child = os.fork()
        if child == 0:
            publisher.close()
            own = Publisher(FACTS, engine.collect, engine.pending)
            own.start()
            there = os.path.exists(publisher.path) and own.path != publisher.path
            own.close()
            os._exit(0 if there and os.path.exists(publisher.path) else 1)
        assert os.waitpid(child, 0)[1] == 0
        engine.change(node(1))
        reader.until_it_knows(engine)
        assert [found.pid for found in engines()] == [os.getpid()]
        reader.close()


def test_a_process_that_ends_says_so_and_removes_its_files():
    code = (
        "import sys\nfrom tests.telemetry.served import Engine\nfrom tests.telemetry.wire import FACTS\n"
        "from radixkv.telemetry.publisher import Publisher\n"
        "p = Publisher(FACTS, Engine().collect, Engine().pending)\np.start()\nprint(p.path, flush=True)\n"
        "sys.stdin.readline()"
    )
    with (
        runtime_folder() as folder,
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        reader = Reader(child.stdout.readline().decode().strip())
        reader.until(lambda: reader.frames)
        child.stdin.close()
        assert reader.until_the_end() == "the process ended"
        assert child.wait() == 0
        assert list(folder.iterdir()) == []
        reader.close()


# ---- faults of the engine's side


def test_what_the_engines_side_raises_is_logged_once_and_serving_goes_on(caplog):
    class Failing(Engine):
        def pending(self):
            raise RuntimeError("no idea")

    engine = Failing()
    with runtime_folder(), caplog.at_level(logging.WARNING):
        publisher = Publisher(FACTS, engine.collect, engine.pending)
        publisher.start()
        reader = Reader(publisher.path)
        reader.until(lambda: len(reader.frames) >= 4)
        reader.close()
        publisher.close()
    assert caplog.text.count("telemetry could not be collected: RuntimeError('no idea')") == 1


def test_a_closed_engine_is_no_news(caplog):
    engine = Engine()
    engine.collect = lambda: (_ for _ in ()).throw(EngineClosed("it is"))
    engine.steps = 1
    with runtime_folder(), caplog.at_level(logging.WARNING):
        publisher = Publisher(FACTS, engine.collect, engine.pending)
        publisher.start()
        reader = Reader(publisher.path)
        reader.until(lambda: len(reader.frames) >= 3)
        reader.close()
        publisher.close()
    assert caplog.text == ""


def test_changes_that_cannot_be_told_are_logged_and_the_next_ones_are(caplog):
    with serving() as (publisher, engine), caplog.at_level(logging.WARNING):
        reader = Reader(publisher.path)
        reader.until(lambda: len(reader.frames) >= 2)
        engine.change(node(1, head=(object(),)))
        wait_until(lambda: "plain values" in caplog.text)
        engine.change(node(1))
        reader.until(lambda: reader.mirror.nodes == {1: node(1)})
        reader.close()


def test_a_publisher_that_stumbles_on_and_on_gives_up_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(module, "_FAILURES", 3)
    with serving() as (publisher, _), caplog.at_level(logging.ERROR):
        reader = Reader(publisher.path)
        reader.until(lambda: reader.frames)
        monkeypatch.setattr(publisher, "_expire", lambda now: 1 / 0)
        assert "failed" in (reader.until_the_end() or "")
        reader.close()
        publisher._thread.join()
        assert caplog.text.count("stumbled") == 3
        assert caplog.text.count("gives up") == 1
        assert engines() == []


def test_no_file_descriptors_left_is_a_rest_and_not_the_end(caplog):
    class Exhausted:
        family = socket.AF_UNIX

        def accept(self):
            raise OSError(24, "Too many open files")

    class Selector:
        def __init__(self):
            self.registered = []

        def register(self, listener, events, data):
            self.registered.append(listener)

        def unregister(self, listener):
            self.registered.remove(listener)

    tired, listener, selector = Door(None, lambda connection, token: None), Exhausted(), Selector()
    tired._selector, tired._look_at = selector, float("inf")
    tired._listen(listener)
    with caplog.at_level(logging.WARNING):
        tired._accept(listener)
        tired._accept(listener)  # both were ready in the same turn
    assert selector.registered == []
    assert caplog.text.count("Too many open files") == 1
    tired.look(time.monotonic())
    assert selector.registered == []
    tired.look(time.monotonic() + 2.0)
    assert selector.registered == [listener]


# ---- the flight recorder


def replay(path) -> Mirror:
    mirror = Mirror()
    for frame in read_recording(path):
        if isinstance(frame, (Snapshot, Delta)):
            mirror.apply(frame.changes)
    return mirror


def test_the_flight_recording_is_the_state_of_now(tmp_path):
    with serving() as (publisher, engine):
        engine.change(*many(100))
        assert publisher.flight(tmp_path / "a.rec") == (tmp_path / "a.rec").stat().st_size
        assert replay(tmp_path / "a.rec").nodes == engine.mirror.nodes
        engine.change(node(3, blocks=(99, 1)))
        publisher.flight(tmp_path / "a.rec")
        assert replay(tmp_path / "a.rec").nodes == engine.mirror.nodes
    publisher.flight(tmp_path / "b.rec")  # behind the end, too
    assert replay(tmp_path / "b.rec").nodes == engine.mirror.nodes


def test_the_engines_thread_gives_its_last_changes_and_waits_for_nothing(tmp_path):
    with serving() as (publisher, engine):
        engine.change(node(1))
        publisher.flight(tmp_path / "a.rec")
        engine.stuck = True
        engine.change(node(2))
        wait_until(lambda: engine.waiting)
        publisher.flight(tmp_path / "a.rec", last=Changes(9.0, nodes=(node(3),)))
        assert list(replay(tmp_path / "a.rec").nodes) == [1, 3]
        engine.answer()


def test_a_stuck_engine_does_not_keep_a_flight_recording_from_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SETTLE", 0.05)
    with serving() as (publisher, engine):
        engine.change(node(1))
        wait_until(lambda: engine.collected)
        engine.stuck = True
        engine.change(node(2))
        publisher.flight(tmp_path / "a.rec")
        assert 2 not in replay(tmp_path / "a.rec").nodes
        engine.answer()


def test_attaching_looks_up_a_process_number():
    with serving() as (publisher, _):
        connection = connect(os.getpid())
        assert connection.getpeername() == str(publisher.path)
        connection.close()
