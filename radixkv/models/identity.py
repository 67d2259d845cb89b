"""Identify the content of model files by few bytes: headers, sizes, times of change, and samples of each tensor.

This is no proof of equal content. It serves records of self-tests, which do not depend on the values of the weights.
KV does: `files_of` and `digest_of_tensors` are for a full digest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

_SAMPLE = 64  # bytes, at the beginning, in the middle and at the end of a tensor


class Piece(NamedTuple):
    """The bytes of one tensor in a file."""

    file: Path
    offset: int
    nbytes: int


def identity_of(pieces: Iterable[Piece]) -> str:
    """Return a digest of the files that hold these tensors. Raises OSError.

    Costs the reading of all bytes before the first tensor of a file, and of three samples a tensor: a millisecond for
    300 tensors.
    """
    by_file: dict[Path, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece)
    digest = hashlib.sha256()
    for path, own in sorted(by_file.items()):
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            digest.update(f"{os.path.realpath(path)}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
            digest.update(file.read(min(piece.offset for piece in own)))
            for piece in sorted(own):
                _add_samples(digest, file.fileno(), piece)
    return digest.hexdigest()


def version_of(model: nn.Module) -> str:
    """Return a digest of samples of all weights, equal on each machine; "" if their files are unknown. Raises OSError.

    Costs three reads a tensor. Two trainings of one model differ in it, unless they differ in very few numbers.
    """
    pieces: tuple[Piece, ...] = getattr(model, "sources", ())
    digest = hashlib.sha256()
    for piece in sorted(pieces, key=lambda each: (each.file.name, each.offset)):
        with piece.file.open("rb") as file:
            _add_samples(digest, file.fileno(), piece)
    return digest.hexdigest() if pieces else ""


def _add_samples(digest: Any, file: int, piece: Piece) -> None:
    for start in (0, piece.nbytes // 2, piece.nbytes - _SAMPLE):
        digest.update(os.pread(file, _SAMPLE, piece.offset + max(start, 0)))


def files_of(model: nn.Module) -> tuple[Path, ...]:
    """Return the files that all weights of a model come from; none if that is unknown, or if they were changed."""
    sources: tuple[Piece, ...] = getattr(model, "sources", ())
    return tuple(sorted({piece.file for piece in sources}))


def digest_of_tensors(model: nn.Module) -> str:
    """Return a digest of all bytes of a model's parameters, buffers, and packed or quantised weights."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        own: dict[str, Any] = dict(module.named_parameters(recurse=False))
        own |= dict(module.named_buffers(recurse=False))
        own["stored"] = getattr(module, "stored", None)
        for key, tensor in own.items():
            if tensor is not None:
                digest.update(f"{name}.{key} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
                digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def versions_of_tensors(model: nn.Module) -> list[int]:
    """Return how often each parameter and buffer was changed in place, as far as torch counts that."""
    tensors = (*model.parameters(), *model.buffers())
    return [-1 if each.is_inference() else each._version for each in tensors]


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: the tensor itself, unless ranks divide it."""
    import torch

    with torch.no_grad():  # the part itself, not a view
        found: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    return local_part(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
