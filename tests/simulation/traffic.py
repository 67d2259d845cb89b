"""Send mixed requests from many threads to a real engine, and check how each of them ends.

Callers wait, read, read slowly, cancel, or stop reading. The engine's thread is real, so no two runs are alike, but the
answer of each request is determined.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from unittest import mock

from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine import Chunk, Completion, Handle, RequestEngine, input_processor
from radixkv.errors import PinBudgetExceeded, PromptTooLong, RequestCancelled, RequestFailed, RequestTimedOut
from radixkv.sampling.params import SamplingParams
from tests.engine.fakes import FakeModel
from tests.simulation.model import VOCAB, SlotModel
from tests.simulation.oracle import replies
from tests.simulation.scenario import Sabotage

Ids = tuple[int, ...]
Judge = Callable[[Ids, SamplingParams, Completion], bool]  # checks a whole answer
_PATIENCE = 300  # seconds after which a request counts as lost


@dataclass(frozen=True)
class Mixture:
    """The requests: token ids below `vocab`, prompts and answers up to these lengths.

    `ways` are the ways to use a handle, and `streams` the numbers of answers, each as often as it is named.
    """

    vocab: int = VOCAB
    longest_prompt: int = 60
    most_new: int = 24
    sampled: float = 0.3  # how many of the requests are not greedy
    timeout: float = 0.1  # how many have a timeout, in seconds
    timeouts: tuple[float, ...] = (0.01, 0.1, 1.0)
    ways: tuple[str, ...] = ("wait", "wait", "read", "read slowly", "cancel", "cancel while it is read", "walk away")
    streams: tuple[int, ...] = (1, 1, 1, 2, 3)


@dataclass
class Tally:
    """The ends of the requests; `wrong` describes the ends that must not be."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0


