"""Our place inside a transformers model: the attention function that its layers call.

Knows how transformers hands over queries, keys and values. Does not know blocks, nor what is done with them: a handler,
set for the current thread while a forward runs, does that. (Keyword arguments to the model would be the other way to
hand it over, but some architectures drop them.)

Which backend computes a model's attention: torch, on any device, or the Triton kernels.

Knows what each of them serves, and how a step asks for it. Does not know work lists, batches or requests.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from radixkv.attention import torch_backend, triton_backend
from radixkv.attention.kv_store import KVStore
from radixkv.errors import InvalidInput
from radixkv.models.loaded import LayerSpec, LoadedModel

# transformers treats names with "flash", "sdpa", "flex_attention", "paged|" or a slash in them specially, and builds no
# masks for a name that it has no mask function for: that is what we want.
IMPLEMENTATION = "radixkv"
# Knows softcaps and sinks, which others of transformers' own leave out.
OWN = "eager"
_transformers_log = logging.getLogger("transformers.modeling_utils")


@dataclass(slots=True)
class AttentionCall:
    """What one layer asks for: query [1, heads, T, dk], key [1, kv_heads, T, dk], value [1, kv_heads, T, dv].

    `extra` holds the arguments that have no field here, `scale` is what scores are multiplied by.
    """

    module: nn.Module | None  # None: from inside a compiled model
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    extra: dict[str, Any]


class Handler(Protocol):
    """Answers the attention calls of one forward pass, in their order."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [T, heads, dv] of `call`."""


_current = threading.local()


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """While this is open, the attention calls of forwards on this thread go to `handler`."""
    _current.handler = handler
    try:
        yield
    finally:
        _current.handler = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The function that is registered with transformers; returns [1, T, heads, dv] and no weights."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        return _attend(query, key, value, s_aux, scale).unsqueeze(0), None
    call = AttentionCall(module, query, key, value, attention_mask, scale, sliding_window, softcap, s_aux, extra)
    return _handler().attend(call).unsqueeze(0), None


def _handler() -> Handler:
    """Who answers calls on this thread."""
    handler: Handler | None = getattr(_current, "handler", None)
    if handler is None:
        raise RuntimeError(
            "this model's attention now lives in a radixkv pool: run it through radixkv, or load another"
        )
    return handler


@torch.library.custom_op("radixkv::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    """One layer's call inside a compiled model: the compiler sees shapes only, and the layers keep their order.

    What a layer's window and softcap are is known to the handler, from the probe.
    """
    call = AttentionCall(None, query, key, value, None, scale, None, None, sinks, {})
    return _handler().attend(call)


@_attend.register_fake
def _shape(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    """[T, heads, dv], as a compiler may know it."""
    return query.new_empty(query.shape[2], query.shape[1], value.shape[3])


AttentionInterface.register(IMPLEMENTATION, _attention)


@contextmanager
def own_attention(model: Any, implementation: str = OWN) -> Iterator[None]:
    """While this is open, `model` computes attention as transformers does."""
    before = IMPLEMENTATION if _is_ours(model) else model.config._attn_implementation
    select(model, implementation)
    try:
        yield
    finally:
        select(model, before)


def _is_ours(model: Any) -> bool:
    """Whether any part of `model` computes attention by our function; the whole need not know of it."""
    parts = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "_attn_implementation", None) == IMPLEMENTATION for config in parts)


def select(model: Any, implementation: str) -> None:
    """Let `model` compute attention by `implementation`; one that has no choice keeps its own, and does not say so."""
    level = _transformers_log.level
    _transformers_log.setLevel(logging.ERROR)
    try:
        model.set_attn_implementation(implementation)
    finally:
        _transformers_log.setLevel(level)


_log = logging.getLogger(__name__)
BACKENDS = ("auto", "torch", "triton")

SPLIT = 512
"""Keys that a tile has, about, where bits must not depend on what else is in a step: several for a long context."""


@dataclass
class AttentionBackend:
    """Copies blocks, stores new KV and computes attention over one store; `KVStore` and `torch_backend` say how.

    `attend` takes a work list, or a tile plan if the backend was made by `recordable_backend`.
    """

    copy: Callable[[Sequence[tuple[int, int]]], None]  # (source, destination) blocks
    write: Callable[[int, Tensor, Tensor, Tensor], None]  # layer, slots, key, value
    attend: Callable[..., Tensor]  # layer, query, work, and by name scale, softcap and sinks


def backend_of(loaded: LoadedModel, store: KVStore, *, deterministic: bool = False) -> AttentionBackend:
    """Return the backend that this model was tested with, over `store`."""
    if loaded.attention == "triton":
        attend = partial(triton_backend.attend, store, split=keys_per_tile(deterministic))
        return AttentionBackend(partial(triton_backend.copy, store), partial(triton_backend.write, store), attend)
    return AttentionBackend(store.copy, store.write, partial(torch_backend.attend, store))


def recordable_backend(store: KVStore) -> AttentionBackend:
    """Return the kernels along plans whose arrays are on the device; they only launch, so they can be recorded."""
    attend = partial(triton_backend.follow, store)
    return AttentionBackend(partial(triton_backend.copy, store), partial(triton_backend.write, store), attend)


def keys_per_tile(deterministic: bool) -> int | None:
    """Return a fixed number of keys per tile if bits must not depend on the rest of a step; None to balance it."""
    return SPLIT if deterministic else None


def check_backend(asked: str, device: torch.device) -> None:
    """Raise InvalidInput for a backend that there is not, or that cannot run on this device whatever the model."""
    if asked not in BACKENDS:
        raise InvalidInput(f"attention={asked!r}: allowed are {', '.join(map(repr, BACKENDS))}")
    if asked == "triton":
        _refuse(triton_backend.absent(device))


def choose_backend(asked: str, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> str:
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
