"""Operators in Triton on a GPU: with them a layer takes nine launches, and those of its attention.

Rows are multiplied by the weights of several linear layers in one product. The stacked weight is the only copy: the
weights of the layers become views of it. So names, shapes and values of a model's weights stay, and values that are
written into them count at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from radixkv.models.attention_interface import RotaryCall, current
from radixkv.models.native.layers import MLP, TORCH, Angles, Attention, NativeModel
from radixkv.models.native.switches import Switches


def obstacle(switches: Switches) -> str | None:
    """Return the reason why the kernels cannot compute a model; None if they can."""
    from radixkv_kernels.layers import WIDEST  # needs Triton

    if switches.activation != "silu" or switches.norm_offset:
        return "its norms or activations are Gemma's"
    if any(each.dim != switches.head_dim for each in switches.rotations):
        return "a part of each head is rotated"
    return f"it has more than {WIDEST} hidden numbers" if switches.hidden > WIDEST else None


class FusedOperators:
    """Operators over contiguous rows in the dtype of the weights."""

    def __init__(self, model: NativeModel) -> None:
        """Stack the weights of `model`, one layer after the other. Raises RuntimeError if they cannot be moved."""
        from radixkv_kernels.layers import add_norm, silu_multiply  # needs Triton

        self._add_norm, self._silu_multiply = add_norm, silu_multiply
        self._stacks = {
            each: StackedLinear([getattr(each, name) for name in each.inputs])
            for each in model.modules()
            if isinstance(each, Attention | MLP)
        }
        self.refresh(model)

    def refresh(self, model: nn.Module) -> None:
        """Move weights into their stacks again, if they have left them."""
        for each in self._stacks.values():
            if not each.stacked:
                each.stack()

    def norm(self, module: Any, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of both, and the sum, in the memory of `hidden`."""
        return self._add_norm(hidden, module.weight, module.epsilon, residual), hidden

    def attention(self, module: Any, normed: Tensor, angles: Angles) -> Tensor:
        """Return the output of an attention, by torch if the handler does not attend along rows."""
        attend_rows = getattr(current.handler, "attend_rows", None)
        if attend_rows is None:
            return TORCH.attention(module, normed, angles)
        call = RotaryCall(module, self._stacks[module](normed), module.heads, module.scale)
        if angles is not None:
            call.cosines, call.sines = angles
        if module.has_norms:
            call.query_weight, call.key_weight = module.q_norm.weight, module.k_norm.weight
            call.epsilon = module.q_norm.epsilon
        output: Tensor = module.o_proj(attend_rows(call).flatten(1))
        return output

    def mlp(self, module: Any, normed: Tensor) -> Tensor:
        """Return the output of an MLP."""
        output: Tensor = module.down_proj(self._silu_multiply(self._stacks[module](normed)))
        return output


class StackedLinear:
    """Linear layers of the same inputs, whose outputs lie side by side."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Multiply layer by layer until `stack` is called. The layers have biases, or none has."""
        self._layers = list(layers)
        names = ("weight",) if layers[0].bias is None else ("weight", "bias")
        self._parts = [[(layer._parameters, name) for layer in layers] for name in names]
        self._stacks: list[Tensor] = []
        self._addresses: list[list[int]] = []

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [T, outputs of all layers] of rows [T, inputs].

        Weights that have left the stack, by a replaced parameter or by new memory, are multiplied layer by layer.
        """
        if self.stacked and self._stacks[0].dtype == rows.dtype:
            return functional.linear(rows, *self._stacks)
        return torch.cat([functional.linear(rows, layer.weight, layer.bias) for layer in self._layers], 1)

    @property
    def stacked(self) -> bool:
        """Whether the weights of all layers are views of the stack."""
        return bool(self._stacks) and all(
            owner[name].data_ptr() == address  # type: ignore[union-attr]  # a parameter
            for parts, addresses in zip(self._parts, self._addresses, strict=True)
            for (owner, name), address in zip(parts, addresses, strict=True)
        )

    def stack(self) -> None:
        """Move the weights into one tensor, unless they are adjacent already: one copy of them.

        Raises RuntimeError for parameters that cannot be moved, such as those made in inference mode.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._stacks = [_stack([owner[name] for owner, name in parts]) for parts in self._parts]  # type: ignore[misc]
        self._addresses = [
            [owner[name].data_ptr() for owner, name in parts]  # type: ignore[union-attr]
            for parts in self._parts
        ]


def _stack(parameters: list[Tensor]) -> Tensor:
    """Return one tensor whose parts, along its first dimension, are the data of the parameters from now on."""
    first = parameters[0]
    shape = (sum(len(each) for each in parameters), *first.shape[1:])
    if _adjacent(parameters):
        return first.detach().as_strided(shape, first.stride())
    stack = first.new_empty(shape)
    sizes = [len(each) for each in parameters]
    for parameter, part in zip(parameters, stack.split_with_sizes(sizes), strict=True):
        part.copy_(parameter)
        parameter.data = part
    return stack


def _adjacent(parameters: list[Tensor]) -> bool:
    """Return whether contiguous tensors follow each other in one storage."""
    storage, end = parameters[0].untyped_storage().data_ptr(), parameters[0].data_ptr()
    for each in parameters:
        if each.untyped_storage().data_ptr() != storage or each.data_ptr() != end or not each.is_contiguous():
            return False
        end += each.nbytes
    return True
