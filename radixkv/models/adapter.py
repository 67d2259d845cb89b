"""Load a decoder: read it, replace its attention by attention over the paged pool, test that nothing changed.

The steps are in files of their own: `loader` (files), `architecture` (unsupported models), `attention_interface`,
`probe` (one token), `rope` (frequencies), `packed` and `quantized` (linear layers), `selftest` (numbers), and
`fallback` (the model's own attention). A model that fails all ways to attend is refused with the reason.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from radixkv import model_path
from radixkv.device import default_place, device_of, unusable_gpu
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import architecture, attention_interface, loader, packed
from radixkv.models.architecture import max_length
from radixkv.models.attention_interface import IMPLEMENTATION, OWN, select
from radixkv.models.loaded import LayerSpec, LoadedModel
from radixkv.models.loader import WHOLE, Division
from radixkv.models.native.layers import NativeModel
from radixkv.models.native.places import is_fused, should_fuse, use_operators
from radixkv.models.probe import Probed, probe
from radixkv.models.quantized.kernels import kernels
from radixkv.models.quantized.layers import check_weights, quantize, quantized_weights, replaceable
from radixkv.models.recurrent.mixers import has_mixers, install
from radixkv.models.verdicts import tested
from radixkv.sizing.kv_size import check_kv_dtype

__all__ = ["LayerSpec", "LoadedModel", "load"]

Look = Callable[[Any], Probed]
_log = logging.getLogger(__name__)
_LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"  # whether transformers has warned
_taken: weakref.WeakKeyDictionary[Any, weakref.ref[LoadedModel]] = weakref.WeakKeyDictionary()  # built models


def load(
    model: Any,
    *,
    tokenizer: Any | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    attention: str = "auto",
    weights: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    fuse: bool = True,
    model_code: str = "auto",
    verify: str = "always",
    kv_dtype: str = "auto",
    division: Division = WHOLE,
) -> LoadedModel:
    """Load `model`: "tiny" (bundled), a folder, a GGUF file, a hub name, or a transformers model that is already built.

    A folder or file may also be a Path. `tokenizer` replaces the tokenizer of the files: a transformers tokenizer, or
    a folder, GGUF file or hub name that has one. It is checked before the weights are loaded.
    A built model is taken over: its attention is replaced, and from then on it runs through radixkv only. dtype "auto"
    is float32 on a CPU, on other devices the dtype of the saved weights; a built model keeps its own. Large float32
    layers are packed for the CPU; a built model also keeps its own weights. `weights` "int8" and "int4" quantise the
    linear layers for float32 on a CPU; "auto" keeps the bits of a quantised GGUF file there, and quantises nothing
    else. `attention` is "torch", "triton", or "auto": Triton on CUDA if it serves the model (else one warning), torch
    elsewhere. With "auto", a model whose attention cannot be replaced runs by the fallback, with one warning that gives
    the reason. With `fuse`, the layers of Llama-like models are fused around attention in Triton on a GPU
    (`native.fused`). `kv_dtype` is the format of the pool, and a `division` is for ranks. Raises InvalidInput
    if there is no whole model to load, no such attention or no such format, and UnsupportedModel with the reason if the
    model cannot run exactly. Costs the
    reading of the weights and a self-test (0.1 s for small models).
    """
    place = place_of(device)
    attention_interface.check_backend(attention, place)
    check_kv_dtype(kv_dtype)
    if tokenizer is not None:
        tokenizer = loader.given_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    built = not isinstance(model, str | os.PathLike)
    if built:
        module = _built(model, place, dtype)
        name = getattr(module.config, "name_or_path", "") or type(model).__name__
        small = check_weights(weights, module.dtype, place)
        loader.check_tokens(module, tokenizer, name)
        module = _borrowed(module, model_code)
    else:
        wanted, name = _dtype(dtype, "auto" if place.type != "cpu" else torch.float32), model_path.name_of(model)
        small = check_weights(weights, wanted, place)
        module, tokenizer = loader.read(
            name,
            tokenizer=tokenizer,
            dtype=wanted,
            device=place,
            weights=small,
            revision=revision,
            trust_remote_code=trust_remote_code,
            model_code=model_code,
            division=division,
        )
        name = model_path.shown_name(name)
        if verify == "always" and isinstance(module, NativeModel):
            module.sources = ()
    keep = built and not isinstance(module, NativeModel)
    own = _quantized(module.eval(), small, name, keep=keep)
    loaded = _take_over(
        own, tokenizer, name, keep=keep and own is module, attention=attention, fuse=fuse, kv_dtype=kv_dtype
    )
    if built:
        _taken[model] = weakref.ref(loaded)
    return loaded


def _borrowed(model: Any, model_code: str) -> Any:
    """Return layers of our own around the parameters of the caller's model, or that model with its own configuration.

    Other models may have been built from the object of its configuration, which selects the attention.
    """
    if model_code == "auto":
        from radixkv.models.native.borrow import borrowed

        if (native := borrowed(model.eval())) is not None:
            return native
    _give_own_config(model)
    return model


def _quantized(module: Any, weights: str, name: str, *, keep: bool) -> Any:
    """Return the model with weights in 8 or 4 bits: itself, or if `keep` a copy that shares all other tensors.

    Raises InvalidInput if a model of the caller cannot be copied.
    """
    if weights not in ("int8", "int4") or kernels() is None or not replaceable(module):
        return module
    try:
        own: Any = packed.with_own_modules(module) if keep else module
    except Exception as error:  # of modules that cannot be copied
        said = f"{name}: weights={weights!r} needs a copy of the model, which cannot be made: {error}"
        raise InvalidInput(f"{said}: load it from its files") from error
    quantize(own, weights)
    return own


def _take_over(
    module: Any,
    tokenizer: Any | None,
    name: str,
    *,
    keep: bool,
    attention: str = "auto",
    fuse: bool = True,
    kv_dtype: str = "auto",
) -> LoadedModel:
    """Freeze, replace attention, probe, test; raises UnsupportedModel and leaves the model with its own attention."""
    own = module.config._attn_implementation
    architecture.check_supported(module)
    try:
        _freeze(module, name)
        install(module)
        inspect = partial(_inspect, module, tokenizer, name, kv_dtype)
        loaded, error = _paged_or_own(module, inspect, name, keep=keep, attention=attention, fuse=fuse)
    except BaseException:
        select(module, own)
        raise
    kept = "" if kv_dtype == "auto" else f", KV in {kv_dtype}"
    said = "%s: %d layers, context %d, self-test error %.1e%s"
    _log.info(said, name, len(loaded.layers), loaded.max_length, error, kept)
    return loaded


def _paged_or_own(
    module: Any, inspect: Callable[[Look], LoadedModel], name: str, *, keep: bool, attention: str, fuse: bool
) -> tuple[LoadedModel, float]:
    """Return the model over the pool, or with attention "auto" by its own attention; and its self-test's error."""
    try:
        select(module, IMPLEMENTATION)
        return _proven(inspect(probe), attention, keep=keep, fuse=fuse)
    except UnsupportedModel as reason:
        if attention != "auto" or has_mixers(module):  # the fallback has no states
            raise
        select(module, OWN)
        from radixkv.models import fallback  # imports transformers, which not every model needs

        try:
            own = replace(inspect(fallback.probe), attention="fallback")
            proven = _packed(own, keep=keep)
        except UnsupportedModel as second:
            if str(second) == str(reason):  # the model itself fails, with any attention
                raise
            raise UnsupportedModel(f"{reason}; nor does its own attention over a cache do: {second}") from second
        _log.warning("%s: each sequence runs by itself, by the fallback: %s", name, reason)
        return proven


