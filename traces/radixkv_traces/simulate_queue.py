"""Simulate a queue before the cache: the order of waiting requests changes the hits and the waits.

Requests arrive at their recorded times, all at once in a trace without times. A session's next request also waits for
the answer to the one before. Prompts are computed one at a time, at a constant rate for tokens that miss. Answers are
generated in parallel, each at a constant rate. The cache is the real one, with one token for each recorded block, as in
`simulate`.

The order follows the rules of the engine's wait queue: turns between the namespaces of a trace, then overdue requests,
then "fcfs" or "longest-prefix". The first waiting requests are announced to the cache, which evicts their cached
prefixes last.

The model leaves out chunks of prompts, preemption, memory of running answers, and the bound on the streams of one
namespace. A prompt is not held while its answer is generated. For the turns, a request has computed its prompt and its
answer as soon as its prefill starts.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from itertools import accumulate, islice, product
from math import inf
from typing import Any

import numpy as np

from radixkv.cache import POLICIES, Hint, PrefixCache
from radixkv.cache.announcements import Announcement
from radixkv.cli.entry_point import table
from radixkv.config import ORDERS
from radixkv.errors import InvalidInput, UnknownPolicy
from radixkv.turns import Group, Turns, group_key
from radixkv_traces import cli
from radixkv_traces.cli import Capacity, positive
from radixkv_traces.simulate import HitRate, Progress
from radixkv_traces.workload import Workload

LOOKED_AT = 128  # waiting requests whose cached prefix is compared, and announced, as in the engine
_STRIDE = 64  # requests between two calls of `progress`


@dataclass(frozen=True, slots=True)
class Service:
    """The speed of a simulated engine, and the bounds of its queue."""

    prefill_rate: float = 20000.0  # prompt tokens per second that miss, over all requests
    decode_rate: float = 50.0  # tokens per second of each answer
    max_sequences: int = 64  # requests that run at once
    max_delay: float = 10.0  # seconds after which an overtaken request goes before others of its namespace

    def __post_init__(self) -> None:
        for name in ("prefill_rate", "decode_rate"):
            if not 0 < getattr(self, name) < inf:
                raise InvalidInput(f"{name}={getattr(self, name)!r}: allowed are tokens per second > 0")
        if not self.max_delay > 0:
            raise InvalidInput(f"max_delay={self.max_delay!r}: allowed are seconds > 0")
        if self.max_sequences < 1:
            raise InvalidInput(f"max_sequences={self.max_sequences!r}: allowed is an int of at least 1")


@dataclass(frozen=True, slots=True)
class QueueResult(HitRate):
    """The result of a replay with a queue; times are seconds of the simulated clock, in the order of service."""

    policy: str
    order: str
    capacity_blocks: int
    input_tokens: int  # of the served requests
    hit_tokens: int
    waits: array[float]  # from arrival to the start of the prefill
    ttfts: array[float]  # from arrival to the first token
    duration: float  # from the first arrival to the last answer
    seconds: float  # of CPU time
    finished: bool  # False: Ctrl-C ended the replay early


def replay_queue(
    workload: Workload,
    capacity_blocks: int,
    policy: str,
    order: str,
    service: Service,
    progress: Progress | None = None,
) -> QueueResult:
    """Serve all requests from a pool of `capacity_blocks` blocks, in the order "fcfs" or "longest-prefix".

    O(blocks) in all, and O(blocks of LOOKED_AT prompts) for each request in the order "longest-prefix". Ctrl-C ends it
    early. Raises InvalidInput, and UnknownPolicy for bounds, which need the order of requests in advance.
    """
    if order not in ORDERS:
        raise InvalidInput(f"order {order!r}: allowed are {', '.join(ORDERS)}")
    if policy not in POLICIES:
        raise UnknownPolicy(f"policy {policy!r} with --order: allowed are {', '.join(sorted(POLICIES))}")
    begin = time.process_time()
    queue = _Queue(workload, capacity_blocks, policy, order, service)
    try:
        for served in queue.run():
            if progress is not None and served % _STRIDE == 0:
                progress(served, len(workload.requests))
    except KeyboardInterrupt:
        pass
    served = min(len(queue.waits), len(queue.ttfts))
    return QueueResult(
        policy,
        order,
        capacity_blocks,
        queue.input_tokens,
        queue.hit_tokens,
        queue.waits[:served],
        queue.ttfts[:served],
        queue.duration,
        time.process_time() - begin,
        served == len(workload.requests),
    )


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that arrived and was not served yet."""

    index: int
    arrival: float
    group: Group
    overtaken_at: float = inf  # for the first time
    announcement: Announcement | None = None


