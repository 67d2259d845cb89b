"""A store finds what it wrote, parents first, and a fault of its files or its disk costs records only."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from radixkv.disk import folder as folders
from radixkv.disk import store as store_module
from radixkv.disk.records import ROOT, Damaged, Index, decode_namespace, encode_namespace
from radixkv.disk.slabs import Slabs
from radixkv.disk.store import PAUSE, Read
from tests.disk.stored import BYTES, WAIT, arrived, block, blocks, opened, run, write

INDEX, SLAB = "index.sqlite3", "slab-00000"


@pytest.fixture(autouse=True)
def any_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write to a full disk, too: machines of tests often have one."""
    monkeypatch.setattr(store_module, "LEAST_FREE", 0)
    monkeypatch.setattr(store_module, "LEAST_SHARE", 0.0)


def test_what_was_written_is_found_after_a_restart(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    for name in (INDEX, SLAB):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    with opened(tmp_path) as store:
        assert [arrived(store, text) for text in (1, 2, 3)] == [6, 6, 2]
        assert arrived(store, 1, namespace=b"sother") == 0
        assert store.stats().records == 10  # the first two blocks are common
        assert store.offer(run(1, 8, first=6))
        assert store.settle(WAIT)
        assert (store.stats().written_blocks, arrived(store, 1, 8)) == (2, 8)


def test_a_run_without_its_parents_is_not_written(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.offer(run(1, 6, first=3))
        assert store.settle(WAIT)
        assert (store.stats().records, store.stats().dropped_blocks) == (0, 3)


def test_leaves_are_evicted_by_their_last_use(tmp_path: Path) -> None:
    with opened(tmp_path, slots=14) as store:  # 2 common blocks, and 4 of each text
        for text in (1, 2, 3):
            store.offer(run(text, 6))
        assert store.settle(WAIT)
        assert store.stats().records == 14
        assert arrived(store, 1) == 6
        store.offer(run(4, 6))
        assert store.settle(WAIT)
        stats = store.stats()
        assert stats.evicted_records and stats.records <= 14
        assert arrived(store, 4) == 6
    with opened(tmp_path, slots=14) as store:
        assert arrived(store, 4) == 6 and store.stats().records == stats.records


def test_a_text_without_records_is_deleted_among_writes(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        wait = threading.Event()
        store.do(lambda: wait.wait(WAIT))
        store.offer(run(1, 6))
        deleted = store.drop(b"sother")  # while the records of text 1 are not durable
        wait.set()
        deleted.result(WAIT)
        assert (arrived(store, 1), store.stats().failed_writes) == (6, 0)


def test_the_text_that_was_used_first_goes_before_the_ends_of_others(tmp_path: Path) -> None:
    index = Index(tmp_path / INDEX, writes=True)
    for text in range(5):
        parent = ROOT
        for number in range(4):
            parent = index.add(parent, block(text + 1, number + 2), 4 * text + number, 0, float(text)).id
    assert index.evict(6, keep=0) == [3, 2, 1, 0, 7, 6]
    index.close()


def test_a_smaller_disk_drops_what_does_not_fit(tmp_path: Path) -> None:
    write(tmp_path, [1, 2, 3])
    with opened(tmp_path, slots=8) as store:
        assert store.stats().records <= 8
        assert (tmp_path / SLAB).stat().st_size <= 8 * BYTES
        assert 2 <= arrived(store, 1) <= 6


def test_what_is_deleted_is_gone_from_the_files(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    with opened(tmp_path) as store:
        store.offer(run(1, 3, namespace=b"sann"))
        store.drop(b"n", blocks(1, 4))
        assert store.settle(WAIT)
        assert (arrived(store, 1), arrived(store, 2), arrived(store, 1, 3, b"sann")) == (3, 6, 3)
        _assert_nowhere(tmp_path, block(1, 4))
        store.drop(b"sann").result(WAIT)
        assert (arrived(store, 1, 3, b"sann"), arrived(store, 2)) == (0, 6)
        (tmp_path / "index.damaged").write_bytes(block(2, 4))
        store.clear().result(WAIT)
        _assert_nowhere(tmp_path, block(2, 4))
        assert not (tmp_path / SLAB).exists()
        assert arrived(store, 2) == store.stats().records == 0
        store.offer(run(3, 6))
        assert store.settle(WAIT)
        assert arrived(store, 3) == 6


def _assert_nowhere(folder: Path, text: bytes) -> None:
    for each in folder.iterdir():
        assert text not in each.read_bytes(), f"{each.name} still has deleted text"


def test_deleted_text_is_not_found_while_it_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [1])
    wait, drop = threading.Event(), Index.drop
    monkeypatch.setattr(Index, "drop", lambda *args: wait.wait(WAIT) and drop(*args))
    with opened(tmp_path) as store:
        dropped = store.drop(b"n")
        assert store.find(b"n", blocks(1, 6)) == store.random_text(random.Random(0)) == []
        wait.set()
        dropped.result(WAIT)
        assert store.ready and store.find(b"n", blocks(1, 6)) == []


@pytest.mark.parametrize("call", ["drop", "empty_log"])
def test_a_deletion_that_fails_deletes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    write(tmp_path, [1, 2])
    with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Index, call, _raising(errno.ENOSPC))
            store.drop(b"n", blocks(1, 4)).result(WAIT)
        assert arrived(store, 1) == arrived(store, 2) == 0
        _assert_nowhere(tmp_path, block(1, 4))
        store.offer(run(2, 6))
        assert store.settle(WAIT) and arrived(store, 2) == 6
    with opened(tmp_path) as store:
        assert arrived(store, 1) == 2


def test_text_that_cannot_be_deleted_is_not_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [1])
    with opened(tmp_path) as store:
        monkeypatch.setattr(Index, "drop", _raising(errno.EIO))
        monkeypatch.setattr(store_module.os, "replace", _raising(errno.EIO))
        assert isinstance(store.drop(b"n").exception(WAIT), OSError)
        assert store.settle(WAIT) and not store.ready and arrived(store, 1) == 0


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN])
def test_a_fault_at_the_start_keeps_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*args: Any, **options: Any) -> None:
        error = sqlite3.OperationalError("not now")
        error.sqlite_errorcode = code
        raise error

    write(tmp_path, [1])
    with monkeypatch.context() as patch:
        patch.setattr(Index, "__init__", fail)
        with opened(tmp_path) as store:
            assert not store.ready
    with opened(tmp_path) as store:
        assert arrived(store, 1) == 6


