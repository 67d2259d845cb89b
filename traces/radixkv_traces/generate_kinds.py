"""What the sessions of made-up workloads do: chat, tool agents, tree-of-thought search, questions on shared documents.

Knows distributions, each stated where it is used. They are round numbers of the orders that published traces show, and
no more than that: measure with your own trace where you have one. Answers come at 50 tokens a second. "Log-normal 40
(1.0)" means a median of 40 and a sigma of 1.0; "geometric 4" a mean of 4, from 1 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from radixkv_traces.generate import Call, Draw, Segment, Session, Shared

TOKENS_PER_SECOND = 50.0
CHAT_CONTEXT = 4096
AGENT_CONTEXT = 131072


def chat(draw: Draw, number: int, shared: Shared) -> Iterator[Call]:
    """People who talk with one of four assistants.

    Assistant by Zipf; its system prompt log-normal 200 (0.5) tokens. Geometric 4 turns: a message of log-normal 40
    (1.0) tokens, an answer of log-normal 200 (0.8), a pause of log-normal 30 (1.2) seconds. A conversation ends before
    it is longer than 4,096 tokens.
    """
    texts = _Texts(number)
    prompt = [shared.segment("assistant", draw.rank(4), 200, 0.5, 1000)]
    now = 0.0
    for _ in range(draw.count(4)):
        prompt.append(texts.new(draw.tokens(40, 1.0, 2000)))
        answer = draw.tokens(200, 0.8, 1500)
        if _length(prompt) + answer > CHAT_CONTEXT:
            return
        yield Call(now, tuple(prompt), answer)
        prompt.append(texts.new(answer))
        now += answer / TOKENS_PER_SECOND + draw.seconds(30, 1.2)


def agent(draw: Draw, number: int, shared: Shared) -> Iterator[Call]:
    """Agents that call tools until they are done, and people who come back with the next task.

    Three agents by Zipf; system prompt and tools log-normal 8,000 (0.4) tokens. Geometric 2.5 tasks of log-normal 150
    (1.0) tokens; each takes geometric 12 calls; a call says log-normal 120 (0.8) tokens, its tool log-normal 400
    (1.3) after log-normal 2 (1.2) seconds; one call in twenty is made again from the same prompt. Before the next task
    pass log-normal 120 (1.5) seconds. Above 131,072 tokens the history becomes a summary of log-normal 1,500 (0.4).
    """
    texts = _Texts(number)
    system = shared.segment("agent", draw.rank(3), 8000, 0.4, 30000)
    prompt, now = [system], 0.0
    for _ in range(draw.count(2.5)):
        prompt.append(texts.new(draw.tokens(150, 1.0, 8000)))
        calls = draw.count(12)
        while calls:
            if _length(prompt) > AGENT_CONTEXT:
                prompt = [system, texts.new(draw.tokens(1500, 0.4, 8000))]
            answer = draw.tokens(120, 0.8, 4000)
            yield Call(now, tuple(prompt), answer, "end_turn" if calls == 1 else "tool_use")
            now += answer / TOKENS_PER_SECOND
            if draw.random() < 0.05:
                continue  # the answer was no good: the same prompt again
            calls -= 1
            prompt.append(texts.new(answer))
            if calls:
                prompt.append(texts.new(draw.tokens(400, 1.3, 20000)))
                now += draw.seconds(2, 1.2)
        now += draw.seconds(120, 1.5)


def tot(draw: Draw, number: int, shared: Shared) -> Iterator[Call]:
    """Tree-of-thought search: every thought is continued in several ways, all are judged, the best are kept.

    One instruction of about 1,000 tokens to propose and one of about 500 to judge; a problem of log-normal 200 (0.6).
    Three levels: five thoughts of log-normal 60 (0.5) tokens below each of the kept ones, a verdict of 5 tokens on
    each, and the two best (at random) are kept. The calls of a level run at once, and a level follows the other.
    """
    texts = _Texts(number)
    propose, judge = (shared.segment(each, 0, size, 0.0, size) for each, size in (("propose", 1000), ("judge", 500)))
    problem = texts.new(draw.tokens(200, 0.6, 2000))
    kept: list[tuple[Segment, ...]] = [()]
    now = 0.0
    for _ in range(3):
        grown = [(*path, texts.new(draw.tokens(60, 0.5, 500))) for path in kept for _ in range(5)]
        for path in grown:
            yield Call(now, (propose, problem, *path[:-1]), path[-1].tokens)
        now += max(path[-1].tokens for path in grown) / TOKENS_PER_SECOND
        for path in grown:
            yield Call(now, (judge, problem, *path), 5)
        now += 5 / TOKENS_PER_SECOND
        kept = draw.sample(grown, 2)


def rag(draw: Draw, number: int, shared: Shared) -> Iterator[Call]:
    """Questions on documents of one collection, with the documents in the prompt.

    An instruction of about 300 tokens, then four of 2,000 documents by Zipf (1.0), the most popular first, each
    log-normal 600 (0.7) tokens. Geometric 1.5 questions on the same documents: log-normal 30 (0.6) tokens, an answer
    of log-normal 150 (0.7), a pause of log-normal 20 (1.0) seconds.
    """
    texts = _Texts(number)
    documents: set[int] = set()
    while len(documents) < 4:
        documents.add(draw.rank(2000))
    prompt = [shared.segment("instruction", 0, 300, 0.0, 300)]
    prompt += [shared.segment("document", each, 600, 0.7, 8000) for each in sorted(documents)]
    now = 0.0
    for _ in range(draw.count(1.5)):
        prompt.append(texts.new(draw.tokens(30, 0.6, 500)))
        answer = draw.tokens(150, 0.7, 1500)
        yield Call(now, tuple(prompt), answer)
        prompt.append(texts.new(answer))
        now += answer / TOKENS_PER_SECOND + draw.seconds(20, 1.0)


KINDS: dict[str, Session] = {"chat": chat, "agent": agent, "tot": tot, "rag": rag}


class _Texts:
    """Texts that only one session has."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._numbers = count()

    def new(self, tokens: int) -> Segment:
        """Another one."""
        return Segment((self._session, next(self._numbers)), tokens)


def _length(prompt: list[Segment]) -> int:
    return sum(segment.tokens for segment in prompt)
