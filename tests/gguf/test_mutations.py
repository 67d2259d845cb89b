"""A damaged GGUF file has a valid header or is refused; no damage raises any other exception."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.header import GGML_TYPES, GGUFHeader, read_header
from tests.gguf.raw_file import u32, u64
from tests.selection import mostly_long


@cache
def small_model() -> bytes:
    """A file of a few kilobytes with every kind of field that models have."""
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(path := Path(folder) / "model.gguf", "llama")
        writer.add_type("model")
        writer.add_uint16("split.count", 1)
        writer.add_custom_alignment(64)
        writer.add_block_count(2)
        writer.add_rope_freq_base(10_000.0)
        writer.add_float64("x", 0.5)
        writer.add_token_list(["<s>", "</s>", "a", "é"])
        writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
        writer.add_token_types([3, 3, 1, 1])
        writer.add_add_bos_token(True)
        for at, name in enumerate(("F32", "F16", "BF16", "Q4_1", "Q8_0")):
            kind = gguf.GGMLQuantizationType[name]
            writer.add_tensor(
                f"blk.{at}.weight", gguf.quants.quantize(np.ones((2, 32), np.float32), kind), raw_dtype=kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mutations") / "model.gguf"
    path.touch()
    return path


def outcome(path: Path, data: bytes) -> GGUFHeader | str:
    """The header, which is checked, or the text of the refusal; any other exception fails the test."""
    with path.open("r+b") as file:  # written in place, many times faster than as a new file
        file.write(data)
        file.truncate()
    try:
        header = read_header(path)
    except (InvalidInput, UnsupportedModel) as error:
        text = str(error)
    else:
        check(header, len(data))
        return header
    assert str(path) in text and ": " in text and text.isprintable()
    return text


def check(header: GGUFHeader, size: int) -> None:
    """Every tensor has the bytes of its type and shape; they lie in the file and do not overlap."""
    assert header.architecture and header.tensors
    end = 0
    for tensor in sorted(header.tensors.values(), key=lambda each: each.offset):
        kind = GGML_TYPES[tensor.type_id]
        assert kind.name == tensor.type_name
        assert tensor.numbers * kind.nbytes == tensor.nbytes * kind.block > 0
        assert end <= tensor.offset
        end = tensor.offset + tensor.nbytes
    assert end <= size


def test_a_file_cut_at_any_byte_is_refused(path: Path) -> None:
    data = small_model()
    header = outcome(path, data)
    assert isinstance(header, GGUFHeader)
    end = max(each.offset + each.nbytes for each in header.tensors.values())
    assert [at for at in range(end) if isinstance(outcome(path, data[:at]), GGUFHeader)] == []
    assert isinstance(outcome(path, data[:end]), GGUFHeader)


@pytest.mark.parametrize("replacement", mostly_long(range(0, 256, 15), 0, 255))
def test_any_byte_of_the_header_may_be_another(replacement: int, path: Path) -> None:
    data = small_model()
    header = outcome(path, data)
    assert isinstance(header, GGUFHeader)
    refused = 0
    for at in range(min(each.offset for each in header.tensors.values())):
        refused += isinstance(outcome(path, data[:at] + bytes([replacement]) + data[at + 1 :]), str)
    assert refused > 100


SIZES = st.sampled_from([0, 1, 255, 2**16, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1])
LIES = SIZES.map(u64) | SIZES.map(lambda number: u32(number % 2**32))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The small model after one to four changes: bytes overwritten, inserted, removed, repeated, flipped or cut."""
    data = small_model()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(data), 1_200)))
        kind = draw(st.sampled_from(["overwrite", "insert", "remove", "repeat", "flip", "cut"]))
        some = draw(LIES | st.binary(min_size=1, max_size=12))
        if kind == "overwrite":
            data = data[:at] + some + data[at + len(some) :]
        elif kind == "insert":
            data = data[:at] + some + data[at:]
        elif kind == "remove":
            data = data[:at] + data[at + len(some) :]
        elif kind == "repeat":
            data = data[:at] + data[at : at + 40] + data[at:]
        elif kind == "flip":
            bit = 1 << draw(st.integers(0, 7))
            data = data[:at] + bytes(each ^ bit for each in data[at : at + 1]) + data[at + 1 :]
        else:
            data = data[:at]
    return data


@given(damaged())
@settings(max_examples=400)
def test_a_damaged_file_has_a_valid_header_or_is_refused(path: Path, data: bytes) -> None:
    outcome(path, data)
