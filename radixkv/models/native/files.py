"""Make a model of our own layers from a configuration and the weights of safetensors files.

The model is made once, on the meta device. Weights go from a file into their final memory, in pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.models import safetensors_files
from radixkv.models.checkpoint import GENERATION, Checkpoint, read_object
from radixkv.models.native.layers import NativeModel
from radixkv.models.native.switches import TYPES, NotListed, switches_of
from radixkv.models.quantized.kernels import kernels
from radixkv.models.quantized.layers import allocated, peak_bytes, replace_layers, replaceable, store
from radixkv.models.safetensors_files import file_tensors

_log = logging.getLogger(__name__)


def empty_model(config: Mapping[str, Any], dtype: torch.dtype) -> NativeModel | None:
    """Return a model without weights, on the meta device; None for a configuration that is not listed."""
    try:
        switches = switches_of(config)
    except NotListed as reason:
        _log.debug("transformers' model code runs this model: %s", reason)
        return None
    with torch.device("meta"):
        model = NativeModel({**TYPES[config["model_type"]], **config}, switches)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False)


def fill(model: NativeModel, weights: Mapping[str, Tensor]) -> None:
    """Put these tensors in the place of parameters of a model; others stay as they are."""
    for name, tensor in weights.items():
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._parameters[key] = nn.Parameter(tensor, requires_grad=False)
    if model.switches.tied:
        model.lm_head.weight = model.model.embed_tokens.weight


def read_model(
    found: Checkpoint, dtype: torch.dtype | str, weights: str, check_memory: Callable[[int], None]
) -> NativeModel | None:
    """Return the model of a folder, on the CPU; None for files that do not match a listed model one to one.

    `dtype` "auto" is the dtype that the configuration states. With `weights` "int8" or "int4", each matrix is quantised
    when it is read. `check_memory` gets the bytes of the weights before the first is read, and may raise.
    """
    config = found.config
    if dtype == "auto":
        dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)  # type: ignore[assignment]
    if not isinstance(dtype, torch.dtype):
        return None
    model = empty_model(config, dtype)
    if model is None or not _fit(model, found):
        return None
    places = replaceable(model) if weights in ("int8", "int4") and kernels() is not None else {}
    small = {name: allocated(model.get_parameter(name), weights, place) for name, place in places.items()}
    check_memory(peak_bytes(model, small))
    large = {name: each for name, each in model.named_parameters() if name not in small}
    filled = {name: torch.empty(each.shape, dtype=dtype, device="cpu") for name, each in large.items()}
    with file_tensors(found) as tensors:
        for name, tensor in tensors.items():
            if name in small:
                store(tensor[...], small[name])
            elif name in filled:
                tensor.read_into(filled[name])
    model.sources = tuple(each.piece for each in found.tensors.values())
    fill(model, filled)
    replace_layers(model, small, places)
    settings = found.folder / GENERATION
    model.generation_config = SimpleNamespace(**(read_object(settings) if settings.is_file() else {}))
    model.config.name_or_path = str(found.folder)
    return model


def _fit(model: NativeModel, found: Checkpoint) -> bool:
    """Return whether the files have each parameter of a model, and nothing else but frequencies, which it computes."""
    wanted = {name: tuple(each.shape) for name, each in model.named_parameters()}
    stored = {name: each.shape for name, each in found.tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    kinds = {safetensors_files.DTYPES.get(each.dtype) for each in found.tensors.values()}
    return wanted == stored and all(each is not None and each.is_floating_point for each in kinds)
