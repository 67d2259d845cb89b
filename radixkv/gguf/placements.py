"""Place the tensors of a GGUF file: the parameter of transformers' model that each one fills, and its stored form.

llama.cpp stores some weights in another order or shifted, for its own kernels. `Placement.restore` undoes that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from radixkv.errors import UnsupportedModel
from radixkv.gguf.architectures import Architecture, architecture_of
from radixkv.gguf.header import GGUFHeader

Values = np.ndarray[Any, np.dtype[np.float32]]
Rows = TypeVar("Rows", np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.uint8]])

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = re.compile(r"blk\.(?P<layer>0|[1-9]\d{0,5})\.(?P<name>\w+)\.(?P<kind>weight|bias)")
_HALVES = {"ffn_gate_exps": 0, "ffn_up_exps": 1}  # of the parameter that both fill
_NAMED = 3  # tensors named in an error


@dataclass(frozen=True)
class Placement:
    """The parameter that a tensor fills.

    `half` is 0 or 1 if it fills the first or second half of the rows of every expert. `head_rows` is not 0 if the rows
    of each head are interleaved. `offset` was added to the values.
    """

    parameter: str
    half: int | None = None
    head_rows: int = 0
    offset: float = 0.0

    @property
    def step(self) -> int:
        """Rows that `restore` takes at a time, or a multiple of it."""
        return self.head_rows or 1

    @property
    def changes(self) -> bool:
        """Whether `restore` changes anything."""
        return bool(self.head_rows or self.offset)

    def restore(self, rows: Values) -> Values:
        """Return the values that transformers has for these rows of the file, [n, columns]; n is a multiple of `step`.

        llama.cpp rotates pairs of neighbouring rows, transformers rotates row i with row i + half of a head.
        """
        return self.reorder(rows - np.float32(self.offset) if self.offset else rows)

    @property
    def keeps_blocks(self) -> bool:
        """Whether `restore` changes at most the order of whole rows, so that stored rows stay valid."""
        return self.half is None and not self.offset

    def reorder(self, rows: Rows) -> Rows:
        """Return rows of numbers or of stored bytes, [n, ...], in the order of transformers."""
        if not self.head_rows:
            return rows
        pairs = rows.reshape(-1, self.head_rows // 2, 2, rows.shape[-1])
        return pairs.swapaxes(1, 2).reshape(rows.shape)


def placements(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, Placement]:
    """Return the placement of every tensor that holds weights, by its name in the file; `config` is its `config_of`.

    Raises UnsupportedModel for a tensor without a place: the answers would differ without it.
    """
    row = architecture_of(header)
    places = {name: _placement(name, row, config["head_dim"]) for name in header.tensors.keys() - row.config_tensors}
    found = {name: place for name, place in places.items() if place is not None}
    if len(found) < len(places):
        raise UnsupportedModel(
            f"{header.path} ({header.architecture}): radixkv has no place for {some(places.keys() - found.keys())}, "
            "and would answer otherwise without: load the safetensors that the file was made from"
        )
    return found


def _placement(name: str, row: Architecture, head_dim: int) -> Placement | None:
    """Return the placement of a tensor, None if the architecture has none of this name."""
    if name in _OUTSIDE:
        return Placement(_OUTSIDE[name], offset=row.norm_offset if name.endswith("norm.weight") else 0.0)
    match = _IN_LAYER.fullmatch(name)
    if match is None or match["name"] not in row.layer:
        return None
    tensor, part = match["name"], f"model.layers.{match['layer']}.{row.layer[match['name']]}"
    if tensor.endswith("_exps"):  # a parameter of its own, not a linear layer's
        half = _HALVES.get(tensor)
        return Placement(part, half=half) if match["kind"] == "weight" else None
    return Placement(
        f"{part}.{match['kind']}",
        head_rows=head_dim if row.interleaved and tensor in ("attn_q", "attn_k") else 0,
        offset=row.norm_offset if tensor.endswith("norm") else 0.0,
    )


def some(names: Collection[str]) -> str:
    """Return the first few names in order, and the number of the others.

    >>> some({"d", "b", "a", "c"})
    'a, b, c and 1 more'
    """
    shown, more = ", ".join(sorted(names)[:_NAMED]), len(names) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown
