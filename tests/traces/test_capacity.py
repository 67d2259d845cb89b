"""A pool's size in every unit, and the bytes of a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.errors import InvalidInput
from radixkv_traces.cli import kv_bytes_per_token, parse_capacity


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("2.5%", 5),
        (" 100% ", 200),
        ("0.1%", 1),  # at least one block
        ("7", 7),
        ("1000", 1000),
        ("1ktok", 15),
        ("64tok", 1),
        ("1Mitok", 16384),
        ("1GiB", 16384),
        ("65536B", 1),
        ("1.5mb", 22),
    ],
)
def test_every_unit_comes_out_in_blocks(text: str, blocks: int) -> None:
    found = parse_capacity(text, unique_blocks=200, block_tokens=64, kv_bytes=1024)
    assert (found.blocks, found.text) == (blocks, text.strip())


@pytest.mark.parametrize(
    "text", ["", "%", "-1%", "0%", "0.0%", "1.5", "0", "63tok", "65535B", "10 apples", "1e3", "inf", "2%%", "9" * 20]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="capacity"):
        parse_capacity(text, unique_blocks=200, block_tokens=64, kv_bytes=1024)


def test_bytes_need_a_model() -> None:
    with pytest.raises(InvalidInput, match="--model"):
        parse_capacity("16GB", 200, 64)


def test_the_bundled_model_is_known_by_name() -> None:
    assert kv_bytes_per_token("tiny") == 2 * 4 * 3 * 64 * 2


def test_an_unknown_model_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"llama-3\.1-8b.*--kv-bytes"):
        kv_bytes_per_token("llama-5")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidInput, match="KV shape"):
        kv_bytes_per_token(str(tmp_path))