class _Queue:
    def __init__(self, workload: Workload, capacity: int, policy: str, order: str, service: Service) -> None:
        self._workload = workload
        self._service = service
        self._by_prefix = order == "longest-prefix"
        self._now = 0.0
        self._cache = PrefixCache(capacity, 1, policy, clock=lambda: self._now)
        self._turns = Turns(service.max_sequences)
        self._waiting: list[_Waiting] = []  # by arrival
        self._arrivals: list[tuple[float, int]] = []  # heap of (time, index), the next one of each session
        self._following = _following(workload)
        self._times = array("d", accumulate((each.timestamp / 1000 for each in workload.requests), max))
        self._running: list[tuple[float, int, Group]] = []  # heap of the ends of answers
        self._prefilled = 0.0  # the end of the present prefill
        self.input_tokens = self.hit_tokens = 0
        self.waits, self.ttfts = array("d"), array("d")
        self._last_answer = 0.0
        followers = set(self._following.values())
        for index, arrival in enumerate(self._times):
            if index not in followers:
                heappush(self._arrivals, (arrival, index))

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last answer so far."""
        return self._last_answer - self._times[0] if self.ttfts else 0.0

    def run(self) -> Iterator[int]:
        """Serve all requests; yields the number of served ones after each."""
        while self._arrivals or self._waiting:
            self._advance()
            if self._waiting:
                yield self._serve(self._take())

    def _advance(self) -> None:
        """Move the clock to the next start of a prefill, or to the next arrival if no request waits."""
        full = len(self._running) >= self._service.max_sequences
        ready = max(self._now, self._prefilled, self._running[0][0] if full else 0.0)
        self._now = ready if self._waiting else max(ready, self._arrivals[0][0])
        while self._running and self._running[0][0] <= self._now:
            self._turns.leave(heappop(self._running)[2])
        while self._arrivals and self._arrivals[0][0] <= self._now:
            self._arrive(*heappop(self._arrivals))

    def _arrive(self, arrival: float, index: int) -> None:
        key, waiting = group_key(self._workload.requests[index].namespace), self._groups()
        group = self._turns.enter(key, waiting)
        self._waiting.append(_Waiting(index, arrival, group))

    def _groups(self) -> dict[Group, None]:
        """Return the groups with waiting requests, by the arrival of their oldest one."""
        waiting = self._waiting if self._turns.several else self._waiting[:1]  # else all are of one group
        return dict.fromkeys(each.group for each in waiting)

    def _take(self) -> _Waiting:
        """Take the next request from the queue, and announce the first ones of the others."""
        turn = min(self._groups(), key=lambda group: group.tokens)
        ready = (each for each in self._waiting if each.group is turn)
        offered = list(islice(ready, LOOKED_AT if self._by_prefix else 1))
        chosen = min(offered, key=self._key) if len(offered) > 1 else offered[0]
        at = self._waiting.index(chosen)
        for other in islice(self._waiting, at):
            if other.group is turn:
                other.overtaken_at = min(other.overtaken_at, self._now)
        del self._waiting[at]
        self._turns.last = turn
        if chosen.announcement is not None:
            chosen.announcement.close()
        for each in islice(self._waiting, LOOKED_AT):
            if each.announcement is None:
                request = self._workload.requests[each.index]
                each.announcement = self._cache.announce(request.blocks, request.namespace)
        return chosen

    def _key(self, waiting: _Waiting) -> tuple[bool, int]:
        if self._now - waiting.overtaken_at >= self._service.max_delay:
            return False, 0
        request = self._workload.requests[waiting.index]
        return True, -self._cache.match(request.blocks, request.namespace).length

    def _serve(self, waiting: _Waiting) -> int:
        """Compute a prompt, and begin its answer; returns the number of served requests."""
        index, service, cache = waiting.index, self._service, self._cache
        request = self._workload.requests[index]
        sequence = cache.open(request.blocks, request.namespace)
        sequence.extend(request.blocks[sequence.length : cache.num_blocks])
        sequence.commit()
        hit = self._workload.hit_tokens(index, sequence.cached_length)
        self._prefilled = self._now + (request.input_length - hit) / service.prefill_rate
        sequence.close(Hint(kind=request.stop or None, output_length=request.output_length))
        end = self._prefilled + request.output_length / service.decode_rate
        heappush(self._running, (end, index, waiting.group))
        waiting.group.tokens += request.input_length - hit + request.output_length
        self._last_answer = max(self._last_answer, end)
        following = self._following.get(index)
        if following is not None:
            heappush(self._arrivals, (max(self._times[following], end), following))
        self.input_tokens += request.input_length
        self.hit_tokens += hit
        self.waits.append(self._now - waiting.arrival)
        self.ttfts.append(self._prefilled - waiting.arrival)
        return len(self.ttfts)


def _following(workload: Workload) -> dict[int, int]:
    """Return the next request of the same session, for each request that has one."""
    last: dict[str, int] = {}
    following = {}
    for index, request in enumerate(workload.requests):
        if request.session is not None:
            if request.session in last:
                following[last[request.session]] = index
            last[request.session] = index
    return following


# ---- the report


def add_queue(parser: argparse.ArgumentParser) -> None:
    """Add the options of the simulated queue."""
    queue = parser.add_argument_group("queue", "with --order, requests take time and wait for each other")
    queue.add_argument(
        "--order", metavar="LIST", help=f"orders of waiting requests: {', '.join(ORDERS)} (default: no request waits)"
    )
    queue.add_argument(
        "--prefill-rate", type=float, default=20000.0, metavar="N",
        help="prompt tokens per second that are computed (default 20000)",
    )  # fmt: skip
    queue.add_argument(
        "--decode-rate", type=float, default=50.0, metavar="N", help="tokens per second of each answer (default 50)"
    )
    queue.add_argument(
        "--max-sequences", type=positive, default=64, metavar="N", help="requests that run at once (default 64)"
    )
    queue.add_argument(
        "--max-delay", type=float, default=10.0, metavar="SECONDS",
        help="a request that was first overtaken so long ago goes before others of its namespace (default 10)",
    )  # fmt: skip


def service_of(arguments: argparse.Namespace) -> Service:
    """Return the speed and the bounds that the options state. Raises InvalidInput."""
    service = Service(**{setting.name: getattr(arguments, setting.name) for setting in fields(Service)})
    if arguments.order is None and service != Service():
        raise InvalidInput("--prefill-rate, --decode-rate, --max-sequences and --max-delay need --order")
    return service


def queue_rows(
    workload: Workload, capacities: Sequence[Capacity], policies: Sequence[str], orders: Sequence[str], service: Service
) -> Iterator[dict[str, Any]]:
    """Simulate each policy at each capacity in each order, until Ctrl-C or SIGTERM."""
    for capacity, policy, order in product(capacities, policies, orders):
        try:
            with cli.Progress(f"{policy}, {order} at {capacity.text}") as progress:
                result = replay_queue(workload, capacity.blocks, policy, order, service, progress)
        except KeyboardInterrupt:  # before its first request
            return
        yield _row(capacity, service, result)
        if not result.finished:
            return


def queue_text(service: Service, rows: Sequence[dict[str, Any]]) -> str:
    """Return the speed of the engine, and a table with a row for each replay."""
    head = (
        f"{service.prefill_rate:,.0f} prompt tokens per second, {service.decode_rate:,.0f} tokens per second of each "
        f"answer, {service.max_sequences:,} requests at once, overdue after {service.max_delay:g} s"
    )
    columns = ("capacity", "blocks", "policy", "order", "hit rate", "wait p50", "p99", "TTFT p50", "p99", "duration")
    lines = [
        [row["capacity"], f"{row['capacity_blocks']:,}", row["policy"], row["order"], f"{row['token_hit_rate']:.4f}"]
        + [f"{(row[name] or {}).get(each, 0.0):,.2f} s" for name in ("wait_s", "ttft_s") for each in ("p50", "p99")]
        + [f"{row['duration_s']:,.0f} s"]
        for row in rows
    ]
    return head + "\n\n" + table(columns, lines, left=(0, 2, 3))


def _row(capacity: Capacity, service: Service, result: QueueResult) -> dict[str, Any]:
    return {
        "policy": result.policy,
        "order": result.order,
        "max_delay": service.max_delay,
        "capacity": capacity.text,
        "capacity_blocks": result.capacity_blocks,
        "token_hit_rate": result.token_hit_rate,
        "requests": len(result.ttfts),
        "input_tokens": result.input_tokens,
        "hit_tokens": result.hit_tokens,
        "wait_s": percentiles(result.waits),
        "ttft_s": percentiles(result.ttfts),
        "duration_s": round(result.duration, 3),
        "seconds": round(result.seconds, 4),
        "finished": result.finished,
    }


def percentiles(values: array[float]) -> dict[str, float] | None:
    """Return mean, median, 90th and 99th percentile and maximum; None without values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    found = {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99, "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}
