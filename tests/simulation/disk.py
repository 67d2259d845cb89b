"""A disk in a simulated life: a real folder, reads that arrive late or not at all, and writes that fail.

Reads run at a step that the seed draws, and their arrival is posted to that step. So a life is the same each time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

from radixkv.disk import store as store_module
from radixkv.disk.slabs import Image, Slabs
from radixkv.disk.store import Read, Store
from radixkv.disk.tier import DiskTier
from radixkv.engine.disk_stage import DiskStage
from tests.simulation.host import HostSlotModel
from tests.simulation.late import LateSlotModel

if TYPE_CHECKING:
    from tests.simulation.world import World

WAIT = 20.0


class SimulatedDisk:
    """The disk of one world, whose memory is that of the model."""

    def __init__(self, world: World) -> None:
        assert isinstance(world.model, HostSlotModel)
        self.world, self.model, self.host = world, world.model, world.model.host
        self.rng = random.Random(f"disk of {world.scenario.seed}")
        self.delay = self.rng.choice((0, 1, 1, 8))
        self.faulty = self.rng.random() < 0.4
        self.folder = TemporaryDirectory()
        self.reads: list[tuple[int, Read]] = []  # with the step at which each runs
        self.abandoned = 0
        self.posted: list[Callable[[], None]] = []
        self.ended = threading.Semaphore(0)
        self.store = Store(lambda: Path(self.folder.name), self.image(0).nbytes, self.rng.choice((16, 1000)))
        assert self.store.settle(WAIT) and self.store.ready
        self._read = self.store.read
        self.store.read = self.read  # type: ignore[method-assign]
        self.store.seconds = lambda blocks: 0.0  # type: ignore[method-assign]
        self.tier = DiskTier(world.cache, self.store, self)
        self.stage = DiskStage(world.core, self.tier, self.put_image, self.posted.append, reopen=lambda old: old)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Let the disk fail, and be written to however full it is."""
        with ExitStack() as stack:
            for name in ("LEAST_FREE", "LEAST_SHARE", "PAUSE"):
                stack.enter_context(mock.patch.object(store_module, name, 0))
            for name in ("read", "write"):
                stack.enter_context(mock.patch.object(Slabs, name, self._failing(getattr(Slabs, name))))
            yield

    def _failing(self, call: Callable[..., object]) -> Callable[..., object]:
        def perhaps(*args: object) -> object:
            if self.faulty and self.rng.random() < 0.1:
                raise OSError(5, "a fault of the disk")
            return call(*args)

        return perhaps

    # The memory

    def offload(self, moves: Sequence[tuple[int, int]]) -> None:
        self.host.offload(moves)

    def image(self, block: int) -> Image:
        if isinstance(self.model, LateSlotModel):
            self.model.flush()
        parts = [
            each[block].reshape(-1).view(np.uint8) for each in (self.host.digests, self.host.tokens, self.host.origins)
        ]
        return np.concatenate(parts)

    def put_image(self, block: int, image: Image) -> None:
        at = 0
        for each in (self.host.digests, self.host.tokens, self.host.origins):
            part = each[block]
            part[...] = image[at : at + part.nbytes].view(part.dtype).reshape(part.shape)
            at += part.nbytes

    # Steps

    def read(self, read: Read) -> None:
        done = read.done

        def ended(read: Read) -> None:
            done(read)
            self.ended.release()

        read.done = ended
        self.reads.append((self.world.step + self.rng.randint(0, self.delay), read))

    def deliver(self, *, all: bool = False) -> None:
        """Run the reads that are due, and their arrivals; and all that the writer was told."""
        if isinstance(self.model, LateSlotModel):
            self.model.flush()  # no copy of a step reads the blocks that are written now
        due = [read for step, read in self.reads if all or step <= self.world.step]
        self.reads = [(step, read) for step, read in self.reads if read not in due]
        for read in due:
            self._read(read)
            assert self.ended.acquire(timeout=WAIT)
            self.posted.pop()()
        assert self.store.settle(WAIT)
        assert not self.posted
        if not self.store.closed and self.rng.random() < 0.1:
            self.empty_the_memory()

    def empty_the_memory(self) -> None:
        """Write all that is cached, and drop it from memory, as a restart does."""
        for node in self.tier.unwritten():
            self.tier.write(node, 0.0)
        assert self.store.settle(WAIT)
        self.world.cache.clear()

    def gave_up(self) -> bool:
        """Whether requests have given up waiting since the last call."""
        before, self.abandoned = self.abandoned, self.store.stats().abandoned_reads
        return self.abandoned > before

    def end(self) -> None:
        if not self.store.closed:
            self.deliver(all=True)
            assert self.store.close(WAIT)
        self.folder.cleanup()
