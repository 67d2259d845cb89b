"""Private files: whole or absent, for their owner only, with nothing left after an error."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from radixkv import private_files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_file_is_whole_private_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    path.chmod(0o644)
    with private_files.replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "before"
    assert (path.read_bytes(), mode(path), names(tmp_path)) == (b"new", 0o600, ["a"])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_file_as_it_was(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a"
    path.write_text("before")

    def half() -> None:
        with private_files.replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        half()
    assert (path.read_text(), names(tmp_path)) == ("before", ["a"])


def test_links_are_replaced_and_never_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, link = tmp_path / "victim", tmp_path / "a"
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(FileExistsError):
        private_files.create(link)
    private_files.write(link, b"new")
    assert not link.is_symlink() and link.read_bytes() == b"new"
    link.unlink()
    link.symlink_to(victim)
    private_files.close(private_files.begin(link, b"head"))
    assert not link.is_symlink() and link.read_bytes() == b"head"
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".radixkv-guessed.new").symlink_to(victim)
    with pytest.raises(FileExistsError):
        private_files.write(link, b"newer")
    assert (victim.read_text(), link.read_bytes()) == ("precious", b"head")


def test_a_pipe_or_a_folder_is_not_replaced(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder):
        with pytest.raises(FileExistsError, match="no regular file"):
            private_files.write(path, b"x")
    assert stat.S_ISFIFO(pipe.stat().st_mode) and names(tmp_path) == ["folder", "pipe"]


def test_a_file_that_grows_begins_with_its_head(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("a longer file than the new one")
    file = private_files.begin(path, b"head")
    assert path.read_bytes() == b"head"
    file.write(b" and more")
    private_files.close(file)
    private_files.close(file)
    assert (path.read_bytes(), mode(path), names(tmp_path)) == (b"head and more", 0o600, ["a"])


def test_a_file_and_its_folder_are_synchronized_before_and_after_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", lambda *_: pytest.fail("a rename does not replace everywhere"))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("name"), replace(*paths))[1])
    private_files.write(tmp_path / "a", b"x")
    assert done == ["file", "name", "folder"]


def test_a_long_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    private_files.write(path, b"x")
    assert names(tmp_path) == ["n" * 255]


# ---- folders


OTHER = 65533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


def opened(path: Path) -> os.stat_result:
    folder = private_files.open_folder(path)
    try:
        return os.fstat(folder)
    finally:
        os.close(folder)


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_missing_folders_are_created_private_whatever_the_umask_is(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert opened(tmp_path / "a" / "b") == (tmp_path / "a" / "b").stat()
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("a", "a/b")] == [0o700, 0o700]
    assert opened(tmp_path / "a" / "b") == (tmp_path / "a" / "b").stat()


@pytest.mark.parametrize("name", [".", "a", "a/b"])
@pytest.mark.parametrize("bits", [0o720, 0o702, 0o1777])
def test_folders_that_others_may_write_are_refused(tmp_path: Path, name: str, bits: int) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True, mode=0o700)
    os.chmod(tmp_path / name, bits)
    if bits == 0o1777 and name != "a/b" and not os.geteuid():
        opened(tmp_path / "a" / "b")  # sticky, and of root
        return
    with pytest.raises(PermissionError, match=f"other users may .* {tmp_path / name}: chmod"):
        opened(tmp_path / "a" / "b")


@as_root
@pytest.mark.parametrize("name", ["a", "a/b", "link"])
def test_folders_and_links_of_other_users_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True, mode=0o700)
    (tmp_path / "link").symlink_to("a")
    os.chown(tmp_path / name, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"{tmp_path / name} belongs to another user, {OTHER}: choose"):
        opened(tmp_path / ("link" if name == "link" else "a") / "b")


@as_root
def test_a_folder_that_is_exchanged_after_its_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True, mode=0o700)
    checked = os.lstat

    def exchanged(name: str, **given: Any) -> os.stat_result:
        found = checked(name, **given)
        if name == "a":
            os.chown(tmp_path / "a", OTHER, OTHER)
        return found

    monkeypatch.setattr(os, "lstat", exchanged)
    with pytest.raises(PermissionError, match=f"{tmp_path / 'a'} belongs to another user, {OTHER}"):
        opened(tmp_path / "a" / "b")


def test_links_on_the_way_are_followed_and_checked(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True, mode=0o700)
    (tmp_path / "relative").symlink_to("a/../a")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative")
    (tmp_path / "loop").symlink_to("loop")
    expected = (tmp_path / "a" / "b").stat()
    assert opened(tmp_path / "relative" / "b") == opened(tmp_path / "absolute" / "b") == expected
    for name in ("relative", "loop/b", "a/file/b"):  # the last folder is no link itself
        (tmp_path / "a" / "file").write_text("x")
        with pytest.raises(NotADirectoryError, match="is no folder: remove it"):
            opened(tmp_path / name)
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write to"):
        opened(tmp_path / "absolute" / "b")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    opened(tmp_path / "b")
    with pytest.raises(PermissionError):
        opened(tmp_path / "a")
    assert before == (os.listdir("/proc/self/fd") if before else [])
