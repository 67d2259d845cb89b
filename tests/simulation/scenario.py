"""The events of one simulated life of an engine: plain data that can be replayed, printed and made smaller.

`draw.py` makes a scenario from a seed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from radixkv.config import EngineConfig
from radixkv.engine.compressed import CompressedPrefix
from radixkv.sampling.params import SamplingParams
from tests.simulation.constraint import Rule

Ids = tuple[int, ...]


class Sabotage(Exception):
    """The exception of every injected fault except lack of memory, distinct from any real one."""


@dataclass(frozen=True)
class Flaw:
    """A fault of one request: `kind` is the place where it raises, `at` the first token that does.

    forward   every forward that computes its token `at` or a later one
    memory    the same, with torch's out-of-memory error
    nan       its logits are NaN from its output token `at` on
    put       its channel does not take chunk `at`
    finish    its channel does not take the completion
    rule      its constraint cannot be followed beyond `at` tokens
    open      the cache opens no sequence for it
    """

    kind: str
    at: int = 0


@dataclass(frozen=True)
class Compressing:
    """Request `ask` computes `text`, which is compressed to `ids` from step `at` on, and released at step `until`."""

    ask: int
    at: int
    text: Ids
    ids: Ids
    namespace: Hashable
    until: int

    @property
    def handle(self) -> CompressedPrefix:
        """Return the handle; its method has the ids, for the model."""
        method, ids, text = " ".join(map(str, self.ids)), np.array(self.ids, np.int32), np.array(self.text, np.int32)
        return CompressedPrefix(method, len(text), len(ids), 0, method, 0.5, ids, text, self.namespace)


@dataclass(frozen=True)
class Ask:
    """One request. Steps count from the beginning of the world; seconds are virtual.

    `cancel` is the step and `cancel_in` the stage in which it is cancelled. `lags` are spans of steps in which its
    reader is away; with `flickers` the reader comes and goes. `rule` is the seed of a constraint on its answers.
    `bad_words` are token ids that no answer contains one after the other. The prompt's tokens from position
    `score_from` on are scored, unless it is 0, and `last_targets` after the prompt, in chunks with at most `most_rows`
    additional rows of logits. The prompt begins with the ids of `prefix`.
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
    rule: int | None = None
    reply_start: int = 0
    bad_words: tuple[Ids, ...] = ()
    score_from: int = 0
    last_targets: Ids = ()
    most_rows: int = 1
    prefix: Compressing | None = None

    @property
    def streams(self) -> int:
        """The largest number of its streams at once."""
        return max(self.params.n, self.params.beam_width)

    @property
    def constraint(self) -> Rule | None:
        """The constraint on its answers."""
        if self.rule is None:
            return None
        breaks = self.flaw.at if self.flaw is not None and self.flaw.kind == "rule" else None
        return Rule(self.rule, self.stop_ids, breaks)


@dataclass(frozen=True)
class Pinning:
    """A pin on the cached part of `tokens` from step `at` to step `until`, or for `ttl` seconds."""

    at: int
    tokens: Ids
    namespace: Hashable
    until: int
    ttl: float | None = None


@dataclass(frozen=True)
class Forgetting:
    """At step `at` clear the cache or a namespace, or demote or discard the cached part of `tokens` from `start` on."""

    at: int
    verb: str  # clear, clear_namespace, demote, discard
    tokens: Ids = ()
    start: int = 0
    namespace: Hashable = None


@dataclass(frozen=True)
class Auditing:
    """An audit of `blocks` blocks is requested at step `at`."""

    at: int
    blocks: int


@dataclass(frozen=True)
class Fault:
    """A fault of the engine that occurs once, at the first chance from step `at` on.

    forward   the run raises at `part` 0, 1 or 2 of 2
    memory    torch is out of memory for every run of more than `size` tokens, for 3 steps
    sampler   the sampler raises
    schedule  planning raises, before (`part` 0) or after its work
    garbled   the run returns one row of logits too few
    offload   copies to host memory raise, `size` times, before (`part` 0) or after some were done
    load      copies from host memory raise, `size` times, before (`part` 0) or after some were done
    clock     `size` seconds pass at once (the engine must not mind)
    """

    at: int
    kind: str
    part: int = 0
    size: int = 0


@dataclass(frozen=True)
class States:
    """Recurrent state of the model: slots for snapshots, the distances between snapshots (see Spacing), host slots."""

    snapshots: int
    prompt: int
    long: int
    least: int
    on_host: int = 0


@dataclass(frozen=True)
class Host:
    """Host memory of `blocks` blocks, from which a token loads `speed` times as fast as it is computed."""

    blocks: int
    speed: float


@dataclass(frozen=True)
class Scenario:
    """A whole life. `seed` names it, and shuffles events without a defined order."""

    seed: int
    num_blocks: int
    block_size: int
    config: EngineConfig
    asks: tuple[Ask, ...]
    policy: str = "lru"
    reuse: bool = True
    pin_budget: float = 0.5
    tick: float = 1.0  # seconds of a step
    observer_raises: int | None = None  # the event at which it raises; None for no observer
    pinnings: tuple[Pinning, ...] = ()
    forgettings: tuple[Forgetting, ...] = ()
    disable_backpressure: int | None = None  # the step from which no request is paused, as when the engine drains
    close: int | None = None  # the step before which the engine is closed
    audits: tuple[Auditing, ...] = ()
    compressings: tuple[Compressing, ...] = ()
    faults: tuple[Fault, ...] = ()
    states: States | None = None
    host: Host | None = None
    disk: bool = False  # a disk below the host
    drafts: bool = False  # whether streams speculate
    ranks: bool = False  # whether two ranks hold the model
    overlap: bool = False  # whether a step is launched before the results of the preceding one are read

    @property
    def last(self) -> int:
        """The last step with an event of the scenario."""
        times = [ask.at for ask in self.asks]
        times += [end for ask in self.asks for _, end in ask.lags]
        times += [ask.cancel for ask in self.asks if ask.cancel is not None]
        times += [pinning.until for pinning in self.pinnings]
        times += [forgetting.at for forgetting in self.forgettings]
        times += [event.at for event in self.faults] + [event.at for event in self.audits]
        times += [event.until for event in self.compressings]
        return max(times, default=0)

    def __str__(self) -> str:
        """Return one line per fact."""
        facts = [
            f"{self.num_blocks} blocks of {self.block_size}, {self.policy}, reuse={self.reuse}, pins {self.pin_budget}",
            f"{self.config}, tick {self.tick}, observer raises at {self.observer_raises}",
            f"{self.states}, {self.host}, overlap={self.overlap}, drafts={self.drafts}",
            f"no backpressure from {self.disable_backpressure}, close at {self.close}",
        ]
        facts += map(str, (*self.asks, *self.pinnings, *self.forgettings, *self.audits, *self.faults))
        return "\n".join(facts)
