"""Simulate several engines and a router: what a division of one pool costs in hits, balance and waits.

Each replica has an equal part of the pool: a real prefix cache with one token for each recorded block, as in simulate.
Requests arrive at their recorded times, and are routed then. A replica computes one prompt at a time, in the order of
arrival, at a constant rate for tokens that miss. The router knows each cache exactly, with the prompts that wait there.

random        any replica, from a fixed seed
round-robin   the replicas in turn
sticky        the replica of the session's first request, which went to the one with the least work
prefix        the replica with the longest cached prefix; of several, the one with the least work
expected-ttft the replica that is expected to answer first: its work, and the tokens of this prompt that miss there.
              Dynamo's router weighs both, too
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from radixkv.cache import POLICIES, Hint, PrefixCache
from radixkv.cli.entry_point import table
from radixkv.errors import InvalidInput, UnknownPolicy
from radixkv_traces import cli
from radixkv_traces.cli import Capacity
from radixkv_traces.records import TraceRequest
from radixkv_traces.simulate import HitRate, Progress
from radixkv_traces.simulate_queue import percentiles
from radixkv_traces.workload import Workload

_STRIDE = 64  # requests between two calls of `progress`


@dataclass(frozen=True, slots=True)
class FleetResult(HitRate):
    """The result of a replay by several replicas. `computed_tokens` are those of each, `ttfts` seconds in order."""

    policy: str
    routing: str
    capacity_blocks: int  # of all replicas
    input_tokens: int
    hit_tokens: int
    computed_tokens: tuple[int, ...]
    ttfts: array[float]
    seconds: float  # of CPU time
    finished: bool  # False: Ctrl-C ended the replay early

    @property
    def imbalance(self) -> float:
        """The computed tokens of the busiest replica over the mean; 1.0 is even."""
        return max(self.computed_tokens) * len(self.computed_tokens) / max(sum(self.computed_tokens), 1)


class _Replica:
    """One engine: its cache, and the time at which it has computed all prompts that were sent to it."""

    def __init__(self, capacity: int, policy: str, clock: Callable[[], float]) -> None:
        self.cache = PrefixCache(capacity, 1, policy, clock=clock)
        self.ready = 0.0
        self.computed_tokens = 0

    def match(self, request: TraceRequest) -> int:
        """The leading blocks of a prompt that are cached."""
        return self.cache.match(request.blocks, request.namespace).length

    def serve(self, request: TraceRequest) -> int:
        """Put a prompt into the cache; return its hit in blocks."""
        sequence = self.cache.open(request.blocks, request.namespace)
        hit = sequence.length
        sequence.extend(request.blocks[hit : self.cache.num_blocks])
        sequence.commit()
        sequence.close(Hint(kind=request.stop or None, output_length=request.output_length))
        return hit


class _Router:
    """The replicas, and the ways to choose one for a request, by name."""

    def __init__(self, workload: Workload, replicas: Sequence[_Replica], rate: float) -> None:
        self._workload, self._replicas, self._rate = workload, replicas, rate
        self._rng = random.Random(0)
        self._sessions: dict[str, int] = {}

    def random(self, index: int, now: float) -> int:
        return self._rng.randrange(len(self._replicas))

    def round_robin(self, index: int, now: float) -> int:
        return index % len(self._replicas)

    def sticky(self, index: int, now: float) -> int:
        session = self._workload.requests[index].session
        chosen = None if session is None else self._sessions.get(session)
        if chosen is None:
            chosen = self._least(lambda replica: max(replica.ready, now))
            if session is not None:
                self._sessions[session] = chosen
        return chosen

    def prefix(self, index: int, now: float) -> int:
        request = self._workload.requests[index]
        return self._least(lambda replica: (-replica.match(request), max(replica.ready, now)))

    def expected_ttft(self, index: int, now: float) -> int:
        request = self._workload.requests[index]

        def wait(replica: _Replica) -> float:
            hit = self._workload.hit_tokens(index, replica.match(request))
            return max(replica.ready, now) + (request.input_length - hit) / self._rate

        return self._least(wait)

    def _least(self, key: Callable[[_Replica], Any]) -> int:
        """Return the replica with the least key; of several, the one that has computed least."""
        return min(range(len(self._replicas)), key=lambda at: (key(each := self._replicas[at]), each.computed_tokens))


ROUTINGS = {
    "random": _Router.random, "round-robin": _Router.round_robin, "sticky": _Router.sticky, "prefix": _Router.prefix,
    "expected-ttft": _Router.expected_ttft,
}  # fmt: skip
"""The ways to choose a replica."""


def replay_replicas(
    workload: Workload,
    capacity_blocks: int,
    policy: str,
    replicas: int,
    routing: str,
    prefill_rate: float = 20000.0,
    progress: Progress | None = None,
) -> FleetResult:
    """Serve all requests from `replicas` equal parts of a pool. O(replicas) matches for each request. Ctrl-C ends it.

    Raises InvalidInput for a routing that is unknown, or a part without a block; UnknownPolicy for bounds.
    """
    if routing not in ROUTINGS:
        raise InvalidInput(f"routing {routing!r}: allowed are {', '.join(ROUTINGS)}")
    if policy not in POLICIES:
        raise UnknownPolicy(f"policy {policy!r} with --replicas: allowed are {', '.join(sorted(POLICIES))}")
    part = _part(capacity_blocks, replicas)
    begin, now = time.process_time(), 0.0
    made = [_Replica(part, policy, lambda: now) for _ in range(replicas)]
    router, ttfts, input_tokens, hit_tokens = _Router(workload, made, prefill_rate), array("d"), 0, 0
    try:
        for index, request in enumerate(workload.requests):
            now = workload.times[index]
            replica = made[ROUTINGS[routing](router, index, now)]
            hit = workload.hit_tokens(index, replica.serve(request))
            replica.ready = max(replica.ready, now) + (request.input_length - hit) / prefill_rate
            replica.computed_tokens += request.input_length - hit
            input_tokens, hit_tokens = input_tokens + request.input_length, hit_tokens + hit
            ttfts.append(replica.ready - now)
            if progress is not None and index % _STRIDE == 0:
                progress(index, len(workload.requests))
    except KeyboardInterrupt:
        pass
    computed, seconds = tuple(each.computed_tokens for each in made), time.process_time() - begin
    facts = policy, routing, capacity_blocks, input_tokens, hit_tokens, computed, ttfts, seconds
    return FleetResult(*facts, len(ttfts) == len(workload.requests))


def _part(capacity_blocks: int, replicas: int) -> int:
    """Return the blocks of each replica. A remainder is not used. Raises InvalidInput for a part without a block."""
    if not 1 <= replicas <= capacity_blocks:
        raise InvalidInput(f"replicas={replicas}: a pool of {capacity_blocks:,} blocks has no part for each")
    return capacity_blocks // replicas


# ---- the report


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("replicas", "with --replicas, several engines have equal parts of the pool")
    group.add_argument(
        "--replicas", metavar="LIST",
        help="numbers of engines, such as 2,4,16, beside one with the whole pool; --prefill-rate is of each. "
        "Imbalance: the computed tokens of the busiest over the mean",
    )  # fmt: skip
    group.add_argument("--routing", metavar="LIST", help=f"routers: {', '.join(ROUTINGS)} (default: all)")


def replica_rows(
    workload: Workload,
    capacities: Sequence[Capacity],
    policies: Sequence[str],
    cases: Sequence[tuple[int, str]],
    prefill_rate: float,
) -> Iterator[dict[str, Any]]:
    """Simulate each policy at each capacity in each case, until Ctrl-C. Checks all sizes before the first replay."""
    for capacity, (replicas, _) in product(capacities, cases):
        _part(capacity.blocks, replicas)
    for capacity, policy, (replicas, routing) in product(capacities, policies, cases):
        try:
            with cli.Progress(f"{policy}, {replicas} by {routing} at {capacity.text}") as progress:
                facts = capacity.blocks, policy, replicas, routing, prefill_rate
                result = replay_replicas(workload, *facts, progress)
        except KeyboardInterrupt:  # before its first request
            return
        yield _row(capacity, result)
        if not result.finished:
            return


def replica_cases(replicas: str | None, routing: str | None) -> list[tuple[int, str]]:
    """Return one engine, then each larger number of replicas with each router; nothing without `replicas`.

    Raises InvalidInput.

    >>> replica_cases("2,4", "sticky")
    [(1, 'prefix'), (2, 'sticky'), (4, 'sticky')]
    """
    if replicas is None:
        if routing is not None:
            raise InvalidInput("--routing needs --replicas, the numbers of engines")
        return []
    numbers = replicas.split(",")
    if not all(each.strip().isdecimal() and int(each) for each in numbers):
        raise InvalidInput(f"--replicas {replicas!r}: numbers of engines are expected, such as 2,4,16")
    routings = list(ROUTINGS) if routing is None else [each.strip() for each in routing.split(",")]
    for each in routings:
        if each not in ROUTINGS:
            raise InvalidInput(f"--routing {each!r}: allowed are {', '.join(ROUTINGS)}")
    larger = [number for number in map(int, numbers) if number > 1]  # with one, all routers do the same
    return [(1, "prefix"), *dict.fromkeys(product(larger, routings))]


def _row(capacity: Capacity, result: FleetResult) -> dict[str, Any]:
    replicas = len(result.computed_tokens)
    return {
        "policy": result.policy,
        "capacity": capacity.text,
        "capacity_blocks": result.capacity_blocks,
        "replicas": replicas,
        "routing": result.routing if replicas > 1 else None,
        "token_hit_rate": result.token_hit_rate,
        "requests": len(result.ttfts),
        "input_tokens": result.input_tokens,
        "hit_tokens": result.hit_tokens,
        "computed_tokens": result.computed_tokens,
        "imbalance": round(result.imbalance, 4),
        "ttft_s": percentiles(result.ttfts),
        "seconds": round(result.seconds, 4),
        "finished": result.finished,
    }


def replicas_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for each replay."""
    columns = ("capacity", "blocks", "policy", "replicas", "routing", "hit rate", "imbalance", "TTFT p50", "p99")
    lines = [
        [row["capacity"], f"{row['capacity_blocks']:,}", row["policy"], str(row["replicas"]), row["routing"] or ""]
        + [f"{row['token_hit_rate']:.4f}", f"{row['imbalance']:.2f}"]
        + [f"{(row['ttft_s'] or {}).get(each, 0.0):,.2f} s" for each in ("p50", "p99")]
        for row in rows
    ]
    return table(columns, lines, left=(0, 2, 4))
