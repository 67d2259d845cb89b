"""Which backend computes a model's attention: torch, on any device, or the Triton kernels.

Knows what each of them serves, and how a step asks for it. Does not know work lists, batches or requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from radixkv.attention import torch_backend, triton_backend
from radixkv.attention.kv_store import KVStore
from radixkv.errors import InvalidInput
from radixkv.models.loaded import LayerSpec, LoadedModel
from radixkv_kernels.work_list import WorkList

_log = logging.getLogger(__name__)
NAMES = ("auto", "torch", "triton")

SPLIT = 512
"""Keys that a tile has, about, where bits must not depend on what else is in a step: several for a long context."""


class Attending(Protocol):
    """Writes and reads the KV of one store; what the calls do stands at `KVStore` and `torch_backend`."""

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store one layer's new keys and values."""
        ...

    def attend(
        self, layer: int, query: Tensor, work: Any, *, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention of query [heads, T, dk] over one layer, along what this backend follows -> [T, heads, dv]."""
        ...


class Backend(Attending, Protocol):
    """Follows work lists, and copies blocks."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers."""
        ...


class TorchBackend:
    """Everything in torch."""

    def __init__(self, store: KVStore) -> None:
        """Serve `store`."""
        self._store = store
        self.copy, self.write = store.copy, store.write

    def attend(
        self, layer: int, query: Tensor, work: WorkList, *, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """As `torch_backend.attend`."""
        return torch_backend.attend(self._store, layer, query, work, scale=scale, softcap=softcap, sinks=sinks)


class TritonBackend:
    """Everything by the kernels; with `split`, a row's bits depend on its own keys alone."""

    def __init__(self, store: KVStore, split: int | None = None) -> None:
        """Serve `store`."""
        self._store, self._split = store, split

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As `triton_backend.copy`."""
        triton_backend.copy(self._store, pairs)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """As `triton_backend.write`."""
        triton_backend.write(self._store, layer, slots, key, value)

    def attend(
        self, layer: int, query: Tensor, work: WorkList, *, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """As `triton_backend.attend`."""
        return triton_backend.attend(
            self._store, layer, query, work, scale=scale, softcap=softcap, sinks=sinks, split=self._split
        )


class PlannedBackend:
    """The kernels, along plans whose arrays are on the device: does nothing but launch, so that it can be recorded."""

    def __init__(self, store: KVStore) -> None:
        """Serve `store`."""
        self._store = store

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """As `triton_backend.write`."""
        triton_backend.write(self._store, layer, slots, key, value)

    def attend(
        self, layer: int, query: Tensor, work: Any, *, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """As `triton_backend.follow`."""
        return triton_backend.follow(self._store, layer, query, work, scale=scale, softcap=softcap, sinks=sinks)


def backend_of(loaded: LoadedModel, store: KVStore, *, deterministic: bool = False) -> Backend:
    """The backend that this model was tested with, over `store`."""
    if loaded.attention == "triton":
        return TritonBackend(store, split_of(deterministic))
    return TorchBackend(store)


def split_of(deterministic: bool) -> int | None:
    """Keys to a tile, for a backend whose bits must not depend on what else is in a step; else as balances it."""
    return SPLIT if deterministic else None


def check(asked: str, device: torch.device) -> None:
    """Raise InvalidInput for a backend that there is not, or that cannot run on this device whatever the model."""
    if asked not in NAMES:
        raise InvalidInput(f"attention={asked!r}: allowed are {', '.join(map(repr, NAMES))}")
    if asked == "triton":
        _refuse(triton_backend.absent(device))


def choose(asked: str, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> str:
    """ "torch" or "triton", for all layers of a model: "auto" is Triton on CUDA, with a warning where it cannot be.

    Raises InvalidInput, with the reason, where "triton" was asked for and cannot serve a layer.
    """
    if asked == "torch" or (asked == "auto" and device.type != "cuda"):
        return "torch"
    reasons = [triton_backend.obstacle(layer.shape, layer.heads, dtype, device) for layer in layers]
    reason = next((reason for reason in reasons if reason is not None), None)
    if asked == "triton":
        _refuse(reason)
    if reason is not None:
        _log.warning("attention runs in torch, not in Triton: %s", reason)
    return "triton" if reason is None else "torch"


def _refuse(reason: str | None) -> None:
    """Raise InvalidInput if there is a reason."""
    if reason is not None:
        raise InvalidInput(f"attention='triton' cannot run here: {reason}; 'auto' and 'torch' can")
