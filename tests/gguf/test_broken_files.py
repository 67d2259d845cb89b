"""Every broken GGUF file is refused with its name, the reason and a remedy, at bounded cost."""

from __future__ import annotations

import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.field_reader import MOST_BYTES
from radixkv.gguf.header import read_header
from tests.gguf.raw_file import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    I32,
    STRING,
    U8,
    U16,
    U32,
    WEIGHT,
    file_of,
    key,
    shards,
    string,
    tensor,
    u32,
    u64,
)  # fmt: skip

REMEDY = re.compile("fetch|copy|convert|give the|run git lfs|keep all shards|check its")


def refusal(path: Path, kind: type[Exception] = InvalidInput) -> str:
    """The text of the refusal, which names the file and a remedy; reading takes little memory."""
    tracemalloc.start()
    try:
        with pytest.raises((InvalidInput, UnsupportedModel)) as raised:
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text = str(raised.value)
    assert type(raised.value) is kind
    assert str(path.parent) in text and REMEDY.search(text), text
    assert peak < 8 * 2**20
    return text


def number(count: int) -> bytes:
    return key("x", ARRAY, u32(U8) + u64(count))


def test_the_raw_file_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of())
    header = read_header(path)
    assert header.metadata == {"general.architecture": "llama"}
    assert [(each.shape, each.nbytes) for each in header.tensors.values()] == [((8,), 32)]


