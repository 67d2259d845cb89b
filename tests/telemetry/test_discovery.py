"""Engines are found while they live and no longer, and never in a folder that another user could have made."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.errors import EngineNotFound, UnsafeFolder
from radixkv.server_settings import is_loopback
from radixkv.telemetry import socket_paths
from radixkv.telemetry.discovery import FoundEngine, advertise, connect, engines, tcp_address
from radixkv.telemetry.protocol import Attach, Decoder
from radixkv.telemetry.socket_paths import claim, is_listening, own_folder, process_start, release
from tests.telemetry.served import runtime_folder
from tests.telemetry.wire import FACTS


@pytest.fixture
def folder():
    with runtime_folder() as there:
        yield there


@pytest.fixture
def claimed(folder):
    path, listener = claim()
    advertise(FACTS, path)
    yield path, listener
    listener.close()
    release(path)


# ---- the folder


def test_the_folder_is_private_and_so_is_what_is_in_it(claimed):
    path, _ = claimed
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.with_suffix(".json").stat().st_mode) == 0o600


@pytest.fixture
def only(folder, monkeypatch):
    """The only folder, not created yet."""
    monkeypatch.setattr(socket_paths, "folders", lambda: [folder])
    return folder


def test_a_link_is_not_followed(only, tmp_path):
    only.symlink_to(tmp_path)
    with pytest.raises(UnsafeFolder, match="it is no folder"):
        own_folder()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_can_enter_is_refused(only):
    only.mkdir(mode=0o755)
    with pytest.raises(UnsafeFolder, match="chmod 700"):
        own_folder()


def test_a_folder_of_another_user_is_refused(only, monkeypatch):
    only.mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: only.stat().st_uid + 1)
    with pytest.raises(UnsafeFolder, match=f"belongs to user {only.stat().st_uid}"):
        own_folder()


def test_a_folder_that_other_users_may_rename_is_refused(only):
    only.parent.chmod(0o777)
    with pytest.raises(UnsafeFolder, match="other users may rename"):
        own_folder()
    only.parent.chmod(0o1777)  # sticky, as /tmp is
    assert own_folder() == only


def test_a_path_too_long_for_a_socket_is_refused(folder, monkeypatch):
    monkeypatch.setattr(socket_paths, "folders", lambda: [folder.parent / ("x" * 80)])
    with pytest.raises(UnsafeFolder, match="too long"):
        own_folder()


def test_nothing_is_read_in_a_folder_that_is_not_private(claimed):
    path, _ = claimed
    assert len(engines()) == 1
    path.parent.chmod(0o755)
    assert engines() == []
    path.parent.chmod(0o700)


# ---- listing engines


def test_an_engine_is_found_with_what_it_said(claimed):
    path, _ = claimed
    (found,) = engines()
    assert found == FoundEngine(
        FACTS.engine, os.getpid(), process_start(os.getpid()), 1000.0, "tiny", "0.1.0", "cpu", str(path)
    )


def test_a_token_is_kept_and_not_shown(claimed):
    advertise(FACTS, claimed[0], "127.0.0.1:7", "s3cret")
    (found,) = engines()
    assert (found.tcp, found.token) == ("127.0.0.1:7", "s3cret")
    assert "s3cret" not in repr(found)


def test_what_a_killed_process_left_is_removed(folder):
    code = (
        "import os, signal\nfrom radixkv.telemetry.discovery import advertise\n"
        "from radixkv.telemetry.socket_paths import claim\nfrom tests.telemetry.wire import FACTS\n"
        "path, listener = claim()\nadvertise(FACTS, path)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".sock"}
    assert engines() == []
    assert list(folder.iterdir()) == []


def rewritten(path: Path, **other: object) -> None:
    file = path.with_suffix(".json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **other}))


def test_another_process_of_the_same_number_is_not_taken_for_the_engine(claimed):
    path, listener = claimed
    listener.close()  # the socket exists, and has no listener
    assert len(engines()) == 1  # alive by its process
    rewritten(path, process="another-boot:17")
    assert engines() == []
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", "7", "null", "{}", '{"engine": 1}', "\x00" * 100, '{"pid": "1"}', "[" * 5000],
    ids=range(10),
)
def test_files_that_are_no_description_are_passed_over(claimed, text):
    path, _ = claimed
    (path.parent / "77.json").write_text(text)
    assert len(engines()) == 1
    (path.parent / "77.json").unlink()


def test_values_of_wrong_types_are_passed_over(claimed):
    path, _ = claimed
    good = json.loads(path.with_suffix(".json").read_text())
    for name in good:
        rewritten(path, **{**good, name: ["x"]})
        assert engines() == [] or name == "socket"
    rewritten(path, **{**good, "socket": "/somewhere/else.sock"})
    assert [found.socket for found in engines()] == [str(path)]  # the client is not redirected


# ---- claiming a socket


def test_stale_files_of_the_same_number_are_taken_over(folder):
    folder.mkdir(mode=0o700)
    stale = folder / f"{os.getpid()}.sock"
    stale.write_text("not even a socket")
    path, listener = claim()
    assert path == stale
    assert is_listening(path)
    listener.close()
    release(path)
    release(path)
    assert not path.exists()


def test_a_socket_with_a_listener_is_left_alone(folder):
    """Two containers may share the folder, with processes of the same number."""
    folder.mkdir(mode=0o700)
    taken = folder / f"{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(taken))
        other.listen(1)
        path, listener = claim()
        assert path.name == f"{os.getpid()}-2.sock"
        listener.close()
        release(path)
        assert is_listening(taken)


# ---- attaching


def heard(listener: socket.socket) -> Attach:
    listener.setblocking(True)
    connection, _ = listener.accept()
    with connection:
        (frame,) = Decoder().feed(connection.recv(4096))
    assert isinstance(frame, Attach)
    return frame


def test_connecting_says_what_one_wants(claimed):
    path, listener = claimed
    (found,) = engines()
    for target in (os.getpid(), str(os.getpid()), path, str(path), found):
        with connect(target, hz=7.0) as connection:
            assert heard(listener) == Attach("", 7.0)
            assert connection.gettimeout() is None


def test_a_token_is_looked_up_for_a_port_of_ours_alone(claimed):
    path, _ = claimed
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        advertise(FACTS, path, f"127.0.0.1:{port}", "s3cret")
        for given, sent in (("", "s3cret"), ("mine", "mine")):
            with connect(f"tcp://127.0.0.1:{port}", token=given):
                assert heard(listener).token == sent
        advertise(FACTS, path, "127.0.0.1:1", "s3cret")
        with connect(f"tcp://127.0.0.1:{port}"):
            assert heard(listener).token == ""


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (1, "process 1 has no running engine; engines on this machine: "),
        ("/no/such.sock", "no engine answers at /no/such.sock: No such file"),
        ("/" + "x" * 200, "no engine answers at"),
        ("tcp://127.0.0.1:1", "no engine answers at tcp://127.0.0.1:1: Connection refused"),
    ],
)
def test_a_missing_engine_is_reported(claimed, target, said):
    with pytest.raises(EngineNotFound, match=said):
        connect(target)


def test_of_several_engines_in_a_process_one_has_to_be_named(claimed):
    path, listener = claim()
    advertise(FACTS, path)
    with pytest.raises(EngineNotFound, match="runs 2 engines: name a socket"):
        connect(os.getpid())
    listener.close()
    release(path)


def test_a_socket_of_another_user_is_not_trusted(claimed, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setattr(socket_paths, "peer_user", lambda connection: 777)
    with pytest.raises(EngineNotFound, match="not yours"):
        connect(claimed[0])


def test_addresses():
    assert tcp_address("tcp://127.0.0.1:80") == ("127.0.0.1", 80)
    assert tcp_address("tcp://[::1]:80") == ("::1", 80)
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "10.0.0.1", "x.org")] == [
        *[True] * 4,
        *[False] * 2,
    ]


def test_other_files_in_the_folder_are_skipped(claimed):
    path, _ = claimed
    os.mkfifo(path.parent / "99.json")  # opening it would wait for a writer for ever
    (path.parent / "98.json").mkdir()
    said = json.loads(path.with_suffix(".json").read_text())
    (path.parent / "97.json").write_text(json.dumps({**said, "process": "another-boot:17"}))
    (path.parent / "97.sock").mkdir()  # cannot be removed as a file
    assert [found.socket for found in engines()] == [str(path)]
    for name in ("98.json", "97.sock"):
        (path.parent / name).rmdir()


def test_a_socket_without_a_description_goes_with_its_listener(claimed):
    path, _ = claimed
    begun, killed, other = (path.with_name(name) for name in ("96.sock", "95.sock", "94.sock"))
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as gone:
        listener.bind(str(begun))
        listener.listen()  # its engine is about to write the description
        gone.bind(str(killed))
        other.write_text("no socket at all")
        assert [found.socket for found in engines()] == [str(path)] and killed.exists()  # it may be about to listen
        for each in (begun, killed, other):
            os.utime(each, (1.0, 1.0))
        assert [found.socket for found in engines()] == [str(path)]
        assert (begun.exists(), killed.exists(), other.exists()) == (True, False, True)
    begun.unlink()
    other.unlink()
