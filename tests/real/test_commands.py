"""The commands with the real model: `radixkv chat FILE.gguf`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def radixkv(*arguments: str, input: str = "") -> str:
    """Run a command; return its output."""
    command = [sys.executable, "-m", "radixkv", *arguments]
    done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_chat_in_the_terminal_forks_and_edits(model_file: Path) -> None:
    lines = ("What is the capital of France?", "/fork", "/edit 1 What is the capital of Japan?", "/branch 1", "/stats")
    system = ("--system", "You answer in one short sentence.", "--kv-memory", "200MB")
    out = radixkv("chat", str(model_file), *system, input="\n".join(lines))
    assert "The capital of France is Paris." in out
    assert "The capital of Japan is Tokyo." in out
    assert "0 of 28 prompt tokens cached" in out
    assert "20 of 28 prompt tokens cached" in out
