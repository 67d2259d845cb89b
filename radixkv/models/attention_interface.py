"""Call a transformers model, replace its attention, and choose the backend that computes it.

`ForwardSignature` calls a forward on one row of tokens with the arguments that the architecture takes. transformers'
layers call the registered attention function, which passes each call to the handler of the current thread; `handled_by`
sets it while a forward runs. (Keyword arguments to the model could also carry the handler, but some architectures drop
them.) The backends are torch, on any device, and the Triton kernels.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from radixkv.attention import torch_backend, triton_backend
from radixkv.attention.kv_store import KVStore
from radixkv.device import device_of
from radixkv.errors import InvalidInput
from radixkv.models import compiled_attention
from radixkv.models.loaded import LayerSpec, LoadedModel
from radixkv.models.recurrent.mixers import CACHES, has_mixers

# transformers treats names with "flash", "sdpa", "flex_attention", "paged|" or a slash specially. It builds no mask for
# a name without a mask function, as intended here.
IMPLEMENTATION = "radixkv"
# Applies softcaps and sinks, which transformers' other implementations leave out.
OWN = "eager"
_transformers_log = logging.getLogger("transformers.modeling_utils")


@dataclass(frozen=True)
class ForwardSignature:
    """The arguments of one architecture's forward.

    `positions`: it takes the tokens' positions, and numbers the first one `first_position`. `counts`: it also reads the
    number of tokens in its cache. `keeps`: it takes the rows that need logits; else it computes logits of all rows.
    `cache` is the name of the argument that holds its cache.
    """

    positions: bool
    counts: bool
    keeps: bool
    cache: str
    first_position: int = 0

    @classmethod
    def of(cls, model: Any) -> ForwardSignature:
        """Inspect signatures and embeddings, and look for scores that grow with the position, as in Llama 4."""
        takes = [signature(part.forward).parameters for part in (model, model.base_model)]
        positions = any("position_ids" in parameters for parameters in takes)
        counts = not positions or bool(getattr(model.config.get_text_config(), "attn_temperature_tuning", False))
        counts = counts and not (has_mixers(model) and getattr(model.config, "num_attention_heads", None) is None)
        cache = next((name for name in CACHES if name in takes[0]), "past_key_values")
        return cls(positions, counts, "logits_to_keep" in takes[0], cache, _first_position(model) if positions else 0)

    def logits(self, model: Any, tokens: Tensor, rows: Tensor, *, positions: Tensor | None = None, **more: Any) -> Any:
        """Return logits [len(rows), vocab] of the rows `rows` of tokens [T]; `more` is passed on to the model.

        `positions` [T] count from 0; without them the model counts by itself. Costs T * vocab if it keeps all rows.
        """
        if positions is not None and self.positions:
            more["position_ids"] = (positions + self.first_position if self.first_position else positions)[None]
        if positions is not None and self.counts and self.cache not in more:
            more = more | self._counted(positions, len(tokens))
        if self.keeps:
            return model(input_ids=tokens[None], logits_to_keep=rows, **more).logits[0]
        return model(input_ids=tokens[None], **more).logits[0].index_select(0, rows)

    def _counted(self, positions: Tensor, count: int) -> dict[str, Any]:
        """Return arguments with which a model that counts positions by itself starts at the right one."""
        from radixkv.models.counted_cache import Before  # imports transformers, which not every model needs

        counted: dict[str, Any] = {self.cache: Before(positions)}
        if not self.positions:  # its own mask would need one length, and each token has another
            counted["attention_mask"] = positions.new_ones(1, count)
        return counted


def _first_position(model: Any) -> int:
    """Return the number of the first position; decoders made from encoders start after their padding id."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(module.padding_idx, int):
            return module.padding_idx + 1
    return 0


@dataclass(slots=True)
class AttentionCall:
    """One layer's call: query [1, heads, T, dk], key [1, kv_heads, T, dk], value [1, kv_heads, T, dv].

    Scores are multiplied by `scale`; `extra` holds the arguments that have no field here.
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


@dataclass(slots=True)
class RotaryCall:
    """One layer's call before norms and rotation, from `native.fused`; heads of keys and values have one size.

    `rows` [T, (heads + 2 * kv_heads) * dim] hold the queries, keys and values of each token. The heads of queries and
    keys are normalised if there are weights [dim], then rotated if there are angles [T, dim].
    """

    module: nn.Module
    rows: Tensor
    heads: int
    scale: float
    cosines: Tensor | None = None
    sines: Tensor | None = None
    query_weight: Tensor | None = None
    key_weight: Tensor | None = None
    epsilon: float = 0.0

    def rotate_and_write(self, key_pool: Tensor, value_pool: Tensor, scales: Sequence[Tensor], slots: Tensor) -> Tensor:
        """Store keys and values in slots [T] of one layer's pools, and return the queries [heads, T, dim], a view."""
        from radixkv_kernels import layers  # needs Triton

        query: Tensor = layers.rotate_and_write(
            self.rows,
            self.heads,
            key_pool,
            value_pool,
            slots,
            scales,
            cosines=self.cosines,
            sines=self.sines,
            query_weight=self.query_weight,
            key_weight=self.key_weight,
            epsilon=self.epsilon,
        )
        return query


