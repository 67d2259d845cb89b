"""Read and check the header of a GGUF model: metadata and tensor table, of all shards if the model is split.

Files are untrusted. Each number of a header is compared with the size of the file before it is used, so that a broken
file is refused within bounded time and memory. No weight is read.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, overload

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.field_reader import FieldReader


class GGMLType(NamedTuple):
    """One tensor type: `block` numbers are stored in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}

REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types of older files, which current converters no longer write."""


T = TypeVar("T", str, int, float, bool, list)  # type: ignore[type-arg]

_MAGIC, _LFS = b"GGUF", b"version https://git-lfs"  # the second: a placeholder, in a clone made without git-lfs
_VERSIONS = (2, 3)  # equal in layout; 3 also allows big-endian files
_MOST_KEYS, _MOST_TENSORS, _MOST_SHARDS = 65_536, 131_072, 4_096
_MOST_DIMS = 4
_LARGEST_ALIGNMENT = 2**20
_AGAIN = "fetch or copy it again"
_NO_MODELS = {
    "mmproj": "the projector of a vision or audio model",
    "clip": "the projector of a vision model",
    "adapter": "an adapter",
    "imatrix": "an importance matrix for quantisation",
}
"""Files that are no model, by `general.type` or `general.architecture`."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file: `nbytes` bytes of type `type_name`, from byte `offset` of `file`.

    `shape` is in torch's order, rows first. The numbers of a row are contiguous.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    file: Path
    offset: int
    nbytes: int

    @property
    def numbers(self) -> int:
        """Numbers in the tensor, once dequantised."""
        return math.prod(self.shape)


class FileVersion(NamedTuple):
    """Identify the content of a file as far as the file system can: writing or replacing it gives another version."""

    device: int
    inode: int
    size: int
    modified_ns: int


