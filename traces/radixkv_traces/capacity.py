"""How many blocks is "2.5%", "4096" or "16GB"? A pool's size, in the units that a person has at hand.

Knows blocks, bytes and the shapes that a model's config.json states. Knows no cache, and loads no model.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from radixkv.errors import InvalidInput

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_FORMS = "a share of the trace's unique blocks (2.5%), blocks (4096), tokens (500ktok) or bytes (16GB, with --model)"

_MODELS = {  # layers, KV heads, head dim: as their config.json says; keys and values of 16 bits
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b": (80, 8, 128),
    "llama-3.2-1b": (16, 8, 64),
    "llama-3.2-3b": (28, 8, 128),
    "mistral-7b": (32, 8, 128),
    "qwen2.5-0.5b": (24, 2, 64),
    "qwen2.5-7b": (28, 4, 128),
    "qwen3-0.6b": (28, 8, 128),
    "qwen3-8b": (36, 8, 128),
    "qwen3-14b": (40, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "qwen3-30b-a3b": (48, 4, 128),
}
_PLAIN = {"full_attention", "sliding_attention", "chunked_attention"}
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


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
        blocks = int(float(number) * _UNITS[unit[:-3]]) // block_tokens
    else:
        if kv_bytes is None:
            raise InvalidInput(f"capacity {text!r}: bytes say nothing without a model; give --model or --kv-bytes")
        blocks = int(float(number) * _UNITS[unit[:-1]]) // (kv_bytes * block_tokens)
    if blocks < 1 and unit != "%":
        raise InvalidInput(f"capacity {text!r}: not even one block of {block_tokens} tokens")
    return Capacity(text.strip(), max(1, blocks))


def kv_bytes_per_token(model: str) -> int:
    """Bytes of keys and values that a token takes in all layers of a model: its folder, its config.json, or a name.

    Named are the bundled "tiny" and some of the usual shapes. A model whose cache is not plain keys and values is
    refused: --kv-bytes says it directly.

    >>> kv_bytes_per_token("llama-3.1-8b")
    131072
    """
    if model.lower() in _MODELS:
        layers, heads, dim = _MODELS[model.lower()]
        return 2 * layers * heads * dim * 2
    path: Path | Traversable = Path(model)
    if model == "tiny":
        path = resources.files("radixkv").joinpath("assets", "tiny")
    if path.is_dir():
        path = path.joinpath("config.json")
    if not path.is_file():
        names = ", ".join(["tiny", *sorted(_MODELS)])
        raise InvalidInput(
            f"model {model!r}: no such folder or config.json, and none of {names}; --kv-bytes says it too"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return _of_config(config.get("text_config") or config, model)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"model {model!r}: {path} states no KV shape ({error!r}); give --kv-bytes") from error


def _of_config(config: dict[str, Any], model: str) -> int:
    odd = [name for name in ("kv_lora_rank", "ssm_cfg", "mamba_d_state") if config.get(name)]
    odd += sorted(set(config.get("layer_types") or ()) - _PLAIN)
    if odd:
        raise InvalidInput(f"model {model!r} has {', '.join(odd)}: its cache is not plain keys and values; --kv-bytes")
    heads = int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    width = _WIDTHS[str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")]
    return 2 * int(config["num_hidden_layers"]) * kv_heads * dim * width
