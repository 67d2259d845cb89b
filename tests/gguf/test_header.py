"""The header of a GGUF file equals the one that the `gguf` package reads, for every type of value and of tensor."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from radixkv.errors import InvalidInput
from radixkv.gguf.header import GGML_TYPES, REMOVED_TYPES, GGUFHeader, find, read_header
from tests.gguf.raw_file import ARCHITECTURE, ARRAY, F32, STRING, U8, U32, file_of, key, shards, tensor, u32

QUANTISED = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]  # types that the package can write


def written(path: Path) -> Path:
    """A file with a value of each type, and two tensors of each type."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "é", "", "words"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 0.0, 2.0])
    writer.add_array("tokenizer.ggml.token_type", [3, 1, 1, 1])
    writer.add_array("flags", [True, False])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_uint32("llama.block_count", 2)
    writer.add_int8("int8", -3)
    writer.add_uint8("uint8", 200)
    writer.add_int16("int16", -300)
    writer.add_uint16("uint16", 60_000)
    writer.add_int32("int32", -(2**31))
    writer.add_int64("int64", -(2**63))
    writer.add_uint64("uint64", 2**64 - 1)
    writer.add_float32("llama.rope.freq_base", 10_000.0)
    writer.add_float64("float64", 0.1)
    for name in QUANTISED:
        kind = gguf.GGMLQuantizationType[name]
        weights = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, kind), raw_dtype=kind)
        writer.add_tensor(f"{name}.norm", np.ones(7, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check_equal(header: GGUFHeader, path: Path) -> None:
    """The same metadata and tensors as the package's own reader has."""
    theirs = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields
    assert {
        each.name: (
            tuple(each.shape[::-1]),
            int(each.tensor_type),
            each.tensor_type.name,
            each.data_offset,
            each.n_bytes,
        )
        for each in theirs.tensors
    } == {
        each.name: (each.shape, each.type_id, each.type_name, each.offset, each.nbytes)
        for each in header.tensors.values()
    }


def test_metadata_and_tensors_equal_the_packages(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf")
    header = read_header(path)
    check_equal(header, path)
    assert header.path == path and header.architecture == "llama"
    assert header.bytes_in(2) == 2 * len(QUANTISED) * (3 * 64 + 7)
    assert header.value("llama.block_count", int) == 2


def test_the_types_match_the_package() -> None:
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {number: tuple(kind) for number, kind in GGML_TYPES.items()}
    assert {number: ours[number] for number in sizes.keys() & ours} == {
        number: sizes[number] for number in sizes.keys() & ours
    }
    assert len(sizes.keys() & ours) >= 30
    assert not REMOVED_TYPES.keys() & (sizes.keys() | ours.keys())


# ---- fields that the package does not write


def read(path: Path, data: bytes) -> GGUFHeader:
    path.write_bytes(data)
    return read_header(path)


def test_version_2_is_laid_out_as_version_3(tmp_path: Path) -> None:
    old = read(tmp_path / "model.gguf", file_of(start=b"GGUF" + u32(2)))
    assert old == read(tmp_path / "model.gguf", file_of())


def test_nested_arrays_are_nested_lists(tmp_path: Path) -> None:
    content = [(U32, [1, 2]), (U32, []), (STRING, ["a", "é"]), (ARRAY, [(U8, [7])])]
    header = read(tmp_path / "model.gguf", file_of([ARCHITECTURE, key("x", ARRAY, (ARRAY, content))]))
    assert header.metadata["x"] == [[1, 2], [], ["a", "é"], [[7]]]


def test_tokens_that_are_not_utf8_keep_their_bytes(tmp_path: Path) -> None:
    tokens = [b"\xff\xfe", b"\xc3", "é".encode(), bytes(range(256))]
    header = read(tmp_path / "model.gguf", file_of([ARCHITECTURE, key("tokens", ARRAY, (STRING, map_strings(tokens)))]))
    assert [each.encode("utf-8", "surrogateescape") for each in header.metadata["tokens"]] == tokens


def map_strings(texts: list[bytes]) -> list[bytes]:
    return [len(each).to_bytes(8, "little") + each for each in texts]


@pytest.mark.parametrize("length", [0, 1, 2**20 - 90, 2**20 - 40, 2**20, 3 * 2**20 + 5])
def test_strings_and_numbers_on_the_edge_of_a_window_are_whole(length: int, tmp_path: Path) -> None:
    """A window of 1 MiB of the file is in memory; the fields after a string of this length straddle its end."""
    texts = ["x" * length, "short", "y" * 70_000, "é"]
    numbers = list(range(40_000))
    keys = [ARCHITECTURE, key("texts", ARRAY, (STRING, texts)), key("numbers", ARRAY, (U32, numbers))]
    header = read(tmp_path / "model.gguf", file_of([*keys, key("last", STRING, "z" * length)]))
    assert header.metadata["texts"] == texts and header.metadata["numbers"] == numbers
    assert header.metadata["last"] == "z" * length and list(header.tensors) == ["a.weight"]


def test_data_starts_and_tensors_lie_on_the_alignment(tmp_path: Path) -> None:
    tensors = [tensor("b", (9,), 0, 256), tensor("a", (), 0, 0), tensor("c", (4, 3, 2, 1), 1, 128)]
    data = file_of([ARCHITECTURE, key("general.alignment", U32, 128)], tensors, alignment=128, data=256 + 36)
    found = read(tmp_path / "model.gguf", data).tensors
    start = len(data) - 256 - 36
    assert {name: (each.shape, each.offset - start, each.nbytes) for name, each in found.items()} == {
        "b": ((9,), 256, 36),
        "a": ((), 0, 4),
        "c": ((1, 2, 3, 4), 128, 48),
    }


def test_a_value_has_the_type_that_is_asked_for(tmp_path: Path) -> None:
    keys = [key("whole", U32, 7), key("real", F32, 0.5), key("name", STRING, "n"), key("list", ARRAY, (U8, [1, 2]))]
    header = read(tmp_path / "model.gguf", file_of([ARCHITECTURE, *keys]))
    assert header.value("whole", int) == 7 and header.value("whole", float) == 7.0
    assert header.value("list", list) == [1, 2] and header.value("name", str) == "n"
    assert header.value("none", int, 5) == 5 and header.value("none", list, []) == []
    for name, kind, text in [
        ("real", int, "real is 0.5, where int is expected"),
        ("whole", bool, "whole is 7, where bool is expected"),
        ("list", str, r"list is \[1, 2\], where str is expected"),
        ("none", int, "its metadata has no none"),
    ]:
        with pytest.raises(InvalidInput, match=f"model.gguf: {text}"):
            header.value(name, kind)


# ---- the model in a folder


def test_a_folder_with_one_model_has_it(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    (tmp_path / "mmproj-F16.gguf").touch()
    assert find(tmp_path) == tmp_path / "mmproj-F16.gguf"
    for name in ("readme.md", ".model.gguf", "imatrix.gguf", "Model.GGUF"):
        (tmp_path / name).touch()
    assert find(tmp_path) == tmp_path / "Model.GGUF"


def test_a_set_of_shards_is_one_model(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    assert find(tmp_path) == paths[0]
    paths[0].unlink()
    assert find(tmp_path) == paths[1]


def test_several_models_are_listed(tmp_path: Path) -> None:
    shards(tmp_path, 2, "a")
    shards(tmp_path, 3, "a")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(InvalidInput, match=r"holds 3 GGUF models: .* a-00001-of-00002.gguf, a-00001-of-00003.gguf, b"):
        find(tmp_path)
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        find(tmp_path / "none")
