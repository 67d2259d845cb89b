"""Replace the linear layers and the embedding of a model by modules with weights of 8 or 4 bits.

Only plain layers of torch are replaced, and only if their inputs are whole groups. A weight that several layers share
is stored once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.errors import InvalidInput
from radixkv.models.architecture import is_plain
from radixkv.models.quantized.kernels import GROUP, Format, QuantizedWeights, kernels

CHOICES = ("auto", "float32", "int8", "int4")
_ROWS = 1024  # rows that are quantised at a time


class QuantizedLayer(nn.Module):
    """A layer whose weights, which other layers may share, have 8 or 4 bits."""

    def __init__(self, weights: QuantizedWeights) -> None:
        super().__init__()
        self.quantized = weights
        self.was_asked = False

    @property
    def stored(self) -> Tensor:
        """The bytes of the weights, for a digest."""
        return torch.from_numpy(self.quantized.content())

    @property
    def weight(self) -> Tensor:
        """The weights in float32; each read expands them, so `unpack` layers whose weight is read."""
        self.was_asked = True
        return self.quantized.dense()


class QuantizedLinear(QuantizedLayer):
    """A linear layer for float32 activations."""

    bias: Tensor | None

    def __init__(self, weights: QuantizedWeights, bias: Tensor | None = None) -> None:
        """Multiply by `weights`."""
        super().__init__(weights)
        self.in_features, self.out_features = weights.inputs, weights.outputs
        self.bias = bias

    def forward(self, input: Tensor) -> Tensor:
        """Multiply [..., in_features] to [..., out_features]."""
        return self.quantized.multiply(input, self.bias)


class QuantizedEmbedding(QuantizedLayer):
    """An embedding whose rows are expanded to float32 when they are looked up."""

    def __init__(self, weights: QuantizedWeights) -> None:
        """Look rows up in `weights`."""
        super().__init__(weights)
        self.num_embeddings, self.embedding_dim = weights.outputs, weights.inputs

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ids [...], [..., embedding_dim]."""
        return self.quantized.rows(input)


@dataclass(frozen=True)
class Replaceable:
    """A parameter [outputs, inputs], and the names of all modules that use it.

    `outer`: an embedding or a head, which never has less than 8 bits.
    """

    modules: tuple[str, ...]
    outer: bool


def check_weights(weights: str, dtype: Any, device: torch.device) -> str:
    """Return the form of weights for a model in `dtype` on `device`; "auto" is "float32" except for float32 on a CPU.

    Raises InvalidInput for a value that does not exist, and for 8 or 4 bits with another device or dtype.
    """
    if weights not in CHOICES:
        raise InvalidInput(f"weights={weights!r}: allowed are {', '.join(map(repr, CHOICES))}")
    if device.type == "cpu" and dtype == torch.float32:
        return weights
    if weights in ("int8", "int4"):
        kind = str(dtype).removeprefix("torch.")
        raise InvalidInput(
            f"weights={weights!r} is for float32 on a CPU, not for {kind} on {device.type}: use weights='float32', "
            "or device='cpu' and dtype='float32'"
        )
    return "float32"


def replaceable(model: nn.Module) -> dict[str, Replaceable]:
    """Return the parameters of `model` that may be quantised, by name."""
    users: dict[int, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)].append((name, module))
    getters = [getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    heads = {id(get()) for get in getters if get is not None}
    return {
        name: Replaceable(
            tuple(user for user, _ in users[id(parameter)]),
            any(id(module) in heads for _, module in users[id(parameter)]),
        )
        for name, parameter in model.named_parameters()
        if all(_is_plain(module, parameter) for _, module in users[id(parameter)])
    }


def _is_plain(module: nn.Module, parameter: Tensor) -> bool:
    """Return whether a module computes as torch's own layer from this weight of float32, or of no memory yet."""
    if type(module) not in (nn.Linear, nn.Embedding) or getattr(module, "weight", None) is not parameter:
        return False
    if not is_plain(module) or (isinstance(module, nn.Embedding) and module.max_norm is not None):
        return False
    return parameter.dtype is torch.float32 and parameter.shape[1] % GROUP == 0


def replace_layers(model: nn.Module, found: Mapping[str, QuantizedWeights], places: Mapping[str, Replaceable]) -> None:
    """Replace the modules of each parameter in `found` by modules with these weights."""
    for name, weights in found.items():
        for place in places[name].modules:
            module = model.get_submodule(place)
            small: nn.Module
            if isinstance(module, nn.Embedding):
                small = QuantizedEmbedding(weights)
            else:
                assert isinstance(module, nn.Linear)
                small = QuantizedLinear(weights, module.bias)
            model.set_submodule(place, small.train(module.training))


def quantized_weights(model: nn.Module) -> list[QuantizedWeights]:
    """Return the weights of a model that have 8 or 4 bits, each once."""
    layers = (each for each in model.modules() if isinstance(each, QuantizedLayer))
    return list({id(each.quantized): each.quantized for each in layers}.values())


@torch.no_grad()
def quantize(model: nn.Module, weights: str) -> int:
    """Quantise the layers of a float32 model in place to "int8" or "int4"; return the number of weights stored.

    Each weight is freed when its layer is replaced. The embedding and the head get 8 bits. Nothing is changed where
    there are no compiled products. Costs about 10 ns per weight.
    """
    if kernels() is None:
        return 0
    places = replaceable(model)
    for name, place in places.items():
        dense = model.get_parameter(name)
        small = allocated(dense, weights, place)
        store(dense, small)
        del dense
        replace_layers(model, {name: small}, places)
    return len(places)


def allocated(dense: Tensor, weights: str, place: Replaceable) -> QuantizedWeights:
    """Return memory for a parameter in its format for `weights` "int8" or "int4"."""
    format = Format.INT8 if weights == "int8" or place.outer else Format.INT4_MIN
    return QuantizedWeights(dense.shape[0], dense.shape[1], format)


def peak_bytes(model: nn.Module, small: Mapping[str, QuantizedWeights]) -> int:
    """Return the most bytes that a model takes while its weights `small` are read one by one in float32."""
    rest = [each.nbytes for name, each in model.named_parameters() if name not in small]
    largest = max(4 * each.numel() for each in model.parameters()) if small else 0
    return sum(rest) + sum(each.nbytes for each in small.values()) + largest


def requantized(weights: QuantizedWeights, dense: Tensor) -> QuantizedWeights:
    """Return new weights [outputs, inputs] with the bits of others; groups of 4 bits get a minimum."""
    format = Format.INT8 if weights.format is Format.INT8 else Format.INT4_MIN
    small = QuantizedWeights(weights.outputs, weights.inputs, format)
    store(dense.detach(), small)
    return small


@torch.no_grad()
def store(dense: Tensor, small: QuantizedWeights) -> None:
    """Round weights [outputs, inputs] to the nearest numbers of the format of `small`, and store them there."""
    for start in range(0, len(dense), _ROWS):
        small.quantise(dense[start : start + _ROWS].to("cpu"), start)


@torch.no_grad()
def dense_layer(module: Any) -> nn.Module:
    """Return a plain layer of torch with the weights of a packed or quantised one, in float32."""
    weight = nn.Parameter(module.weight, requires_grad=False)
    if isinstance(module, QuantizedEmbedding):
        embedding = nn.Embedding(module.num_embeddings, module.embedding_dim, _weight=weight, _freeze=True)
        return embedding.train(module.training)
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    linear.weight = weight
    linear.bias = module.bias
    return linear.train(module.training)
