"""A process that is killed at any line, or at any byte, of a writer leaves files that readers believe.

Each life is a fork of one process. SIGKILL comes at the n-th line that runs in a module of a writer. A limit of the
size of files ends other lives inside a write: the kernel writes up to the limit, then kills. Every eighth line and
every 26th byte is tried.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv import private_files
from radixkv.chat import saved
from radixkv.disk import records, slabs, store
from radixkv.engine.observers import trace_writer
from radixkv.errors import InvalidInput
from radixkv.telemetry import recording
from radixkv.telemetry.protocol import Bye, Delta, Hello
from radixkv.telemetry.records import Changes
from radixkv_traces import formats
from tests.disk import stored
from tests.telemetry.wire import FACTS, node

WRITERS = {module.__file__ for module in (private_files, saved, recording, trace_writer, records, slabs, store)}
DELTAS = [Delta(Changes(float(at), nodes=(node(at),)), seq=at) for at in range(1, 4)]
MODEL, VOCABULARY = "tiny", 100
LINES, BYTES = 8, 26  # from one death to the next


class _Killer:
    """Ends the process at the n-th line of a writer's module, in any thread."""

    def __init__(self, lines: int) -> None:
        self.left = lines

    def __call__(self, frame: FrameType, event: str, _: Any) -> _Killer | None:
        if frame.f_code.co_filename not in WRITERS:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def lives(write: Callable[[], object], setting: Callable[[], object]) -> int:
    """Run `write` in a fork with a setting; return the signal that ended it, 0 for none."""
    number = os.fork()
    if not number:
        try:
            setting()
            write()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(number, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def killed_at_line(line: int) -> Callable[[], None]:
    def setting() -> None:
        killer = _Killer(line)
        threading.settrace(killer)
        sys.settrace(killer)

    return setting


def killed_at_byte(size: int) -> Callable[[], None]:
    def setting() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

    return setting


def every_death(write: Callable[[], object], check: Callable[[], object], size: int, rarer: int = 1) -> None:
    """Kill `write` at its lines, then at the bytes of a file of `size`, and check the files each time."""
    for line in range(0, 10_000, LINES * rarer):
        if not lives(write, killed_at_line(line)):
            break
        check()
    assert line > 20  # it was killed at many places, and has lived at last
    for at in range(0, size, BYTES * 20 * rarer):
        assert lives(write, killed_at_byte(at)) == signal.SIGXFSZ
        check()
    assert lives(write, killed_at_byte(size + 100_000)) == 0


def strays(folder: Path) -> None:
    """Check that other files have names of their own, and remove them."""
    for path in folder.iterdir():
        if path.name.startswith(".radixkv-"):
            assert path.stat().st_mode & 0o777 == 0o600
            path.unlink()


def conversation(number: int) -> saved.SessionState:
    message = {"role": "assistant", "content": "x"}
    turn = saved.Turn(({"role": "user", "content": f"{number}"},), (5, 6), message, (), 4)
    return saved.SessionState(None, "01 Jan 2026", None, "append", "error", [], [turn], [number, 2, 5, 6])


@pytest.mark.long
@pytest.mark.parametrize("exists", [True, False])
def test_a_save_is_the_one_before_or_the_new_one(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "chat.json"

    def check() -> None:
        if exists or path.exists():
            assert saved.read(path, MODEL, VOCABULARY).token_ids[0] in ((7,) if exists else ()) + (8,)
        strays(tmp_path)
        restore()

    def restore() -> None:
        path.unlink(missing_ok=True)
        if exists:
            saved.write(conversation(7), MODEL, path)

    restore()
    saved.write(conversation(8), MODEL, tmp_path / "size")
    size = (tmp_path / "size").stat().st_size
    every_death(lambda: saved.write(conversation(8), MODEL, path), check, size)
    assert saved.read(path, MODEL, VOCABULARY).token_ids[0] == 8


@pytest.mark.long
def test_a_recording_in_progress_ends_after_a_whole_frame(tmp_path: Path) -> None:
    path = tmp_path / "live.rec"
    before = [Hello(FACTS, ts=1.0), DELTAS[0]]

    def write(frames: list[Delta] = DELTAS, ts: float = 0.0) -> None:
        with recording.RecordingWriter(path, FACTS, ts) as writer:
            for frame in frames:
                writer.write(frame)

    def check() -> None:
        frames = list(recording.read_recording(path))
        if isinstance(frames[-1], Bye):
            frames.pop()
        assert frames == before or frames == [Hello(FACTS), *DELTAS[: len(frames) - 1]]
        strays(tmp_path)
        write(DELTAS[:1], 1.0)

    write()
    size = path.stat().st_size
    write(DELTAS[:1], 1.0)
    every_death(write, check, size)
    assert len(list(recording.read_recording(path))) == 4


def ended(number: int) -> Any:
    stream = SimpleNamespace(output_length=1, finish_reason="stop")
    prompt = np.arange(40, dtype=np.int32)
    reported = SimpleNamespace(submitted=0.0)
    return SimpleNamespace(streams=[stream], reported=reported, prompt=prompt, namespace=None, session=number)


@pytest.mark.long
def test_a_trace_keeps_the_lines_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    def write() -> None:
        writer = trace_writer.TraceWriter(path, 16)
        for number in range(3):
            writer.ended(ended(number), None)
        writer.close()

    def check() -> None:
        if path.exists():
            assert path.stat().st_mode & 0o777 == 0o600
            *whole, cut = path.read_bytes().split(b"\n")
            assert [json.loads(line)["session"] for line in whole] == ["0", "1", "2"][: len(whole)]
            assert len(cut) < 1000
            if whole:
                sessions = [request.session for request in formats.read(path)]
                assert sessions == ["0", "1", "2"][: len(whole) + cut.endswith(b"}")]
            path.unlink()

    write()
    size = path.stat().st_size
    path.unlink()
    every_death(write, check, size - 20)  # ids are random numbers, so that lines differ in length
    assert len(path.read_bytes().splitlines()) == 3


def test_a_save_that_was_cut_is_refused(tmp_path: Path) -> None:
    """The check itself: a file that another program wrote in part is not believed."""
    path = tmp_path / "chat.json"
    saved.write(conversation(7), MODEL, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(InvalidInput):
            saved.read(path, MODEL, VOCABULARY)
    path.write_bytes(whole)
    assert saved.read(path, MODEL, VOCABULARY).token_ids[0] == 7


def test_a_disk_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that writes, evicts and deletes leaves a folder in which all that is found is right."""
    monkeypatch.setattr(store, "LEAST_FREE", 0)
    monkeypatch.setattr(store, "LEAST_SHARE", 0.0)
    folder, found = tmp_path / "folder", set[tuple[int, ...]]()

    def begin() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        stored.write(folder, [1, 2])

    def write() -> None:
        with stored.opened(folder, slots=14) as opened:
            opened.offer(stored.run(3, 6))
            opened.offer(stored.run(4, 6))  # evicts
            assert opened.settle(stored.WAIT)
            opened.drop(b"n", stored.blocks(1, 3))

    def check() -> None:
        with stored.opened(folder, slots=14) as opened:
            found.add(tuple(stored.arrived(opened, text) for text in (1, 2, 3, 4)))
            opened.offer(stored.run(5, 6))
            assert opened.settle(stored.WAIT)
            assert stored.arrived(opened, 5) == 6
            assert not opened.stats().failed_writes
        begin()

    begin()
    every_death(write, check, 32_000, rarer=10)
    assert len(found) > 3
