"""The forward of a decoder layer in nine launches and its attention's: `GpuLayer`, and the norm after the last layer.

A layer returns the output of its MLP and leaves the residual on this tensor, so that the next norm adds both. The
forwards replace the forwards of a model's modules only in the forwards of radixkv whose attention runs in Triton: all
others use the modules as they are written.

Rows are multiplied by the weights of several linear layers in one product. The stacked weight is the only copy: the
weights of the layers become views of it. So names, shapes and values of a model's weights stay, and values that are
written into them count at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from radixkv.models.attention_interface import AttentionCall, RotaryCall, handler_or_none
from radixkv.models.observed import epsilon_of


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


NORMS = ("input_layernorm", "post_attention_layernorm")
_RESIDUAL = "radixkv_residual"
Attend = Callable[[RotaryCall], Tensor]


def completed(hidden: Tensor) -> Tensor:
    """Return the hidden states of a layer's output: with the residual, if it is still apart."""
    residual = vars(hidden).get(_RESIDUAL)
    return hidden if residual is None else hidden + residual.view(hidden.shape)


def _attending() -> Attend | None:
    """Return the function that attends along rows in the present forward; None outside of radixkv's forwards."""
    found: Attend | None = getattr(handler_or_none(), "attend_rows", None)
    return found


class GpuNorm:
    """An RMS norm that adds the residual first."""

    def __init__(self, own: nn.Module) -> None:
        """Scale by the present weight of `own`."""
        from radixkv_kernels.layers import add_norm  # needs Triton

        self._parameters, self._epsilon, self._add_norm = own._parameters, epsilon_of(own), add_norm

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """Return normalised rows [T, width]; `hidden` [T, width] becomes the next residual."""
        weight: Any = self._parameters["weight"]
        return self._add_norm(hidden, weight, self._epsilon, residual)


class GpuAttention:
    """The projections of an attention module around its attention."""

    def __init__(self, own: Any, like: AttentionCall, *, rotates: bool) -> None:
        """Attend as in the call `like`, with queries and keys that are rotated or not."""
        self.own, self._rotates = own, rotates
        self._heads, self._dim, self._scale = like.query.shape[1], like.query.shape[3], like.scale
        self.qkv = StackedLinear([own.q_proj, own.k_proj, own.v_proj])
        self._out = own.o_proj._parameters
        self._query_norm, self._key_norm = (getattr(own, name, None) for name in ("q_norm", "k_norm"))

    def __call__(self, normed: Tensor, angles: Any, attend: Attend) -> Tensor:
        """Return [T, hidden] of normalised rows [T, hidden] and angles ([1, T, dim], [1, T, dim])."""
        call = RotaryCall(self.own, self.qkv(normed), self._heads, self._scale)
        if self._rotates:
            call.cosines, call.sines = angles[0].squeeze(0), angles[1].squeeze(0)
        if self._query_norm is not None and self._key_norm is not None:
            call.query_weight, call.key_weight = self._query_norm.weight, self._key_norm.weight
            call.epsilon = epsilon_of(self._query_norm)
        return functional.linear(attend(call).flatten(1), self._out["weight"], self._out["bias"])

    def takes(self, hidden: Tensor, angles: Any) -> bool:
        """Return whether a call can have these angles: of whole heads, in the dtype of the hidden states."""
        if not self._rotates:
            return True
        return isinstance(angles, tuple) and all(
            isinstance(each, Tensor)
            and each.ndim == 3
            and each.shape[0] == 1
            and each.shape[2] == self._dim
            and each.dtype == hidden.dtype
            for each in angles
        )


class GpuMLP:
    """A gated MLP with SiLU."""

    def __init__(self, own: Any) -> None:
        """Multiply by the present weights of `own`."""
        from radixkv_kernels.layers import silu_multiply  # needs Triton

        self.gate_up = StackedLinear([own.gate_proj, own.up_proj])
        self._down, self._multiply = own.down_proj._parameters, silu_multiply

    def __call__(self, normed: Tensor) -> Tensor:
        """Return [T, hidden] of rows [T, hidden]."""
        return functional.linear(self._multiply(self.gate_up(normed)), self._down["weight"], self._down["bias"])


class GpuLayer:
    """The forward of a decoder layer with norms before attention and MLP, and a residual around each."""

    def __init__(self, own: Any, like: AttentionCall, *, rotates: bool) -> None:
        """Replace the forward of `own`, whose attention calls are as `like`."""
        self._own = own
        self.input_norm, self.post_norm = GpuNorm(own.input_layernorm), GpuNorm(own.post_attention_layernorm)
        self.attention, self.mlp = GpuAttention(own.self_attn, like, rotates=rotates), GpuMLP(own.mlp)
        self.completes = False
        """Whether to add the residual here: after the last layer, unless its norm is a `GpuLastNorm`."""

    @property
    def stacks(self) -> tuple[StackedLinear, StackedLinear]:
        """Return the products whose weights are stacked."""
        return self.attention.qkv, self.mlp.gate_up

    def __call__(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        """Return the hidden states [1, T, hidden] of the next layer, whose residual may be apart."""
        attend = _attending()
        if attend is None:
            return type(self._own).forward(self._own, hidden_states, *args, **named)
        residual = hidden_states.view(-1, hidden_states.shape[-1])
        normed = self.input_norm(residual, vars(hidden_states).pop(_RESIDUAL, None))
        attended = self.attention(normed, named.get("position_embeddings"), attend)
        normed = self.post_norm(attended, residual)
        output = self.mlp(normed).view(hidden_states.shape)
        if self.completes:
            return output.add_(attended.view(output.shape))
        vars(output)[_RESIDUAL] = attended
        return output


class GpuLastNorm:
    """The forward of the norm after the last layer."""

    def __init__(self, own: Any) -> None:
        """Replace the forward of `own`."""
        self._own, self._norm = own, GpuNorm(own)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Normalise [1, T, hidden], with the residual added first."""
        if _attending() is None:
            found: Tensor = type(self._own).forward(self._own, hidden_states)
            return found
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        return self._norm(rows, vars(hidden_states).pop(_RESIDUAL, None)).view(hidden_states.shape)


def replaced_forward(module: nn.Module) -> GpuLayer | GpuLastNorm | None:
    """Return the forward that replaces the one of this module; None if it is as written."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, GpuLayer | GpuLastNorm) else None