def test_an_index_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    write(tmp_path / "b", [1])
    (tmp_path / "a" / INDEX).symlink_to(tmp_path / "b" / INDEX)
    with opened(tmp_path / "a") as store:
        assert not store.ready


def test_a_damaged_record_does_not_free_the_slot_of_another(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    with sqlite3.connect(tmp_path / INDEX) as db:
        db.execute("update record set slot = 0 where slot = 9")
    db.close()
    with opened(tmp_path) as store:
        arrived(store, 2)
        for text in (3, 4):
            store.offer(run(text, 6))
        assert store.settle(WAIT)
        assert [arrived(store, text) for text in (1, 3, 4)] == [6, 6, 6]


def test_a_text_without_its_namespace_is_no_random_text(tmp_path: Path) -> None:
    write(tmp_path, [1])
    with opened(tmp_path) as store:
        namespace, *text = store.random_text(random.Random(0))
        assert namespace == b"n" and text == blocks(1, len(text))
    with sqlite3.connect(tmp_path / INDEX) as db:
        db.execute("delete from record where parent = 0")
    db.close()
    with opened(tmp_path) as store:
        assert store.random_text(random.Random(0)) == []


def test_a_read_while_closing_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [1])
    read, ended = Slabs.read, threading.Event()
    monkeypatch.setattr(Slabs, "read", lambda *args: time.sleep(0.1) or read(*args))
    with opened(tmp_path) as store:
        found = store.find(b"n", blocks(1, 6))
        for _ in range(4):
            store.read(Read(found[:3], lambda number, image: None, lambda read: ended.set()))
    assert ended.wait(WAIT) and not caplog.records


def test_a_list_of_folders_creates_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "about.json").write_text("{}")
    assert len(folders.listed(tmp_path)) == 1
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["about.json"]


