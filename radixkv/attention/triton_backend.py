"""Attention, writes and copies by the Triton kernels, or by torch where they cannot run.

The functions have the signatures of `torch_backend` and of the store, so that a backend can be exchanged for another.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from radixkv.attention import torch_backend
from radixkv.attention.kv_store import KVStore, LayerShape, kv_format
from radixkv.device import Device, Stream, device_of
from radixkv_kernels.work_list import WorkList

TRITON = find_spec("triton") is not None

LARGEST = 256
"""Numbers per head that tiles are made for: with more, they spill and exceed a processor's shared memory."""

INTERPRETED_PROCESSORS = 2
"""Processors that the interpreter is given: it runs programs one after the other."""

FIRST = -1
"""The priority of streams whose programs start before programs of other streams."""

_log = logging.getLogger("radixkv")
_PLANS: WeakKeyDictionary[WorkList, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()
_OBSTACLES: WeakKeyDictionary[KVStore, dict[tuple[int, int], str | None]] = WeakKeyDictionary()
_REGIONS: WeakKeyDictionary[KVStore, Any] = WeakKeyDictionary()


def device_obstacle(device: torch.device) -> str | None:
    """Return the reason why no kernel can run on this device; None if kernels can."""
    if not TRITON:
        return "Triton is not installed"
    if not device_of(device).is_gpu and not _kernels().INTERPRETED:
        return f"Triton does not run on {device.type}"
    return None if _kernels().INTERPRETED else missing_compiler() or None


def missing_compiler() -> str:
    """Return what to install so that Triton can compile its launches, in one sentence; "" if nothing is missing.

    A cache of Triton that was filled before needs no compiler.
    """
    from triton import knobs

    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    headers = Path(sysconfig.get_path("include", sysconfig.get_default_scheme().replace("_local", "_prefix")))
    missing = [] if any(map(shutil.which, compilers)) else [f"a C compiler ({' or '.join(compilers)})"]
    if not (headers / "Python.h").exists():
        missing.append("the headers of Python (python{}.{}-dev)".format(*sys.version_info))
    if not missing or any(Path(knobs.cache.dir).glob("*/*_utils.*")):
        return ""
    return f"Triton cannot compile its launches: install {' and '.join(missing)}"


def layer_obstacle(store: KVStore, heads: int, layer: int = 0) -> str | None:
    """Return the reason why the kernels cannot serve this layer for `heads` query heads; None if they can.

    Costs less than a microsecond from the second call on.
    """
    found = _OBSTACLES.setdefault(store, {})
    key = heads, layer
    if key not in found:
        found[key] = shape_obstacle(store.layers[layer], heads, store.dtype, store.device, store.format.name)
    return found[key]


def shape_obstacle(
    shape: LayerShape, heads: int, dtype: torch.dtype, device: torch.device, kv_dtype: str = "auto"
) -> str | None:
    """Return the same as `layer_obstacle` for a layer that has no store yet."""
    if reason := device_obstacle(device):
        return reason
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernels do not store {dtype}"
    if max(shape.key_dim, shape.value_dim) > LARGEST:
        return f"heads of {max(shape.key_dim, shape.value_dim)} numbers do not fit into a tile, at most {LARGEST} do"
    most = _chosen(shape, dtype, device, kv_dtype)[-1].rows
    if heads // shape.kv_heads > most:
        return f"{heads // shape.kv_heads} query heads share a kv head, at most {most} fit into a tile"
    return None


def attend(
    store: KVStore,
    layer: int,
    query: Tensor,
    work: WorkList,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    split: int | None = None,
) -> Tensor:
    """Attention of query [heads, T, dk], the rows of all sequences in turn, over one layer's KV -> [T, heads, dv].

    `sinks` [heads] are logits that take weight and add no value. The first layer of a step cuts `work` into tiles and
    sends them to the device in one copy, and all others of the same shape reuse them. Results have the dtype of
    `query`. With `split`, keys are cut into parts of about `split` keys in every step: if no run is shared either, a
    row's bits depend on its own keys alone. If the kernels cannot serve the layer, torch does, with one warning per
    reason.
    """
    if _falls_back(layer_obstacle(store, len(query), layer)):
        own = store.format.attending(partial(torch_backend.attend, store))
        return own(layer, query, work, scale=scale, softcap=softcap, sinks=sinks)
    step = _plan(store, layer, len(query), work, split)
    return follow(store, layer, query, step, scale=scale, softcap=softcap, sinks=sinks)


def follow(
    store: KVStore,
    layer: int,
    query: Tensor,
    step: Any,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    order: Callable[[Sequence[Callable[[], None]]], None] | None = None,
) -> Tensor:
    """Attend along a `radixkv_kernels.attention.TilePlan`; only launches kernels, and reads no number back.

    `order` launches the kinds of tile, by default one after the other.
    """
    rows = query if query.stride(2) == 1 else query.contiguous()
    options: dict[str, Any] = {} if order is None else {"order": order}
    keys, values, scales = pools(store, layer)
    if query.dtype != store.dtype:  # products are computed in the dtype of their rows
        rows = rows.to(store.dtype)
        options["output"] = query.new_empty(query.shape[1], len(query), values.shape[3])
    output: Tensor = _kernels().attend(
        rows, keys, values, step, scale=scale, softcap=softcap, sinks=sinks, scales=scales, **options
    )
    return output


def pools(store: KVStore, layer: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return the pools of a layer's keys and values, and the scales of both if they hold codes."""
    (keys, *of_keys), (values, *of_values) = store.key_parts[layer].tensors, store.value_parts[layer].tensors
    return keys, values, (*of_keys, *of_values)


def rotates(store: KVStore) -> bool:
    """Return whether `layers.rotate_and_write` serves every layer: codes only of heads whose size is a power of two."""
    sizes = enumerate(shape.key_dim for shape in store.layers)
    return all(size.bit_count() == 1 or not pools(store, layer)[2] for layer, size in sizes)


class ForkedStreams:
    """Launches the kinds of tile of a step in streams of their own, so that a recorded step runs them side by side.

    Each stream waits for the present one, and the present one then waits for all. This costs two events for each kind
    but the first. A replay of the recorded step costs the host nothing for them.

    The first kind has the smallest tiles. The streams of the others have priority, so that their programs start first:
    small programs fit into the room that larger ones leave, but two small ones leave no room for a larger one. A
    recorded launch keeps the priority of its stream.
    """

    def __init__(self, device: Device) -> None:
        """Use `device`; streams are made when first needed."""
        self._device = device
        self._streams: list[Stream] = []

    def __call__(self, kinds: Sequence[Callable[[], None]]) -> None:
        """Launch the first kind in the present stream, and each of the others in a stream of its own."""
        others = kinds[1:]
        while len(self._streams) < len(others):
            self._streams.append(self._device.stream(FIRST))
        own, used = self._device.current_stream(), self._streams[: len(others)]
        try:
            for stream, launch in zip(used, others, strict=True):
                stream.wait_stream(own)
                with self._device.on(stream):
                    launch()
            for launch in kinds[:1]:
                launch()
        finally:  # after an error, too, no stream may use memory that the present one frees
            for stream in used:
                own.wait_stream(stream)


def write(store: KVStore, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Store key [kv_heads, T, key_dim] and value [kv_heads, T, value_dim] in slots int64 [T], all different.

    A slot of -1 is a padded row, which is not stored (torch's write, used if Triton cannot run, does not allow it).
    """
    if _falls_back(layer_obstacle(store, 1, layer)):
        return store.write(layer, slots, key, value)
    from radixkv_kernels import blocks

    key, value = (new if new.stride(2) == 1 else new.contiguous() for new in (key, value))
    keys, values, scales = pools(store, layer)
    blocks.write(key, value, keys, values, slots, scales)


def copy(store: KVStore, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks (source, destination) in all layers, as `KVStore.copy`, in one launch for most models.

    Pairs with a block that is both a source and a destination, which a cache never makes, are left to the store.
    """
    if not pairs:
        return
    chained = not {source for source, _ in pairs}.isdisjoint(destination for _, destination in pairs)
    if chained or _falls_back(layer_obstacle(store, 1)):
        return store.copy(pairs)
    from radixkv_kernels import blocks

    upload = device_of(store.device).upload  # the host does not wait for these copies
    if store not in _REGIONS:
        _REGIONS[store] = blocks.regions(store.tensors, upload)
    blocks.copy(_REGIONS[store], upload(np.array(pairs, dtype=np.int64)))


@cache
def _kernels() -> ModuleType:
    """Return `radixkv_kernels.attention`, imported at the first call because it needs Triton."""
    from radixkv_kernels import attention

    return attention


def _chosen(shape: LayerShape, dtype: torch.dtype, device: torch.device, kv_dtype: str) -> tuple[Any, ...]:
    """Return the kinds of tile for a layer of this shape."""
    _, generation, shared = _device(device)
    (_, stored), *_ = kv_format(kv_dtype, dtype).columns(shape.key_dim)
    kinds: tuple[Any, ...] = _kernels().kinds(
        shape.key_dim, shape.value_dim, dtype, generation=generation, shared=shared, stored=stored
    )
    return kinds


def _device(device: torch.device) -> tuple[int, int, int]:
    """Return a device's processors, its generation, and the shared bytes of a processor, as in `attention.kinds`."""
    gpu = device_of(device)
    if not gpu.is_gpu:
        return INTERPRETED_PROCESSORS, 9, 0
    properties = gpu.properties()
    return properties.processors, properties.generation, properties.shared_memory


def _plan(store: KVStore, layer: int, heads: int, work: WorkList, split: int | None) -> Any:
    """Return the tiles of `work` for layers of this shape, made at the first call; they live as long as the list."""
    plans = _PLANS.setdefault(work, {})
    shape = store.layers[layer]
    key = (store, shape, heads, split)
    if key not in plans:
        device = device_of(store.device)
        tiled = tiling(store, shape, heads)
        plans[key] = _kernels().plan(work, device=device.place, pinned=device.pinned, split=split, **tiled)
    return plans[key]


def tiling(store: KVStore, shape: LayerShape, heads: int) -> dict[str, Any]:
    """Return the arguments with which `radixkv_kernels.attention` cuts a work list for layers of this shape."""
    return {
        "heads": heads,
        "kv_heads": shape.kv_heads,
        "chosen": _chosen(shape, store.dtype, store.device, store.format.name),
        "processors": _device(store.device)[0],
    }


def _falls_back(reason: str | None) -> bool:
    """Return whether there is a reason to use torch; log each reason once."""
    if reason is not None:
        _warn(reason)
    return reason is not None


@cache
def _warn(reason: str) -> None:
    """Warn once per reason."""
    _log.warning("attention runs in torch, not in Triton: %s", reason)
