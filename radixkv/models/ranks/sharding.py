"""Load one rank's part of a model, by transformers' own plan of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixkv import model_path
from radixkv.device import GPU
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, loader
from radixkv.models.identity import local_part
from radixkv.models.loaded import LoadedModel
from radixkv.sizing.kv_shapes import kv_shape
from radixkv.sizing.kv_size import KVShape


def shape_of(name: str, revision: str | None, size: int, settings: Mapping[str, Any]) -> KVShape:
    """Return the KV shape of a model that `size` ranks can share; fetches its files, and reads no weight.

    Raises InvalidInput with the numbers for heads that do not divide, for states, and for weights of 8 or 4 bits;
    UnsupportedModel for a model without a plan.
    """
    if settings["weights"] in ("int8", "int4"):
        raise InvalidInput(f"tensor_parallel={size}: weights={settings['weights']!r} cannot be divided: use float32")
    folder, _ = loader.folder_of(name, revision)
    if model_path.is_gguf(folder):
        raise InvalidInput(f"tensor_parallel={size} needs a folder of safetensors, and {name!r} is a GGUF file")
    shape = kv_shape(str(folder))
    if obstacle := shape.ranks_obstacle(size):
        raise InvalidInput(f"tensor_parallel={size}: {obstacle}")
    if obstacle := _plan_obstacle(folder, trust_remote_code=settings["trust_remote_code"]):
        raise UnsupportedModel(f"tensor_parallel={size}: {obstacle}")
    return shape


def _plan_obstacle(folder: Path, *, trust_remote_code: bool) -> str:
    """Return why transformers' plan does not divide the attention of a model; "" if it does."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
    plan = getattr(config, "base_model_tp_plan", None) or {}
    styles = [style for name, style in plan.items() if "attn" in name or "attention" in name]
    if not styles:
        return f"transformers has no plan that divides the attention of {config.model_type}"
    if any("gather" in style for style in styles):
        return f"transformers' plan of {config.model_type} leaves all heads on each rank"
    return ""


def load(name: str, rank: int, device: str, settings: Mapping[str, Any]) -> LoadedModel:
    """Load the part of this rank; all ranks do so together. `settings` as in `adapter.load`."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        raise UnsupportedModel(
            f"this transformers divides no model between ranks: install a newer one ({error})"
        ) from error
    size = torch.distributed.get_world_size()
    division = loader.Division(1 / size, {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")})
    place = f"{device}:{rank}" if device == GPU else device
    return adapter.load(name, **settings, device=place, fuse=False, division=division)


def check_divided(loaded: LoadedModel, shape: KVShape, size: int) -> None:
    """Raise UnsupportedModel unless this rank holds its share of the KV heads of each layer."""
    held, whole = [each.kv_heads for each in loaded.stored_layers], [each.kv_heads for each in shape.layers]
    if [each * size for each in held] != whole:
        raise UnsupportedModel(
            f"{loaded.name}: transformers' plan leaves {held[0]} of {whole[0]} KV heads on each of {size} ranks"
        )


def write_state(state: Mapping[str, Tensor], folder: str) -> str:
    """Write whole weights to a file for the other ranks; return its path."""
    file = Path(folder) / "weights"
    torch.save(dict(state), file)
    return str(file)


def read_state(file: str) -> Mapping[str, Tensor]:
    """Map the weights that `write_state` wrote."""
    state: Mapping[str, Tensor] = torch.load(file, mmap=True, weights_only=True)
    return state


def held_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of the weights of this rank."""
    tensors = {id(each): local_part(each) for each in (*loaded.model.parameters(), *loaded.model.buffers())}
    return sum(each.nbytes for each in tensors.values())
