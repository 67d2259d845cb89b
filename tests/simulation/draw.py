"""Draw a scenario from a seed: the same seed always gives the same one.

Prompts form trees (parts of earlier prompts, earlier answers, few letters), and pools are small. Some worlds have one
kind of fault only, so that no kind hides the others.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from radixkv.cache.tokens import FIRST_PSEUDO
from radixkv.config import EngineConfig
from radixkv.sampling.params import SamplingParams
from tests.simulation.model import MOST_DROPPED, VOCAB
from tests.simulation.oracle import Reply, replies
from tests.simulation.scenario import (
    Ask,
    Auditing,
    Compressing,
    Fault,
    Flaw,
    Forgetting,
    Host,
    Ids,
    Pinning,
    Scenario,
    States,
)


class Profile(NamedTuple):
    """The values that one kind of world draws from."""

    block_size: tuple[int, ...]
    longest: tuple[int, ...]  # tokens of a prompt
    most_new: tuple[int, ...]  # tokens of an answer
    widest: tuple[int, ...]  # streams of one request
    room: tuple[float, ...]  # the pool, in units of the largest request
    streams: tuple[int, ...]  # at once
    chunk: tuple[int, ...]
    budget: tuple[int, ...]  # tokens of a step, beyond one a stream
    gap: tuple[int, ...]  # steps between arrivals


MIXED = Profile(
    block_size=(1, 2, 3, 4, 4, 8, 16),
    longest=(6, 20, 20, 60),
    most_new=(3, 8, 16),
    widest=(1, 2, 4),
    room=(1, 1, 1.5, 2, 4),
    streams=(1, 2, 4, 8, 16),
    chunk=(1, 2, 5, 8, 16, 64),
    budget=(0, 1, 3, 10, 30, 100),
    gap=(0, 1, 3, 8),
)
# Many short prompts with long answers arrive together: all are admitted, and then blocks run out.
CROWD = MIXED._replace(
    block_size=(1, 2, 3, 4, 8), longest=(8,), most_new=(16, 30), room=(1, 1.2, 1.5), streams=(4, 8, 16), gap=(0, 1, 2)
)
# The same with several streams per request and small steps: a preempted request resumes in several steps.
FAMILIES = CROWD._replace(
    block_size=(1, 2, 3), widest=(2, 4), room=(1, 1.2, 1.5, 2), streams=(8, 16), chunk=(1, 2, 5), budget=(0, 1, 3, 10)
)
GROUPS: tuple[tuple[Hashable, ...], ...] = (("tenant",), (7,), (("ann", 1), ("ann", 2)), (("ben", 1), ("ben", 1, 2)))
"""The namespaces of each group that takes turns with others."""
PROFILES = (MIXED, CROWD, FAMILIES)


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    return _with_turns(_Draw(seed).scenario())


def _with_turns(scenario: Scenario) -> Scenario:
    """Return the same life of up to four groups, mostly with few streams; the other draws do not depend on it."""
    rng = random.Random(f"turns of {scenario.seed}")
    if rng.random() < 0.3:
        return scenario
    namespaces = [each for group in rng.sample(GROUPS, rng.choice((0, 1, 2, 3))) for each in group]
    asks = tuple(replace(ask, namespace=rng.choice((ask.namespace, *namespaces))) for ask in scenario.asks)
    widest = max(ask.streams for ask in asks)
    most = rng.choice((widest, widest + 1, scenario.config.max_sequences, scenario.config.max_sequences))
    config = replace(
        scenario.config,
        max_sequences=min(most, scenario.config.max_sequences),
    )
    return replace(scenario, asks=asks, config=config, tick=rng.choice((1.0, 1.0, 0.25, 0.5, 3.0)))


def with_states(scenario: Scenario) -> Scenario:
    """Return the same life of a model with recurrent state; with a host tier, mostly with slots for states there."""
    rng = random.Random(f"states of {scenario.seed}")
    snapshots = rng.choice((1, 2, 5, 20, 100)) if scenario.reuse else 0
    states = States(snapshots, rng.choice((2, 4, 16)), rng.choice((8, 32, 1000)), rng.choice((1, 1, 4)))
    if scenario.host is not None and snapshots:
        states = replace(states, on_host=rng.choice((0, 1, 5, 100)))
    asks = tuple(replace(ask, reply_start=rng.choice((0, rng.randint(0, len(ask.prompt))))) for ask in scenario.asks)
    return replace(scenario, states=states, asks=asks)


def with_drafts(scenario: Scenario) -> Scenario:
    """Return the same life of an engine that speculates: it is not deterministic, and steps have room for drafts."""
    room = random.Random(f"drafts of {scenario.seed}").choice((0, 3, 20, 100))
    budget = scenario.config.max_batch_tokens + room
    config = replace(scenario.config, deterministic=False, speculate="tree", max_batch_tokens=budget)
    return replace(scenario, config=config, drafts=True)


def with_host(scenario: Scenario) -> Scenario:
    """Return such a life of an engine with a host tier: prompts come back, mostly with failing transfers.

    Smaller blocks make more prefixes worth a load.
    """
    rng = random.Random(f"host of {scenario.seed}")
    size = rng.choice((1, 1, 2, scenario.block_size))
    pool = int(scenario.num_blocks * scenario.block_size / size) + 1
    host = Host(rng.choice((2, pool // 2 + 1, pool, 4 * pool)), rng.choice((0.9, 1.1, 2, 5, 50)))
    kinds = rng.choice(((), ("offload",), ("load",), ("load", "load", "offload")))
    later = rng.choice((0, 5, scenario.last))
    again = tuple(
        replace(ask, number=len(scenario.asks) + ask.number, at=ask.at + later, cancel=None, lags=(), flaw=None)
        for ask in scenario.asks
    )
    last = scenario.last + later
    faults = tuple(Fault(rng.randint(0, last), kind, rng.randrange(2), rng.choice((1, 1, 2, 5))) for kind in kinds)
    asks, faults = (*scenario.asks, *again), (*scenario.faults, *faults)
    return replace(scenario, num_blocks=pool, block_size=size, host=host, asks=asks, faults=faults)


def with_prefixes(scenario: Scenario) -> Scenario:
    """Return such a life in which a third of the requests name a compressed prefix, which may not be there."""
    rng, made, first = random.Random(f"prefixes of {scenario.seed}"), list[Compressing](), 2 * len(scenario.asks)
    for _ in range(rng.choice((1, 2))):
        text = tuple(rng.choices(range(VOCAB), k=rng.choice((2 * scenario.block_size, 37, 50))))
        dropped, names = rng.choice((0, 1, len(text) // 2)), sorted({ask.namespace for ask in scenario.asks}, key=repr)
        ids = tuple(rng.choices(range(FIRST_PSEUDO + dropped, 2**31, MOST_DROPPED), k=len(text) - dropped))
        for namespace in rng.sample(names, min(len(names), rng.choice((1, 2)))):
            at, rest = rng.randint(0, scenario.last), rng.choice((40, 100, scenario.last + 60))
            made.append(Compressing(first + len(made), at, text, ids, namespace, at + rest))
    asks = tuple(_after(ask, rng.choice(made), rng) if ask.number % 3 == 1 else ask for ask in scenario.asks)
    greedy = SamplingParams(max_tokens=1, temperature=0)
    asks += tuple(Ask(each.ask, each.at, each.text, greedy, 0, namespace=each.namespace) for each in made)
    room = sum(2 + len(each.text + each.ids) // scenario.block_size for each in made)
    config, blocks = replace(scenario.config, deterministic=False), int(room * rng.choice((0.7, 1, 2)))
    life = replace(scenario, num_blocks=scenario.num_blocks + blocks, config=config, asks=asks, reuse=True)
    cleared = tuple(Forgetting(each.at + 60, "clear_namespace", namespace=each.namespace) for each in made)
    forgettings = (*scenario.forgettings, *(cleared if scenario.seed % 3 == 0 else ()))
    return replace(life, compressings=tuple(made), forgettings=forgettings)


def _after(ask: Ask, made: Compressing, rng: random.Random) -> Ask:
    """Return the same request after a compressed prefix, mostly when it is there; no such prompt is scored."""
    at, params = max(ask.at, made.at + rng.choice((0, 30, 60, 60))), ask.params.but(prompt_logprobs=None)
    ask = replace(ask, prompt=made.ids + ask.prompt, namespace=made.namespace, prefix=made, at=at, params=params)
    flaw = ask.flaw and replace(ask.flaw, at=ask.flaw.at + len(made.ids) * (ask.flaw.kind in ("forward", "memory")))
    return replace(ask, flaw=flaw, cancel=None, lags=(), score_from=0, last_targets=())


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        rng = self.rng
        self.letters = rng.choice((1, 2, 3, VOCAB))
        self.profile = rng.choices(PROFILES, (4, 3, 3))[0]
        self.block_size = rng.choice(self.profile.block_size)
        self.longest, self.most_new = rng.choice(self.profile.longest), rng.choice(self.profile.most_new)
        self.namespaces: tuple[Hashable, ...] = (None, "tenant", 7)[: rng.choice((1, 1, 1, 2, 3))]
        self.priorities = rng.choice(((0,), (0,), (0,), (0, 1), (-1, 0, 5)))
        self.widest = rng.choice(self.profile.widest)
        # How often each kind of fault or event happens to a request; most worlds have only some kinds.
        self.chance = {
            trouble: rng.choice((0, 0, often))
            for trouble, often in (
                ("cancel", 0.3),
                ("cancel_in", 0.3),
                ("timeout", 0.4),
                ("lag", 0.5),
                ("flaw", 0.25),
                ("sampled", 0.5),
                ("warm", 0.15),
            )
        }

    def scenario(self) -> Scenario:
        rng = self.rng
        asks = self._asks(rng.choice((4, 8, 12, 20)))
        last = max(ask.at for ask in asks)
        return Scenario(
            seed=self.seed,
            num_blocks=self._pool(asks),
            block_size=self.block_size,
            config=self._config(),
            asks=tuple(asks),
            policy=rng.choice(("lru", "lru", "fifo", "lfu", "slru")),
            reuse=rng.random() < 0.85,
            pinnings=tuple(self._pinning(rng.choice(asks), last) for _ in range(rng.choice((0, 0, 1, 4)))),
            observer_raises=rng.choice((None, None, 0, 10, 100)),
            pin_budget=rng.choice((0.5, 1.0)),
            forgettings=tuple(self._forgetting(rng.choice(asks), last) for _ in range(rng.choice((0, 0, 1, 3)))),
            disable_backpressure=last + rng.randint(1, 20) if rng.random() < 0.1 else None,
            close=rng.randint(1, last + 20) if rng.random() < 0.1 else None,
            audits=tuple(
                Auditing(rng.randint(0, last + 20), rng.choice((1, 5, 30))) for _ in range(rng.choice((0, 0, 2)))
            ),
            faults=tuple(self._fault(last) for _ in range(rng.choice((0, 0, 1, 4)))),
        )

    def _pool(self, asks: list[Ask]) -> int:
        """Return a pool that most requests fit alone, and seldom many at once."""
        sizes = sorted(
            ask.streams * -(-(len(ask.prompt) + max(ask.max_tokens - 1, 0)) // self.block_size) for ask in asks
        )
        alone = self.rng.choice((sizes[-1], sizes[-1], sizes[-2]))
        return int(alone * self.rng.choice(self.profile.room)) + self.rng.choice((0, 1, 2))

    def _config(self) -> EngineConfig:
        rng = self.rng
        streams = max(rng.choice(self.profile.streams), self.widest - rng.choice((0, 0, 0, 1)))
        chunk, deterministic = rng.choice(self.profile.chunk), rng.random() < 0.15
        return EngineConfig(
            max_sequences=streams,
            max_batch_tokens=streams + max(rng.choice(self.profile.budget), chunk if deterministic else 0),
            prefill_chunk=chunk,
            deterministic=deterministic,
            block_size=1,  # the scheduler serves chunks of any length
            order=rng.choice(("fcfs", "longest-prefix")),
            max_delay=rng.choice((None, 1.0, 3.0, 10.0)),
        )

    # ---- requests

    def _asks(self, count: int) -> list[Ask]:
        asks: list[Ask] = []
        at, gap = 0, self.rng.choice(self.profile.gap)
        for number in range(count):
            at += self.rng.choice((0, 0, 0, gap, 2 * gap))
            asks.append(self._ask(number, at, asks))
        return asks

    def _ask(self, number: int, at: int, before: list[Ask]) -> Ask:
        rng = self.rng
        new = (
            0
            if self._happens("warm")
            else rng.randint(1 if self.profile is MIXED else self.most_new // 2, self.most_new)
        )
        ask = Ask(
            number=number,
            at=at,
            prompt=self._prompt(before),
            params=self._params(max(new, 1)),
            max_tokens=new,
            stop_ids=frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 1)))),
            seed=rng.randrange(1000),
            namespace=rng.choice(self.namespaces),
            priority=rng.choice(self.priorities),
        )
        return self._with_beams(self._with_bad_words(self._with_scores(self._constrained(self._troubled(ask)))))

    def _constrained(self, ask: Ask) -> Ask:
        """Constrain the answers of some requests, in some worlds; the other draws do not depend on it."""
        rng = random.Random(f"{self.seed}/{ask.number}")
        if not ask.max_tokens or rng.random() >= (0.5 if self.seed % 2 else 0):
            return ask
        ask = replace(ask, rule=rng.randrange(1000))
        if ask.flaw is None and rng.random() < 0.1:
            ask = replace(ask, flaw=Flaw("rule", rng.randrange(ask.max_tokens)))
        return ask

    def _with_bad_words(self, ask: Ask) -> Ask:
        """Exclude words from the answers of some requests, in some worlds; the other draws do not depend on it."""
        rng = random.Random(f"bad words of {self.seed}/{ask.number}")
        if not ask.max_tokens or ask.rule is not None or rng.random() >= (0.3 if self.seed % 3 == 1 else 0):
            return ask
        words = tuple(
            tuple(rng.choices(range(VOCAB), k=rng.choice((1, 2, 2, 3)))) for _ in range(rng.choice((1, 5, 8)))
        )
        return replace(ask, bad_words=words, params=ask.params.but(bad_words=["their text"]))

    def _with_beams(self, ask: Ask) -> Ask:
        """Search for the answers of some requests with beams, in some worlds; the other draws do not depend on it."""
        rng = random.Random(f"beams of {self.seed}/{ask.number}")
        if not ask.max_tokens or ask.rule is not None or rng.random() >= (0.5 if self.seed % 5 in (2, 3) else 0):
            return ask
        params = ask.params.but(
            n=1,
            beam_width=rng.choice((2, max(2, self.widest), 4)),
            length_penalty=rng.choice((1.0, 1.0, 0.0, 2.0, -1.0)),
            early_stopping=rng.choice((False, True, "never")),
        )
        stop_ids = rng.choice((ask.stop_ids, frozenset(rng.sample(range(VOCAB), 4))))
        return replace(ask, params=params, stop_ids=stop_ids)

    def _with_scores(self, ask: Ask) -> Ask:
        """Score some prompts, with or without an answer, in some worlds; the other draws do not depend on it."""
        rng = random.Random(f"scores of {self.seed}/{ask.number}")
        if ask.rule is not None or rng.random() >= (0.5 if self.seed % 4 == 1 else 0):
            return ask
        ask = replace(ask, most_rows=random.Random(f"rows of {self.seed}").choice((1, 3, 10, 1000)))
        if ask.max_tokens and rng.random() < 0.5:
            return replace(ask, score_from=1, params=ask.params.but(prompt_logprobs=rng.choice((0, 1, 3))))
        targets = tuple(rng.choices(range(VOCAB), k=rng.choice((1, 1, 3))))
        start = rng.choice((1, rng.randint(1, len(ask.prompt)), len(ask.prompt)))
        params = ask.params.but(n=1, min_tokens=0)
        return replace(ask, max_tokens=0, params=params, score_from=start, last_targets=targets)

    def _prompt(self, before: list[Ask]) -> Ids:
        """Return a new text, an earlier one, a branch of one, or the next turn after an answer."""
        rng = self.rng
        kind = rng.choice(("new", "again", "branch", "branch", "turn")) if before else "new"
        if kind == "new":
            return self._letters(rng.randint(1, self.longest))
        base = rng.choice(before)
        if kind == "again":
            return base.prompt
        if kind == "turn":
            answer = rng.choice(answers_of(base)).tokens
            return (*base.prompt, *answer, *self._letters(rng.randint(1, 6)))[: 2 * self.longest]
        return (*base.prompt[: rng.randint(0, len(base.prompt))], *self._letters(rng.randint(1, 8)))

    def _letters(self, count: int) -> Ids:
        return tuple(self.rng.randrange(self.letters) for _ in range(count))

    def _params(self, new: int) -> SamplingParams:
        rng = self.rng
        if not self._happens("sampled"):
            return SamplingParams(
                max_tokens=new,
                temperature=0,
                n=rng.choice((1, self.widest) if self.profile is FAMILIES else (1, 1, self.widest)),
            )
        return SamplingParams(
            max_tokens=new,
            min_tokens=rng.choice((0, 0, new // 2)),
            temperature=rng.choice((0.7, 1.0)),
            top_k=rng.choice((0, 0, 5)),
            presence_penalty=rng.choice((0, 0, 1.5)),
            n=rng.choice((1, self.widest)),
        )

    def _troubled(self, ask: Ask) -> Ask:
        rng = self.rng
        if self._happens("cancel"):
            ask = replace(ask, cancel=ask.at + rng.choice((0, 1, 2, 5, 10, 20)))
        if self._happens("cancel_in"):
            ask = replace(
                ask, cancel_in=rng.choice(("waiting", "prefill", "decode", "preempted", "preempted", "paused"))
            )
        if self._happens("timeout"):
            ask = replace(ask, timeout=float(rng.choice((0.5, 2, 5, 10, 30))))
        if self._happens("lag"):
            begins = sorted(ask.at + rng.randint(0, 20) for _ in range(rng.choice((1, 2))))
            ask = replace(
                ask,
                lags=tuple((begin, begin + rng.choice((1, 3, 10, 40))) for begin in begins),
                flickers=rng.random() < 0.3,
            )
        if self._happens("flaw"):
            ask = replace(ask, flaw=self._flaw(ask))
        return ask

    def _flaw(self, ask: Ask) -> Flaw:
        rng = self.rng
        kind = rng.choice(("forward", "forward", "memory", "nan", "put", "finish", "open"))
        at = rng.randrange(len(ask.prompt) + ask.max_tokens) if kind in ("forward", "memory") else rng.randrange(3)
        return Flaw(kind, at)

    # ---- other events

    def _pinning(self, ask: Ask, last: int) -> Pinning:
        at = self.rng.randint(0, last + 20)
        ttl = self.rng.choice((None, None, 4.0, 20.0))
        return Pinning(at, ask.prompt, self.rng.choice(self.namespaces), at + self.rng.choice((1, 10, 40)), ttl)

    def _forgetting(self, ask: Ask, last: int) -> Forgetting:
        at, verb = self.rng.randint(0, last + 20), self.rng.choice(("clear", "demote", "discard"))
        if verb == "clear" and at % 2:  # without a draw, so that the other lives of a seed stay the same
            return Forgetting(at, "clear_namespace", namespace=self.namespaces[at % len(self.namespaces)])
        if verb == "clear":
            return Forgetting(at, verb)
        return Forgetting(at, verb, ask.prompt, self.rng.randrange(len(ask.prompt)), self.rng.choice(self.namespaces))

    def _fault(self, last: int) -> Fault:
        rng = self.rng
        at = rng.randint(0, last + 20)
        kind = rng.choice(("forward", "forward", "memory", "sampler", "schedule", "garbled", "clock"))
        return Fault(at, kind, part=rng.randrange(3), size=rng.choice((1, 2, 5, 20)))

    def _happens(self, trouble: str) -> bool:
        return self.rng.random() < self.chance[trouble]


def answers_of(ask: Ask) -> tuple[Reply, ...]:
    """Return the answer that each stream of a request must give."""
    return replies(ask.prompt, ask.params, ask.max_tokens, ask.stop_ids, ask.seed, ask.constraint, ask.bad_words)