class Handler(Protocol):
    """Answers the attention calls of one forward pass, in their order."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [T, heads, dv] of `call`."""


class _NoHandler:
    """Refuses attention calls of models whose attention radixkv has replaced."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Raise RuntimeError."""
        raise RuntimeError(
            "this model's attention now lives in a radixkv pool: run it through radixkv, or load another"
        )


NO_HANDLER = _NoHandler()
"""Answers where no forward of radixkv runs."""


class _Current(threading.local):
    handler: Handler = NO_HANDLER


current = _Current()
"""The handler of calls on this thread."""


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Pass the attention calls of forwards on this thread to `handler` while this is open."""
    before, current.handler = current.handler, handler
    try:
        yield
    finally:
        current.handler = before


def attention(
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
    """Attend as transformers asks; returns [1, T, heads, dv] and no weights."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        return _attend(query, key, value, s_aux, scale).unsqueeze(0), None
    call = AttentionCall(module, query, key, value, attention_mask, scale, sliding_window, softcap, s_aux, extra)
    return current.handler.attend(call).unsqueeze(0), None


def _call_handler(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    """Answer one layer's call inside a compiled model: the compiler sees only shapes, and the layers keep their order.

    The handler takes a layer's window and softcap from the probe.
    """
    call = AttentionCall(None, query, key, value, None, scale, None, None, sinks, {})
    return current.handler.attend(call)


def _output_shape(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
    """Return an empty [T, heads, dv] that shows a compiler the shape of an output."""
    return query.new_empty(query.shape[2], query.shape[1], value.shape[3])


# `torch.library.custom_op` would take twice as long in each call, for checks of aliases and for autograd.
_library: Any = torch.library.Library("radixkv", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_library.define("attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, float scale) -> Tensor")
_library.impl("attend", _call_handler, "CompositeExplicitAutograd")
torch.library.register_fake("radixkv::attend", _output_shape, lib=_library)
_attend: Callable[..., Tensor] = torch.ops.radixkv.attend.default


@contextmanager
def own_attention(model: Any, implementation: str = OWN) -> Iterator[None]:
    """Let `model` compute attention as transformers does while this is open."""
    before = IMPLEMENTATION if _is_ours(model) else model.config._attn_implementation
    select(model, implementation)
    try:
        yield
    finally:
        select(model, before)


def _is_ours(model: Any) -> bool:
    """Return whether any part of `model` computes attention by our function; the whole model may say otherwise."""
    parts = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "_attn_implementation", None) == IMPLEMENTATION for config in parts)


def select(model: Any, implementation: str) -> None:
    """Let `model` compute attention by `implementation`; a model without a choice keeps its own, without a warning."""
    if (library := sys.modules.get("transformers.modeling_utils")) is not None:  # it is there if one of its models is
        library.AttentionInterface.register(IMPLEMENTATION, attention)
    own = threading.get_ident()

    def no_warning(record: logging.LogRecord) -> bool:  # a filter, not the level: other threads may log and select
        return record.thread != own or record.levelno >= logging.ERROR

    _transformers_log.addFilter(no_warning)
    try:
        model.set_attn_implementation(implementation)
    finally:
        _transformers_log.removeFilter(no_warning)


_log = logging.getLogger(__name__)
BACKENDS = ("auto", "torch", "triton", "compiled")

SPLIT = 512
"""Keys per tile, about, if bits must not depend on the rest of a step; a long context then has several tiles."""


@dataclass
class AttentionBackend:
    """Copies blocks, stores new KV and computes attention over one store; `KVStore` and `torch_backend` say how.

    `attend` takes a work list, or a tile plan if the backend was made by `recordable_backend`. A layer has the number
    of its attention call in a forward.
    """

    copy: Callable[[Sequence[tuple[int, int]]], None]  # (source, destination) blocks
    write: Callable[[int, Tensor, Tensor, Tensor], None]  # layer, slots, key, value
    attend: Callable[..., Tensor]  # layer, query, work, and by name scale, softcap and sinks
    rotate: Callable[[int, Tensor, RotaryCall], Tensor] | None = None  # layer, slots, call: writes, returns queries
    short_chunk: int = 1  # rows of a sequence that have an item each


def backend_of(loaded: LoadedModel, store: KVStore, *, deterministic: bool = False) -> AttentionBackend:
    """Return the backend that this model was tested with, over `store`, which has a layer for each stored one."""
    around = store.format.attending
    if loaded.attention == "triton":
        attend = partial(triton_backend.attend, store, split=keys_per_tile(deterministic))
        backend = _kernels_over(store, attend)
    elif loaded.attention == "compiled":
        compiled = compiled_attention.CompiledAttention(store)
        short = 1 if deterministic else compiled_attention.SHORT_CHUNK
        backend = AttentionBackend(store.copy, compiled.write, compiled.attend, short_chunk=short)
    else:
        backend = AttentionBackend(store.copy, store.write, around(partial(torch_backend.attend, store)))
    return _storing_once(backend, loaded.layers)


def recordable_backend(store: KVStore, layers: Sequence[LayerSpec]) -> AttentionBackend:
    """Return the kernels along plans whose arrays are on the device; they only launch, so they can be recorded.

    Kinds of tile are launched in streams of their own.
    """
    order = triton_backend.ForkedStreams(device_of(store.device))
    attend = partial(triton_backend.follow, store, order=order)
    return _storing_once(_kernels_over(store, attend), layers)


def _kernels_over(store: KVStore, attend: Callable[..., Tensor]) -> AttentionBackend:
    """Return the kernels that copy and write, and `attend`."""

    def rotate(layer: int, slots: Tensor, call: RotaryCall) -> Tensor:
        return call.rotate_and_write(*triton_backend.pools(store, layer), slots)

    copy, write = partial(triton_backend.copy, store), partial(triton_backend.write, store)
    return AttentionBackend(copy, write, attend, rotate if triton_backend.rotates(store) else None)


def _storing_once(backend: AttentionBackend, layers: Sequence[LayerSpec]) -> AttentionBackend:
    """Return a backend whose layers with a `source` write nothing, and read the pool's layer of their source.

    A model without such layers keeps `backend`: the pool's layers then have the same numbers as the calls.
    """
    stored = [number for number, layer in enumerate(layers) if layer.source is None]
    if len(stored) == len(layers):
        return backend
    places = [stored.index(number if each.source is None else each.source) for number, each in enumerate(layers)]
    writes = [
        partial(backend.write, place) if each.source is None else _write_nothing
        for place, each in zip(places, layers, strict=True)
    ]

    def write(layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        writes[layer](slots, key, value)

    def attend(layer: int, query: Tensor, work: Any, **options: Any) -> Tensor:
        output: Tensor = backend.attend(places[layer], query, work, **options)
        return output

    return AttentionBackend(backend.copy, write, attend, short_chunk=backend.short_chunk)


def _write_nothing(slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Leave the pool as it is: the source has written this KV."""


def keys_per_tile(deterministic: bool) -> int | None:
    """Return a fixed number of keys per tile if bits must not depend on the rest of a step; None to balance it."""
    return SPLIT if deterministic else None


def check_backend(asked: str, device: torch.device) -> None:
    """Raise InvalidInput for an unknown backend, or one that cannot run any model on this device."""
    if asked not in BACKENDS:
        raise InvalidInput(f"attention={asked!r}: allowed are {', '.join(map(repr, BACKENDS))}")
    if asked == "triton":
        _refuse(asked, triton_backend.device_obstacle(device))
    if asked == "compiled":
        _refuse(asked, compiled_attention.obstacle([], torch.float32, device))


def choose_backend(
    asked: str,
    layers: Sequence[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    small_weights: bool = False,
    kv_dtype: str = "auto",
) -> str:
    """Return "torch", "triton" or "compiled", for all layers of a model.

    "auto" is Triton on CUDA, or torch with a warning. On a CPU it is the compiled functions for a model with
    `small_weights`, whose products are compiled too, and for a pool of 8 or 16 bits, which they read as it is; torch
    for others. Raises InvalidInput with the reason if the backend that was asked for cannot serve a layer.
    """
    shapes = [layer.shape for layer in layers]
    if asked == "auto" and not device_of(device).is_gpu:
        if not small_weights and kv_dtype == "auto":
            return "torch"
        reason = compiled_attention.obstacle(shapes, dtype, device)
        if reason is not None and kv_dtype != "auto":
            _log.warning("attention over %s KV runs in torch, which expands it: %s", kv_dtype, reason)
        return "compiled" if reason is None else "torch"
    if asked == "torch":
        return "torch"
    if asked == "compiled":
        _refuse(asked, compiled_attention.obstacle(shapes, dtype, device))
        return "compiled"
    obstacle = triton_backend.shape_obstacle
    reasons = [obstacle(layer.shape, layer.heads, dtype, device, kv_dtype) for layer in layers]
    reason = next((reason for reason in reasons if reason is not None), None)
    if asked == "triton":
        _refuse(asked, reason)
    if reason is not None:
        _log.warning("attention runs in torch, not in Triton: %s", reason)
    return "triton" if reason is None else "torch"


def _refuse(asked: str, reason: str | None) -> None:
    """Raise InvalidInput if there is a reason."""
    if reason is not None:
        raise InvalidInput(f"attention={asked!r} cannot run here: {reason}; 'auto' and 'torch' can")