NESTED = u32(ARRAY) + u64(1)
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "another format": (b"\x80\x02ccollections" + bytes(100), "is no GGUF file: it starts with b'\\x80\\x02cc'"),
    "a placeholder": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run git lfs pull"),
    "only the magic": (b"GGUF", "is truncated: it has 4 bytes"),
    "2^60 tensors": (file_of(tensor_count=2**60), "1,152,921,504,606,846,976 tensors do not fit"),
    "2^60 keys": (file_of(key_count=2**60), "1,152,921,504,606,846,976 metadata keys do not fit"),
    "one key more": (file_of(key_count=2), "byte 98 of 160: a name of 0 bytes"),
    "a string past the end": (file_of([key("x", STRING, u64(200))]), "a string of 200 bytes"),
    "a key past the end": (file_of([u64(300)]), "a field of 300 bytes"),
    "a string in an array past the end": (
        file_of([key("x", ARRAY, u32(STRING) + u64(2) + string("good") + u64(700))]),
        "a string of 700 bytes",
    ),
    "nested arrays": (file_of([key("x", ARRAY, NESTED * 5 + u32(U8) + u64(0))]), "arrays nested more than 4 deep"),
    "an unknown value type": (file_of([key("x", 13, b"")]), "unknown value type 13"),
    "an unknown array type": (file_of([key("x", ARRAY, u32(77) + u64(1))]), "unknown array type 77"),
    "a truth value of 2": (file_of([key("x", BOOL, 2)]), "a truth value that is neither 0 nor 1"),
    "a key twice": (file_of([ARCHITECTURE, ARCHITECTURE]), "metadata key general.architecture is there twice"),
    "an empty key": (file_of([key("", U32, 1)]), "a name of 0 bytes"),
    "a key with a control code": (file_of([key("a\x1b[2J", U32, 1)]), r"the name 'a\x1b[2J' is not printable"),
    "no architecture": (file_of([]), "no valid general.architecture"),
    "an architecture that is a number": (
        file_of([key("general.architecture", U32, 7)]),
        "general.architecture is 7, where str is expected",
    ),
    "an architecture that is not text": (
        file_of([key("general.architecture", STRING, string(b"\xff"))]),
        "no valid general.architecture",
    ),
    "an alignment of 0": (file_of([ARCHITECTURE, key("general.alignment", U32, 0)]), "general.alignment is 0"),
    "an alignment of 48": (file_of([ARCHITECTURE, key("general.alignment", U32, 48)]), "not a power of two"),
    "a tensor twice": (file_of(tensors=[WEIGHT, WEIGHT]), "tensor a.weight is there twice"),
    "2^31 dimensions": (file_of(tensors=[string("a") + u32(2**31) + bytes(30)]), "has 2,147,483,648 dimensions"),
    "a dimension of 0": (file_of(tensors=[tensor("a", (8, 0))]), "has the dimensions 8 x 0"),
    "a product of 2^64": (file_of(tensors=[tensor("a", (2**32, 2**32))]), "4,294,967,296 x 4,294,967,296"),
    "rows that do not fit blocks": (file_of(tensors=[tensor("a", (48, 2), 3)]), "no multiple of the 32 in a block"),
    "an offset off the grid": (file_of(tensors=[tensor("a", (8,), 0, 8)]), "is at 8, no multiple of 32"),
    "an offset of 2^64 - 32": (file_of(tensors=[tensor("a", (8,), 0, 2**64 - 32)]), "is truncated: tensor a ends at"),
    "data cut": (file_of(data=31), "is truncated: tensor a.weight ends at byte 160, and the file has 159"),
    "overlapping tensors": (
        file_of(tensors=[tensor("b", (8,), 0, 32), tensor("a", (16,), 0, 0)], data=64),
        "the bytes of tensors a and b overlap",
    ),
    "a shard beyond its set": (
        file_of([ARCHITECTURE, key("split.no", U16, 3), key("split.count", U16, 3)]),
        "it is shard 4 of 3",
    ),
    "a set of 60,000": (file_of([ARCHITECTURE, key("split.count", U16, 60_000)]), "it is shard 1 of 60000"),
    "a set under another name": (
        file_of([ARCHITECTURE, key("split.no", U16, 1), key("split.count", U16, 3)]),
        "the name of this one must end in -00002-of-00003.gguf",
    ),
}  # fmt: skip
UNSUPPORTED: dict[str, tuple[bytes, str]] = {
    "big-endian": (b"GGUF\0\0\0\3" + bytes(100), "is big-endian: convert it"),
    "version 1": (file_of(start=b"GGUF" + u32(1)), "has GGUF version 1; radixkv reads versions 2 and 3"),
    "version 4": (file_of(start=b"GGUF" + u32(4)), "has GGUF version 4"),
    "a removed tensor type": (file_of(tensors=[tensor("a", (32,), 31)]), "has type Q4_0_4_4, which ggml has removed"),
    "a new tensor type": (file_of(tensors=[tensor("a", (32,), 999)]), "type number 999, which this release does not"),
    "a projector": (file_of([ARCHITECTURE, key("general.type", STRING, "mmproj")]), "is the projector of a vision or"),
    "an old projector": (file_of([key("general.architecture", STRING, "clip")]), "is the projector of a vision model"),
    "an adapter": (file_of([ARCHITECTURE, key("general.type", STRING, "adapter")]), "is an adapter, no model"),
    "an importance matrix": (file_of([key("general.type", STRING, "imatrix")]), "is an importance matrix"),
    "something else": (file_of([ARCHITECTURE, key("general.type", STRING, "new\n")]), r"is of type 'new\n', no model"),
    "a vocabulary": (file_of(tensors=[]), "holds a vocabulary without weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(name: str, tmp_path: Path) -> None:
    data, text = BROKEN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert text in refusal(path)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_whole_file_that_is_no_readable_model_is_unsupported(name: str, tmp_path: Path) -> None:
    data, text = UNSUPPORTED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert text in refusal(path, UnsupportedModel)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (key("x", ARRAY, u32(U8) + u64(MOST_BYTES)), "array values do not fit"),
        (key("x", ARRAY, u32(STRING) + u64(20_000_000)), "array values do not fit"),
        (
            key("x", ARRAY, u32(ARRAY) + u64(4_500_000) + (u32(U8) + u64(0)) * 40_000),
            "more than 5,000,000 array values",
        ),
        (key("x", STRING, u64(2**30)), "a string of 1,073,741,824 bytes"),
    ],
    ids=["bytes", "strings", "empty arrays", "a string"],
)
def test_limits_hold_in_a_file_that_is_large_enough_for_the_lie(fields: bytes, text: str, tmp_path: Path) -> None:
    """The rest of the file, a hole of 64 GB that takes no space, has room for each of these counts."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + u32(3) + u64(1) + u64(1) + fields)
    os.truncate(path, 2**36)
    assert text in refusal(path)


def test_a_header_has_a_largest_number_of_keys_and_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for counts in (u64(10**6) + u64(1), u64(1) + u64(10**6)):
        path.write_bytes(b"GGUF" + u32(3) + counts)
        os.truncate(path, 2**36)
        assert "1,000,000" in refusal(path)


# ---- paths


def test_paths_that_are_no_file_are_refused(tmp_path: Path) -> None:
    assert "is a folder: give the path of a GGUF file in it" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "none.gguf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "none.gguf")
    assert "is a link to nothing" in refusal(tmp_path / "link.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is no regular file" in refusal(tmp_path / "pipe.gguf")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    assert "cannot be read" in refusal(tmp_path / "loop.gguf")
    assert "cannot be read: File name too long" in refusal(tmp_path / ("x" * 300 + ".gguf"))
    with pytest.raises(InvalidInput, match=r"'nul\\x00.gguf' is no name of a file"):
        read_header(Path("nul\0.gguf"))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file_of())

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    assert "cannot be read: Permission denied: check its permissions" in refusal(path)


# ---- shards


def test_any_shard_names_the_model(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    headers = [read_header(path) for path in paths]
    assert headers[0] == headers[1] == headers[2]
    assert headers[0].path == paths[0]
    assert {name: each.file for name, each in headers[0].tensors.items()} == {
        f"blk.{at}.weight": path for at, path in enumerate(paths)
    }


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    paths = shards(tmp_path, 12)
    for path in paths[2:]:
        path.unlink()
    text = refusal(paths[0])
    assert f"is one of 12 shards, and {tmp_path} lacks {', '.join(each.name for each in paths[2:7])} and 5 more" in text
    paths[0].unlink()
    assert f"lacks {paths[0].name}" in refusal(paths[1])


def swapped(paths: list[Path]) -> None:
    first, second = paths[0].read_bytes(), paths[1].read_bytes()
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)


def of_another_set(paths: list[Path]) -> None:
    other = paths[0].parent / "other"
    other.mkdir()
    paths[1].write_bytes(shards(other, 4)[1].read_bytes())


def of_another_model(paths: list[Path]) -> None:
    keys = [key("split.no", U16, 1), key("split.count", U16, 3), key("split.tensors.count", I32, 7)]
    paths[1].write_bytes(file_of(keys, [tensor("blk.9.weight", (8,))]))


def with_the_same_tensor(paths: list[Path]) -> None:
    keys = [key("split.no", U16, 1), key("split.count", U16, 3), key("split.tensors.count", I32, 3)]
    paths[1].write_bytes(file_of(keys, [tensor("blk.0.weight", (8,))]))


def with_another_tensor(paths: list[Path]) -> None:
    keys = [key("split.no", U16, 1), key("split.count", U16, 3), key("split.tensors.count", I32, 3)]
    two = [tensor("blk.1.weight", (8,)), tensor("blk.8.weight", (8,), 0, 32)]
    paths[1].write_bytes(file_of(keys, two, data=64))


def truncated(paths: list[Path]) -> None:
    paths[1].write_bytes(paths[1].read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (swapped, "is shard 2 of 3: keep all shards in one folder"),
        (of_another_set, "is shard 2 of 4, unlike its name"),
        (of_another_model, "are of different models: their split.tensors.count differ"),
        (with_the_same_tensor, "blk.0.weight is in "),
        (with_another_tensor, "have 4 tensors, and 3 are expected"),
        (truncated, "is truncated: tensor blk.1.weight ends at"),
    ],
)
def test_a_set_with_a_wrong_shard_is_refused(change: Callable[[list[Path]], None], text: str, tmp_path: Path) -> None:
    paths = shards(tmp_path)
    change(paths)
    assert text in refusal(paths[0])
