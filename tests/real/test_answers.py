"""The answers make sense: questions that this small model answers right, and that a wrong forward would not."""

from __future__ import annotations

import pytest

from radixkv import Engine, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40)
FACTS = (
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of Italy?", "Rome"),
    ("How many days are in a week?", "7"),
    ("What is the opposite of hot?", "cold"),
    ("What is the chemical formula of water?", "H2O"),
    ("What is the first month of the year?", "January"),
    ("How many legs does a spider have?", "eight"),
    ("Which planet is known as the Red Planet?", "Mars"),
    ("What gas do plants absorb from the air?", "carbon dioxide"),
    ("Which animal says meow?", "cat"),
)


@pytest.mark.parametrize(("question", "word"), FACTS)
def test_a_fact(engine: Engine, question: str, word: str) -> None:
    reply = engine.chat("You answer in one short sentence.").send(question, GREEDY)
    assert word in reply.text
    assert reply.finish_reason == "stop"


def test_branches_answer_from_their_own_histories(engine: Engine) -> None:
    chat = engine.chat("You answer in one short sentence.")
    assert "Paris" in chat.send("What is the capital of France?", GREEDY).text
    [branch] = chat.fork()
    assert "Tokyo" in branch.edit(1, "What is the capital of Japan?", GREEDY).text
    spoken = "What language is spoken there?"
    assert "French" in chat.send(spoken, GREEDY).text
    assert "Japanese" in branch.send(spoken, GREEDY).text
    chat.rewind()
    again = chat.send("Which currency do they use?", GREEDY)
    assert "Euro" in again.text