def test_the_lock_is_released_although_a_child_process_lives(tmp_path: Path) -> None:
    folder = folders.DiskFolder(tmp_path / "a")
    child = os.fork()
    if not child:
        time.sleep(WAIT)
        os._exit(0)
    try:
        folder.close()
        folders.DiskFolder(tmp_path / "a").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("name", [INDEX, SLAB])
def test_a_flipped_byte_anywhere_costs_hits_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", [1, 2])
    size = (tmp_path / "whole" / name).stat().st_size
    lost, step = 0, 17 if name == SLAB else 419
    for at in range(0, size, step):
        folder = tmp_path / "flipped"
        shutil.copytree(tmp_path / "whole", folder)
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1 << at % 8
        (folder / name).write_bytes(data)
        lost += _survives(folder)
        shutil.rmtree(folder)
    assert lost


@pytest.mark.parametrize("name", [INDEX, SLAB])
def test_a_file_that_was_cut_costs_hits_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", [1, 2])
    size = (tmp_path / "whole" / name).stat().st_size
    lost = 0
    for at in sorted({*range(0, size, 4096 if name == INDEX else BYTES // 2), 1, 100, size - 1}):
        folder = tmp_path / "cut"
        shutil.copytree(tmp_path / "whole", folder)
        os.truncate(folder / name, at)
        lost += _survives(folder)
        shutil.rmtree(folder)
    assert lost > 2


@pytest.mark.parametrize("name", [INDEX, SLAB])
def test_a_missing_file_costs_hits_only(tmp_path: Path, name: str) -> None:
    write(tmp_path, [1])
    (tmp_path / name).unlink()
    with opened(tmp_path) as store:
        assert arrived(store, 1) == store.stats().records == 0
    assert _survives(tmp_path)


def _survives(folder: Path) -> bool:
    """Whether blocks were lost; what is found is right, the folder takes text again, and keeps it."""
    with opened(folder) as store:
        found = [arrived(store, text) for text in (1, 2)]
        for text in (1, 2, 3):
            store.offer(run(text, 6))
        assert store.settle(WAIT)
        again = [arrived(store, text) for text in (1, 2, 3)]
        if not store.stats().failed_writes:
            store.offer(run(4, 6))
            assert store.settle(WAIT)
            assert arrived(store, 4) >= 2
    with opened(folder) as store:
        assert all(arrived(store, text) <= 6 for text in (1, 2, 3, 4))
    return found != [6, 6] or again != [6, 6, 6]


def test_an_index_of_another_version_is_renamed_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, [1])
    with sqlite3.connect(tmp_path / INDEX) as db:
        db.execute("pragma user_version = 99")
    db.close()
    with opened(tmp_path) as store:
        assert store.stats().records == 0
        assert (tmp_path / "index.damaged").exists() and "version 99" in caplog.text
        store.offer(run(2, 6))
        assert store.settle(WAIT)
        assert arrived(store, 2) == 6


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "sync"])
def test_after_a_fault_of_writing_reading_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, call: str
) -> None:
    write(tmp_path, [1])
    now = [1000.0]
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now[0])
    with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Slabs, call, _raising(number))
            store.offer(run(2, 6))
            assert store.settle(WAIT)
            assert not store.offer(run(2, 6))
        stats = store.stats()
        assert (stats.failed_writes, stats.records) == (1, 6) and stats.dropped_blocks > 6
        assert (arrived(store, 1), arrived(store, 2)) == (6, 2)
        assert len([each for each in caplog.records if "cannot be written" in each.message]) == 1
        now[0] += PAUSE
        assert store.offer(run(2, 6)) and store.settle(WAIT)
        assert arrived(store, 2) == 6


def test_a_fault_of_reading_ends_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [1])
    with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Slabs, "read", _raising(errno.EIO))
            assert arrived(store, 1) == 0
        assert store.stats().failed_reads == 1 and arrived(store, 1) == 6


def test_nothing_is_written_to_a_disk_that_is_almost_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LEAST_FREE", 1 << 62)
    with opened(tmp_path) as store:
        store.offer(run(1, 6))
        assert store.settle(WAIT)
        assert (store.stats().failed_writes, store.stats().records) == (1, 0) and not store.room


