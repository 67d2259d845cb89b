"""Who talks to the demo's engine: chats and agents that share system prompts, by turns, made up from a seed.

Knows token ids and when a turn comes. Knows no cache, no engine and no screen; there is no text, only numbers.
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
    """What one kind of conversation is like; pairs are the least and the most, tokens or seconds or turns."""

    name: str
    system: int
    turns: tuple[int, int]
    asks: tuple[int, int]
    answers: tuple[int, int]
    pauses: tuple[float, float]
    forks: float  # how often a turn is tried several times, from the same history
    shares: int  # how many different system prompts there are


CHAT = Kind("chat", 180, (2, 9), (15, 160), (40, 260), (3.0, 25.0), 0.0, 4)
AGENT = Kind("agent", 1400, (4, 14), (60, 700), (25, 120), (0.3, 3.0), 0.15, 2)
SEARCH = Kind("search", 420, (2, 4), (20, 60), (60, 180), (0.2, 1.0), 0.7, 1)
KINDS = (CHAT, CHAT, CHAT, AGENT, AGENT, SEARCH)


@dataclass
class Conversation:
    """One session: its history so far; it is `over` when no turn will follow."""

    number: int
    kind: Kind
    namespace: str | None
    turns_left: int
    random: Random
    history: array[int] = field(default_factory=lambda: array("i"))

    @property
    def over(self) -> bool:
        """Whether this was its last turn."""
        return self.turns_left <= 0

    def ask(self) -> array[int]:
        """The prompt of its next turn: the history and something new."""
        self.turns_left -= 1
        self.history.extend(_tokens(self.random, self.random.randint(*self.kind.asks)))
        return self.history[:]

    def tries(self) -> int:
        """How many answers the turn asks for at once."""
        return self.random.randint(2, 4) if self.random.random() < self.kind.forks else 1

    def answer_length(self) -> int:
        """Tokens of one answer."""
        return self.random.randint(*self.kind.answers)

    def pause(self) -> float:
        """Seconds until its next turn."""
        return self.random.uniform(*self.kind.pauses)


class Workload:
    """Turns in the order of time; about `sessions` conversations are under way at once."""

    def __init__(self, seed: int, sessions: int) -> None:
        self._random = Random(seed)
        self._systems = {
            (kind.name, index): _tokens(self._random, kind.system)
            for kind in dict.fromkeys(KINDS)
            for index in range(kind.shares)
        }
        self._due: list[tuple[float, int, Conversation]] = []
        self._count = 0
        for _ in range(sessions):
            self._begin(self._random.uniform(0, 8))

    def due(self, now: float) -> list[Conversation]:
        """The conversations whose next turn has come, at `now` seconds since the beginning."""
        ready = []
        while self._due and self._due[0][0] <= now:
            ready.append(heapq.heappop(self._due)[2])
        return ready

    def answered(self, conversation: Conversation, answer: array[int], now: float) -> None:
        """A turn ended: the next one follows after a pause, or another conversation begins."""
        conversation.history.extend(answer)
        if conversation.over:
            self._begin(now + self._random.uniform(0.5, 6))
        else:
            self._push(now + conversation.pause(), conversation)

    def new_tokens(self, count: int) -> array[int]:
        """Tokens that nobody has seen before, as a rule."""
        return _tokens(self._random, count)

    def _begin(self, when: float) -> None:
        kind = self._random.choice(KINDS)
        self._count += 1
        own = Random(self._random.getrandbits(32))
        namespace = self._random.choice(TENANTS)
        conversation = Conversation(self._count, kind, namespace, own.randint(*kind.turns), own)
        conversation.history.extend(self._systems[kind.name, own.randrange(kind.shares)])
        self._push(when, conversation)

    def _push(self, when: float, conversation: Conversation) -> None:
        heapq.heappush(self._due, (when, conversation.number, conversation))


def _tokens(random: Random, count: int) -> array[int]:
    return array("i", random.choices(range(VOCABULARY), k=count))
