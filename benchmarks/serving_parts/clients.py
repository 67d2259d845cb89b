"""Run the clients of the serving benchmark: N clients that wait for each answer."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

from .servers import Server
from .workloads import Session


@dataclass(frozen=True)
class Record:
    """One request as its client saw it; times are seconds on one clock, `arrivals` one for each token."""

    session: str
    turn: int
    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    sent: float
    arrivals: tuple[float, ...]


def closed_loop(server: Server, sessions: list[Session], clients: int) -> list[Record]:
    """`clients` clients work through the sessions without a pause; a session's branches follow it. In no order."""
    records: list[Record] = []
    with ThreadPoolExecutor(clients) as pool:
        pending = {pool.submit(_play, server, session, []) for session in sessions}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for session, history, new in (future.result() for future in done):
                records += new
                pending |= {pool.submit(_play, server, branch, list(history)) for branch in session.branches}
    return records


def _play(server: Server, session: Session, history: list[int]) -> tuple[Session, list[int], list[Record]]:
    """One session, turn by turn; returns it with the history at its end."""
    records = []
    for number, turn in enumerate(session.turns):
        history += turn.new
        prompt, arrivals, reply = tuple(history), [], []
        sent = time.perf_counter()
        for tokens in server.stream(list(prompt), turn.reply):
            arrivals += [time.perf_counter()] * len(tokens)
            reply += tokens
        if len(reply) != turn.reply:
            raise RuntimeError(f"{server.name} gave {len(reply)} tokens, {turn.reply} were asked for")
        records.append(Record(session.name, number, prompt, tuple(reply), sent, tuple(arrivals)))
        history += reply
    return session, history, records
