"""Hold weights of 8 or 4 bits, and multiply float32 rows by them with the compiled products of `kernels.cpp`.

A row has the same bits alone and in a batch, with any number of threads. So a prompt computed in chunks, or after a
cache hit, gives the numbers of one forward.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.models.quantized import build

GROUP = 32  # inputs that share a scale
_TESTED_ROWS = (1, 14)  # weights expanded in registers, and into memory
_TOLERANCE = 1e-5  # relative to the norms of row and weights
_log = logging.getLogger(__name__)


class Format(IntEnum):
    """The stored form of a group of 32 weights: 34, 18 or 20 bytes.

    INT8 is a scale times 8 bits, INT4 a scale times 4 bits, INT4_MIN a scale times 4 bits plus a minimum. Scales and
    minima are float16.
    """

    INT8 = 0
    INT4 = 1
    INT4_MIN = 2

    @property
    def bits(self) -> int:
        """Bits of a weight, without its group's scale and minimum."""
        return 8 if self is Format.INT8 else 4

    @property
    def description(self) -> str:
        """The format in words."""
        return f"{self.bits} bits" + " with a minimum" * (self is Format.INT4_MIN)


BLOCKS = {"Q8_0": Format.INT8, "Q4_0": Format.INT4, "Q4_1": Format.INT4_MIN}
"""The types of ggml whose blocks hold the same numbers."""
_GROUP_BYTES = {Format.INT8: 34, Format.INT4: 18, Format.INT4_MIN: 20}
_PANEL = 64  # outputs


