"""How many blocks is "2.5%", "4096" or "16GB"? A pool's size, in the units that a person has at hand.

Knows blocks and bytes. Knows no cache; what a model's token takes is `radixkv.kv_shapes`'s to know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from radixkv.errors import InvalidInput
from radixkv.kv_shapes import kv_shape
from radixkv.kv_size import UNITS

_FORMS = "a share of the trace's unique blocks (2.5%), blocks (4096), tokens (500ktok) or bytes (16GB, with --model)"
MAX_BLOCKS = 1 << 26
"""Of a simulated pool, which has a few bytes for each: petabytes of a large model's KV."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pool's size as it was asked for, and in blocks."""

    text: str
    blocks: int


def parse_capacity(text: str, unique_blocks: int, block_tokens: int, kv_bytes: int | None = None) -> Capacity:
    """Blocks of a share, a number, tokens or bytes; `kv_bytes` are those of one token. InvalidInput otherwise.

    >>> [parse_capacity(each, 1000, 512, 131072).blocks for each in ("2.5%", "300", "1Mtok", "16GiB")]
    [25, 300, 1953, 256]
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|(?:[kmgt]i?)?(?:b|tok)|)\s*", text, re.IGNORECASE)
    if match is None:
        raise InvalidInput(f"capacity {text!r}: allowed is {_FORMS}")
    number, unit = match[1], match[2].lower()
    if unit == "%":
        blocks = int(unique_blocks * float(number) / 100)
    elif unit == "":
        if "." in number:
            raise InvalidInput(f"capacity {text!r}: blocks are a whole number")
        blocks = int(number)
    elif unit.endswith("tok"):
        blocks = int(float(number) * UNITS[unit[:-3]]) // block_tokens
    else:
        if kv_bytes is None:
            raise InvalidInput(f"capacity {text!r}: bytes say nothing without a model; give --model or --kv-bytes")
        blocks = int(float(number) * UNITS[unit[:-1]]) // (kv_bytes * block_tokens)
    if blocks > MAX_BLOCKS:
        raise InvalidInput(f"capacity {text!r}: {blocks:,} blocks; at most {MAX_BLOCKS:,} can be simulated")
    if blocks < 1 and unit != "%":
        raise InvalidInput(f"capacity {text!r}: not even one block of {block_tokens} tokens")
    return Capacity(text.strip(), max(1, blocks))


def kv_bytes_per_token(model: str) -> int:
    """Bytes of keys and values that a token takes in all layers of a model: its folder, its config.json, or a name.

    As `radixkv plan` counts them, in the dtype that the weights are saved in. Raises InvalidInput where nothing says
    so; --kv-bytes says it directly.

    >>> kv_bytes_per_token("llama-3.1-8b")
    131072
    """
    try:
        return kv_shape(model).bytes_per_token()
    except InvalidInput as error:
        raise InvalidInput(f"{error}; or give --kv-bytes") from error
