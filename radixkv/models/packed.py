"""Pack the weights of linear layers on a CPU for oneDNN, whose product of few rows takes half of torch's time.

A decode multiplies one row per sequence by every weight, and torch's own float32 product is slow for 2 to 16 rows. The
operators used here are those that torch.compile emits for frozen weights. They are private: if torch lacks them, or
they give other numbers, layers run unpacked.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from radixkv.models.architecture import is_plain
from radixkv.models.native.layers import NativeModel
from radixkv.models.quantized.layers import QuantizedLayer, dense_layer

_log = logging.getLogger(__name__)
# A call of oneDNN takes about 10 microseconds more than one of torch; products with fewer weights do not save that.
MIN_WEIGHTS = 1 << 18
_EXPECTED_ROWS = 8  # oneDNN chooses a layout for this number of rows; every layout serves any number
_TESTED_ROWS = (1, 7)  # a matrix by a vector, and a product of few rows: different kernels
_TOLERANCE = 1e-5  # relative to the norms of row and weights; another order of float32 sums differs by 1e-7


class PackedLinear(nn.Module):
    """An `nn.Linear` of float32 whose weight only oneDNN can read; the same numbers up to rounding."""

    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        """Pack the weight of `linear`, which may be freed afterwards: one copy, at the speed of memory."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.was_asked = False
        self.repack(linear.weight)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def repack(self, weight: Tensor) -> None:
        """Multiply by `weight` [out_features, in_features] from now on."""
        plain = weight.detach().to("cpu", torch.float32)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain, _EXPECTED_ROWS)

    @property
    def stored(self) -> Tensor:
        """A copy of the weight in torch's layout, for a digest."""
        weight: Tensor = self._packed.to_dense()
        return weight

    @property
    def weight(self) -> Tensor:
        """The weight in torch's layout, bit for bit; each read copies it, so `unpack` layers whose weight is read."""
        self.was_asked = True
        weight: Tensor = self._packed.to_dense()
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """Multiply [..., in_features] to [..., out_features]."""
        product: Tensor = self._multiply(input, self._packed, self.bias, "none", [], "")
        return product


def pack(model: nn.Module, *, keep: bool) -> nn.Module:
    """Return `model` with its large linear layers packed; `model` itself if none can be packed.

    If `keep`, `model` and its layers stay as they are, and the returned model has modules of its own around the same
    tensors: packed weights then exist twice. If not, each weight is freed when its layer is packed, one layer at a
    time, unless an embedding shares it. Costs a copy and two small products per layer.
    """
    names = [name for name, module in model.named_modules() if _is_worth_packing(module)]
    if not names or not _is_possible():
        return model
    try:
        target = with_own_modules(model) if keep else model
        refused = [name for name in names if not _pack_one(target, name)]
    except Exception as error:
        _log.debug("linear layers run unpacked: %s: %s", type(error).__name__, error)
        return model
    if refused:
        _log.warning("oneDNN computes %d linear layers wrongly here (%s); torch does them", len(refused), refused[0])
    return model if len(refused) == len(names) else target


def unpack(model: nn.Module, *, asked_only: bool = False) -> int:
    """Turn packed and quantized layers of `model` into plain ones, all or those whose weight was read.

    Returns their number.
    """
    kinds = (PackedLinear, QuantizedLayer)
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    chosen = [(name, module) for name, module in packed if module.was_asked or not asked_only]
    for name, module in chosen:
        model.set_submodule(name, dense_layer(module))
    if chosen and isinstance(model, NativeModel):
        model.operators.refresh(model)
    return len(chosen)


def _is_possible() -> bool:
    """Return whether this torch has oneDNN, switched on, and the two operators."""
    mkldnn: Any = torch.backends.mkldnn
    switched_on = mkldnn.is_available() and getattr(mkldnn, "enabled", True)
    needed = ("_reorder_linear_weight", "_linear_pointwise")
    if switched_on and all(hasattr(torch.ops.mkldnn, operator) for operator in needed):
        return True
    _log.debug("linear layers run unpacked: this torch has no oneDNN, or not the operators for packed weights")
    return False


def _is_worth_packing(module: nn.Module) -> bool:
    """Return whether this is a large float32 layer on a CPU that computes as `nn.Linear`: no subclass, no hooks."""
    if type(module) is not nn.Linear or not is_plain(module):
        return False
    weight = module.weight
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.numel() >= MIN_WEIGHTS


def with_own_modules(model: nn.Module) -> nn.Module:
    """Copy the modules and the configuration of `model` around the same parameters and buffers."""
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, tensors)


@torch.no_grad()
def _pack_one(model: nn.Module, name: str) -> bool:
    """Pack the layer called `name`; return False, with nothing changed, if it would compute something else."""
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    packed = PackedLinear(linear)
    if not all(_agree(linear, packed, rows) for rows in _TESTED_ROWS):
        return False
    model.set_submodule(name, packed.train(linear.training))
    return True


def _agree(linear: nn.Linear, packed: PackedLinear, rows: int) -> bool:
    """Return whether both give the same for random input, within float32 rounding."""
    draw = torch.randn(rows, linear.in_features, generator=torch.Generator().manual_seed(rows))
    expected = functional.linear(draw, linear.weight, linear.bias)
    scale = draw.norm(dim=1)[:, None] * linear.weight.norm(dim=1)
    if linear.bias is not None:
        scale = scale + linear.bias.abs()
    return bool(((packed(draw) - expected).abs() <= _TOLERANCE * scale).all())  # NaN is no agreement
