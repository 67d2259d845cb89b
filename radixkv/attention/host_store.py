"""Images of offloaded blocks in host memory: copy blocks from the pool to the host, and cached runs back.

On a CPU the host memory is a second pool. On CUDA it is pinned, an image of a block is one piece with the keys and
values of all layers, and the copy engine of the device reads and writes it; the CPU never does.

Only copies between the device's own memories run in the stream of the calling thread, as the forward does: they fill
a stage of offloaded blocks, and empty a stage of loaded ones. So every block is read and written in the forward's
order. The copies between the stages and the host run meanwhile, offloads and loads in a stream each, ordered by events.
Callers validate block ids and slots; they are not checked here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.kv_store import KVStore
from radixkv.device import Event, device_of
from radixkv.errors import InvalidInput
from radixkv.sizing.kv_size import size_text

PIECE = 1 << 30
"""Bytes of host memory that are pinned at once: torch rounds each allocation up to a power of two."""

STAGE = 64 << 20
"""Bytes of the device's memory through which blocks are copied in each direction, unless one block is larger."""

STAGED = 32
"""Blocks whose images move between two engines at once."""

_SHOWN = 4 * PIECE  # bytes that take seconds to pin
_MEASURED = 16 << 20  # bytes that are loaded to measure the bandwidth


class HostCosts(NamedTuple):
    """Seconds that a token takes, measured: to load its KV from the host, and to compute it in a prefill."""

    load_seconds_per_token: float
    prefill_seconds_per_token: float


class HostLoadPlan(Protocol):
    """The part of a write plan that a load reads."""

    @property
    def slots(self) -> NDArray[np.int64]:
        """The pool's slots [tokens] to write, of consecutive tokens."""

    @property
    def copies(self) -> Sequence[tuple[int, int]]:
        """Whole blocks (source, destination) of the pool to copy first."""


class HostLoad(Protocol):
    """The part of a `radixkv.cache.Load` that a store reads."""

    @property
    def plan(self) -> HostLoadPlan:
        """The slots to write."""

    @property
    def sources(self) -> NDArray[np.int64]:
        """Where the KV of each slot is [tokens]: host block * block_size + the token's offset, as in its slot."""


