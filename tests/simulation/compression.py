"""Compress the prefixes of a simulated life, release them, and check that requests find them exactly until then."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import inf
from typing import TYPE_CHECKING

from radixkv.engine.compressed import CompressedPrefixes
from radixkv.errors import OutOfBlocks, PinBudgetExceeded, PrefixGone
from tests.simulation.scenario import Compressing

if TYPE_CHECKING:
    from tests.simulation.world import Customer, World

ERRORS = (OutOfBlocks, PinBudgetExceeded, PrefixGone)


class Compressions:
    """The compressed prefixes of one world."""

    def __init__(self, world: World) -> None:
        self.world, self.made = world, CompressedPrefixes(world.core, 1, "fake")
        self.jobs: list[Iterator[None]] = []
        self.ends: list[str] = []

    def events(self) -> None:
        """Begin the compressions of this step, do a piece of each that goes on, and release prefixes."""
        for each in self.world.scenario.compressings:
            if each.at == self.world.step and each.ask in self.world.customers:
                self.jobs.append(self._job(each))
        self.jobs = [job for job in self.jobs if next(job, self) is None]
        for each in self.world.scenario.compressings:
            if each.until == self.world.step:
                self.made.release(each.handle, self.world.namespace(each.namespace))
                assert each not in self.there(each.namespace)

    def _job(self, each: Compressing) -> Iterator[None]:
        """Do in pieces what `Engine.compress` does."""
        customer, prefix = self.world.customers[each.ask], each.handle
        request, channel = customer.request, customer.channel
        while not channel.ended:
            yield
        try:
            if channel.error is None:
                for _ in self.made.pieces(prefix, request.namespace, inf):
                    yield
            self.ends.append(type(channel.error).__name__)
        except ERRORS as error:
            self.ends.append(type(error).__name__)

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

    def end(self) -> list[str]:
        """Release all; return how each compression ended."""
        for job in self.jobs:
            job.close()  # type: ignore[attr-defined]
        for each in self.world.scenario.compressings:
            self.world.core.admission.unpin_compressed(self.world.namespace(each.namespace))
        return [f"compressed: {end}" for end in self.ends]
