"""Write a model and its tokenizer to a folder that `load` reads back with the same weights, bit for bit.

Weights go from the model's memory to the disk in small pieces. No copy of them is made, progress is reported in bytes,
and Ctrl-C acts at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixkv.models.checkpoint import INDEX, WEIGHTS
from radixkv.models.safetensors_files import DTYPES

SHARD_BYTES = 5 * 10**9
_PIECE = 1 << 24  # bytes of one write
_ALIGNMENT = 64  # bytes; products of matrices round differently on numbers that are not aligned as torch's are
_LENGTH = 8  # bytes of the number that precedes the header
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_model(
    folder: Path,
    model: Any,
    tokenizer: Any | None,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], object] = lambda _: None,
) -> None:
    """Write configuration, generation settings, tokenizer and weights of a transformers model to an existing folder.

    Weights that share memory, as a tied head does, are written once. Files of weights have at most `shard_bytes`,
    except for a single larger weight. `progress` is called with the bytes of each write. Raises OSError.
    """
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    shards = list(_shards(_distinct(model.state_dict()), shard_bytes))
    names = [f"model-{at:05}-of-{len(shards):05}.safetensors" for at in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS]
    else:
        _write_index(folder / INDEX, dict(zip(names, shards, strict=True)))
    for name, tensors in zip(names, shards, strict=True):
        _write_tensors(folder / name, tensors, progress)


def bytes_of(model: Any) -> int:
    """Return the bytes of the weights that `write_model` writes."""
    return sum(each.nbytes for each in _distinct(model.state_dict()).values())


def _distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without those that have the memory and shape of an earlier one."""
    found: dict[object, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault((tensor.data_ptr(), tensor.shape) if tensor.numel() else name, (name, tensor))
    return dict(found.values())


def _shards(tensors: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    """Divide tensors into files of at most `most` bytes, in their order."""
    shard: dict[str, Tensor] = {}
    taken = 0
    for name, tensor in tensors.items():
        if shard and taken + tensor.nbytes > most:
            yield shard
            shard, taken = {}, 0
        shard[name] = tensor
        taken += tensor.nbytes
    yield shard


def _write_index(path: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> None:
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    places = {name: file for file, tensors in shards.items() for name in tensors}
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], progress: Callable[[int], object]) -> None:
    """Write a safetensors file: the header's length in 8 bytes, a JSON header, and the tensors without gaps.

    Tensors whose bytes are no multiple of the alignment come last, those with larger numbers first. So all others are
    aligned to 64 bytes, and these to their numbers.
    """
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % _ALIGNMENT > 0, -item[1].itemsize))
    with path.open("xb") as file:
        header = _header(ordered)
        file.write(len(header).to_bytes(_LENGTH, "little") + header)
        for _, tensor in ordered:
            for piece in _pieces(tensor):
                progress(file.write(piece))
        file.flush()
        os.fsync(file.fileno())  # some file systems report a full disk only here


def _header(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        end = offset + tensor.nbytes
        fields[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    return text + b" " * (-(_LENGTH + len(text)) % _ALIGNMENT)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the tensor's bytes, which are not copied if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]
