"""Python SDKs get the scripted replies in each of their forms, and the second turn of a conversation hits the first."""

from __future__ import annotations

import json
from itertools import chain, pairwise

import pytest

from tests.clients.conftest import Run
from tests.clients.recorder import Traffic, Turn
from tests.clients.scripted import call
from tests.figures import Figure

REPLIES = {
    "My name is Nora.": "Hello Nora!",
    "What is my name?": "Your name is Nora.",
    "weather in Paris?": call("get_weather", city="Paris"),
    "It is sunny": "Take a hat.",
    "Nora is 30": call("Person", name="Nora", age=30),
}
# Program, environment, and number of conversations.
RUNS = [
    ("openai_sdk.py", "openai3", 4),
    ("openai_sdk.py", "openai2", 4),
    ("anthropic_sdk.py", "openai3", 2),
    ("openai_agents.py", "openai3", 2),
    ("langchain_openai_sdk.py", "openai3", 4),
    ("litellm_sdk.py", "openai2", 4),
]


@pytest.mark.parametrize(("program", "environment", "count"), RUNS, ids=lambda value: str(value).removesuffix(".py"))
def test_a_conversation_hits_its_own_beginning(
    program: str, environment: str, count: int, traffic: Traffic, run_program: Run, figure: Figure
) -> None:
    output = run_program(program, environment)
    conversations = [[Turn(*turn) for turn in turns] for turns in json.loads(output.splitlines()[-1])]
    assert len(conversations) == count
    turns = [turn for turns in conversations for turn in turns]
    assert turns == traffic.turns()  # the client reads the server's own counts
    for before, turn in chain.from_iterable(map(pairwise, conversations)):
        assert turn.cached == before.total - 1  # the last sampled token, which ends the reply, is not computed yet
    prompt, cached = sum(turn.prompt for turn in turns), sum(turn.cached for turn in turns)
    figure(f"{program}, {environment}: {len(turns)} requests, {cached:,} of {prompt:,} prompt tokens hit")
