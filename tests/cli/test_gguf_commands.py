"""The commands on a GGUF file: its name, its findings, and a conversation."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from radixkv import SamplingParams
from radixkv.cli import main
from tests.cli.gguf_chat_model import write_chat_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    return write_chat_model(tmp_path / "small-Q8_0.gguf")


@pytest.mark.parametrize("arguments", [["small-Q8_0.gguf"], ["--model", "small-Q8_0.gguf"], ["."]])
def test_chat(
    arguments: list[str], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand again\n"))
    assert main(["chat", *arguments, "--kv-memory", "16MB", "--max-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("small-Q8_0, 512 tokens" if arguments != ["."] else "., 512 tokens")
    assert out.count("prompt tokens cached") == 2


def test_doctor_describes_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", file.name, "--device", "cpu", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    seen = {each["about"]: each["seen"] for each in findings}
    assert seen["model"].startswith("small-Q8_0: llama, float32 on cpu, context 512, 264 token ids")
    assert seen["file"].startswith("GGUF of architecture llama, ")
    assert seen["file"].endswith("KiB of weights; tensors: 16 Q8_0, 5 F32")
    assert "chat template" in seen
