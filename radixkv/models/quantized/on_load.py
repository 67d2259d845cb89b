"""Quantise the weights of safetensors files one by one, before transformers builds its model around the others.

transformers gets a number without memory in place of each quantised weight. It renames tensors, joins experts and
ties weights as without quantisation. So the peak of memory is the finished model and one tensor. Files are read, not
mapped, because the pages of a map count as memory of the process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from radixkv.models.checkpoint import Checkpoint
from radixkv.models.quantized.kernels import QuantizedWeights
from radixkv.models.quantized.layers import allocated, peak_bytes, replace_layers, replaceable, store
from radixkv.models.safetensors_files import file_tensors
from radixkv.models.weights.check import check_weights


def read(empty: Any, found: Checkpoint, name: str, weights: str, check_memory: Callable[[int], None]) -> Any:
    """Return a float32 model with plain layers in `weights` "int8" or "int4"; `empty` is it on the meta device.

    Layers whose weights transformers computes from those in the files keep float32. `check_memory` gets the bytes of
    the peak before a weight is read, and may raise. Raises the errors of `check_weights`. Raises ValueError for code of
    the model's own, quantised files, and a weight that is used elsewhere, and KeyError for unusual dtypes: such models
    must be loaded in float32 first.
    """
    if "auto_map" in found.config or "quantization_config" in found.config:
        raise ValueError("it has code of its own, or is quantised")
    sources, small = _allocated(empty, found, weights)
    check_memory(peak_bytes(empty, small))
    with file_tensors(found) as tensors:
        state: dict[str, Any] = dict(tensors)
        for key, tensor in tensors.items():
            if (own := sources.get(key, "")) in small:
                store(tensor[...], small[own])
                state[key] = _stand_in(small[own])
        model, info = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict=state,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model.config.name_or_path = str(found.folder)
    model.generation_config = _generation_config(found.folder)
    check_weights(model, info, name, found.tensors)
    places = replaceable(model)
    if wrong := {each for each, value in model.named_parameters() if _has_no_memory(value) and each not in places}:
        raise ValueError(f"{min(wrong)} is also used by another module")
    replace_layers(model, {each: small[each] for each in places if each in small}, places)
    return model


def _allocated(empty: Any, found: Checkpoint, weights: str) -> tuple[dict[str, str], dict[str, QuantizedWeights]]:
    """Return the names in the model of the tensors that are quantised, by their names in the files, and their memory.

    A head that shares its weights with the embedding may have weights of its own in the files.
    """
    places = replaceable(empty)
    users = {f"{module}.weight": name for name, place in places.items() for module in place.modules}
    sources = {key: own for key, own in _plainly_named(empty, found).items() if own in users}
    small = {}
    for key, own in sources.items():
        dense = empty.get_parameter(users[own])
        if found.tensors[key].shape == dense.shape:
            small[own] = allocated(dense, weights, places[users[own]])
    return sources, small


def _plainly_named(empty: Any, found: Checkpoint) -> dict[str, str]:
    """Return the name in the model of each tensor that transformers only renames, by its name in the files."""
    changes = get_model_conversion_mapping(empty)
    converters = [each for each in changes if isinstance(each, WeightConverter)]
    renamings = [each for each in changes if not isinstance(each, WeightConverter)]
    prefix, parameters = empty.base_model_prefix, empty.state_dict()
    names = {key: rename_source_key(key, renamings, converters, prefix, parameters) for key in sorted(found.tensors)}
    return {key: name for key, (name, converter) in names.items() if converter is None}


def _stand_in(small: QuantizedWeights) -> Tensor:
    """Return a tensor of the same shape without memory.

    transformers compares a head with the embedding whose weights it should share: equal weights have equal numbers.
    """
    content = zlib.crc32(small.content().data) % (1 << 24)
    return torch.tensor(float(content)).expand(small.outputs, small.inputs)


def _has_no_memory(parameter: Tensor) -> bool:
    return parameter.untyped_storage().nbytes() < parameter.nbytes


def _generation_config(folder: Path) -> Any:
    """Return the generation settings of a folder: of their own file, or those in the configuration."""
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", local_files_only=True, _from_model_config=True
        )
