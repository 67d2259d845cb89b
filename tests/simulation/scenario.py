"""What happens in one simulated life of an engine: plain data, so that it can be replayed, printed and made smaller.

Knows: settings, requests, disturbances. Knows no engine. `draw.py` makes one from a seed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from radixkv.config import EngineConfig
from radixkv.sampling.params import SamplingParams

Ids = tuple[int, ...]


class Sabotage(Exception):
    """What every injected fault raises (but for a lack of memory), so that no other exception is taken for one."""


class Unhashable:
    """A namespace of a class whose instances cannot be hashed after all."""

    def __hash__(self) -> int:
        raise Sabotage("do not hash me")

    def __repr__(self) -> str:
        return "Unhashable()"


@dataclass(frozen=True)
class Flaw:
    """What is wrong with one request: `kind` says where it raises, `at` from which token on.

    forward   every forward that computes its token `at` or a later one
    memory    the same, as torch says that memory is out
    nan       its logits are no numbers from its output token `at` on
    put       handing its chunk `at` over
    finish    handing its completion over
    namespace hashing its namespace
    """

    kind: str
    at: int = 0


@dataclass(frozen=True)
class Ask:
    """One request. Steps count from the beginning of the world; seconds are virtual, one a step.

    `cancel` is a step at which it is cancelled, `cancel_in` a stage in which it is. `lags` are spans of steps in which
    its reader reads nothing, or (`flickers`) now and then.
    """

    number: int
    at: int
    prompt: Ids
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    namespace: Hashable = None
    priority: int = 0
    timeout: float | None = None
    cancel: int | None = None
    cancel_in: str | None = None
    lags: tuple[tuple[int, int], ...] = ()
    flickers: bool = False
    flaw: Flaw | None = None


@dataclass(frozen=True)
class Pinning:
    """From step `at` to step `until`, or for `ttl` seconds, what is cached of `tokens` is pinned."""

    at: int
    tokens: Ids
    namespace: Hashable
    until: int
    ttl: float | None = None


@dataclass(frozen=True)
class Forgetting:
    """At step `at` the cache is cleared, or what is cached of `tokens` from `start` on is demoted or discarded."""

    at: int
    verb: str  # clear, demote, discard
    tokens: Ids = ()
    start: int = 0
    namespace: Hashable = None


@dataclass(frozen=True)
class Auditing:
    """At step `at` somebody asks for an audit of so many blocks."""

    at: int
    blocks: int


@dataclass(frozen=True)
class Fault:
    """Something breaks once, at the first chance from step `at` on.

    forward   the run raises at `part` 0, 1 or 2 of 2
    memory    torch is out of memory, for every run of more than `size` tokens, as long as this lasts: 3 steps
    sampler   the sampler raises
    schedule  planning raises, before (`part` 0) or after it did its work
    garbled   the run returns a row of logits too few
    clock     (no fault of ours) `size` seconds pass at once
    """

    at: int
    kind: str
    part: int = 0
    size: int = 0


@dataclass(frozen=True)
class Scenario:
    """All of it. `seed` names it, and shuffles what no rule orders."""

    seed: int
    num_blocks: int
    block_size: int
    config: EngineConfig
    asks: tuple[Ask, ...]
    policy: str = "lru"
    reuse: bool = True
    pin_budget: float = 0.5
    observer_raises: int | None = None  # at which event; None: nobody listens
    pinnings: tuple[Pinning, ...] = ()
    forgettings: tuple[Forgetting, ...] = ()
    disable_backpressure: int | None = None  # the step from which nobody is paused any more, as the engine drains
    close: int | None = None  # the step before which the engine is closed
    audits: tuple[Auditing, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def last(self) -> int:
        """The last step at which something comes from outside."""
        times = [ask.at for ask in self.asks]
        times += [end for ask in self.asks for _, end in ask.lags]
        times += [ask.cancel for ask in self.asks if ask.cancel is not None]
        times += [pinning.until for pinning in self.pinnings]
        times += [forgetting.at for forgetting in self.forgettings]
        times += [event.at for event in self.faults] + [event.at for event in self.audits]
        return max(times, default=0)

    def __str__(self) -> str:
        """One line a fact, for people."""
        facts = [
            f"{self.num_blocks} blocks of {self.block_size}, {self.policy}, reuse={self.reuse}, pins {self.pin_budget}",
            f"{self.config}, observer raises at {self.observer_raises}",
            f"no backpressure from {self.disable_backpressure}, close at {self.close}",
        ]
        facts += map(str, (*self.asks, *self.pinnings, *self.forgettings, *self.audits, *self.faults))
        return "\n".join(facts)
