"""Quantise the weights of safetensors files one by one while transformers loads them.

transformers chooses the place of each tensor, renames it and joins experts, as without quantisation. `OnLoad` hooks
into that: it rounds each finished weight of a plain layer, and returns a parameter without memory in its place. So the
peak of memory is the finished model and one tensor. Files are read, not mapped, because the pages of a map count as
memory of the process.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from radixkv.models.checkpoint import Checkpoint
from radixkv.models.quantized.kernels import QuantizedWeights
from radixkv.models.quantized.layers import chosen_format, replace_layers, replaceable, store
from radixkv.models.safetensors_files import file_tensors

_METHOD = "radixkv-on-load"


class CannotQuantise(Exception):
    """These files must be loaded in float32 first; the message has the reason."""


def read(found: Checkpoint, weights: str, check_memory: Callable[[int], None]) -> tuple[Any, Any, OnLoad]:
    """Return a float32 model whose plain layers have no memory, transformers' loading info, and the `OnLoad`.

    Call `finish` on the last after the loading info was checked. `weights` is "int8" or "int4". `check_memory` gets the
    bytes of the peak before a weight is read, and may raise. Raises CannotQuantise for a model with code of its own,
    for files that are quantised already and for unusual dtypes.
    """
    folder = found.folder
    if "auto_map" in found.config or "quantization_config" in found.config:
        raise CannotQuantise("it has code of its own, or is quantised")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    on_load = OnLoad(empty, weights)
    check_memory(on_load.peak_bytes)
    with ExitStack() as stack:
        tensors = {name: tensor for file in found.files for name, tensor in file_tensors(folder / file, stack)}
        model, info = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict=tensors,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            quantization_config=on_load,
        )
    model.config.name_or_path = str(folder)
    model.generation_config = _generation_config(folder)
    return model, info, on_load


def _generation_config(folder: Path) -> Any:
    """Return the generation settings of a folder: of their own file, or those in the configuration."""
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", local_files_only=True, _from_model_config=True
        )


@register_quantization_config(_METHOD)
class OnLoad(QuantizationConfigMixin):  # type: ignore[misc]  # transformers shows no types
    """The weights that are quantised while a model is loaded: by name before, by parameter afterwards."""

    def __init__(self, empty: nn.Module, weights: str) -> None:
        """Choose the weights of `empty`, a float32 model on the meta device."""
        self.quant_method = _METHOD
        places = replaceable(empty)
        shapes = {name: empty.get_parameter(name).shape for name in places}
        self._allocated = {
            name: QuantizedWeights(shape[0], shape[1], chosen_format(weights, places[name]))
            for name, shape in shapes.items()
        }
        self._chosen = {f"{module}.weight": name for name, place in places.items() for module in place.modules}
        self._stored: dict[int, tuple[nn.Parameter, QuantizedWeights]] = {}  # by id of the parameter
        rest = [4 * each.numel() for name, each in empty.named_parameters() if name not in places]
        self.peak_bytes = sum(rest) + sum(each.nbytes for each in self._allocated.values())
        self.peak_bytes += 4 * max(each.numel() for each in empty.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> OnLoad:
        """Return the same object: transformers copies the configuration that holds it."""
        return self

    def chosen(self, name: str) -> bool:
        """Return whether the parameter of this name is quantised."""
        return name in self._chosen

    def convert(self, name: str, dense: Tensor) -> Tensor:
        """Quantise the weights of a parameter; return a parameter of the same shape that takes no memory.

        Weights of another shape than the model's are returned as they are, and transformers reports them.
        """
        small = self._allocated[self._chosen[name]]
        if dense.shape != (small.outputs, small.inputs):
            del self._chosen[name]
            return dense
        if any(small is each for _, each in self._stored.values()):  # a head with weights of its own
            small = QuantizedWeights(small.outputs, small.inputs, small.format)
        store(dense, small)
        # transformers compares a head with the embedding whose weights it should share: equal weights, equal numbers
        content = zlib.crc32(small.content().data) % (1 << 24)
        stand_in = nn.Parameter(torch.tensor(float(content)).expand(dense.shape), requires_grad=False)
        self._stored[id(stand_in)] = stand_in, small
        return stand_in

    def finish(self, model: nn.Module) -> None:
        """Replace the layers of quantised weights. Raises CannotQuantise if another module uses such a weight."""
        places = replaceable(model)
        found = {
            name: self._stored.pop(id(parameter))[1]
            for name, parameter in model.named_parameters()
            if name in places and id(parameter) in self._stored
        }
        used = {id(each) for each in model.parameters()}
        if used & self._stored.keys():
            raise CannotQuantise("a weight of a plain layer is also used by another module")
        self._stored.clear()
        self._allocated.clear()
        replace_layers(model, found, places)


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):  # type: ignore[misc]  # transformers shows no types
    """Passes weights to the `OnLoad` that it was made for, and leaves no trace on the model."""

    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        """Change nothing: layers are replaced when all weights are there."""

    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """Remove the marks of a quantised model, which is none for transformers."""
        self.remove_quantization_config(model)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return bool(self.quantization_config.chosen(param_name))

    def get_quantize_ops(self) -> _Operation:
        return _Operation(self.quantization_config)


class _Operation(ConversionOps):  # type: ignore[misc]  # transformers shows no types
    def __init__(self, on_load: OnLoad) -> None:
        self._on_load = on_load

    def convert(self, input_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        tensors = {name: each[0] if isinstance(each, list) else each for name, each in input_dict.items()}
        return {
            name: self._on_load.convert(name, each) if self._on_load.chosen(name) else each
            for name, each in tensors.items()
        }
