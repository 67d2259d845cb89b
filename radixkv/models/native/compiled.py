"""Operators for weights of 8 and 4 bits on a CPU: one call of a compiled function for each part of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from radixkv.models.attention_interface import AttentionCall, current
from radixkv.models.native.layers import MLP, TORCH, Angles, Attention, Norm
from radixkv.models.quantized.kernels import Kernels, SiblingWeights, rows_of
from radixkv.models.quantized.layers import QuantizedLinear

_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}  # as the library numbers them


class CompiledOperators:
    """Operators over float32 rows. Parts whose layers are not quantised compute in torch."""

    def __init__(self, model: nn.Module, library: Kernels) -> None:
        """Use the weights of `model`'s modules."""
        self._library = library
        self.refresh(model)

    def refresh(self, model: nn.Module) -> None:
        """Take the present weights of the model, after a reload or after layers were replaced."""
        modules = list(model.modules())
        self._factors = {
            each: (each.weight.detach() + each.offset).contiguous() for each in modules if isinstance(each, Norm)
        }
        parts: dict[nn.Module, list[str]] = {each: each.inputs for each in modules if isinstance(each, Attention)}
        mlps = [each for each in modules if isinstance(each, MLP) and len(each.inputs) == 2]
        parts |= {each: [*each.inputs, "down_proj"] for each in mlps}
        self._weights = {each: found for each, names in parts.items() if (found := _siblings(each, names))}

    def norm(self, module: Any, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of both, and the sum."""
        total = hidden if residual is None else residual + hidden
        factors = self._factors[module]
        given = rows_of(total, len(factors))
        found = torch.empty_like(given)
        self._library.rms_norm(
            given.data_ptr(), factors.data_ptr(), found.data_ptr(), len(given), len(factors), module.epsilon
        )
        return found, total

    def mlp(self, module: Any, normed: Tensor) -> Tensor:
        """Return the output of an MLP. Raises MemoryError, and RuntimeError for rows of another width."""
        weights = self._weights.get(module)
        if weights is None:
            return TORCH.mlp(module, normed)
        library, given = self._library, rows_of(normed, module.down_proj.out_features)
        found = torch.empty_like(given)
        failed = library.mlp(
            weights.addresses,
            weights.bias_addresses,
            given.data_ptr(),
            found.data_ptr(),
            len(given),
            _ACTIVATIONS[module.activation],
            library.instructions,
            torch.get_num_threads(),
            library.parallel,
        )
        if failed:
            raise MemoryError("no memory is left for the activations of an MLP")
        return found

    def attention(self, module: Any, normed: Tensor, angles: Angles) -> Tensor:
        """Return the output of an attention. Raises MemoryError, and RuntimeError for rows of another width."""
        weights = self._weights.get(module)
        if weights is None:
            return TORCH.attention(module, normed, angles)
        rows = self._projected(module, weights, normed, angles)
        count, dim, total = len(rows), module.head_dim, weights.outputs
        keys, values = module.heads * dim, (module.heads + module.kv_heads) * dim
        strides = count * total, dim, total, 1
        call = AttentionCall(
            module,
            rows.as_strided((1, module.heads, count, dim), strides),
            rows.as_strided((1, module.kv_heads, count, dim), strides, keys),
            rows.as_strided((1, module.kv_heads, count, dim), strides, values),
            None,
            module.scale,
            module.window,
            module.softcap,
            None,
            {},
        )
        output: Tensor = module.o_proj(current.handler.attend(call).reshape(count, -1))
        return output

    def _projected(self, module: Any, weights: SiblingWeights, normed: Tensor, angles: Angles) -> Tensor:
        """Return queries, keys and values side by side, [T, outputs], with norms and rotation."""
        library, threads = self._library, torch.get_num_threads()
        given = rows_of(normed, module.o_proj.out_features)
        count, total, dim = len(given), weights.outputs, module.head_dim
        found = given.new_empty(count, total)
        start = found.data_ptr()
        failed = library.multiply(
            weights.addresses, weights.bias_addresses, len(weights.weights), given.data_ptr(), start, count,
            library.instructions, threads, library.parallel,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"{given.numel() * 4:,} bytes of packed rows do not fit into memory")
        rotated = 0
        tables: tuple[int | None, int | None] = None, None
        if angles is not None:
            rotated, tables = angles[0].shape[1], (angles[0].data_ptr(), angles[1].data_ptr())
        passes: list[tuple[int, int, Any]] = [(0, module.heads + module.kv_heads, None)]
        if module.has_norms:
            passes = [(0, module.heads, module.q_norm), (module.heads * dim, module.kv_heads, module.k_norm)]
        elif angles is None:
            passes = []
        for first, heads, norm in passes:
            scaling = (None, 0.0) if norm is None else (self._factors[norm].data_ptr(), norm.epsilon)
            library.rotate(
                start + 4 * first, count, total, heads, dim, *scaling, *tables, rotated, threads, library.parallel
            )
        return found


def _siblings(module: nn.Module, names: list[str]) -> SiblingWeights | None:
    """Return the weights of quantised layers of a module; None if not all of them are."""
    layers = [each for name in names if isinstance(each := getattr(module, name), QuantizedLinear)]
    if len(layers) < len(names):
        return None
    return SiblingWeights([each.quantized for each in layers], [each.bias for each in layers])
