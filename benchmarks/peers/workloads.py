"""The seeded workloads of `cache_ops.py`, the same for every engine; each returns plain numbers.

The clock is CPU time of this thread, which a busy machine disturbs less than wall time. Checks run outside the clock:
held and matched slots must contain the prompt's own tokens, evicted counts must be exact, and in the end every slot is
free or in the tree.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from engines import Engine, Ids, Slots

SEED = 20240607
VOCABULARY = 128_000
PAGE = 16
ROOMY = 1 << 25  # token slots: a pool that never evicts in these workloads
now = time.thread_time_ns

Make = Callable[[int], Engine]  # capacity in tokens -> a fresh engine
Numbers = dict[str, float]


class Store:
    """Stands in for the KV tensors: one token id a slot."""

    def __init__(self, slots: int = 1 << 20) -> None:
        self.ids = np.full(slots, -1, np.int32)

    def execute(self, plan: tuple[int, Slots, list[tuple[Slots, Slots]]], full: Ids) -> None:
        start, slots, copies = plan
        while len(slots) and slots.max() >= len(self.ids):
            self.ids = np.concatenate([self.ids, np.full_like(self.ids, -1)])
        for source, target in copies:
            self.ids[target] = self.ids[source]
        self.ids[slots] = full[start:]

    def expect(self, slots: Slots, ids: Ids) -> None:
        assert np.array_equal(self.ids[slots], ids), "these slots hold other tokens"


def tokens(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def distinct(rng: np.random.Generator, count: int, length: int) -> npt.NDArray[np.int32]:
    """[count, length] tokens; rows differ in the first, so that none share one by accident."""
    rows = rng.integers(0, VOCABULARY, (count, length), dtype=np.int32)
    rows[:, 0] = VOCABULARY + np.arange(count)
    return rows


def settle() -> None:
    gc.collect()
    gc.freeze()


def middle(nanoseconds: list[int]) -> float:
    return round(float(np.median(nanoseconds)) / 1e3, 2)


def put(engine: Engine, store: Store, ids: Ids) -> int:
    """One whole request, not timed; returns its hit."""
    key = engine.key(ids)
    ticket = engine.open(key)
    engine.reserve(ticket, key)
    store.execute(engine.prepare(ticket), ids)
    engine.publish(ticket)
    engine.release(ticket)
    hit: int = ticket.hit
    return hit


# ---- match


def match(make: Make, shape: str, length: int, repeats: int) -> Numbers:
    """Match a fully cached prompt among 1,000 others.

    node: published at once. grown: 512 tokens a turn, as one session does. chain: grown likewise, and another prompt
    branches off (16 tokens) after each turn, so that the path has length / 512 nodes in every engine.
    """
    engine, store, rng = make(ROOMY), Store(), np.random.default_rng(SEED)
    for _ in range(1000):
        put(engine, store, tokens(rng, 1024))
    ids = tokens(rng, length)
    for end in [length] if shape == "node" else range(512, length + 1, 512):
        put(engine, store, ids[:end])
        if shape == "chain":
            put(engine, store, np.concatenate([ids[:end], tokens(rng, PAGE)]))
    key = engine.key(ids)
    found, slots = engine.found(engine.match(key))
    assert found == length, (found, length)
    store.expect(slots, ids)
    settle()
    spent = []
    for _ in range(repeats):
        key = engine.key(ids)
        begin = now()
        engine.match(key)
        spent.append(now() - begin)
    return {"us": middle(spent)}


# ---- insert


def insert(make: Make, repeats: int, prefix: int = 2048, suffix: int = 8192) -> Numbers:
    """A new suffix below a shared, cached prefix: publishing it, and the whole request."""
    engine, store, rng = make(ROOMY), Store(), np.random.default_rng(SEED)
    shared = tokens(rng, prefix)
    put(engine, store, shared)
    settle()
    publish, reserved, whole = [], [], []
    for i in range(repeats):
        ids = np.concatenate([shared, tokens(rng, suffix)])
        ids[prefix] = VOCABULARY + i  # no accidental sharing
        key = engine.key(ids)
        begin = now()
        ticket = engine.open(key)
        opened = now()
        engine.reserve(ticket, key)
        planned = now()
        store.execute(engine.prepare(ticket), ids)
        ready = now()
        engine.publish(ticket)
        published = now()
        engine.release(ticket)
        end = now()
        assert ticket.hit == prefix, ticket.hit
        publish.append(published - ready)
        reserved.append(published - ready + planned - opened)
        whole.append(planned - begin + end - ready)
    found, slots = engine.found(engine.match(key))
    assert found == len(ids)
    store.expect(slots, ids)
    engine.check()
    return {"publish_us": middle(publish), "reserve_publish_us": middle(reserved), "request_us": middle(whole)}


# ---- evict


def evict(make: Make, leaves: int, repeats: int, leaf: int = 64, prefix: int = 512) -> Numbers:
    """A pool of `leaves` leaves below one shared prefix: the last ones have room, then each new leaf evicts an old one,
    and in the end one request evicts half of all. The cost of eviction is the difference.
    """
    rng = np.random.default_rng(SEED)
    shared = tokens(rng, prefix)
    bodies = distinct(rng, leaves + repeats, leaf)
    engine, store = make(prefix + leaves * leaf), Store(prefix + 2 * bodies.size)
    put(engine, store, shared)
    gc.collect()
    before = resident_bytes()
    for body in bodies[: leaves - repeats]:
        put(engine, store, np.concatenate([shared, body]))
    bytes_per_leaf = (resident_bytes() - before) / (leaves - repeats)
    settle()
    with_room = [timed_leaf(engine, store, shared, body) for body in bodies[leaves - repeats : leaves]]
    assert engine.freed_by_eviction == 0
    full = []
    for i, body in enumerate(bodies[leaves:]):
        full.append(timed_leaf(engine, store, shared, body))
        assert engine.freed_by_eviction == (i + 1) * leaf, engine.freed_by_eviction
    oldest = engine.match(engine.key(np.concatenate([shared, bodies[0]])))
    newest = engine.match(engine.key(np.concatenate([shared, bodies[-1]])))
    assert engine.found(oldest)[0] == prefix and engine.found(newest)[0] == prefix + leaf, "not the oldest went"
    half = leaves * leaf // 2
    bulk = timed_bulk(engine, half)
    assert engine.freed_by_eviction == repeats * leaf + half
    engine.check()
    reserve = middle([reserved for reserved, _ in full])
    return {
        "us": round(reserve - middle([reserved for reserved, _ in with_room]), 2),
        "reserve_us": reserve,
        "request_us": middle([request for _, request in full]),
        "half_ms": bulk,
        "resident_bytes_per_leaf": round(bytes_per_leaf),
    }


def timed_leaf(engine: Engine, store: Store, shared: Ids, body: Ids) -> tuple[int, int]:
    """One request of a new leaf: nanoseconds of its reserve, and of all its verbs."""
    ids = np.concatenate([shared, body])
    key = engine.key(ids)
    begin = now()
    ticket = engine.open(key)
    opened = now()
    engine.reserve(ticket, key)
    reserved = now()
    store.execute(engine.prepare(ticket), ids)
    ready = now()
    engine.publish(ticket)
    engine.release(ticket)
    end = now()
    assert ticket.hit == len(shared), ticket.hit
    return reserved - opened, reserved - begin + end - ready


def timed_bulk(engine: Engine, count: int) -> float:
    """Milliseconds of one reserve of `count` new tokens."""
    big = engine.key(np.full(count, 7, np.int32))
    ticket = engine.open(big)
    begin = now()
    engine.reserve(ticket, big)
    spent = now() - begin
    engine.prepare(ticket)
    engine.publish(ticket)
    engine.release(ticket)
    return round(spent / 1e6, 2)


def traced_bytes(make: Make, leaves: int, leaf: int = 64, prefix: int = 512) -> Numbers:
    """Bytes that Python allocates for a leaf; native memory of another engine would not be counted."""
    rng = np.random.default_rng(SEED)
    engine, store = make(prefix + leaves * leaf), Store(prefix + leaves * leaf)
    shared = tokens(rng, prefix)
    bodies = distinct(rng, leaves, leaf)
    put(engine, store, shared)
    gc.collect()
    tracemalloc.start()
    for body in bodies:
        put(engine, store, np.concatenate([shared, body]))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"bytes": round(used / leaves)}


def resident_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


# ---- multi-turn


def order_of_turns(sessions: int, turns: int, order: str) -> Iterator[int]:
    """uniform: any unfinished session comes next. window: 200 sessions are active at a time."""
    draw = random.Random(SEED)
    left = [turns] * sessions
    active = list(range(sessions if order == "uniform" else min(200, sessions)))
    waiting = iter(range(len(active), sessions))
    while active:
        at = draw.randrange(len(active))
        session = active[at]
        left[session] -= 1
        yield session
        if not left[session]:
            following = next(waiting, None)
            if following is None:
                active[at] = active[-1]
                active.pop()
            else:
                active[at] = following


def turns(make: Make, order: str, new: int, sessions: int, in_flight: int = 16) -> Numbers:
    """`sessions` x 10 turns of `new` tokens (a quarter of them generated), 8 system prompts of `new` tokens, 16
    requests in flight.

    The pool holds 30% of all unique tokens. Clock: open + reserve when a request arrives, publish + release when it
    ends.
    """
    generated, per_session, prompts = new // 4, 10, 8
    rng = np.random.default_rng(SEED)
    system = [tokens(rng, new) for _ in range(prompts)]
    capacity = int((prompts * new + sessions * per_session * new) * 0.30) // PAGE * PAGE
    engine, store = make(capacity), Store()
    history = [system[i % prompts] for i in range(sessions)]
    flying: deque[Any] = deque()
    spent = hit = asked = count = 0
    settle()

    def finish() -> int:
        ticket = flying.popleft()
        begin = now()
        engine.publish(ticket)
        engine.release(ticket)
        return now() - begin

    for session in order_of_turns(sessions, per_session, order):
        fresh = tokens(rng, new)
        prompt = np.concatenate([history[session], fresh[: new - generated]])
        history[session] = full = np.concatenate([history[session], fresh])
        prompt_key, full_key = engine.key(prompt), engine.key(full)
        begin = now()
        ticket = engine.open(prompt_key)
        engine.reserve(ticket, full_key)
        spent += now() - begin
        store.execute(engine.prepare(ticket), full)
        if count % 16 == 0:
            store.expect(engine.held(ticket), full[: ticket.hit])
        hit, asked, count = hit + ticket.hit, asked + len(prompt), count + 1
        flying.append(ticket)
        if len(flying) > in_flight:
            spent += finish()
    while flying:
        spent += finish()
    engine.check()
    return {
        "turns_per_s": round(count / (spent / 1e9)),
        "us": round(spent / count / 1e3, 2),
        "hit_rate": round(hit / asked, 5),
        "evicted_tokens": engine.freed_by_eviction,
    }


# ---- decode and the machine


def call_nanoseconds() -> Numbers:
    """CPU time of one empty Python call: the present speed of this machine, to compare absolute figures by."""

    def nothing() -> None:
        pass

    spent = []
    for _ in range(50):
        begin = now()
        for _ in range(1000):
            nothing()
        spent.append(now() - begin)
    return {"ns": round(float(np.median(spent)) / 1000, 1)}


def decode(make: Make, length: int = 4096, new: int = 2048, sequences: int = 8) -> Numbers:
    """One token at a time: reserve and publish each, round-robin over open requests of `length` tokens, as a decode
    step does.

    Only for engines whose tickets take a second `reserve`; the clock is read once a round of all sequences.
    """
    engine, rng = make(ROOMY), np.random.default_rng(SEED)
    sequence_of = [tokens(rng, length) for _ in range(sequences)]
    tickets = []
    for ids in sequence_of:
        ticket = engine.open(engine.key(ids))
        engine.reserve(ticket, engine.key(ids))
        engine.publish(ticket)
        tickets.append(ticket.sequence)
    settle()
    spent = []
    for i in range(new):
        token = engine.key(np.array([i], np.int32))
        begin = now()
        for sequence in tickets:
            sequence.extend(token)
            sequence.commit()
        spent.append((now() - begin) / sequences)
    assert all(sequence.length == length + new for sequence in tickets)
    return {"us": round(float(np.median(spent)) / 1e3, 3), "mean_us": round(float(np.mean(spent)) / 1e3, 3)}
