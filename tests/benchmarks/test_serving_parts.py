"""The load and the figures of benchmarks/serving.py: a benchmark that asks the wrong thing is worse than none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from serving_parts.clients import Record, closed_loop
from serving_parts.servers import Counted
from serving_parts.workloads import Session, Shape, build

SMALL = Shape(opening=5, sessions=4, turns=3, new=(1, 4), reply=(2, 3), branch_every=2)


class Echo:
    """Replies with numbers that depend on the whole prompt; counts how many it serves at once."""

    name = "echo"

    def __init__(self, cut: int = 0) -> None:
        self.lock, self.now, self.most, self.cut = threading.Lock(), 0, 0, cut

    def stream(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        for number in range(tokens - self.cut):
            yield [hash((*prompt, number)) % 1000]
        with self.lock:
            self.now -= 1

    def counted(self) -> Counted:
        return Counted(0, 0, None, 0)

    def close(self) -> None: ...


def check_histories(records: list[Record], sessions: list[Session]) -> None:
    """Each request was sent once, after the whole history of its session and of the parent of that session."""
    found = {(record.session, record.turn): record for record in records}
    assert len(found) == len(records) == sum(session.requests for session in sessions)

    def follow(session: Session, history: list[int]) -> None:
        for number, turn in enumerate(session.turns):
            record = found[session.name, number]
            history += turn.new
            assert list(record.prompt) == history
            assert len(record.reply) == len(record.arrivals) == turn.reply
            history += record.reply
        for branch in session.branches:
            follow(branch, list(history))

    for session in sessions:
        follow(session, [])


@pytest.mark.parametrize("clients", [1, 3])
def test_clients_say_what_the_sessions_say(clients: int) -> None:
    sessions, server = build(SMALL, vocab=100), Echo()
    check_histories(closed_loop(server, sessions, clients), sessions)
    assert server.most <= clients
