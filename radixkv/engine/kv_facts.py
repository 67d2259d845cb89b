"""Return the facts that decide the bits of a block; a fingerprint is made from them."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import TYPE_CHECKING, Any

import torch

from radixkv.config import EngineConfig
from radixkv.device import device_of
from radixkv.version import __version__

if TYPE_CHECKING:
    from radixkv.models.adapter import LoadedModel


def facts(loaded: LoadedModel, config: EngineConfig, image_bytes: int) -> dict[str, Any]:
    """Return all that decides the bits of a block, except the values of the weights."""
    from radixkv.models.verdicts import module_kinds  # imports layers and kernels

    settings = {name: value for name, value in vars(loaded.config).items() if name != "_name_or_path"}
    found = {
        "modules": _digest(module_kinds(loaded.model)),
        "config": _digest(settings),
        "attention": loaded.attention,
        "dtype": str(loaded.dtype),
        "kv_dtype": config.kv_dtype,
        "image": image_bytes,
        "layers": [repr(layer) for layer in loaded.layers],
        "block_size": config.block_size,
        "max_length": loaded.max_length,
        "device": loaded.device.type,
    }
    if config.deterministic:
        place = device_of(loaded.device)
        name = place.properties() if place.is_gpu else (platform.processor(), torch.backends.cpu.get_cpu_capability())
        versions = torch.__version__, __version__, torch.get_num_threads()
        found |= {"deterministic": [*versions, str(name), config.prefill_chunk]}
    return found


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain(value: object) -> object:
    """Return the fields of a config in a config, sets in order, since it differs between processes, and else a text."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return vars(value) if type(value).__name__.endswith("Config") else str(value)