def stored_bytes(outputs: int, inputs: int, format: Format) -> int:
    """Return the bytes in memory of weights [outputs, inputs]; outputs are stored in panels of 64."""
    return -(-outputs // _PANEL) * _PANEL * (inputs // GROUP) * _GROUP_BYTES[format]


class _Weights(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


class Kernels:
    """The compiled functions, with the instruction set that this CPU has: 2 is AVX-512, 1 is AVX2."""

    def __init__(self, path: str) -> None:
        """Load the library; raises OSError if it cannot be loaded, BuildError for another CPU."""
        self.file = os.path.realpath(path)  # whose name has hashes of the compiler and of the content
        number, pointer, library = ctypes.c_int64, ctypes.c_void_p, ctypes.CDLL(path)
        self.multiply = library.radixkv_multiply
        spread = number, number, pointer  # instructions, threads, and the function that runs these
        self.multiply.restype = ctypes.c_int
        self.multiply.argtypes = pointer, pointer, number, pointer, pointer, number, *spread
        self.expand_rows = library.radixkv_expand_rows
        self.expand_rows.restype, self.expand_rows.argtypes = None, (pointer, pointer, number, pointer)
        self.store_blocks, self.quantise = library.radixkv_store_blocks, library.radixkv_quantise
        for store in (self.store_blocks, self.quantise):
            store.restype, store.argtypes = None, (pointer, pointer, number, number)
        self.rms_norm = library.radixkv_rms_norm
        self.rms_norm.restype, self.rms_norm.argtypes = None, (*[pointer] * 3, number, number, ctypes.c_float)
        self.mlp = library.radixkv_mlp
        self.mlp.restype, self.mlp.argtypes = ctypes.c_int, (*[pointer] * 4, number, number, *spread)
        self.rotate = library.radixkv_rotate
        self.rotate.restype = None
        self.rotate.argtypes = (
            pointer, *[number] * 4, pointer, ctypes.c_float, pointer, pointer, number, number, pointer
        )  # fmt: skip
        self.store, self.attend = library.radixkv_store, library.radixkv_attend
        self.store.restype = self.attend.restype = None
        self.store.argtypes = pointer, pointer, number, pointer, number, number, pointer, number, number
        self.attend.argtypes = (
            *[pointer] * 3, *[number] * 3, ctypes.c_float, ctypes.c_float, pointer, pointer, number, *spread
        )  # fmt: skip
        self.instructions = int(library.radixkv_instructions())
        if not self.instructions:
            raise build.BuildError("this CPU has no AVX2")
        self.parallel = _parallel()

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernels:
        """Return the same functions."""
        return self


def _parallel() -> int | None:
    """Return the address of the function that runs threads of the OpenMP library that torch uses; None without one.

    Threads of another library would compete with torch's for the cores.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


@cache
def kernels() -> Kernels | None:
    """Return the products for this machine; None, with one warning, where there are none. Compiles at the first call.

    Costs a hash of the source, or five seconds if nothing is compiled yet.
    """
    found = _loaded()
    if not isinstance(found, str):
        return found
    _log.warning("weights are float32, not of 8 or 4 bits: %s", found)
    return None


def obstacle() -> str | None:
    """Return the reason why there are no products on this machine; None if there are. Costs as `kernels`."""
    found = _loaded()
    return found if isinstance(found, str) else None


@cache
def _loaded() -> Kernels | str:
    """Return the products, or the reason why there are none."""
    try:
        found = Kernels(str(build.library()))
    except (OSError, AttributeError, build.BuildError) as error:
        return str(error)
    return found if _are_right(found) else "the compiled products give wrong numbers here"


class QuantizedWeights:
    """Weights [outputs, inputs] in groups of 32 inputs, filled row by row and then never changed.

    A copy of the model shares them.
    """

    def __init__(self, outputs: int, inputs: int, format: Format, using: Kernels | None = None) -> None:
        """Allocate memory for the weights, about 1.06, 0.56 or 0.63 bytes each; `inputs` is a multiple of 32."""
        library = using or kernels()
        assert library is not None and inputs % GROUP == 0
        self.outputs, self.inputs, self.format = outputs, inputs, format
        self._library, self._multiply = library, library.multiply
        self._parallel, self._instructions = library.parallel, library.instructions
        self._data = torch.zeros(stored_bytes(outputs, inputs, format), dtype=torch.uint8)
        self._layout = _Weights(self._data.data_ptr(), outputs, inputs // GROUP, format)
        self.address = ctypes.addressof(self._layout)
        self._addresses = (ctypes.c_void_p * 1)(self.address)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeights:
        """Return the same weights."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._data.numel()

    def content(self) -> NDArray[np.uint8]:
        """Return the bytes in memory, for comparisons."""
        return self._data.numpy()

    def store_blocks(self, blocks: NDArray[np.uint8], first: int) -> None:
        """Store rows of blocks [rows, bytes] of the type in `BLOCKS` that has this format, from row `first` on."""
        stored = np.ascontiguousarray(blocks)
        assert stored.shape[1] == self.inputs // GROUP * _GROUP_BYTES[self.format]
        assert first + len(stored) <= self.outputs
        self._library.store_blocks(self.address, stored.ctypes.data, first, len(stored))

    def quantise(self, rows: Tensor, first: int) -> None:
        """Round rows [rows, inputs] to the nearest numbers of INT8 or INT4_MIN, and store them from row `first` on."""
        given = rows_of(rows, self.inputs)
        assert first + len(given) <= self.outputs and self.format != Format.INT4
        self._library.quantise(self.address, given.data_ptr(), first, len(given))

    def multiply(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply [..., inputs] to [..., outputs] in float32, and add `bias` [outputs].

        Rows are packed first: that takes their memory again. Raises MemoryError without it, RuntimeError for rows of
        another width.
        """
        given = rows_of(rows, self.inputs)
        product = given.new_empty((*rows.shape[:-1], self.outputs))
        failed = self._multiply(
            self._addresses,
            (ctypes.c_void_p * 1)(None if bias is None else bias.data_ptr()),
            1,
            given.data_ptr(),
            product.data_ptr(),
            given.numel() // self.inputs,
            self._instructions,
            torch.get_num_threads(),
            self._parallel,
        )
        if failed:
            raise MemoryError(f"{given.numel() * 4:,} bytes of packed rows do not fit into memory")
        return product

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` [...] in float32, [..., inputs]. Raises IndexError for an id outside of the weights."""
        wanted = ids.to(torch.int64).contiguous()
        if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < self.outputs:
            raise IndexError(f"row ids must be within [0, {self.outputs})")
        found = torch.empty((*ids.shape, self.inputs), dtype=torch.float32)
        self._library.expand_rows(self.address, wanted.data_ptr(), wanted.numel(), found.data_ptr())
        return found

    def dense(self) -> Tensor:
        """Return all weights in float32, [outputs, inputs]."""
        return self.rows(torch.arange(self.outputs))


class SiblingWeights:
    """Weights with equal inputs, which one call multiplies; their outputs lie side by side. Shares all weights."""

    def __init__(self, weights: Sequence[QuantizedWeights], biases: Sequence[Tensor | None]) -> None:
        """Hold the weights and their biases; a bias is [outputs] of float32."""
        self.weights = tuple(weights)
        self.biases = tuple(None if bias is None else bias.detach() for bias in biases)
        self.outputs = sum(each.outputs for each in self.weights)
        count = len(self.weights)
        self.addresses = (ctypes.c_void_p * count)(*(each.address for each in self.weights))
        self.bias_addresses = (ctypes.c_void_p * count)(
            *(None if bias is None else bias.data_ptr() for bias in self.biases)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SiblingWeights:
        """Return the same weights."""
        return self


def as_float32(rows: Tensor) -> Tensor:
    """Return contiguous float32 rows: the same tensor if it is that already."""
    if rows.dtype is torch.float32 and rows.is_contiguous():  # three times faster than two calls that change nothing
        return rows
    return rows.to(torch.float32).contiguous()


def rows_of(given: Tensor, width: int) -> Tensor:
    """Return contiguous float32 rows [..., width] for a compiled function, which reads this number without a check.

    Raises RuntimeError for rows of another width, as the layers of torch.
    """
    if given.shape[-1] != width:
        raise RuntimeError(f"rows have {given.shape[-1]} numbers, and the weights {width} inputs")
    return as_float32(given)


def _are_right(library: Kernels) -> bool:
    """Return whether products equal the products of the expanded weights, for each format. Costs a millisecond."""
    draw = torch.Generator().manual_seed(1)
    for format in Format:
        weights = QuantizedWeights(70, 3 * GROUP, format, library)
        values = torch.randn(70, 3 * GROUP, generator=draw)
        if format == Format.INT4:
            blocks = torch.randint(0, 256, (70, 3 * 18), generator=draw).numpy().astype(np.uint8)
            blocks[:, 1::18] = 0x2C  # scales of 1/16 and more
            weights.store_blocks(blocks, 0)
            values = weights.dense()
        else:
            weights.quantise(values, 0)
        dense = weights.dense().double()
        if not (dense - values).norm() <= 0.1 * values.norm():
            return False
        for rows in _TESTED_ROWS:
            given = torch.randn(rows, 3 * GROUP, generator=draw)
            error = (weights.multiply(given) - given.double() @ dense.T).abs()
            scale = given.double().norm(dim=1)[:, None] * dense.norm(dim=1)
            if not bool((error <= _TOLERANCE * scale).all()):
                return False
    return True
