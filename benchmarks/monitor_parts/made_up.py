"""A simulated engine: it publishes made-up telemetry over a real Unix socket, always busy, from a seed.

Ten times a second nodes are used, held, released, evicted and published, and requests advance, end and begin. The
records of ended requests, evictions and sessions are at their limits from the start.
"""

from __future__ import annotations

import os
import random
import sys
import time
from concurrent.futures import Future
from dataclasses import replace

from radixkv.telemetry.mirror import ENDED_REQUESTS, EVICTIONS, SESSIONS
from radixkv.telemetry.publisher import Publisher
from radixkv.telemetry.records import (
    NEXT_VICTIMS,
    Changes,
    EngineFacts,
    EvictionRecord,
    NodeRecord,
    RequestRecord,
    SequenceRecord,
    SessionRecord,
)

USED, TOGGLED, REPLACED = 200, 40, 20
"""Nodes that change in a tenth of a second: used; held or released; evicted and published again."""
RUNNING, ENDING = 16, 2
"""Running requests, and how many of them end in a tenth of a second and are replaced."""


class Engine:
    """A tree that changes at random, from a seed; every block has one owner."""

    def __init__(self, nodes: int, blocks: int) -> None:
        self.random = random.Random(1)
        self.facts = EngineFacts(
            engine="benchmark", pid=os.getpid(), started=time.time(), version="0", model="made-up", device="none",
            dtype="none", attention="none", eviction="lru", num_blocks=blocks, block_size=16, bytes_per_block=2**21,
            max_length=32768, max_sequences=64, max_batch_tokens=2048, prefill_chunk=512,
        )  # fmt: skip
        self.free = list(range(blocks))
        self.nodes: dict[int, NodeRecord] = {}
        self.children: dict[int, int] = {}
        self.ids = 0
        self.each = max(1, blocks * 95 // 100 // nodes)
        for namespace in (None, "team-red", "team-blue"):
            self._add(0, namespace)
        while len(self.nodes) < nodes:
            self._add(self._any(), None)
        self.requests: dict[int, RequestRecord] = {}
        self.asked = self.evicted = 0
        self.sent_all = False

    def _any(self) -> int:
        """Return a parent, usually a young one, so that the tree is deep as well as wide."""
        ids = list(self.nodes)
        return self.random.choice(ids[-400:] if self.random.random() < 0.8 else ids[:3])

    def _add(self, parent: int, namespace: str | None) -> NodeRecord:
        self.ids += 1
        above = self.nodes.get(parent)
        runs: list[int] = []
        for block in sorted(self.free.pop() for _ in range(self.each if above else 0)):
            if runs and runs[-2] + runs[-1] == block:
                runs[-1] += 1
            else:
                runs += [block, 1]
        now = time.time()
        node = self.nodes[self.ids] = NodeRecord(
            id=self.ids, parent=parent, start=above.start + above.tokens if above else 0,
            tokens=16 * self.each if above else 0, blocks=tuple(runs), holders=0, locks=0, pins=0, hits=0, priority=0,
            demoted=False, born=now, used=now, namespace=namespace,
            head=tuple(self.random.randrange(32000) for _ in range(8)),
        )  # fmt: skip
        self.children[parent] = self.children.get(parent, 0) + 1
        return node

    def changes(self) -> Changes:
        """Return the changes of a tenth of a second; the first call returns everything."""
        if not self.sent_all:
            self.sent_all = True
            return self._everything()
        went = self._evict()
        gone = tuple(node.id for node in went)
        changed = {node.id: node for node in (self._add(self._any(), None) for _ in range(REPLACED))}
        for place, number in enumerate(self.random.sample(list(self.nodes), USED)):
            node = self.nodes[number]
            locks = 1 - min(1, node.locks) if place < TOGGLED else node.locks
            node = replace(node, used=time.time(), hits=node.hits + 1, locks=locks, holders=locks)
            changed[number] = self.nodes[number] = node
        held = [node for node in changed.values() if node.locks][:16]
        sequences = tuple(
            SequenceRecord(place + 1, None, 0, node.id, node.start + node.tokens, 0, (), node.used)
            for place, node in enumerate(held)
        )
        requests = self._requests()
        return Changes(
            time.time(), nodes=tuple(changed.values()), gone_nodes=gone, sequences=sequences, requests=requests,
            sessions=tuple(self._session(each.session or 0) for each in requests),
            evictions=tuple(map(self._evicted, went)), stats=self._stats(), next_victims=self._victims(),
        )  # fmt: skip

    def _everything(self) -> Changes:
        begun = [self._begun() for _ in range(ENDED_REQUESTS)]
        victims = self.random.choices(list(self.nodes.values()), k=EVICTIONS)
        self.requests = {each.number: each for each in (self._begun() for _ in range(RUNNING))}
        return Changes(
            time.time(), reset=True, stats=self._stats(), nodes=tuple(self.nodes.values()),
            requests=(*(_ended(each) for each in begun), *self.requests.values()),
            sessions=tuple(self._session(number) for number in range(1, SESSIONS + 1)),
            evictions=tuple(map(self._evicted, victims)), next_victims=self._victims(),
        )  # fmt: skip

    # ---- requests, sessions, evictions

    def _begun(self) -> RequestRecord:
        self.asked += 1
        now, prompt = time.time(), self.random.randrange(200, 4000)
        cached = self.random.randrange(prompt)
        return RequestRecord(
            self.asked, "decode", 1 + self.asked % SESSIONS, None, 0, 1, prompt, 500, cached, prompt - cached, 0, 1, 0,
            False, now - 0.3, now - 0.25, now - 0.1, miss_reason="diverged", miss_at=cached,
        )  # fmt: skip

    def _requests(self) -> tuple[RequestRecord, ...]:
        """Add a token to each running request; end the oldest ones, and start others."""
        updated = {
            number: replace(each, output_tokens=each.output_tokens + 1) for number, each in self.requests.items()
        }
        for number in list(updated)[:ENDING]:
            updated[number] = _ended(updated[number])
        updated |= {each.number: each for each in (self._begun() for _ in range(ENDING))}
        self.requests = {number: each for number, each in updated.items() if each.live}
        return tuple(updated.values())

    def _session(self, number: int) -> SessionRecord:
        turns, now = 1 + self.asked // SESSIONS, time.time()
        asked = 900 * turns
        return SessionRecord(number, None, turns, 1, 300 * turns, asked, asked * 2 // 3, 80 * turns, now - 600, now)

    def _evicted(self, node: NodeRecord) -> EvictionRecord:
        self.evicted += 1
        now = time.time()
        again = now + 0.5 if self.evicted % 10 == 0 else None
        why = "to make room for 40 blocks when 12 were free"
        return EvictionRecord(
            self.evicted, now, node.id, node.start, node.tokens, self.each, now - node.used, node.hits, True, why, again
        )

    def _leaves(self) -> list[int]:
        return [number for number, node in self.nodes.items() if node.parent and not self.children.get(number)]

    def _victims(self) -> tuple[int, ...]:
        return tuple(number for number in self._leaves() if not self.nodes[number].locks)[:NEXT_VICTIMS]

    def _evict(self) -> list[NodeRecord]:
        gone = [self.nodes.pop(number) for number in self.random.sample(self._leaves(), REPLACED)]
        for node in gone:
            self.children[node.parent] -= 1
            for first, count in zip(node.blocks[::2], node.blocks[1::2], strict=True):
                self.free.extend(range(first, first + count))
        return gone

    def _stats(self) -> dict[str, float]:
        """Return the counters of a busy engine."""
        asked, held = self.asked, 16 * self.each
        cached = self.facts.num_blocks - len(self.free) - held
        return {
            "cache.num_blocks": self.facts.num_blocks, "cache.free_blocks": len(self.free), "cache.held_blocks": held,
            "cache.cached_blocks": cached, "cache.nodes": len(self.nodes), "cache.query_tokens": 2000 * asked,
            "cache.evicted_tokens": 16 * self.each * self.evicted, "cache.regret_tokens": 16 * self.evicted,
            "prompt_tokens": 2000 * asked, "cached_tokens": 1000 * asked, "computed_tokens": 1000 * asked,
            "output_tokens": 8 * asked, "finished": asked - RUNNING, "running": RUNNING, "waiting": 0,
            "steps": 4 * asked, "step_seconds": 0.02 * asked, "step_tokens": 1008 * asked, "monitor_ns": 4e5 * asked,
        }  # fmt: skip


def _ended(request: RequestRecord) -> RequestRecord:
    return replace(request, phase="finished", ended=time.time(), finish="stop")


def publish(nodes: int, blocks: int) -> None:
    """Publish until the standard input ends; print the path of the socket."""
    engine = Engine(nodes, blocks)

    def collect() -> Future[Changes]:
        future: Future[Changes] = Future()
        future.set_result(engine.changes())
        return future

    publisher = Publisher(engine.facts, collect, lambda: True)
    publisher.start()
    print(publisher.path, flush=True)
    sys.stdin.read()
    publisher.close("the benchmark is over")
