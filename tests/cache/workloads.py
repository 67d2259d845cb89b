"""Serial workloads to compare policies: chains of blocks with a time each, some that suit LRU and some that do not."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from radixkv.cache import Hint, PrefixCache


@dataclass(frozen=True)
class Request:
    """A prompt of whole blocks (block size 1), and the facts for its hint."""

    time: float
    chain: list[int]
    kind: str | None = None
    output: int = 0


def replay(cache: PrefixCache, requests: list[Request], now: list[float], *, hints: bool = True) -> Iterator[int]:
    """Serve one request after the other; yield the hit of each in blocks."""
    for request in requests:
        now[0] = request.time
        sequence = cache.open(request.chain)
        sequence.extend(request.chain[sequence.length : cache.num_blocks])
        sequence.commit()
        hit = sequence.cached_length
        sequence.close(Hint(kind=request.kind, output_length=request.output) if hints else None)
        yield hit


def hits(requests: list[Request], blocks: int, policy: str) -> tuple[int, PrefixCache]:
    """Return the blocks that were hit in all, and the cache."""
    now = [0.0]
    cache = PrefixCache(blocks, 1, policy, clock=lambda: now[0])
    return sum(replay(cache, requests, now)), cache


class Fresh:
    """A source of unused token ids."""

    def __init__(self) -> None:
        self.last = 0

    def run(self, count: int) -> list[int]:
        self.last += count
        return list(range(self.last - count, self.last))


def scan(rng: random.Random, count: int) -> list[Request]:
    """Half of the requests are for forty hot texts; the texts of the others never come again."""
    new = Fresh()
    hot = [new.run(5) for _ in range(40)]
    return [Request(float(i), rng.choice(hot) if rng.random() < 0.5 else new.run(8)) for i in range(count)]


def documents(rng: random.Random, count: int) -> list[Request]:
    """A shared start, one of 200 documents (Zipf), and a question of one block."""
    new = Fresh()
    start, texts = new.run(2), [new.run(rng.randint(2, 12)) for _ in range(200)]
    weights = [1 / (i + 1) for i in range(200)]
    return [Request(float(i), start + rng.choices(texts, weights)[0] + new.run(1)) for i in range(count)]


def kinds(rng: random.Random, count: int) -> list[Request]:
    """Texts that differ in the reason why their first turn ended: only after a tool call are they continued."""
    new, requests = Fresh(), []
    for i in range(count // 2):
        chain, returns = new.run(6), rng.random() < 0.4
        requests.append(Request(float(i), chain, "tool_use" if returns else "end_turn", 50))
        if returns:
            requests.append(Request(i + rng.uniform(20, 60), chain + new.run(1), "end_turn", 50))
    return sorted(requests, key=lambda request: request.time)


def walk(rng: random.Random, count: int) -> list[Request]:
    """Recently used texts are used next: a random walk over 400 texts."""
    new, place, requests = Fresh(), 0, []
    texts = [new.run(rng.randint(1, 8)) for _ in range(400)]
    for i in range(count):
        place += rng.randint(-6, 6)
        requests.append(Request(float(i), texts[place % 400]))
    return requests


def stack(rng: random.Random, count: int) -> list[Request]:
    """Reuse by stack distance alone: only recency carries information."""
    new, requests = Fresh(), []
    texts = [new.run(rng.randint(1, 6)) for _ in range(400)]
    for i in range(count):
        text = texts.pop(min(399, int(rng.paretovariate(0.7)) - 1))
        texts.insert(0, text)
        requests.append(Request(float(i), text))
    return requests


def turns(rng: random.Random, count: int) -> list[Request]:
    """Conversations that grow, branch and are retried."""
    new, said, requests = Fresh(), [[-1]], []
    said = [new.run(3)]
    for i in range(count):
        start = rng.choice(said[-20:])
        chain = start[: rng.randint(0, len(start))] + new.run(rng.randint(0, 4))
        said.append(chain)
        requests.append(Request(i * rng.choice((0.1, 1.0)) + i, chain or new.run(1), rng.choice((None, "a", "b"))))
    return sorted(requests, key=lambda request: request.time)


WORKLOADS: dict[str, Callable[[random.Random, int], list[Request]]] = {
    each.__name__: each for each in (scan, documents, kinds, walk, stack, turns)
}