def _freeze(module: Any, name: str) -> None:
    """Fix rotary frequencies that would depend on the batch."""
    length = max_length(module)
    if isinstance(module, NativeModel):
        found = module.frozen
    else:
        from radixkv.models import rope  # imports transformers, which not every model needs

        found = rope.freeze(module, length)
    for frozen in found:
        _log.warning("%s: the rotary frequencies of %s are fixed to those for %d tokens", name, frozen, length)


def _proven(loaded: LoadedModel, attention: str, *, keep: bool, fuse: bool) -> tuple[LoadedModel, float]:
    """Return the model with the requested attention, and the error of its self-test, which it has passed.

    What fails is replaced by torch: fused layers, and with "auto" attention.
    """
    small = bool(quantized_weights(loaded.model))
    backend = attention_interface.choose_backend(
        attention, loaded.layers, loaded.dtype, loaded.device, small, loaded.kv_dtype
    )
    loaded = replace(loaded, attention=backend)
    if isinstance(loaded.model, NativeModel):
        use_operators(loaded, fuse=fuse and should_fuse(loaded))
    if is_fused(loaded.model):
        try:
            return _packed(loaded, keep=keep)
        except UnsupportedModel as reason:
            use_operators(loaded, fuse=False)
            _log.warning("%s: its layers run in torch: fused, %s", loaded.name, reason)
    try:
        return _packed(loaded, keep=keep)
    except UnsupportedModel as reason:
        if attention != "auto" or loaded.attention == "torch":
            raise
        other = "Triton" if loaded.attention == "triton" else "compiled functions"
        _log.warning("%s: attention runs in torch: with %s, %s", loaded.name, other, reason)
        return _packed(replace(loaded, attention="torch"), keep=keep)


