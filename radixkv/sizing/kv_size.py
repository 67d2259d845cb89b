"""Compute the bytes that the keys and values of a token take; parse and format sizes such as "8GiB"."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from radixkv.errors import InvalidInput

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
"""Factors of the prefixes before the "B" of bytes (or before "tok"), in lower case."""

WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per number, by the name of the dtype."""

KV_DTYPES: dict[str, tuple[int, int] | None] = {"auto": None, "float16": (2, 0), "int8": (1, 2)}
"""The formats of a pool: bytes of a number, and of the scale of each token and head; "auto" has the model's width."""

ASSUMED_DTYPE = "bfloat16"
"""The dtype of weights whose config has none."""


LARGEST_HEAD = 512
"""Numbers of a head, at most, in a pool of 8 bits."""

DRAFT_TOKENS = 3 << 20
"""Tokens of past text that an engine keeps for drafts."""

DRAFT_BYTES = 8 * DRAFT_TOKENS + (4 << 20)
"""Bytes of that text, with the chains in which it is found."""


def check_kv_dtype(kv_dtype: object, dtype: str = "float32", heads: Iterable[tuple[int, int]] = ()) -> None:
    """Raise InvalidInput, with the remedy, if the pool of a model cannot have the format `kv_dtype`.

    `dtype` is that in which the model computes, and `heads` are the dims of keys and values in each layer.
    """
    if kv_dtype not in KV_DTYPES:
        raise InvalidInput(f"kv_dtype={kv_dtype!r}: allowed are {', '.join(map(repr, KV_DTYPES))}")
    if kv_dtype == "float16" and WIDTHS.get(dtype, 1) < 4:
        raise InvalidInput(f"kv_dtype='float16': the model computes in {dtype}, and 'auto' stores these 16 bits")
    for number, dims in enumerate(heads if kv_dtype == "int8" else ()):
        for part, dim in zip(("keys", "values"), dims, strict=True):
            if dim % 16 or dim > LARGEST_HEAD:
                raise InvalidInput(
                    f"kv_dtype='int8': the {part} of layer {number} have {dim} numbers, no multiple of 16 up to "
                    f"{LARGEST_HEAD}; 'auto' and 'float16' store them"
                )


