"""Install a simulated GPU: torch's factories, new threads, and launches of Triton's interpreter use it meanwhile.

`with torch.device("meta")` still makes tensors without values, as libraries do that build a model before its weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from radixkv import device
from tests.virtual_gpu.bound_launches import Code
from tests.virtual_gpu.gpu import VirtualGpu
from tests.virtual_gpu.kernel_arguments import Uses, uses_of
from tests.virtual_gpu.memory import READ, STORE, Span, span_of
from tests.virtual_gpu.tensor import OperatorMode, VirtualTensor, leaves_of, map_leaves


@contextmanager
def installed(gpu: VirtualGpu) -> Iterator[VirtualGpu]:
    """Let `torch.device("meta")` be `gpu` while this is open, in this thread and in those that start meanwhile."""
    with pytest.MonkeyPatch.context() as patch, OperatorMode(gpu):
        patch.setitem(device._DEVICES, gpu.place, gpu)
        _patch_skeletons(patch, gpu)
        _patch_factories(patch, gpu)
        _patch_threads(patch, gpu)
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: gpu.sync_debug_mode)
        patch.setattr(torch.cuda, "set_sync_debug_mode", partial(setattr, gpu, "sync_debug_mode"))
        if find_spec("triton") is not None:
            _patch_launches(patch, gpu)
        yield gpu


def _patch_skeletons(patch: pytest.MonkeyPatch, gpu: VirtualGpu) -> None:
    """Let a context of the meta device make plain tensors of that device, without values."""
    _device_constructors()  # torch caches this list; it must not contain the functions of `_patch_factories`
    original = DeviceContext.__torch_function__

    def without_values(context: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if context.device != gpu.place:
            return original(context, func, types, args, kwargs)
        with _disable_current_modes():
            return original(context, func, types, args, kwargs)

    patch.setattr(DeviceContext, "__torch_function__", without_values)


def _patch_factories(patch: pytest.MonkeyPatch, gpu: VirtualGpu) -> None:
    """Let `torch.tensor` and its like copy numbers: torch makes none of them for the meta device."""

    def on_device(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is None or torch.device(device) != gpu.place:
                return original(data, *args, device=device, **kwargs)
            return original(data, *args, **kwargs).to(gpu.place)

        return make

    for name in ("tensor", "as_tensor", "asarray"):
        patch.setattr(torch, name, on_device(getattr(torch, name)))


def _patch_threads(patch: pytest.MonkeyPatch, gpu: VirtualGpu) -> None:
    """Let new threads queue their operators too: a dispatch mode belongs to one thread."""
    original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(thread: threading.Thread) -> None:
        with OperatorMode(gpu):
            original(thread)

    patch.setattr(threading.Thread, "_bootstrap_inner", bootstrap)


def _patch_launches(patch: pytest.MonkeyPatch, gpu: VirtualGpu) -> None:
    """Queue the launches of Triton's interpreter that have a tensor of the GPU, and let them be bound."""
    import triton
    from triton.runtime import driver
    from triton.runtime.interpreter import InterpretedFunction

    from radixkv_kernels import launches

    original = InterpretedFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [leaf for leaf in leaves if isinstance(leaf, VirtualTensor)]
        if not there:
            return original(kernel, *args, **kwargs)
        if not gpu.is_current:
            gpu.violation("other device", f"{kernel.__name__} is launched outside of `current`")
        if len(there) < len(leaves):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        host_args, host_kwargs = map_leaves(_backing, args), map_leaves(_backing, kwargs)
        work = partial(original, kernel, *host_args, **host_kwargs)
        gpu.enqueue(f"the launch of {kernel.__name__}", work, _spans(uses_of(kernel.fn), given))
        return Code(gpu, kernel, given, lambda values, grid: run(kernel, *values, grid=grid, warmup=False))

    patch.setattr(InterpretedFunction, "run", run)
    if triton.knobs.runtime.interpret:
        named = property(lambda kernel: [SimpleNamespace(name=name) for name in kernel.arg_names])
        patch.setattr(InterpretedFunction, "params", named, raising=False)
        patch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda _: gpu.current_stream().number))
        patch.setattr(launches, "device", lambda: gpu.number if gpu.is_current else -1)


def _spans(uses: Uses, given: Mapping[str, Any]) -> list[Span]:
    """Return the accesses of a launch, of which any may be to a part of the span."""
    kinds = [(name, READ) for name in uses.loads] + [(name, STORE) for name in uses.stores]
    tensors = [(given[name], kind) for name, kind in kinds if isinstance(given.get(name), VirtualTensor)]
    return [span for each, kind in tensors for span in span_of(each.lease.memory, each.backing, kind)]


def _backing(leaf: Any) -> Any:
    return leaf.backing if isinstance(leaf, VirtualTensor) else leaf
