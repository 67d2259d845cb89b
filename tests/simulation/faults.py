"""Raise the faults of a scenario in forwards, sampler and scheduler, and record the requests in each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from radixkv.models.loaded import SequenceInput
from radixkv.sampling.params import SampleRow
from radixkv.sampling.sampler import Pending, Sampler
from radixkv.sampling.token_mask import TokenMask
from tests.simulation.scenario import Ask, Fault, Sabotage, Scenario

MEMORY_LASTS = 3  # steps
MEMORY_ERRORS = (torch.OutOfMemoryError, RuntimeError)  # of a GPU and of a CPU


@dataclass
class Faults:
    """`chunk_of` and `row_of` return the request of a chunk or a row; `now` returns the step."""

    scenario: Scenario
    now: Callable[[], int]
    chunk_of: Callable[[SequenceInput], Ask]
    row_of: Callable[[SampleRow], Ask]
    # By id; the exceptions are kept, so that their ids stay unique.
    blamed: dict[int, tuple[Exception, set[int]]] = field(default_factory=dict)
    # By step: requests that fail together, because the cause is not known.
    swept: dict[int, set[int]] = field(default_factory=dict)
    fired: set[Fault] = field(default_factory=set)
    began: dict[Fault, int] = field(default_factory=dict)
    transfers: Counter[Fault] = field(default_factory=Counter)  # how often each has failed

    # ---- called by the engine

    def in_forward(self, chunks: Sequence[SequenceInput], part: int) -> None:
        """Raise the faults that are due at this part of a run."""
        asks = [self.chunk_of(chunk) for chunk in chunks]
        for chunk, ask in zip(chunks, asks, strict=True):
            if self._is_flawed(ask, chunk) and part == ask.number % 3:
                self._raise(ask.flaw.kind if ask.flaw else "", asks, f"request {ask.number} cannot be computed")
        for fault in self._due("forward"):
            if part == fault.part:
                self.fired.add(fault)
                self._raise("forward", asks, f"a fault of the forward at step {fault.at}")
        for fault in self._due("memory"):
            size = sum(len(chunk.tokens) for chunk in chunks)
            if size > fault.size and part == 1:
                self._raise("memory", asks, f"no memory for {size} tokens at once")

    def gives_nan(self, chunk: SequenceInput) -> bool:
        """Return whether the logits of this chunk are NaN."""
        ask = self.chunk_of(chunk)
        end = chunk.start + len(chunk.tokens)
        return ask.flaw is not None and ask.flaw.kind == "nan" and end >= len(ask.prompt) + ask.flaw.at

    def in_sampler(self, rows: Sequence[SampleRow]) -> None:
        """Raise the faults of the sampler that are due."""
        for fault in self._due("sampler"):
            self.fired.add(fault)
            self._raise("sampler", [self.row_of(row) for row in rows], f"a fault of the sampler at step {fault.at}")

    def in_schedule(self, part: int, running: list[Ask]) -> None:
        """Raise the faults that are due before or after planning, which end all running requests."""
        for fault in self._due("schedule"):
            if bool(part) == bool(fault.part):
                self.fired.add(fault)
                self.swept[self.now()] = {ask.number for ask in running}
                raise Sabotage(f"a fault of planning at step {fault.at}")

    def garbles(self, present: list[Ask]) -> bool:
        """Return whether a run of this step returns too few rows, which ends all requests of the step."""
        for fault in self._due("garbled"):
            self.fired.add(fault)
            self.swept[self.now()] = {ask.number for ask in present}
            return True
        return False

    def in_transfer(self, kind: str, part: int) -> None:
        """Raise the faults of offloads or loads that are due; no request fails because of them."""
        for fault in self._due(kind):
            if part == min(fault.part, 1):
                self.transfers[fault] += 1
                if self.transfers[fault] >= fault.size:
                    self.fired.add(fault)
                raise Sabotage(f"a fault of the {kind} at step {fault.at}")

    # ---- afterwards

    def explains(self, error: BaseException | None, ask: Ask) -> bool:
        """Return whether this error was raised for this request alone, or for all requests of a step."""
        found, asks = self.blamed.get(id(error), (None, set[int]()))
        swept = any(ask.number in asks for asks in self.swept.values())
        return (found is error and asks == {ask.number}) or (found is None and swept)

    # ---- inside

    def _is_flawed(self, ask: Ask, chunk: SequenceInput) -> bool:
        flaw = ask.flaw
        return flaw is not None and flaw.kind in ("forward", "memory") and chunk.start + len(chunk.tokens) > flaw.at

    def _due(self, kind: str) -> list[Fault]:
        now = self.now()
        due = [fault for fault in self.scenario.faults if fault.kind == kind and fault.at <= now]
        if kind == "memory":  # it lasts some steps; the others occur once
            return [fault for fault in due if now < self.began.setdefault(fault, now) + MEMORY_LASTS]
        return [fault for fault in due if fault not in self.fired]

    def _raise(self, kind: str, asks: list[Ask], text: str) -> None:
        error: Exception = Sabotage(text)
        if kind == "memory":
            error = MEMORY_ERRORS[self.now() % 2](f"DefaultCPUAllocator: can't allocate memory: {text}")
        self.blamed[id(error)] = (error, {ask.number for ask in asks})
        raise error


@dataclass(frozen=True)
class FaultySampler:
    """A sampler that calls `fault` with the rows of each `begin`."""

    sampler: Sampler
    fault: Callable[[Sequence[SampleRow]], None]

    def begin(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        sources: Sequence[int] | None = None,
        mask: TokenMask | None = None,
    ) -> Pending:
        if rows:  # without rows only the finite logits are asked for
            self.fault(rows)
        return self.sampler.begin(logits, rows, sources, mask)


class Listener:
    """An observer of the cache that raises after `raises` events; it must get no event after that."""

    def __init__(self, raises: int) -> None:
        self.events, self.raises = 0, raises

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self._event

    def _event(self, *facts: object) -> None:
        self.events += 1
        if self.events > self.raises:
            raise Sabotage("an observer of the cache")
