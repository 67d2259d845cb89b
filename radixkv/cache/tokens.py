"""Token ids as native int32 bytes: the one form in which the cache stores and compares tokens."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.errors import InvalidInput, InvalidTokens

WIDTH = 4  # bytes a token
UNKNOWN = b"\xff" * WIDTH  # stands for a token that is not known yet; no valid id has these bytes
FIRST_PSEUDO = 1 << 30
"""The ids of compressed prefixes begin here: no vocabulary is as large."""

Tokens: TypeAlias = "SequenceOf[int] | array[int] | npt.NDArray[np.integer[Any]]"

_ALLOWED = "token ids are a flat sequence of ints, 0 <= id < 2**31"
_INT32 = np.dtype(np.int32)
_TOP = WIDTH - 1 if sys.byteorder == "little" else 0


def as_bytes(tokens: Any) -> bytes:
    """Native int32 bytes of `tokens`. O(n).

    Ids >= 2**31 and values other than ints raise InvalidTokens; `refuse_negative` finds negative ids.
    """
    kind = type(tokens)
    is_array = kind is np.ndarray
    if (is_array and tokens.dtype is _INT32 and tokens.ndim == 1) or (kind is array and tokens.typecode == "i"):
        raw: bytes = tokens.tobytes()
        return raw
    if is_array:
        return _from_array(tokens)
    return _from_ints(tokens) if kind is list else _from_any(tokens)


def refuse_negative(raw: bytes, start: int = 0) -> None:
    """Raise InvalidTokens if an id at or after byte `start` is negative; bytes that the tree matched are valid.

    A negative id has the top bit of its top byte set, so the top bytes of valid ids are ASCII: one C loop, no array.
    """
    if not raw[start + _TOP :: WIDTH].isascii():
        ids = np.frombuffer(raw, _INT32)
        at = int(np.argmax(ids < 0))
        raise InvalidTokens(f"token {at} is {ids[at]}: {_ALLOWED}")


def is_compressed(raw: bytes | bytearray) -> bool:
    """Return whether a text, as native int32 bytes, begins with the ids of a compressed prefix."""
    return int.from_bytes(raw[:WIDTH], sys.byteorder) >= FIRST_PSEUDO


def common_prefix(raw: bytes, at: int, key: bytes | bytearray) -> int:
    """Bytes of whole tokens that `raw[at:]` and `key` share: one comparison if they agree, bisection if not."""
    low, high = 0, min(len(key), len(raw) - at) // WIDTH
    if raw.startswith(key[: high * WIDTH], at):
        return high * WIDTH
    while high - low > 1:  # the first `low` tokens agree, the first `high` do not
        middle = (low + high) // 2
        if raw.startswith(key[low * WIDTH : middle * WIDTH], at + low * WIDTH):
            low = middle
        else:
            high = middle
    return low * WIDTH


def check_int(name: str, value: object, least: int | None = None) -> None:
    """Raise InvalidInput unless `value` is an int (of Python or of numpy, but no bool), and at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidInput(f"{name}={value!r}: allowed is an int")
    if least is not None and value < least:
        raise InvalidInput(f"{name}={value}: allowed is an int of at least {least}")


def _from_array(tokens: npt.NDArray[Any]) -> bytes:
    if tokens.ndim != 1:
        raise InvalidTokens(f"an array of shape {tokens.shape}: {_ALLOWED}")
    if tokens.dtype == _INT32:
        return tokens.tobytes()
    if tokens.size == 0:
        return b""
    if tokens.dtype.kind not in "iu":
        raise InvalidTokens(f"an array of {tokens.dtype}: {_ALLOWED}")
    if tokens.min() < 0 or tokens.max() >= 2**31:
        raise InvalidTokens(f"ids from {tokens.min()} to {tokens.max()}: {_ALLOWED}")
    return tokens.astype(_INT32).tobytes()


def _from_any(tokens: Any) -> bytes:
    if isinstance(tokens, (str, bytes, bytearray, memoryview)):
        raise InvalidTokens(f"got {tokens!r:.100}: {_ALLOWED}")
    if hasattr(tokens, "__array__"):
        return _from_array(np.asarray(tokens))
    if not hasattr(tokens, "__len__") or isinstance(tokens, (set, frozenset, dict)):
        raise InvalidTokens(f"got {tokens!r:.100}: {_ALLOWED}")
    return _from_ints(tokens)


def _from_ints(tokens: Any) -> bytes:
    try:
        return array("i", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise InvalidTokens(f"{error}: {_ALLOWED}") from error