class Traffic:
    """Sends `requests` of a mixture from `clients` threads; `after(n)` is called when n requests have ended."""

    def __init__(
        self, engine: RequestEngine, judge: Judge, mixture: Mixture, seed: int = 0, after: Callable[[int], None] = print
    ) -> None:
        self.engine, self.judge, self.mixture, self.seed, self.after = engine, judge, mixture, seed, after
        self.tally = Tally()
        self._numbers = count()
        self._ended = count(1)
        self._lock = threading.Lock()
        rng = random.Random(seed)
        self._texts = [self._letters(rng, mixture.longest_prompt) for _ in range(12)]

    def run(self, requests: int, clients: int) -> Tally:
        """Send all requests and wait for them; passes on exceptions of the clients' threads."""
        with ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(self._client, requests) for _ in range(clients)]:
                done.result()
        return self.tally

    def _client(self, requests: int) -> None:
        """Send one request after the other, sometimes the next turn of a conversation."""
        said: Ids = ()
        while (number := next(self._numbers)) < requests:
            rng = random.Random(f"{self.seed}/{number}")
            said = self._request(rng, number, self._prompt(rng, said))
            with self._lock:
                self.after(next(self._ended))
            if rng.random() < 0.05:
                self._visit(rng)

    # ---- one request

    def _request(self, rng: random.Random, number: int, prompt: Ids) -> Ids:
        """Send a request, use its handle, and check the answer; returns prompt and answer."""
        params, way = self._params(rng), rng.choice(self.mixture.ways)
        timeout = rng.choice(self.mixture.timeouts) if rng.random() < self.mixture.timeout else None
        handle = self.engine.submit(
            list(prompt),
            params,
            namespace=rng.choice((None, None, "tenant")),
            priority=rng.choice((0, 0, 0, 1)),
            timeout=timeout,
        )
        read = self._use(rng, handle, way)
        answer = self._end(number, handle, way, timeout)
        if answer is None:
            return ()
        streams = [answer, *answer.alternatives]
        if read and any(read.get(each.index, ()) != each.token_ids for each in streams):
            self._wrong(f"request {number}: the chunks are not the answer")
        if not self.judge(prompt, params, answer):
            self._wrong(f"request {number}: {prompt} with {params} was answered {[each.token_ids for each in streams]}")
        with self._lock:
            self.tally.tokens += sum(len(each.token_ids) for each in streams)
        return (*prompt, *answer.token_ids)

    def _use(self, rng: random.Random, handle: Handle, way: str) -> dict[int, Ids]:
        """Use a handle before its end; returns the tokens by stream if it read them all."""
        read: dict[int, Ids] = {}
        if way == "cancel":
            time.sleep(rng.choice((0, 0, 0.005, 0.05)))
            handle.cancel()
        elif way != "wait":
            stop_at = rng.randint(0, 10)
            for n, chunk in enumerate(_without_errors(handle)):
                read[chunk.index] = read.get(chunk.index, ()) + chunk.token_ids
                if way == "read slowly" and n % 8 == 5:
                    time.sleep(0.02)
                if way == "cancel while it is read" and n == stop_at:
                    handle.cancel()
                if way == "walk away" and n == stop_at:
                    break
        return read if way.startswith("read") else {}

    def _end(self, number: int, handle: Handle, way: str, timeout: float | None) -> Completion | None:
        """Wait for the end; returns None if it was cancelled or a fault was injected."""
        try:
            answer = handle.result(_PATIENCE)
            self._count("finished")
            return answer
        except RequestCancelled:
            self._count("cancelled", way.startswith("cancel"), number)
        except RequestTimedOut:
            self._count("timed out", timeout is not None, number)
        except RequestFailed as error:
            self._count("failed", isinstance(error.__cause__, Sabotage), number)
        except PromptTooLong:  # pins leave too little room
            self._count("refused")
        except TimeoutError:
            self._count("lost", False, number)
        return None

    def _visit(self, rng: random.Random) -> None:
        """Call other methods: probe, stats, demote, pin, clear."""
        text = list(rng.choice(self._texts)[: rng.randint(1, self.mixture.longest_prompt)])
        verb = rng.choice(("probe", "stats", "demote", "pin", "clear"))
        if verb == "probe":
            self.engine.probe(text)
        elif verb == "stats":
            self.engine.stats()
        elif verb == "demote":
            self.engine.demote(text, keep=len(text) // 2)
        elif verb == "clear":
            self.engine.clear_cache()
        else:
            try:
                with self.engine.warm(text[:8], pin=True, ttl=rng.choice((None, 0.01))):
                    time.sleep(0.005)
            except (PinBudgetExceeded, PromptTooLong):
                self._count("pin refused")
            except RequestFailed as error:
                self._count("failed", isinstance(error.__cause__, Sabotage), -1)

    # ---- requests

    def _prompt(self, rng: random.Random, said: Ids) -> Ids:
        most = self.mixture.longest_prompt
        if said and len(said) < most and rng.random() < 0.5:
            return (*said, *self._letters(rng, rng.randint(1, 6)))
        base = rng.choice(self._texts)[: rng.randint(0, most)]
        return (*base, *self._letters(rng, rng.randint(1, 6)))

    def _letters(self, rng: random.Random, count: int) -> Ids:
        return tuple(rng.randrange(self.mixture.vocab) for _ in range(count))

    def _params(self, rng: random.Random) -> SamplingParams:
        greedy = rng.random() >= self.mixture.sampled
        return SamplingParams(
            max_tokens=rng.randint(1, self.mixture.most_new),
            temperature=0 if greedy else 1,
            seed=rng.randrange(1 << 30),
            n=rng.choice(self.mixture.streams),
            ignore_eos=True,
        )

    # ---- tally

    def _count(self, end: str, allowed: bool = True, number: int = -1) -> None:
        with self._lock:
            self.tally.ends[end] += 1
        if not allowed:
            self._wrong(f"request {number} must not have {end}")

    def _wrong(self, text: str) -> None:
        with self._lock:
            self.tally.wrong.append(text)


def _without_errors(handle: Handle) -> Iterator[Chunk]:
    """Yield the chunks up to an error; waiting for the result raises it again."""
    try:
        yield from handle
    except (RequestFailed, RequestTimedOut, PromptTooLong):
        return


def is_expected(prompt: Ids, params: SamplingParams, answer: Completion) -> bool:
    """Check answers of the model that only remembers: every stream equals the oracle's."""
    assert params.seed is not None
    expected = replies(prompt, params, params.max_tokens, frozenset(), params.seed)
    given = [(each.token_ids, each.finish_reason) for each in (answer, *answer.alternatives)]
    return [(each.tokens, each.finish_reason) for each in expected] == given


@contextmanager
def memory_engine(num_blocks: int = 60, faults: float = 0.0, **config: object) -> Iterator[RequestEngine]:
    """Make an engine whose model only remembers; a part of its forwards raises, and slow readers pause soon."""
    cache = PrefixCache(num_blocks, 4)
    model, rng = SlotModel(cache, 0), random.Random(0)

    def fault(chunks: object, part: int) -> None:
        if part == 0 and rng.random() < faults:
            raise Sabotage("a fault of the forward")

    model.fault = fault
    fake = FakeModel(vocab_size=VOCAB, stop_token_ids=frozenset())
    engine = RequestEngine(fake, model, cache, EngineConfig(**{"monitor": False, **config}))  # type: ignore[arg-type]
    with mock.patch.object(input_processor, "MAX_UNREAD", 4), engine:
        yield engine
    assert model.broken is None, model.broken


def leaked(engine: RequestEngine) -> int:
    """Return how many blocks are held though no request runs; checks the cache, and empties it."""
    core = engine.core
    engine.client.thread.ask(core.cache.check)
    stats = engine.stats().cache
    held = stats.held_blocks + stats.sequences
    engine.clear_cache()
    engine.client.thread.ask(core.cache.check)
    return held + stats.num_blocks - engine.stats().cache.free_blocks
