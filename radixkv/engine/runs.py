"""Cached runs that move between engines: their files, and how an engine exports and imports them.

A file has a head of fixed size, tokens and checksums, and the images. The head, the part after it and each image have a
checksum. Checksums detect damage; they prove no origin.

An engine reads and writes a run in pieces between its steps, so running streams wait for one piece only. Each piece
opens the text again, and holds it while bytes are copied. So a run ends early if its text is evicted or cleared
between two pieces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from struct import Struct
from typing import IO, TYPE_CHECKING, Any, Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from radixkv import private_files
from radixkv.attention.host_store import STAGED
from radixkv.cache import Sequence
from radixkv.cache.types import Load
from radixkv.disk.folder import fingerprint
from radixkv.engine.core import Core
from radixkv.engine.kv_facts import facts
from radixkv.engine.request import TokenIds
from radixkv.errors import InvalidInput, WeightsChanged

if TYPE_CHECKING:
    from radixkv.models.adapter import LoadedModel
    from radixkv.models.weights.fixed import Weights

_HEAD, _CHECKSUM = Struct("<8s24sIIQ"), Struct("<I")  # format, fingerprint, tokens of a block, tokens, image bytes
_FORMAT = b"RKV-RUN1"
_PIECE = 1 << 20  # bytes that are read at once: a wrong length allocates no more than there is
Images = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Run:
    """The tokens of a cached prefix, int32 [n], and images of its blocks, uint8 [ceil(n / block_size), bytes].

    `checksums` are uint32, one for each image. `fingerprint` identifies the weights and settings that determine the
    images.
    """

    fingerprint: str
    block_size: int
    tokens: TokenIds = field(repr=False)
    images: Images = field(repr=False)
    checksums: NDArray[np.uint32] = field(repr=False)

    def write(self, file: str | os.PathLike[str] | IO[bytes]) -> None:
        """Write the run to a binary stream, or to a path: a whole file that only its owner may read. Raises OSError."""
        if isinstance(file, str | os.PathLike):
            with private_files.replacing(file) as opened:
                return self.write(opened)
        numbers = self.block_size, len(self.tokens), self.images.shape[1]
        head = _HEAD.pack(_FORMAT, self.fingerprint.encode(), *numbers)
        for part in (head, self.tokens.astype("<i4").tobytes() + self.checksums.tobytes()):
            file.write(part + _CHECKSUM.pack(crc32(part)))
        file.write(self.images.data)

    @staticmethod
    def begins(path: str | os.PathLike[str]) -> bool:
        """Return whether a file of this user begins as a run does. Raises OSError."""
        with private_files.open_own(path) as opened:
            return opened.read(len(_FORMAT)) == _FORMAT

    @classmethod
    def read(cls, file: str | os.PathLike[str] | IO[bytes]) -> Self:
        """Read a run from a path, or from a binary stream up to the run's end; `import_run` checks its images.

        Raises InvalidInput for damage and for a file of another user, OSError.
        """
        if isinstance(file, str | os.PathLike):
            with private_files.open_own(file) as opened:
                return cls.read(opened)
        form, name, block_size, count, nbytes = _HEAD.unpack(_checked(file, _HEAD.size))
        if form != _FORMAT or not block_size or not count:
            raise InvalidInput(f"this is no run of the format {_FORMAT!r}, but {form!r}")
        blocks = -(-count // block_size)
        body = np.frombuffer(_checked(file, 4 * (count + blocks)), np.uint32)
        images = np.frombuffer(_exactly(file, blocks * nbytes), np.uint8).reshape(blocks, nbytes)
        return cls(name.decode("latin-1"), block_size, body[:count].view(np.int32), images, body[count:])


def _checked(stream: IO[bytes], count: int) -> bytearray:
    """Read bytes and the checksum after them."""
    data = _exactly(stream, count)
    if _exactly(stream, _CHECKSUM.size) != _CHECKSUM.pack(crc32(data)):
        raise InvalidInput("the run is damaged: a checksum differs, or this is no run")
    return data


def _exactly(stream: IO[bytes], count: int) -> bytearray:
    """Read `count` bytes. Raises InvalidInput if there are fewer."""
    data = bytearray()
    while len(data) < count:
        piece = stream.read(min(count - len(data), _PIECE))
        if not isinstance(piece, bytes):
            raise InvalidInput("the stream has text: open the file in binary mode")
        if not piece:
            raise InvalidInput(f"the run is damaged: it ends {count - len(data)} bytes early")
        data += piece
    return data


def _checksums(images: Images) -> NDArray[np.uint32]:
    return np.array([crc32(image.data) for image in images], np.uint32)


class RunExchange:
    """Exports and imports runs of one engine; any thread may call `export_run` and `import_run`, which wait."""

    def __init__(self, core: Core, ask: Callable[[Callable[[], Any]], Any], weights: Weights) -> None:
        """Use the core in calls that `ask` runs on the engine's thread, and waits for; `weights` are the model's."""
        self._core, self._ask, self.weights = core, ask, weights
        self._size, self._num_blocks = core.cache.block_size, core.cache.num_blocks
        self._weights, self._known = 0, dict[int, str]()  # how often they have changed, and their fingerprint

    def weights_changed(self) -> None:
        """Have another fingerprint from now on; on the engine's thread."""
        self._weights += 1

    def export_run(self, loaded: LoadedModel, tokens: TokenIds, namespace: Hashable) -> Run:
        """Return the cached prefix of a text; see `Engine.export_run`."""
        weights, image_bytes = self._ask(self._begin)
        name = self.fingerprint_of(loaded, weights, image_bytes)  # first: each piece checks that it is of these weights
        most = min(-(-len(tokens) // self._size), self._num_blocks)
        images, start, end = np.empty((most, image_bytes), np.uint8), -1, 0
        while start < end and end % (STAGED * self._size) == 0:
            start, (piece, end) = end, self._ask(partial(self._read, weights, tokens, namespace, end))
            first = start // self._size
            images[first : first + len(piece)] = piece
        if not end:
            raise InvalidInput("nothing of this text is cached in this namespace, so there is no run")
        images = images[: -(-end // self._size)]
        return Run(name, self._size, tokens[:end].copy(), images, _checksums(images))

    def import_run(self, loaded: LoadedModel, run: Run, namespace: Hashable) -> int:
        """Cache a run, and return how many of its tokens are cached then; see `Engine.import_run`."""
        weights, image_bytes = self._ask(self._begin)
        shape = -(-len(run.tokens) // self._size), image_bytes
        if run.block_size != self._size:
            raise InvalidInput(f"the run has blocks of {run.block_size} tokens, and this engine of {self._size}")
        if run.fingerprint != self.fingerprint_of(loaded, weights, image_bytes):
            raise InvalidInput("the run was computed with other weights or settings than the present ones")
        if run.images.shape != shape or not np.array_equal(_checksums(run.images), run.checksums):
            raise InvalidInput(f"the run is damaged: its images {run.images.shape} differ from their checksums")
        before, length = -1, 0
        while before < length < len(run.tokens):
            before, length = length, self._ask(partial(self._write, weights, run, namespace, length))
        return length

    def fingerprint_of(self, loaded: LoadedModel, weights: int, image_bytes: int) -> str:
        """Return the fingerprint of such weights; it is computed once, which reads all of them. Any thread may call."""
        known = self._known
        if weights not in known:
            about = facts(loaded, self._core.config, image_bytes)
            self._known = known = {weights: fingerprint({"weights": self.weights.digest(), **about})}
        return known[weights]

    # ---- pieces, on the engine's thread

    def _begin(self) -> tuple[int, int]:
        """Return the number of the present weights, and the bytes of an image. Raises InvalidInput if no run moves."""
        if self._core.cache.state_rows:
            raise InvalidInput("runs of a model with recurrent state cannot move: they do not hold the state")
        if not self._core.config.prefix_cache:
            raise InvalidInput("with prefix_cache=False nothing is cached, so there are no runs")
        return self._weights, self._core.runner.image_bytes

    def _open(self, weights: int, tokens: TokenIds, namespace: Hashable) -> closing[Sequence]:
        if weights != self._weights:
            raise WeightsChanged("the weights were reloaded while a run moved: try again")
        return closing(self._core.cache.open(tokens, namespace, purpose="resume"))

    def _read(self, weights: int, tokens: TokenIds, namespace: Hashable, start: int) -> tuple[Images, int]:
        """Copy images of cached blocks from token `start` on; returns them, and where their tokens end."""
        with self._open(weights, tokens, namespace) as sequence:
            most = start + STAGED * self._size
            self._load_from_host(sequence, tokens[sequence.length : most])
            end, runner = min(sequence.length, most), self._core.runner
            if end <= start:
                return np.empty((0, runner.image_bytes), np.uint8), start
            blocks = sequence.block_table[start // self._size : -(-end // self._size)]
            return runner.read_images(blocks.tolist(), end - start), end

    def _load_from_host(self, sequence: Sequence, tokens: TokenIds) -> None:
        """Load the host-resident part of `tokens`, which follow a sequence, as far as the pool has room."""
        host, count = self._core.host, min(sequence.loadable(tokens), self._room(sequence))
        if host is not None and count and host.load_between_steps(sequence, tokens[:count]):
            sequence.commit()

    def _write(self, weights: int, run: Run, namespace: Hashable, length: int) -> int:
        """Cache more of a run, unless some of its first `length` tokens have gone; returns how many are cached."""
        with self._open(weights, run.tokens, namespace) as sequence:
            start, first = sequence.length, sequence.length // self._size
            new = run.tokens[start : min((first + STAGED) * self._size, start + self._room(sequence))]
            if start >= length and len(new):
                plan = sequence.extend(new)
                if self._core.host is not None:
                    self._core.host.offload()
                sources = start % self._size + np.arange(len(new))
                images = run.images[first : -(-(start + len(new)) // self._size)]
                self._core.runner.load_images(Load(plan, sources), images)
                sequence.commit()
            return sequence.length

    def _room(self, sequence: Sequence) -> int:
        """Return how many tokens surely fit after a sequence, whose last block may have to be copied."""
        cache, offset = self._core.cache, sequence.length % self._size
        blocks = cache.available_blocks - bool(offset)
        return max(0, blocks * self._size + -offset % self._size)
