"""Run the clients of the serving benchmark: N clients that wait for each answer, or arrivals at a fixed rate."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

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
    """`clients` clients work through the sessions without a pause; a session's branches follow it."""
    return _play_all(server, [(session, 0.0) for session in sessions], clients, pauses=False)


def open_loop(server: Server, sessions: list[Session], rate: float, seed: int = 0) -> list[Record]:
    """Sessions arrive as a Poisson process, `rate` requests a second over all their turns, and pause as they say."""
    draw = np.random.default_rng(seed)
    requests = sum(session.requests for session in sessions)
    gaps = draw.exponential(requests / len(sessions) / rate, len(sessions))
    starts = np.cumsum(gaps) - gaps[0]
    crowd = sum(1 + len(session.branches) for session in sessions)
    return _play_all(server, list(zip(sessions, starts.tolist(), strict=True)), crowd, pauses=True)


def _play_all(server: Server, jobs: list[tuple[Session, float]], threads: int, *, pauses: bool) -> list[Record]:
    """Play each session from its time on, then its branches; records in no order."""
    records: list[Record] = []
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        pending = {pool.submit(_play, server, session, [], begin + at, pauses) for session, at in jobs}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for session, history, new in (future.result() for future in done):
                records += new
                pending |= {
                    pool.submit(_play, server, branch, list(history), begin, pauses) for branch in session.branches
                }
    return records


def _play(
    server: Server, session: Session, history: list[int], at: float, pauses: bool
) -> tuple[Session, list[int], list[Record]]:
    """One session, turn by turn; returns it with the history at its end."""
    time.sleep(max(0.0, at - time.perf_counter()))
    records = []
    for number, turn in enumerate(session.turns):
        if pauses:
            time.sleep(turn.pause)
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
