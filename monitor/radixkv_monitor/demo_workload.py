"""The demo's conversations: chats and agents that share system prompts and take turns, made up from a seed.

Texts are token ids only. Each conversation draws from a random generator of its own, so it does not depend on the order
in which others are served.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field
from random import Random

VOCABULARY = 32_000
TENANTS = (None, None, None, "team-red", "team-blue")


@dataclass(frozen=True)
class Kind:
    """The properties of a kind of conversation. Pairs are the least and the most: tokens, seconds or turns."""

    name: str
    system: int
    turns: tuple[int, int]
    questions: tuple[int, int]
    answers: tuple[int, int]
    pauses: tuple[float, float]
    forks: float  # how often a turn is tried several times, from the same history
    retries: float  # how often a turn repeats the last question
    cancels: float  # how often the user stops an answer
    systems: int  # the number of different system prompts


CHAT = Kind("chat", 180, (2, 9), (15, 160), (40, 260), (3.0, 25.0), forks=0.0, retries=0.12, cancels=0.08, systems=4)
AGENT = Kind("agent", 1400, (4, 10), (40, 320), (25, 120), (0.3, 3.0), forks=0.2, retries=0.0, cancels=0.0, systems=2)
SEARCH = Kind("search", 420, (2, 4), (20, 60), (60, 180), (0.2, 1.0), forks=0.7, retries=0.0, cancels=0.0, systems=1)
KINDS = (CHAT, CHAT, CHAT, AGENT, AGENT, SEARCH)


@dataclass
class Conversation:
    """One session and its history so far; `over` after its last turn."""

    number: int
    kind: Kind
    namespace: str | None
    turns_left: int
    random: Random
    system: array[int]
    history: array[int] = field(init=False)
    _asked: array[int] | None = None

    def __post_init__(self) -> None:
        self.history = self.system[:]

    @property
    def over(self) -> bool:
        """Return whether this was its last turn."""
        return self.turns_left <= 0

    def ask(self) -> array[int]:
        """Return the next prompt: the history and new tokens, or the last prompt again."""
        self.turns_left -= 1
        if self._asked is not None and self.random.random() < self.kind.retries:
            self.history = self._asked[:]
        else:
            self.history.extend(_tokens(self.random, self.random.randint(*self.kind.questions)))
            self._asked = self.history[:]
        return self.history[:]

    def answers(self) -> list[array[int]]:
        """Return the coming answers: one, or several to the same history."""
        tries = self.random.randint(2, 4) if self.random.random() < self.kind.forks else 1
        return [_tokens(self.random, self.random.randint(*self.kind.answers)) for _ in range(tries)]

    def stop_after(self) -> int | None:
        """Return after how many tokens the user stops the answer; None if never."""
        stopped = self.random.random() < self.kind.cancels
        return self.random.randint(5, self.kind.answers[0]) if stopped else None

    def pause(self) -> float:
        """Return the seconds until the next turn."""
        return self.random.uniform(*self.kind.pauses)


class Workload:
    """Turns in order of time, from `began` on; about `sessions` conversations are open at once."""

    def __init__(self, seed: int, sessions: int, began: float = 0.0) -> None:
        self._random = Random(seed)
        self._systems = {
            (kind.name, index): _tokens(self._random, kind.system)
            for kind in dict.fromkeys(KINDS)
            for index in range(kind.systems)
        }
        self._due: list[tuple[float, int, Conversation]] = []
        self._count = 0
        for _ in range(sessions):
            self._begin(began + self._random.uniform(0, 8))

    @property
    def next_due(self) -> float:
        """Return the time of the next turn; infinity if all conversations wait for an answer."""
        return self._due[0][0] if self._due else float("inf")

    def due(self, now: float) -> list[tuple[float, Conversation]]:
        """Return the conversations whose next turn is due by `now`, and since when."""
        ready = []
        while self.next_due <= now:
            when, _, conversation = heapq.heappop(self._due)
            ready.append((when, conversation))
        return ready

    def answered(self, conversation: Conversation, answer: array[int], now: float) -> None:
        """End a turn: the next one follows after a pause, or another conversation starts."""
        conversation.history.extend(answer)
        if conversation.over:
            self._begin(now + self._random.uniform(0.5, 6))
        else:
            self._push(now + conversation.pause(), conversation)

    def _begin(self, when: float) -> None:
        kind = self._random.choice(KINDS)
        self._count += 1
        own = Random(self._random.getrandbits(32))
        namespace, system = self._random.choice(TENANTS), self._systems[kind.name, own.randrange(kind.systems)]
        self._push(when, Conversation(self._count, kind, namespace, own.randint(*kind.turns), own, system))

    def _push(self, when: float, conversation: Conversation) -> None:
        heapq.heappush(self._due, (when, conversation.number, conversation))


def _tokens(random: Random, count: int) -> array[int]:
    return array("i", random.choices(range(VOCABULARY), k=count))
