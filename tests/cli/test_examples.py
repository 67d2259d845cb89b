"""Every example runs, and prints the promised lines."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from tests.disk.stored import let_any_disk_do

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMISED = {
    "chat.py": ["Your boat is green.", "Your name is Nora. You live in Oslo.", "Your boat is red."],
    "forked_agents.py": [f"There are {count} {item}s in stock." for item, count in (("lamp", 4), ("rope", 31))],
    "warm_start.py": [
        "first start: 0 of 1,601 prompt tokens",
        "second start: 1,600 of 1,601 prompt tokens were read from disk",
    ],
    "cache_alone.py": ["7 of 10 tokens are cached", "hit rate 35%"],
}


def test_every_example_is_tested():
    elsewhere = {"agent_http.py", "fleet.py"}  # tests/serve/test_sdks.py has a server, tests/fleet Dynamo
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISED) | elsewhere


@pytest.mark.parametrize("name", PROMISED)
def test_it_runs(name, capsys, monkeypatch):
    torch.set_num_threads(1)
    let_any_disk_do(monkeypatch)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    out = capsys.readouterr().out
    for line in PROMISED[name]:
        assert line in out
