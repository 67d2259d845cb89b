"""Compress the prefixes of a simulated life, release them, and check that requests find them exactly until then."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from radixkv.engine.compressed import CompressedPrefixes, CompressionJob
from radixkv.errors import EngineClosed, OutOfBlocks, PinBudgetExceeded, PrefixGone
from tests.simulation.scenario import Compressing

if TYPE_CHECKING:
    from tests.simulation.world import Customer, World

ERRORS = (EngineClosed, OutOfBlocks, PinBudgetExceeded, PrefixGone)


class Compressions:
    """The compressed prefixes of one world."""

    def __init__(self, world: World) -> None:
        self.world, self.made = world, CompressedPrefixes(world.core, 1)
        self.jobs: list[CompressionJob] = []

    def events(self) -> None:
        """Begin the compressions of this step, and release prefixes."""
        for each in self.world.scenario.compressings:
            if each.at == self.world.step and each.ask in self.world.customers:
                self.jobs.append(CompressionJob(each.handle, self.world.customers[each.ask].request, Future()))
                self.made.add(self.jobs[-1])
            if each.until == self.world.step:
                self.made.release(each.handle, self.world.namespace(each.namespace))
                assert each not in self.there(each.namespace)

    def there(self, namespace: Hashable) -> list[Compressing]:
        """Return the prefixes of a namespace that requests must find."""
        made, number = self.made, self.world.namespace(namespace)
        return [each for each in self.world.scenario.compressings if made.find(each.handle.name, number)]

    def note(self, customer: Customer) -> None:
        """Note whether the prefix of a request, which is started now, is gone."""
        if (prefix := customer.ask.prefix) is not None:
            match = self.world.cache.match(prefix.handle.ids, customer.request.namespace)
            customer.gone = match.length < len(prefix.ids)
            with self.world.model.watched():
                assert not (customer.gone and prefix in self.there(prefix.namespace)), "a pinned prefix is gone"

    @property
    def progress(self) -> int:
        """Return how much was done."""
        pieces = sum(each.pieces for each in self.world.model.compressed)
        return pieces + sum(each.future.done() + (each.pin is not None) for each in self.jobs)

    def end(self) -> list[str]:
        """Release all; return how each compression ended."""
        for each in self.world.scenario.compressings:
            number = self.world.namespace(each.namespace)
            self.made.release(each.handle, number)
            if self.world.step == self.world.scenario.close:
                self.world.core.admission.unpin_compressed(number)
        errors = [each.future.exception(timeout=0) for each in self.jobs]
        own = {id(each.request.channel.error) for each in self.jobs}  # None, or the error of the exact text
        assert all(id(error) in {id(None), *own} or isinstance(error, ERRORS) for error in errors), errors
        return [f"compressed: {type(error).__name__}" for error in errors]
