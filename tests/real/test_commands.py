"""The commands with the real model: `radixkv chat FILE.gguf` and `radixkv convert`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from radixkv import Engine, SamplingParams


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


def test_a_converted_model_gives_the_same_logits(model_file: Path, tmp_path: Path) -> None:
    """The folder has float32 weights, so the file is read to float32, too."""
    prompt = [{"role": "user", "content": "Grüße! Write a short poem about the sea."}]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    radixkv("convert", str(model_file), str(tmp_path / "folder"))
    replies = []
    for path in (tmp_path / "folder", model_file):
        with Engine.load(path, num_blocks=20, dtype="float32", weights="float32", monitor=False) as loaded:
            replies += loaded.generate([prompt], params)
    done, own = replies
    assert (done.token_ids, done.logprobs) == (own.token_ids, own.logprobs)
