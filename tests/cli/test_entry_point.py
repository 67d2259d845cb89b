"""A command that a signal ends cleans up, and has the exit status that shells expect."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import argparse, signal, sys, time
from radixkv.cli import entry_point

def run(arguments):
    try:
        print("running", flush=True)
        time.sleep(60)
    finally:
        print("restored", flush=True)
        if arguments.slow:
            time.sleep(60)

if __name__ == "__main__":
    if "nohup" in sys.argv:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(entry_point.run("program", argparse.Namespace(module="command", slow="slow" in sys.argv)))
"""


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "command.py").write_text(COMMAND)
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n" + COMMAND, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_command_clean_up(number: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path) as process:
        process.send_signal(number)
        assert process.communicate(timeout=30) == ("restored\n", "")
    assert process.returncode == 128 + number


def test_a_second_signal_ends_the_command_at_once(tmp_path: Path) -> None:
    with started(tmp_path, "slow") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "restored\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    with started(tmp_path, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30) == ("restored\n", "")
    assert process.returncode == 128 + signal.SIGTERM