class HostStore:
    """Images of `num_blocks` blocks of a pool, in host memory. Not safe for two threads at once."""

    def __init__(self, store: KVStore, num_blocks: int, *, staged: bool | None = None) -> None:
        """Allocate num_blocks * store.bytes_per_block bytes, and two stages of up to `STAGE` bytes on a GPU.

        Pinning takes time; a progress bar is shown on a terminal for many GiB. With `staged`, blocks are copied through
        a stage, by default unless the pool is on a CPU; blocks are outermost in such a pool. Raises InvalidInput for no
        blocks, for a store without KV, and if the memory cannot be allocated.
        """
        if num_blocks < 1 or not store.bytes_per_block:
            raise InvalidInput(f"host memory for {num_blocks} blocks of {size_text(store.bytes_per_block)} holds no KV")
        self.num_blocks, self.block_size = num_blocks, store.block_size
        self.bytes_per_block = store.bytes_per_block
        self._store = store
        staged = store.device.type != "cpu" if staged is None else staged
        kind = StagedTransfers if staged else DirectTransfers
        try:
            self._transfers: StagedTransfers | DirectTransfers = kind(store, num_blocks)
        except (MemoryError, RuntimeError, ValueError) as error:  # numpy raises ValueError for a size beyond 63 bits
            raise InvalidInput(f"host memory of {size_text(self.nbytes)} cannot be allocated: {error}") from error

    @property
    def nbytes(self) -> int:
        """Bytes of all images."""
        return self.bytes_per_block * self.num_blocks

    def offload(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (block of the pool, host block); host blocks are all different."""
        if moves:
            blocks, images = np.array(moves, dtype=np.int64).T
            with self._on_device():
                self._transfers.offload(blocks, images)

    def load(self, loads: Sequence[HostLoad]) -> None:
        """Run the copies of all plans, then copy cached runs from the host to the slots of the plans, and to no others.

        Slots of all loads are different. Whole blocks are copied as such. The other tokens of a plan that starts or
        ends inside a block are copied one by one. A load may be repeated.
        """
        if not loads:
            return
        copies = [pair for each in loads for pair in each.plan.copies]
        slots = np.concatenate([each.plan.slots for each in loads])
        sources = np.concatenate([each.sources for each in loads])
        if not len(slots):
            return
        first = self._whole_blocks(slots, sources)
        rest = np.ones(len(slots), dtype=bool)
        rest[(first[:, None] + np.arange(self.block_size)).ravel()] = False
        with self._on_device():
            self._store.copy(copies)
            if len(first):
                self._transfers.load_blocks(sources[first] // self.block_size, slots[first] // self.block_size)
            if rest.any():
                self._transfers.load_slots(sources[rest], slots[rest])

    def image(self, block: int) -> NDArray[np.uint8]:
        """Return a copy of the image in a host block: all layers, keys and values, in one piece. Waits for a GPU."""
        self._wait()
        image = np.empty(self.bytes_per_block, np.uint8)
        at = 0
        for part in self._transfers.image_parts(block):
            image[at : at + part.nbytes].reshape(part.shape)[...] = part
            at += part.nbytes
        return image

    def put_image(self, block: int, image: NDArray[np.uint8]) -> None:
        """Set the image of a host block, which no copy reads or writes meanwhile. Any thread may; waits as `image`."""
        self._wait()
        at = 0
        for part in self._transfers.image_parts(block):
            part[...] = image[at : at + part.nbytes].reshape(part.shape)
            at += part.nbytes

    def blank(self, image: NDArray[np.uint8], tokens: int) -> None:
        """Set all slots of an image but its first `tokens` to zero."""
        at = 0
        for pool in self._store.tensors:
            heads, nbytes = pool.shape[0], pool.nbytes // self._store.num_blocks
            image[at : at + nbytes].reshape(heads, self.block_size, -1)[:, tokens:] = 0
            at += nbytes

    def measure(self) -> float:
        """Return the bytes per second of a load; overwrites the images of some blocks, and leaves the pool as it is.

        Costs three copies of 16 MiB or less, or of a single block.
        """
        count = min(self.num_blocks, self._store.num_blocks, max(1, _MEASURED // self.bytes_per_block))
        blocks = np.arange(count)
        with self._on_device():
            self._transfers.offload(blocks, blocks)
            self._transfers.load_blocks(blocks, blocks)  # maps the memory
            self._wait()
            began = time.perf_counter()
            self._transfers.load_blocks(blocks, blocks)
            self._wait()
        return count * self.bytes_per_block / max(time.perf_counter() - began, 1e-9)

    def _wait(self) -> None:
        """Wait until all copies are done."""
        device_of(self._store.device).synchronize()

    def _on_device(self) -> AbstractContextManager[Any]:
        """Launch on the pool's device, whichever device the thread uses otherwise."""
        return device_of(self._store.device).current()

    def _whole_blocks(self, slots: NDArray[np.int64], sources: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions where all slots of a block follow one another, with a single image as their source.

        Where two cached runs meet inside a block, each has an image of its own.
        """
        size = self.block_size
        starts = np.flatnonzero(slots % size == 0)
        starts = starts[starts + size <= len(slots)]
        for each in (slots, sources):
            starts = starts[each[starts + size - 1] == each[starts] + size - 1]
        return starts


class DirectTransfers:
    """Copies by numpy between two pools of a CPU, in one pass; blocks that are adjacent in both are one run.

    Block ids, images, sources and slots are int64 [n].
    """

    def __init__(self, store: KVStore, num_blocks: int) -> None:
        """Allocate the second pool; the system maps a page when it is first written."""
        images = KVStore(
            store.layers,
            num_blocks,
            store.block_size,
            dtype=store.dtype,
            blocks_first=not store.runs_are_views,
            kv_dtype=store.format.name,
        )
        self._block_size = store.block_size
        pools = list(zip(store.tensors, images.tensors, strict=True))
        self._blocks = [(_items(pool.flatten(2)), _items(image.flatten(2))) for pool, image in pools]
        self._tokens = [(_items(pool), _items(image)) for pool, image in pools]

    def offload(self, blocks: NDArray[np.int64], images: NDArray[np.int64]) -> None:
        """Copy blocks of the pool to images."""
        runs = _runs(blocks, images)
        for pool, image in self._blocks:
            for here, there in runs:
                image[:, there] = pool[:, here]

    def load_blocks(self, images: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
        """Copy images to blocks of the pool."""
        runs = _runs(images, blocks)
        for pool, image in self._blocks:
            for there, here in runs:
                pool[:, here] = image[:, there]

    def image_parts(self, image: int) -> list[NDArray[np.uint8]]:
        """View the bytes of an image, by tensor of the pool: each [heads, bytes]."""
        return [image_of[:, image, None].view(np.uint8) for _, image_of in self._blocks]

    def load_slots(self, sources: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Copy tokens of images to slots of the pool."""
        (there, offset), (here, place) = np.divmod(sources, self._block_size), np.divmod(slots, self._block_size)
        for pool, image in self._tokens:
            pool[:, here, place] = image[:, there, offset]


def _items(pool: Tensor) -> NDArray[np.void]:
    """View [heads, ..., numbers] as items of as many bytes: [heads, ...]. An item is copied as one piece."""
    width = pool.shape[-1] * pool.itemsize
    return pool.view(torch.uint8).numpy().view(np.dtype((np.void, width)))[..., 0]


def _runs(first: NDArray[np.int64], second: NDArray[np.int64]) -> list[tuple[slice, slice]]:
    """Cut pairs of block ids into runs that are adjacent in both.

    >>> _runs(np.array([4, 5, 2]), np.array([7, 8, 9]))
    [(slice(4, 6, None), slice(7, 9, None)), (slice(2, 3, None), slice(9, 10, None))]
    """
    cuts = np.flatnonzero((np.diff(first) != 1) | (np.diff(second) != 1)) + 1
    starts, lengths = [0, *cuts.tolist()], np.diff([0, *cuts, len(first)]).tolist()
    firsts, seconds = first[starts].tolist(), second[starts].tolist()
    return [(slice(a, a + n), slice(b, b + n)) for a, b, n in zip(firsts, seconds, lengths, strict=True)]


class Stage:
    """Rows of the device's memory that one stream fills and another one empties, in turn; each row has one block.

    `filled` and `emptied` are placed after the latest use of either kind.
    """

    def __init__(self, store: KVStore, count: int) -> None:
        """Allocate `count` rows in the present stream. They may be used once all its work is done."""
        device, widths = device_of(store.device), [pool.nbytes // store.num_blocks for pool in store.tensors]
        self.rows = torch.empty(count, sum(widths), dtype=torch.uint8, device=store.device)
        parts = zip(store.tensors, self.rows.split_with_sizes(widths, 1), strict=True)
        self.parts = [(pool, part.view(pool.dtype)) for pool, part in parts]
        self.filled, self.emptied = device.event(), device.event()

    def filling(self) -> AbstractContextManager[None]:
        """Let the present stream fill the rows while this is open, once they are empty."""
        return _after(self.emptied, self.filled)

    def emptying(self) -> AbstractContextManager[None]:
        """Let the present stream empty the rows while this is open, once they are filled."""
        return _after(self.filled, self.emptied)


@contextmanager
def _after(before: Event, done: Event) -> Iterator[None]:
    """Let the present stream wait for `before`, and place `done` at the end, after an error, too."""
    before.wait()
    try:
        yield
    finally:
        done.record()


class StagedTransfers:
    """Copies by the device through stages in its memory, so that each image is one copy of one piece.

    An image that a load has read is written by a later offload only: its blocks are gathered after the load's blocks
    were written, in the stream of the caller, so no event orders these two.
    """

    def __init__(self, store: KVStore, num_blocks: int) -> None:
        """Allocate the stages, then the images: pinned if the pool is on CUDA."""
        assert not store.runs_are_views, "a block is one piece of a stored tensor"
        self._store, self._device = store, device_of(store.device)
        nbytes = store.bytes_per_block
        self._offloads, self._loads = self._device.stream(), self._device.stream()
        self.before_latest, self._latest = self._device.event(), np.zeros(0, np.int64)  # the latest offload's images
        with torch.inference_mode(False), self._device.current():
            self._count = max(1, min(num_blocks, STAGE // nbytes))
            with self._device.on(self._offloads):  # which uses it last, so its memory is freed in order
                self.leaving = Stage(store, self._count)
            self.arriving = Stage(store, self._count)
            self._per_piece = max(1, PIECE // nbytes)
            self._pieces = self._allocate(num_blocks, nbytes)
        self._device.synchronize()

    def _allocate(self, num_blocks: int, nbytes: int) -> list[Tensor]:
        """Return the images [blocks, bytes] in pieces of about a GiB, and show the progress of pinning many."""
        counts = [min(self._per_piece, num_blocks - at) for at in range(0, num_blocks, self._per_piece)]
        shown = self._device.is_gpu and num_blocks * self._store.bytes_per_block >= _SHOWN
        return [self._device.pinned((count, nbytes), torch.uint8) for count in _shown(counts, shown)]

    def offload(self, blocks: NDArray[np.int64], images: NDArray[np.int64]) -> None:
        """Copy blocks of the pool to images."""
        with self._device.on(self._offloads):
            self.before_latest.record()
        self._latest, stage = images, self.leaving
        for at in range(0, len(blocks), self._count):
            index = self._device.upload(blocks[at : at + self._count])
            with stage.filling():
                for pool, part in stage.parts:
                    torch.index_select(self._table(pool), 0, index, out=part[: len(index)])
            with self._device.on(self._offloads), stage.emptying():
                for row, image in enumerate(images[at : at + len(index)].tolist()):
                    self._image(image).copy_(stage.rows[row], non_blocking=True)

    def load_blocks(self, images: NDArray[np.int64], blocks: NDArray[np.int64]) -> None:
        """Copy images to blocks of the pool."""
        for at in range(0, len(blocks), self._count):
            index = self._device.upload(blocks[at : at + self._count])
            self._fill(images[at : at + len(index)])
            with self.arriving.emptying():
                for pool, part in self.arriving.parts:
                    self._table(pool).index_copy_(0, index, part[: len(index)])

    def load_slots(self, sources: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Copy tokens of images to slots of the pool."""
        size = self._store.block_size
        images, rows = np.unique(sources // size, return_inverse=True)
        for at in range(0, len(images), self._count):
            here = (at <= rows) & (rows < at + self._count)
            chosen = np.stack([rows[here] - at, sources[here] % size, *np.divmod(slots[here], size)])
            row, offset, block, place = self._device.upload(chosen).unbind()
            self._fill(images[at : at + self._count])
            with self.arriving.emptying():
                for pool, part in self.arriving.parts:
                    heads, _, _, dim = pool.shape
                    new = part.view(-1, heads, size, dim).transpose(0, 1)
                    pool[:, block, place] = new[:, row, offset]

    def image_parts(self, image: int) -> list[NDArray[np.uint8]]:
        """View the bytes of an image, which is one piece."""
        return [self._image(image).view(torch.uint8).numpy()]

    def _fill(self, images: NDArray[np.int64]) -> None:
        """Copy images to the first rows of their stage, after the offloads that write them."""
        # The latest offload waits for the step in flight, and few loads need it.
        offloaded = self.leaving.emptied if np.isin(images, self._latest).any() else self.before_latest
        with self._device.on(self._loads), self.arriving.filling():
            offloaded.wait()
            for row, image in enumerate(images.tolist()):
                self.arriving.rows[row].copy_(self._image(image), non_blocking=True)

    def _image(self, image: int) -> Tensor:
        """View an image [bytes]."""
        return self._pieces[image // self._per_piece][image % self._per_piece]

    def _table(self, pool: Tensor) -> Tensor:
        """View a tensor of the pool as [blocks, numbers]."""
        return pool.transpose(0, 1).view(self._store.num_blocks, -1)


def _shown(counts: list[int], shown: bool) -> Iterable[int]:
    """Iterate the sizes of pieces that are pinned; if `shown`, with a progress bar on a terminal."""
    if not shown:
        return counts
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(counts, "pinning host memory", console=console, disable=not console.is_terminal, transient=True)
