"""Clients of Ollama's API get the scripted replies, and each next turn hits the previous prompt and reply."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL, Host, Run, run_client
from tests.clients.install import OLLAMA, obstacle
from tests.clients.recorder import Traffic
from tests.clients.scripted import call
from tests.figures import Figure

REPLIES = {
    "My name is Nora.": "Hello Nora!",
    "What is my name?": "Your name is Nora.",
    "weather in Paris?": call("get_weather", city="Paris"),
    "It is sunny": "Take a hat.",
    "think hard": "<think>\nHm, so.\n</think>\n\nIt is 42.",
    "Who is 30?": '{"name": "Nora", "age": 30}',
}


def test_each_turn_hits_the_previous_one(traffic: Traffic, run_program: Run, figure: Figure) -> None:
    check("ollama, Python", run_program("ollama_sdk.py", "openai2"), traffic, figure)


def test_each_turn_hits_the_previous_one_on_node(host: Host, traffic: Traffic, tmp_path: Path, figure: Figure) -> None:
    if not OLLAMA.installed:
        pytest.skip(f"{OLLAMA.name} is not installed: {obstacle() or '`make clients` installs it'}")
    script = Path(__file__).parent / "programs" / "ollama_js.mjs"
    command = ["node", str(script), str(OLLAMA.path), host.url, MODEL]
    check("ollama, Node.js", run_client(command, tmp_path, tmp_path, {}), traffic, figure)


def check(name: str, output: str, traffic: Traffic, figure: Figure) -> None:
    """Check the counts that the client read, and the hits that the server counted."""
    conversations = json.loads(output.splitlines()[-1])
    turns = [each for each in traffic.exchanges() if each.usage]  # other requests are refused on purpose
    counted = [[each.usage["prompt"], each.usage["cached"], each.usage["output"]] for each in turns]
    given = [cost for costs in conversations for cost in costs]
    assert given == [[count[0], *count[-2:]] if len(given[0]) == 3 else [count[0], count[2]] for count in counted]
    rest, prompt, cached = iter(counted), 0, 0
    for costs in conversations:
        for before, turn in pairwise([next(rest) for _ in costs]):
            assert turn[1] == before[0] + before[2] - 1  # the last sampled token is not computed yet
            prompt, cached = prompt + turn[0], cached + turn[1]
    figure(f"{name}: {len(counted)} requests, {cached:,} of {prompt:,} prompt tokens of next turns hit")