def test_a_folder_that_is_deleted_meanwhile_costs_hits_only(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with opened(folder) as store:
        store.offer(run(1, 6))
        assert store.settle(WAIT)
        shutil.rmtree(folder)
        store.offer(run(2, 6))
        assert store.settle(WAIT)
        assert store.stats().failed_writes == 1 and not store.room
        assert arrived(store, 1) <= 6


def test_a_folder_that_cannot_be_opened_is_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "missing") as store:
        assert not store.ready and not store.offer(run(1, 6)) and store.find(b"n", blocks(1, 6)) == []
        assert "is off" in caplog.text


def test_unsynchronized_writes_that_are_lost_cost_hits_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The power is cut after each write, synchronization and transaction: any writes that were not durable are gone."""
    rng, moments, pending = random.Random(3), list[Path](), list[int]()
    folder = tmp_path / "folder"
    folder.mkdir()
    write_, sync_, commit_ = Slabs.write, Slabs.sync, Index.commit

    def cut() -> None:
        moment = tmp_path / f"cut-{len(moments)}"
        shutil.copytree(folder, moment)
        moments.append(moment)
        if pending:
            with open(moment / SLAB, "r+b") as file:
                for slot in rng.sample(pending, rng.randint(1, len(pending))):
                    file.seek(slot * BYTES)
                    file.write(rng.choice((bytes(BYTES), bytes(rng.randbytes(BYTES)))))

    def written(slabs: Slabs, slot: int, image: Any) -> None:
        write_(slabs, slot, image)
        pending.append(slot)
        cut()

    def synced(slabs: Slabs) -> None:
        sync_(slabs)
        pending.clear()
        cut()

    def committed(index: Index) -> None:
        commit_(index)
        cut()

    with monkeypatch.context() as patch:
        patch.setattr(Slabs, "write", written)
        patch.setattr(Slabs, "sync", synced)
        patch.setattr(Index, "commit", committed)
        with opened(folder, slots=12) as store:  # the third text evicts
            for text in (1, 2, 3):
                store.offer(run(text, 6))
                assert store.settle(WAIT)
    assert len(moments) > 14
    for moment in moments:
        with opened(moment, slots=12) as store:
            assert all(arrived(store, text) <= 6 for text in (1, 2, 3))
            store.offer(run(4, 6))
            assert store.settle(WAIT) and arrived(store, 4) == 6
    with opened(moments[-1], slots=12) as store:
        assert arrived(store, 3) == 6, "what was durable is there"


def test_a_record_is_bound_to_its_text_and_its_slot(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    with sqlite3.connect(tmp_path / INDEX) as db:
        db.execute("update record set slot = 3 - slot where slot in (1, 2)")
    db.close()
    index = Index(tmp_path / INDEX, writes=False)
    try:
        root = index.find(ROOT, b"n")
        assert root is not None
        first = index.find(root.id, block(1, 0))
        assert first is not None
        with pytest.raises(Damaged):
            index.find(first.id, block(1, 1))
    finally:
        index.close()
    with opened(tmp_path) as store:
        assert arrived(store, 1) == 1 and arrived(store, 2) == 1
        assert store.stats().damaged_records == 9


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (("a", (1, None)), ("a", (True, None))), (b"a", b"a"), ("é\ud800", "é\ud800")]
)
def test_equal_namespaces_have_one_code(one: Any, other: Any) -> None:
    code = encode_namespace(one)
    assert code == encode_namespace(other) is not None
    assert decode_namespace(code) == one


def test_different_namespaces_have_different_codes() -> None:
    values = [None, 0, 1, -1, "", "n", "i1", b"", b"n", (), (None,), ("a", "b"), ("ab",), (("a",), "b"), ("a", ("b",))]
    assert len({encode_namespace(each) for each in values}) == len(values)

    class Name(str):
        pass

    nested: Any = ()
    for _ in range(100_000):
        nested = (nested,)
    for each in (1.0, Name("a"), ("a", 1.5), frozenset(), 10**5000, nested):
        assert encode_namespace(each) is None


def _raising(number: int) -> Any:
    def call(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call
