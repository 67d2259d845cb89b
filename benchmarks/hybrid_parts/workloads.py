"""Token streams of chats, agents and repeated prompts, as an engine would see them; the same each time.

A chat template is imitated by control tokens: a message is a header of three tokens, its words, and two closing tokens.
A template that strips reasoning opens the reply with two thinking tokens, and leaves the reasoning out of the history.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

VOCAB = 30_000
HEADER, CLOSE, THINK, THOUGHT = [1, 2, 3], [4, 5], [6, 7], [8, 9]


class Ask(NamedTuple):
    """One request: its conversation, its prompt, where the last message of the prompt ends, and the reply."""

    session: int
    prompt: Tokens
    message_end: int
    reply: Tokens


class Workload(NamedTuple):
    """Requests in the order of their arrival, one at a time. States of memory are counted per session."""

    name: str
    asks: list[Ask]
    sessions: int
    resumes: bool = False  # whether each turn must resume from the end of the last message of the turn before


def chats(name: str, *, strips: bool, sessions: int, turns: int) -> Workload:
    """Make conversations that share a system prompt of 250 tokens, and whose turns mix at random."""
    rng = random.Random(name)
    system = message(rng, 250)

    def one(session: int) -> Iterator[Ask]:
        history = list(system)
        for _ in range(turns):
            history += message(rng, rng.randint(20, 200))
            opening = HEADER + (THINK if strips else [])
            thoughts = words(rng, rng.randint(50, 400)) + THOUGHT if strips else []
            answer = words(rng, rng.randint(20, 250)) + CLOSE[:1]
            yield ask(session, history, opening, thoughts + answer)
            history += HEADER + answer + CLOSE[1:]

    return Workload(name, mixed(rng, [one(session) for session in range(sessions)]), sessions, strips)


def agents(name: str, *, tasks: int, forks: int, steps: int) -> Workload:
    """Make tasks with one program of 1,200 tokens; a planner works on each, then agents fork from its history."""
    rng = random.Random(name)
    program = message(rng, 1200)

    def work(session: int, history: list[int], count: int) -> Iterator[Ask]:
        for _ in range(count):
            history += message(rng, rng.randint(40, 400))
            reply = words(rng, rng.randint(30, 120)) + CLOSE[:1]
            yield ask(session, history, HEADER, reply)
            history += HEADER + reply + CLOSE[1:]

    def task(first: int) -> Iterator[Ask]:
        history = program + message(rng, rng.randint(300, 900))
        yield from work(first, history, 3)
        yield from mixed(rng, [work(first + 1 + fork, list(history), steps) for fork in range(forks)])

    each = 1 + forks
    return Workload(name, mixed(rng, [task(number * each) for number in range(tasks)]), tasks * each)


def repeats(name: str, *, prompts: int, asks: int) -> Workload:
    """Make prompts of 60 to 3,000 tokens, every second one after one of three openings, and repeat some often."""
    rng = random.Random(name)
    openings = [message(rng, 400) for _ in range(3)]
    texts = []
    for number in range(prompts):
        opening = openings[rng.randrange(3)] if number % 2 else []
        texts.append(opening + message(rng, round(60 * 50 ** rng.random())))
    shares = [1 / (1 + number) ** 0.6 for number in range(prompts)]
    chosen = rng.choices(range(prompts), shares, k=asks)
    found = [ask(each, texts[each], HEADER, words(rng, rng.randint(20, 100)) + CLOSE[:1]) for each in chosen]
    return Workload(name, found, prompts)


def workloads(*, quick: bool) -> list[Workload]:
    """Return all workloads; the quick ones are smaller."""
    size = 1 if quick else 3
    return [
        chats("chats", strips=False, sessions=8 * size, turns=8),
        chats("chats that strip reasoning", strips=True, sessions=8 * size, turns=8),
        agents("agents", tasks=2 * size, forks=4, steps=4),
        repeats("repeated prompts", prompts=12 * size, asks=80 * size),
    ]


# ---- parts


def ask(session: int, history: list[int], opening: list[int], reply: list[int]) -> Ask:
    """Return the request of a turn; the reply follows `opening`, which is a part of the prompt."""
    return Ask(session, np.array(history + opening, np.int32), len(history), np.array(reply, np.int32))


def message(rng: random.Random, count: int) -> list[int]:
    """Return a message of `count` words with its control tokens."""
    return HEADER + words(rng, count) + CLOSE


def words(rng: random.Random, count: int) -> list[int]:
    """Return random tokens."""
    draw: Callable[[int], int] = rng.randrange
    return [10 + draw(VOCAB - 10) for _ in range(count)]


def mixed(rng: random.Random, streams: list[Iterator[Ask]]) -> list[Ask]:
    """Return all requests; each time, a random conversation that has not ended makes the next one."""
    found, left = [], list(streams)
    while left:
        stream = rng.choice(left)
        made = next(stream, None)
        if made is None:
            left.remove(stream)
        else:
            found.append(made)
    return found
