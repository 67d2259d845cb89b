"""The example scripts run on the shipped samples, and print true figures."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "traces"


def printed(capsys, monkeypatch, name, *arguments):
    torch.set_num_threads(1)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    return capsys.readouterr().out


def number(out, label):
    return int(re.search(rf"{label} *([\d,]+)", out)[1].replace(",", ""))


@pytest.mark.long
def test_agents_find_what_they_and_earlier_attempts_said(capsys, monkeypatch):
    out = printed(capsys, monkeypatch, "agent_replay.py", "--sessions", "3")
    assert "3 sessions" in out
    prompt, cached = number(out, "prompt tokens"), number(out, "found in cache")
    retried = number(out, "by 1 retries")
    assert 0 < retried < cached < prompt
    assert number(out, "forks in the tree") >= 1