def _inspect(module: Any, tokenizer: Any | None, name: str, kv_dtype: str, look: Look) -> LoadedModel:
    """Collect the properties of the model that running it needs, found by a probe.

    Raises InvalidInput if its pool cannot have the format.
    """
    length = max_length(module)
    # Our own errors name the limit; a warning of transformers says that the model would fail.
    getattr(tokenizer, "deprecation_warnings", {})[_LENGTH_WARNING] = True
    layers, width, state = look(module)
    dims = [(layer.key_dim, layer.value_dim) for layer in layers]
    check_kv_dtype(kv_dtype, str(module.dtype).removeprefix("torch."), dims)
    vocab_size = min(width, module.get_input_embeddings().num_embeddings)
    return LoadedModel(
        model=module,
        config=module.config,
        codec=tokenizer,
        layers=tuple(_without_unreached_limits(layer, length) for layer in layers),
        max_length=length,
        vocab_size=vocab_size,
        stop_token_ids=frozenset(i for i in _stop_token_ids(module, tokenizer) if 0 <= i < vocab_size),
        name=name,
        dtype=module.dtype,
        device=module.device,
        state=state,
        kv_dtype=kv_dtype,
    )


def _packed(loaded: LoadedModel, *, keep: bool) -> tuple[LoadedModel, float]:
    """Return the model with packed linear layers if they pass, and the error of its self-test, which it has passed."""
    model: Any = packed.pack(loaded.model, keep=keep)
    try:
        error = tested(replace(loaded, model=model, config=model.config))
    except UnsupportedModel as reason:
        if not packed.unpack(model):
            raise
        _log.debug("%s: with packed layers: %s", loaded.name, reason)
        return loaded, tested(loaded)
    packed.unpack(model, asked_only=True)
    return replace(loaded, model=model, config=model.config), error


def _without_unreached_limits(layer: LayerSpec, max_length: int) -> LayerSpec:
    """Drop windows and chunks that no sequence exceeds, which saves a work list per step."""
    window, chunk = (limit if limit and limit < max_length else None for limit in layer.attention_window)
    return replace(layer, window=window, chunk=chunk)


def place_of(device: str | torch.device) -> torch.device:
    """Return the device; "auto" is CUDA if present, else the CPU. Raises InvalidInput for a missing device."""
    if device == "auto":
        return default_place()
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device={device!r} is no device; use 'auto', 'cpu' or 'cuda'") from error
    if not device_of(place).available():
        reason = unusable_gpu() or "torch sees no CUDA device here"
        raise InvalidInput(f"device {str(device)!r} was asked for, but {reason}")
    return place


def _dtype(dtype: str | torch.dtype, auto: Any) -> Any:
    """Return the torch dtype, or `auto`. Raises InvalidInput for anything except a floating point dtype."""
    if dtype == "auto":
        return auto
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise InvalidInput(f"dtype={dtype!r} is no dtype for a model; use 'auto', 'float32', 'bfloat16' or 'float16'")
    return wanted


def _built(model: Any, device: torch.device, dtype: str | torch.dtype) -> Any:
    """Return a model that the caller has built, moved to the device and dtype."""
    if not hasattr(model, "set_attn_implementation") or not hasattr(model, "get_input_embeddings"):
        raise InvalidInput(f"a model is a name, a folder, a GGUF file or a transformers model, got {model!r:.200}")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{type(model).__name__} has no language model head; load its ...ForCausalLM class")
    if any(each.is_meta for each in model.parameters()):
        raise InvalidInput(f"this {type(model).__name__} lies on the meta device, without weights; load them first")
    wanted = _dtype(dtype, model.dtype)
    _warn_of_another(model, wanted, device)
    return _cast(model.to(device), wanted)


def _warn_of_another(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Warn if a model that was taken over before, and perhaps runs, is moved or cast: it has one set of weights."""
    before = _taken.get(model, lambda: None)()
    if before is not None and (before.dtype, before.device.type) != (dtype, device.type):
        said = "%s: what has loaded it as %s on %s runs with other weights from now on: load a copy for %s on %s"
        _log.warning(said, before.name, before.dtype, before.device, dtype, device)


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Cast the model's weights to `dtype`, but not its buffers: rotary frequencies must stay in float32 or better."""
    before = model.dtype
    for parameter in model.parameters():
        if parameter.dtype == before:
            parameter.data = parameter.data.to(dtype)
    return model


def _give_own_config(model: Any) -> None:
    """Copy the configuration, which selects the attention: other models may have been built from this object."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in copies:
            module.config = copies[id(config)]


def _stop_token_ids(module: Any, tokenizer: Any | None) -> set[int]:
    """Return every end-of-sequence id that the generation settings, the configuration or the tokenizer names."""
    settings = (getattr(module, "generation_config", None), module.config.get_text_config(), tokenizer)
    return set().union(*(loader.stop_ids(each) for each in settings))