def head_bytes(dim: int, width: int, kv_dtype: str = "auto") -> int:
    """Return the bytes in which a pool stores `dim` numbers of a token's head; `width` is that of the model's numbers.

    >>> head_bytes(64, 4), head_bytes(64, 4, "float16"), head_bytes(64, 4, "int8")
    (256, 128, 66)
    """
    number, scale = KV_DTYPES[kv_dtype] or (width, 0)
    return dim * number + scale


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV of a token in one attention layer: `kv_heads` keys of `key_dim` and values of `value_dim` numbers."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers stored per token in this layer."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    def bytes_per_token(self, width: int, kv_dtype: str = "auto") -> int:
        """Return the bytes stored per token in this layer, as `head_bytes`."""
        return self.kv_heads * sum(head_bytes(dim, width, kv_dtype) for dim in (self.key_dim, self.value_dim))

    def of_rank(self, ranks: int) -> LayerKV:
        """Return the share of the fullest of `ranks` tensor-parallel ranks: whole heads, at least one per rank."""
        return replace(self, kv_heads=-(-self.kv_heads // ranks))


@dataclass(frozen=True, slots=True)
class LayerState:
    """The recurrent state of a sequence in one layer: numbers of convolutions, and of states in float32."""

    convolution: int
    recurrent: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of a model: every layer that stores some, in order; and of a hybrid model the layers with state.

    `dtype` is the dtype of the saved weights and `context` the longest sequence in tokens; each is None if the config
    does not have it. `notes` are sentences about storage that the numbers alone do not explain.
    """

    name: str
    layers: tuple[LayerKV, ...]
    dtype: str | None = None
    context: int | None = None
    notes: tuple[str, ...] = ()
    states: tuple[LayerState, ...] = ()

    def bytes_per_state(self, dtype: str | None = None) -> int:
        """Return the bytes of the recurrent state of a sequence of any length; 0 for a model without."""
        width = WIDTHS[self._dtype(dtype)]
        return sum(each.convolution * width + each.recurrent * WIDTHS["float32"] for each in self.states)

    def bytes_per_token(self, dtype: str | None = None, ranks: int = 1, kv_dtype: str = "auto") -> int:
        """Return the bytes of a token in all layers, on one of `ranks`, in the pool's format `kv_dtype`.

        Raises InvalidInput for an unsupported dtype or format and for less than one rank.

        >>> KVShape("70B", (LayerKV(8, 128, 128),) * 80).bytes_per_token("float16")
        327680
        """
        width = WIDTHS[self._dtype(dtype)]
        if ranks < 1:
            raise InvalidInput(f"{ranks} tensor-parallel ranks: there must be at least 1")
        check_kv_dtype(kv_dtype, heads=[(layer.key_dim, layer.value_dim) for layer in self.layers])
        return sum(layer.of_rank(ranks).bytes_per_token(width, kv_dtype) for layer in self.layers)

    def ranks_obstacle(self, ranks: int) -> str:
        """Return why an engine cannot divide the model between tensor-parallel ranks, with the numbers; "" if it can.

        >>> KVShape("70B", (LayerKV(8, 128, 128),) * 80).ranks_obstacle(3)
        'layer 0 has 8 KV heads, which do not divide by 3 ranks'
        """
        if self.states and ranks > 1:
            return f"{len(self.states)} layers keep a recurrent state, which is not divided"
        odd = ((at, each.kv_heads) for at, each in enumerate(self.layers) if each.kv_heads % ranks)
        return next((f"layer {at} has {heads} KV heads, which do not divide by {ranks} ranks" for at, heads in odd), "")

    def _dtype(self, dtype: str | None) -> str:
        """Return the dtype to count with. Raises InvalidInput for an unsupported one."""
        dtype = dtype or self.dtype or ASSUMED_DTYPE
        if dtype not in WIDTHS:
            raise InvalidInput(f"dtype {dtype!r}: KV is kept in one of {', '.join(WIDTHS)}")
        return dtype


def size_text(number: float, *, up: bool = False) -> str:
    """Format bytes in the largest binary unit that gives at least 1, with four digits; `up` never gives less.

    >>> size_text(327680), size_text(8 * 2**30), size_text(1000), size_text(98305, up=True)
    ('320 KiB', '8 GiB', '1000 B', '96.01 KiB')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if (value := number / 2**power) >= 1:
            scale = 10 ** (4 - len(str(int(value))))
            return f"{(math.ceil if up else round)(value * scale) / scale:.15g} {unit}"
    return f"{number:.0f} B"


def bytes_of(text: str) -> int | None:
    """Return the bytes of "8GiB", "512 MB", "1.5g" or "0"; None if `text` is not a size.

    >>> bytes_of("1.5 GiB"), bytes_of("much")
    (1610612736, None)
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]i?|)b?\s*", text, re.IGNORECASE | re.ASCII)
    return int(float(match[1]) * UNITS[match[2].lower()]) if match else None


def parse_size(text: str) -> int:
    """Return the bytes of "8GiB", "512 MB" or "1.5g"; raises InvalidInput for other text and for 0 bytes.

    >>> parse_size("8GiB"), parse_size("512 MB")
    (8589934592, 512000000)
    """
    size = bytes_of(text)
    if not size:
        raise InvalidInput(f"memory {text!r}: give bytes, such as 8GiB or 512MB")
    return size


def parse_bytes(text: str | int, name: str = "kv_memory", *, automatic: bool = True) -> int:
    """Return the bytes of a setting such as `kv_memory`: 536870912, "512MB" or "1.5GiB"; raises InvalidInput.

    `automatic` says whether the error names "auto" among the allowed values.

    >>> parse_bytes("512MB"), parse_bytes("1.5 GiB")
    (512000000, 1610612736)
    """
    size = None if isinstance(text, bool) else bytes_of(str(text))
    if size is None:
        auto = '"auto", ' if automatic else ""
        raise InvalidInput(f'{name} must be {auto}bytes, or a size such as "512MB" or "2GiB"; got {text!r}')
    return size
