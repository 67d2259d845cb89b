"""A simulated model on two ranks: rank 1 executes what it reads from the buffers of rank 0.

One of both raises a fault, and the other one breaks off anywhere, or goes through. The step then raises the fault
itself, so that its requests are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch

from radixkv.cache import PrefixCache
from radixkv.models.loaded import SequenceInput
from radixkv.models.ranks.messages import Pairs, Step, decode, encode
from tests.simulation.model import SlotModel


class RankedSlotModel(SlotModel):
    """Rank 0 of two; `other` is rank 1, a model of the same parts. `raised` counts the faults of each rank."""

    def __init__(self, cache: PrefixCache, seed: int) -> None:
        super().__init__(cache, seed)
        self.other: Any = type("Other", type(self).__bases__[1:], {})(cache, seed + 1)
        self.raised = [0, 0]
        if host := getattr(self, "host", None):
            host.offload = partial(self._transfer, "moves", host.offload, self.other.host.offload)
            host.load = partial(self._transfer, "loads", host.load, self.other.host.load)
            host.check = partial(_both, host.check, self.other.host.check)

    def run(self, chunks: Sequence[SequenceInput], copies: Pairs, sampled: Any = None) -> torch.Tensor:
        step, run = decode(encode(Step(copies=copies, inputs=chunks))), super().run
        calls = partial(run, chunks, copies), partial(self.other.run, step.inputs, step.copies)
        logits, others = self._together(self, self.other, *calls)
        with self.watched():
            assert (others.numpy() == self.logits_after(chunks)).all(), "the ranks have different logits"
        found: torch.Tensor = logits
        return found

    def recheck(self, *arguments: Any) -> Any:
        with self.watched():
            return _both(super().recheck, self.other.recheck, *arguments)

    def _transfer(self, name: str, call: Any, others: Any, items: Any) -> None:
        sent = getattr(decode(encode(Step(**{name: items}))), name)
        self._together(call.__self__, others.__self__, partial(call, items), partial(others, sent))

    def _together(self, own: Any, other: Any, *calls: Callable[[], Any]) -> list[Any]:
        """Call both; raise the first error. The `fault` of `own` and `other` is called at equal parts."""
        fault, errors, parts, results = own.fault, dict[int, Exception](), (count(), count()), list[Any]()

        def of_own(*facts: Any) -> None:
            part = next(parts[0])
            try:
                fault(*facts)
            except Exception as error:
                rank = self._rng.randrange(2)
                self.raised[rank] += 1
                if rank == 0:
                    raise
                errors.setdefault(part, error)

        def of_other(*facts: Any) -> None:
            if error := errors.get(next(parts[1])):
                raise error

        own.fault, other.fault, failed = of_own, of_other, list[Exception]()
        for call in calls:
            try:
                results.append(call())
            except Exception as error:
                failed.append(error)
                errors.setdefault(self._rng.randrange(5), error)  # where rank 1 finds its connection closed
        own.fault, self.broken = fault, self.broken or self.other.broken
        if failed:
            raise failed[0]
        return results


def _both(call: Callable[..., Any], others: Callable[..., Any], *arguments: Any) -> Any:
    found = call(*arguments)
    assert others(*arguments) == found, "the ranks hold different KV"
    return found
