"""A publisher starts completely or not at all, and leaves no thread and no file, in any process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

from radixkv.telemetry.discovery import engines
from radixkv.telemetry.publisher import Publisher
from tests.telemetry.served import Reader, runtime_folder, serving, threads_and_files, unix
from tests.telemetry.wire import FACTS, node


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


def test_nothing_is_left_after_the_end():
    with serving() as (publisher, _):  # one-time initialisation happens now
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
        reader.until_current(engine)
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
