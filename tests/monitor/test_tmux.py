"""Run the command in a real terminal: every view is drawn, and the terminal is restored however the command ends.

tmux is the terminal. Expected output is polled for, so a deadline is reached only by a failing test.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import Delta, Hello, Snapshot
from radixkv.telemetry.recording import read_recording
from tests.selection import mostly_long
from tests.telemetry.served import many, serving, wait_until

pytestmark = pytest.mark.skipif(
    shutil.which("tmux") is None, reason="tmux, which is the terminal here, is not installed"
)

DEADLINE = 60.0  # the deadline in seconds, on a busy machine
MAIN = """import os, sys
print(os.getpid(), file=open(sys.argv.pop(1), "w"))
from radixkv_monitor.cli import main
sys.exit(main())"""


class Terminal:
    """A shell in a window of tmux."""

    def __init__(self, folder: Path, size: tuple[int, int]) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self._pid = folder / "pid"
        self.folder = folder
        width, height = map(str, size)
        paths = os.pathsep.join(each for each in sys.path if each)
        # readline sets COLUMNS and LINES, which would then hide later sizes.
        shell = [
            "env",
            "-u",
            "COLUMNS",
            "-u",
            "LINES",
            "PS1=$ ",
            f"PYTHONPATH={paths}",
            "OMP_NUM_THREADS=1",
            "sh",
            "-i",
        ]
        self._do("new-session", "-d", "-x", width, "-y", height, "-c", str(folder), shlex.join(shell))
        self._do("set", "-g", "status", "off")
        self._tty = self._do("display-message", "-p", "#{pane_tty}").strip()
        self.wait(lambda: self.shows("$"), "the shell")

    def _do(self, *command: str) -> str:
        return subprocess.run([*self._tmux, *command], capture_output=True, text=True, check=True).stdout

    def type(self, text: str) -> None:
        """Type a line into the shell."""
        self._do("send-keys", "-l", text)
        self._do("send-keys", "Enter")

    def write(self, text: str) -> None:
        """Write text to the terminal at once, without a line end."""
        self._do("send-keys", "-l", text)

    def press(self, key: str) -> None:
        self._do("send-keys", key)

    def text(self) -> str:
        return self._do("capture-pane", "-p")

    def shows(self, *words: str) -> bool:
        text = self.text()
        return all(word in text for word in words)

    def wait(self, true: Callable[[], object], expected: str) -> None:
        end = time.monotonic() + DEADLINE
        while not true():
            assert time.monotonic() < end, f"waited in vain for {expected}:\n{self.text()}"
            time.sleep(0.05)

    def wait_for(self, *words: str) -> None:
        self.wait(lambda: self.shows(*words), repr(words))

    def resize(self, width: int, height: int) -> None:
        self._do("resize-window", "-x", str(width), "-y", str(height))

    def modes(self) -> str:
        """Return the modes that a program may change: the screen, the cursor, the mouse, and the line discipline."""
        flags = "#{alternate_on} #{cursor_flag} #{mouse_any_flag} #{mouse_all_flag} #{mouse_sgr_flag} #{wrap_flag}"
        line = subprocess.run(["stty", "-g", "-F", self._tty], capture_output=True, text=True, check=True)
        return self._do("display-message", "-p", flags) + line.stdout

    def start(self, *arguments: str) -> int:
        """Start the monitor in the shell; return its process id."""
        self._pid.unlink(missing_ok=True)
        command = shlex.join([sys.executable, "-c", MAIN, str(self._pid), *arguments])
        self.type(f"{command}; echo status $?.")
        self.wait(lambda: self._pid.exists() and self._pid.read_text().endswith("\n"), "the command")
        return int(self._pid.read_text())

    def close(self) -> None:
        """Close the window, as a user does."""
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)


@contextmanager
def terminal(size: tuple[int, int]) -> Iterator[Terminal]:
    """Return a terminal in a folder with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="rkv"))
    made = Terminal(folder, size)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder)


def is_there(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return subprocess.check_output(["ps", "-o", "stat=", "-p", str(pid)], text=True).strip()[:1] != "Z"
    except subprocess.CalledProcessError:
        return False


def mirrors(path: Path) -> Iterator[Mirror]:
    """Yield the states of a recording, and check that it starts with a hello and a snapshot and ends after a whole
    frame.
    """
    hello, first, *rest = read_recording(path)
    assert isinstance(hello, Hello) and isinstance(first, Snapshot)
    mirror = Mirror()
    for frame in (first, *rest):
        assert isinstance(frame, Snapshot | Delta)
        mirror.apply(frame.changes)
        yield mirror


@pytest.mark.parametrize("way", mostly_long(["q", "C-c", "SIGTERM", "SIGHUP", "SIGINT"], "q", "SIGTERM"))
def test_whatever_ends_it_puts_the_terminal_back_and_closes_the_recording(way: str) -> None:
    with serving() as (publisher, engine), terminal((80, 24)) as tty:
        engine.change(*many(50))
        before = tty.modes()
        pid = tty.start(str(publisher.path), "--view", "tree", "--record", "a.rec")
        tty.wait_for("recording to a.rec", "49 nodes")
        assert tty.modes() != before
        if way.startswith("SIG"):
            os.kill(pid, signal.Signals[way])
            tty.wait_for(f"status {128 + signal.Signals[way]}.")
        else:
            if way == "C-c":
                tty.press("/")  # letters are a filter here
            tty.press(way)
            tty.wait_for("status 0.")
        assert not is_there(pid)
        assert tty.modes() == before
        assert [len(mirror.nodes) for mirror in mirrors(tty.folder / "a.rec")][-1] == 50


@pytest.mark.long
def test_a_closed_window_leaves_no_process() -> None:
    with serving() as (publisher, engine), terminal((80, 24)) as tty:
        engine.change(*many(50))
        pid = tty.start(str(publisher.path), "--record", "a.rec")
        tty.wait_for("recording to a.rec")
        tty.close()
        wait_until(lambda: not is_there(pid), "it is gone with its terminal")
        wait_until(lambda: publisher.attached == 0)
        assert [len(mirror.nodes) for mirror in mirrors(tty.folder / "a.rec")][-1] == 50


@pytest.mark.long
def test_ctrl_z_goes_to_the_shell_and_fg_comes_back() -> None:
    with serving() as (publisher, engine), terminal((80, 24)) as tty:
        engine.change(*many(50))
        before = tty.modes()
        tty.start(str(publisher.path), "--view", "tree")
        tty.wait_for("49 nodes")
        tty.press("Space")
        tty.wait_for("‖ frozen")
        shown = tty.text()
        tty.press("C-z")
        tty.wait_for("Stopped")
        assert tty.modes() == before
        tty.type("clear; fg")
        tty.wait_for("‖ frozen", "49 nodes")
        assert tty.text().splitlines()[0] == shown.splitlines()[0]
        tty.press("q")
        tty.wait(lambda: not tty.shows("‖ frozen"), "the shell")
        assert tty.modes() == before