def file_version(file: BinaryIO) -> FileVersion:
    """Return the present version of an open file."""
    found = os.fstat(file.fileno())
    return FileVersion(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a model: all metadata, and the tensors of all shards by name.

    `path` is the model's file, the first one of a set of shards. Arrays are lists. Bytes of a metadata string that are
    not UTF-8 are lone surrogates ("surrogateescape"): print such a string by `repr`.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    versions: Mapping[Path, FileVersion] = field(default_factory=dict, compare=False)  # of all shards

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`, such as "llama"."""
        return str(self.metadata["general.architecture"])

    @overload
    def value(self, key: str, kind: type[T]) -> T: ...
    @overload
    def value(self, key: str, kind: type[T], default: T) -> T: ...
    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the value of a key, or `default`; raises InvalidInput if it is missing or not of the type `kind`."""
        found = typed(self.path, self.metadata, key, kind)
        if found is None:
            if default is None:
                raise InvalidInput(f"{self.path}: its metadata has no {key}: {_AGAIN}, or convert the model again")
            return default
        return found

    def bytes_in(self, itemsize: int) -> int:
        """Return the bytes of all weights, dequantised to `itemsize` bytes per number."""
        return itemsize * sum(each.numbers for each in self.tensors.values())


def read_header(path: Path) -> GGUFHeader:
    """Return the checked header of a model, given its file or any shard of it. Costs the header's bytes.

    Raises InvalidInput for a broken file or a missing shard, UnsupportedModel for a whole file that holds no model or
    that has a version or tensor type that radixkv does not read. Both name the file and the remedy.
    """
    named = _read_part(path)
    parts = [named] if named.count == 1 else _parts(named)
    tensors: dict[str, GGUFTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise InvalidInput(f"{name} is in {tensors[name].file} and in {part.path}: fetch or copy both again")
            tensors[name] = tensor
    header = GGUFHeader(parts[0].path, parts[0].metadata, tensors, {part.path: part.version for part in parts})
    if len(parts) > 1:
        _check_total(header, len(parts))
    _check_model(header)
    return header


def models_in(folder: Path) -> list[Path]:
    """Return the models in a folder: each GGUF file, of a set of shards the first. Raises InvalidInput.

    Projectors and importance matrices are skipped by their names, if there is any other file.
    """
    try:
        files = sorted(
            each
            for each in folder.iterdir()
            if each.suffix.lower() == ".gguf" and not each.name.startswith(".") and not each.is_dir()
        )
    except OSError as error:
        raise InvalidInput(f"{folder} cannot be read: {error.strerror}") from error
    models: dict[str, Path] = {}
    for file in [each for each in files if not re.search("mmproj|imatrix", each.name, re.IGNORECASE)] or files:
        shard = _SHARD.fullmatch(file.name)
        models.setdefault(f"{shard['stem']}-of-{shard['count']}" if shard else file.name, file)
    return list(models.values())


def find(folder: Path) -> Path | None:
    """Return the only model in a folder, None if it has none. Raises InvalidInput for several, with their names."""
    models = models_in(folder)
    if len(models) > 1:
        names = ", ".join(each.name for each in models)
        raise InvalidInput(f"{folder} holds {len(models)} GGUF models: give the path of one of {names}")
    return next(iter(models), None)


def shards(file: Path) -> list[Path]:
    """Return the files of the model of which `file` is a part."""
    shard = _SHARD.fullmatch(file.name)
    return [file] if shard is None else sorted(file.parent.glob(f"{escape(shard['stem'])}-*-of-{shard['count']}.*"))


def typed(path: Path, metadata: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """Return the value of a key, None if it is missing; raises InvalidInput if it is not of the type `kind`.

    A whole number is accepted as a float; a bool is not accepted as a number.
    """
    found = metadata.get(key)
    if found is None:
        return None
    if type(found) is int and kind is float:
        found = float(found)
    if type(found) is not kind:
        raise InvalidInput(
            f"{path}: {key} is {_shortened(found)}, where {kind.__name__} is expected: {_AGAIN}, or convert the model "
            "again"
        )
    return found


def _shortened(value: object) -> str:
    text = repr(value[:10] if isinstance(value, list | str) else value)
    return text if len(text) < 80 else text[:80] + "..."


# ---- one file


@dataclass(frozen=True)
class _Part:
    """One file: a model, or one shard of it; `number` counts from 1."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    number: int
    count: int
    version: FileVersion


def _read_part(path: Path) -> _Part:
    try:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise InvalidInput(f"{path} is a folder: give the path of a GGUF file in it")
        if not stat.S_ISREG(found.st_mode):
            raise InvalidInput(f"{path} is no regular file: give the path of a GGUF file")
        with path.open("rb") as file:
            return _read_fields(path, file)
    except FileNotFoundError as error:
        if path.is_symlink():
            text = f"{path} is a link to nothing, as in a cache that was cleaned: {_AGAIN}"
        else:
            text = f"{path} does not exist: give the path of a GGUF file"
        raise InvalidInput(text) from error
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}: check its permissions and its disk") from error
    except ValueError as error:  # of `os.stat`: a name that no file can have
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{str(path)!r} is no name of a file: {error}") from error


def _read_fields(path: Path, file: BinaryIO) -> _Part:
    version = file_version(file)
    size = version.size
    _check_start(path, file.read(max(len(_LFS), 24)), size)
    file.seek(8)
    reader = FieldReader(path, file, size)
    tensor_count = reader.count("tensors", 25, _MOST_TENSORS)
    key_count = reader.count("metadata keys", 14, _MOST_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.name()
        if key in metadata:
            raise reader.broken(f"metadata key {key} is there twice")
        metadata[key] = reader.value()
    alignment = _alignment(path, metadata)
    infos = [_tensor_info(reader) for _ in range(tensor_count)]
    start = -(-reader.position // alignment) * alignment
    tensors = _placed(path, infos, start, alignment, size)
    count = _whole(path, metadata, "split.count", default=1) or 1
    number = _whole(path, metadata, "split.no", default=0) + 1
    if not number <= count <= _MOST_SHARDS:
        raise InvalidInput(f"{path}: it is shard {number} of {count}: {_AGAIN}")
    return _Part(path, metadata, tensors, number, count, version)


def _check_start(path: Path, start: bytes, size: int) -> None:
    """Refuse a file that does not start as a little-endian GGUF file of a supported version."""
    if not start:
        raise InvalidInput(f"{path} is empty: {_AGAIN}")
    if start.startswith(_LFS):
        raise InvalidInput(f"{path} stands in for the model (Git LFS): run git lfs pull")
    if not start.startswith(_MAGIC):
        raise InvalidInput(f"{path} is no GGUF file: it starts with {start[:4]!r}, not with {_MAGIC!r}: {_AGAIN}")
    if len(start) < 24:
        raise InvalidInput(f"{path} is truncated: it has {size} bytes: {_AGAIN}")
    version = int.from_bytes(start[4:8], "little")
    if version in _VERSIONS:
        return
    if version & 0xFFFF == 0 and int.from_bytes(start[4:8], "big") in _VERSIONS:
        raise UnsupportedModel(f"{path} is big-endian: convert it with gguf_convert_endian.py of llama.cpp")
    raise UnsupportedModel(
        f"{path} has GGUF version {version}; radixkv reads versions {' and '.join(map(str, _VERSIONS))}: fetch a "
        "current file of the model, or convert it again"
    )


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = _whole(path, metadata, "general.alignment", default=32)
    if not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise InvalidInput(f"{path}: general.alignment is {alignment:,}, not a power of two up to 2**20: {_AGAIN}")
    return alignment


def _whole(path: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    """Return a number that is not negative, or `default` if the key is missing."""
    found = typed(path, metadata, key, int)
    if found is not None and found < 0:
        raise InvalidInput(f"{path}: {key} is {found}: {_AGAIN}")
    return default if found is None else found


def _tensor_info(reader: FieldReader) -> tuple[str, tuple[int, ...], int, int]:
    """Return the name, the dimensions in ggml's order, the type id, and the offset from the start of the data."""
    name = reader.name()
    dims = reader.u32()
    if dims > _MOST_DIMS:
        raise reader.broken(f"tensor {name} has {dims:,} dimensions, at most {_MOST_DIMS} are possible")
    return name, tuple(reader.u64() for _ in range(dims)), reader.u32(), reader.u64()


def _placed(
    path: Path, infos: Sequence[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int, size: int
) -> dict[str, GGUFTensor]:
    """Return the tensors of a file with its data from byte `start`; their bytes lie in the file and do not overlap."""
    tensors: dict[str, GGUFTensor] = {}
    for name, dims, type_id, offset in infos:
        if name in tensors:
            raise InvalidInput(f"{path}: tensor {name} is there twice: {_AGAIN}")
        if offset % alignment:
            raise InvalidInput(f"{path}: tensor {name} is at {offset:,}, no multiple of {alignment}: {_AGAIN}")
        type_name, nbytes = _sized(path, name, dims, type_id)
        tensors[name] = GGUFTensor(name, dims[::-1], type_id, type_name, path, start + offset, nbytes)
    _check_places(path, sorted(tensors.values(), key=lambda each: each.offset), size)
    return tensors


def _sized(path: Path, name: str, dims: tuple[int, ...], type_id: int) -> tuple[str, int]:
    """Return the name of a tensor's type, and its bytes."""
    if type_id not in GGML_TYPES:
        removed = REMOVED_TYPES.get(type_id)
        text = (
            f"{removed}, which ggml has removed" if removed else f"number {type_id}, which this release does not read"
        )
        raise UnsupportedModel(f"{path}: tensor {name} has type {text}: fetch the model in another quantisation")
    kind = GGML_TYPES[type_id]
    numbers = math.prod(dims)
    if not 0 < numbers < 2**63:
        raise InvalidInput(f"{path}: tensor {name} has the dimensions {_times(dims)}: {_AGAIN}")
    row = dims[0] if dims else 1
    if row % kind.block:
        raise InvalidInput(
            f"{path}: tensor {name} has rows of {row:,} numbers, no multiple of the {kind.block} in a block of "
            f"{kind.name}: {_AGAIN}"
        )
    return kind.name, numbers // kind.block * kind.nbytes


def _times(dims: tuple[int, ...]) -> str:
    return " x ".join(f"{each:,}" for each in dims)


def _check_places(path: Path, tensors: Sequence[GGUFTensor], size: int) -> None:
    """Refuse tensors, in the order of their offsets, that overlap or end after the file."""
    end, last = 0, ""
    for tensor in tensors:
        if tensor.offset < end:
            raise InvalidInput(f"{path}: the bytes of tensors {last} and {tensor.name} overlap: {_AGAIN}")
        end, last = tensor.offset + tensor.nbytes, tensor.name
        if end > size:
            raise InvalidInput(
                f"{path} is truncated: tensor {last} ends at byte {end:,}, and the file has {size:,}: {_AGAIN}"
            )


# ---- shards, and the model as a whole


def _parts(named: _Part) -> list[_Part]:
    """Return all shards of the set that `named` belongs to, in order."""
    match = _SHARD.fullmatch(named.path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (named.number, named.count):
        right = f"-{named.number:05}-of-{named.count:05}.gguf"
        raise InvalidInput(
            f"{named.path} is shard {named.number} of {named.count}: keep all shards in one folder; the name of this "
            f"one must end in {right}"
        )
    paths = [
        named.path.with_name(f"{match['stem']}-{number:05}-of-{named.count:05}.gguf")
        for number in range(1, named.count + 1)
    ]
    missing = [each.name for each in paths if not each.exists()]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise InvalidInput(
            f"{named.path} is one of {named.count} shards, and {named.path.parent} lacks "
            f"{', '.join(missing[:5])}{more}: fetch or copy them"
        )
    parts = [named if path == named.path else _read_part(path) for path in paths]
    for number, part in enumerate(parts, 1):
        if (part.number, part.count) != (number, named.count):
            raise InvalidInput(f"{part.path} is shard {part.number} of {part.count}, unlike its name: {_AGAIN}")
        for key in part.metadata.keys() & parts[0].metadata.keys() - {"split.no"}:
            if part.metadata[key] != parts[0].metadata[key]:
                raise InvalidInput(
                    f"{part.path} and {parts[0].path} are of different models: their {key} differ: fetch both again"
                )
    return parts


def _check_total(header: GGUFHeader, shards: int) -> None:
    """Refuse a set of shards whose number of tensors is not the one that the first shard has in its metadata."""
    total = _whole(header.path, header.metadata, "split.tensors.count", default=len(header.tensors))
    if total != len(header.tensors):
        raise InvalidInput(
            f"{header.path} and its shards have {len(header.tensors):,} tensors, and {total:,} are expected: fetch or "
            f"copy all {shards} again"
        )


def _check_model(header: GGUFHeader) -> None:
    """Refuse files that hold no model: projectors, adapters, matrices, vocabularies."""
    architecture = typed(header.path, header.metadata, "general.architecture", str)
    kind = typed(header.path, header.metadata, "general.type", str) or "model"
    for each in (kind, architecture):
        if each in _NO_MODELS:
            raise UnsupportedModel(f"{header.path} is {_NO_MODELS[each]}, no model: give the file of the model itself")
    if kind != "model":
        raise UnsupportedModel(f"{header.path} is of type {kind!r}, no model: give the file of the model itself")
    if not architecture or not architecture.isprintable():
        raise InvalidInput(f"{header.path}: its metadata has no valid general.architecture: {_AGAIN}")
    if not header.tensors:
        raise UnsupportedModel(f"{header.path} holds a vocabulary without weights: give the file of the model itself")
