"""Write GGUF files field by field, also broken ones, independently of the reader and of the `gguf` package."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data)) + data


def value(kind: int, content: Any) -> bytes:
    """A value without its type; bytes stand for themselves, and an array is a pair of its type and its values."""
    if isinstance(content, bytes):
        return content
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        inner, values = content
        return u32(inner) + u64(len(values)) + b"".join(value(inner, each) for each in values)
    return struct.pack("<" + CODES[kind], content)


def key(name: str | bytes, kind: int, content: Any) -> bytes:
    return string(name) + u32(kind) + value(kind, content)


def tensor(name: str | bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


ARCHITECTURE = key("general.architecture", STRING, "llama")
WEIGHT = tensor("a.weight", (8,))  # 32 bytes


def file_of(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    start: bytes = b"GGUF" + u32(3),
    tensor_count: int | None = None,
    key_count: int | None = None,
    alignment: int = 32,
    data: int = 32,
) -> bytes:
    """A file with an architecture and a weight, unless others are given; `data` bytes follow the header."""
    keys = [ARCHITECTURE] if keys is None else keys
    tensors = [WEIGHT] if tensors is None else tensors
    counts = u64(len(tensors) if tensor_count is None else tensor_count)
    counts += u64(len(keys) if key_count is None else key_count)
    header = start + counts + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + bytes(data)


def shards(folder: Path, count: int = 3, stem: str = "model", **first: Any) -> list[Path]:
    """A set of shards with one weight each; `first` are further keys of the first one, as unsigned numbers."""
    paths = []
    for at in range(count):
        keys = [key("split.no", U16, at), key("split.count", U16, count), key("split.tensors.count", I32, count)]
        if at == 0:
            keys += [ARCHITECTURE, *(key(name, U32, number) for name, number in first.items())]
        path = folder / f"{stem}-{at + 1:05}-of-{count:05}.gguf"
        path.write_bytes(file_of(keys, [tensor(f"blk.{at}.weight", (8,))]))
        paths.append(path)
    return paths
