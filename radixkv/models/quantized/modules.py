"""Compute the projections of an attention module, and a gated MLP, in one call each: models with 8 or 4 bits.

The forward of a module is replaced only if it gives the same numbers for the inputs that the module gets in a forward
of the model, and for larger and smaller ones. Positions include the last one, because some models scale by the
position. The module's parts stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.models.attention_interface import AttentionCall, handled_by, handler_or_none
from radixkv.models.observed import Player, Use, close, is_plain, observed
from radixkv.models.quantized.kernels import Kernels, SiblingWeights, as_float32, kernels, rows_of
from radixkv.models.quantized.layers import QuantizedLinear
from radixkv.models.quantized.norms import FusedNorm

_TOLERANCE = 1e-5  # relative to a row's norm; another order of sums differs by 1e-7
_MAGNITUDES = (1e-2, 1.0, 30.0, 1e4)  # of the inputs: some models cut large numbers
_ACTIVATIONS = (0, 1)  # SiLU, and GELU by tanh


@torch.inference_mode()
def fuse_modules(model: nn.Module, max_length: int) -> int:
    """Replace forwards of attention modules and MLPs of a model in place, and return their number.

    The model attends by the function of `attention_interface`, to at most `max_length` tokens. Costs two forwards of a
    few tokens. A model that fails in them keeps its forwards.
    """
    library = kernels()
    candidates = [module for module in model.modules() if _is_attention(module) or _is_mlp(module)]
    if library is None or not candidates:
        return 0
    try:
        seen = observed(model, candidates, max_length)
    except Exception:  # the self-test comes later, and reports what fails
        return 0
    count = 0
    for module in candidates:
        uses = seen[id(module)]
        fused = next((each for each in _fused(module, uses, library) if all(map(each.agrees, uses))), None)
        if fused is not None and uses:
            module.forward = fused
            count += 1
    return count


def restore_modules(model: nn.Module) -> None:
    """Remove all replaced forwards: the modules compute by their parts again."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), FusedMLP | FusedAttention):
            del module.forward


def _fused(module: nn.Module, uses: list[Use], library: Kernels) -> Iterator[FusedMLP | FusedAttention]:
    """Yield the forwards that may compute the same as the module's."""
    if _is_mlp(module):
        for activation in _ACTIVATIONS:
            yield FusedMLP(module, activation, library)
    elif uses and all(len(use.calls) == 1 for use in uses) and _has_heads(module, uses[0].calls[0][0]):
        for rotates in (True, False):
            yield FusedAttention(module, uses[0].calls[0][0], rotates, library)


class _Fused:
    """A forward that replaces the module `own`'s."""

    def __init__(self, own: Any, names: tuple[str, ...], library: Kernels) -> None:
        """Use the weights and biases that the parts `names` have at each call."""
        self._own, self._names, self._library = own, names, library
        self._inputs = getattr(own, names[0]).in_features
        self._weights = self._of([getattr(own, name) for name in names])

    @staticmethod
    def _of(layers: list[QuantizedLinear]) -> SiblingWeights:
        return SiblingWeights([each.quantized for each in layers], [each.bias for each in layers])

    def _siblings(self) -> SiblingWeights:
        """Return the present weights of the parts, which a reload replaces."""
        own, weights = self._own, self._weights
        layers = [getattr(own, name) for name in self._names]
        for layer, quantized, address in zip(layers, weights.weights, weights.bias_addresses, strict=True):
            bias = layer.bias
            if layer.quantized is not quantized or (bias is not None and bias.data_ptr() != address):
                self._weights = self._of(layers)
                break
        return self._weights


# ---- MLPs


_MLP = ("gate_proj", "up_proj", "down_proj")


class FusedMLP(_Fused):
    """The forward of a gated MLP."""

    def __init__(self, own: Any, activation: int, library: Kernels) -> None:
        """Compute down(activation(gate) * up)."""
        super().__init__(own, _MLP, library)
        self._activation = activation
        self._outputs = own.down_proj.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [..., outputs] from [..., inputs]. Raises MemoryError, and RuntimeError for another width."""
        given, library, weights = rows_of(x, self._inputs), self._library, self._siblings()
        found = given.new_empty((*given.shape[:-1], self._outputs))
        failed = library.mlp(
            weights.addresses,
            weights.bias_addresses,
            given.data_ptr(),
            found.data_ptr(),
            given.numel() // self._inputs,
            self._activation,
            library.instructions,
            torch.get_num_threads(),
            library.parallel,
        )
        if failed:
            raise MemoryError("no memory is left for the activations of an MLP")
        return found

    def agrees(self, use: Use) -> bool:
        """Return whether this gives the same numbers as the module, for its input in several magnitudes."""
        if len(use.args) != 1 or use.named or not isinstance(use.args[0], Tensor):
            return False
        own = type(self._own).forward
        return all(close(self(x), own(self._own, x), _TOLERANCE) for x in (use.args[0] * size for size in _MAGNITUDES))


# ---- attention


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_NORMS = ("q_norm", "k_norm")


class FusedAttention(_Fused):
    """The forward of an attention module: one product, norms and rotation in place, attention, the last product.

    The module's own forward runs with a cache of transformers, and outside of the forwards of radixkv.
    """

    def __init__(self, own: Any, like: AttentionCall, rotates: bool, library: Kernels) -> None:
        """Make calls as `like`, with queries and keys that are rotated or not."""
        super().__init__(own, _PROJECTIONS, library)
        heads, self._kv_heads, self._key_dim = like.query.shape[1], like.key.shape[1], like.query.shape[3]
        self._heads, self._value_dim, self._rotates = heads, like.value.shape[3], rotates
        self._options = like.scale, like.window, like.softcap
        names = (name for name, each in own.named_parameters(recurse=False) if each is like.sinks)
        self._sinks = next(names, None)  # by name, as a reload may replace the parameter
        self._passes: list[tuple[int, int, FusedNorm | None]] = []  # first number, heads, and their norm
        norms = [norm for name in _NORMS if (norm := getattr(own, name, None)) is not None]
        if norms:
            for start, count, norm in zip((0, heads * self._key_dim), (heads, self._kv_heads), norms, strict=True):
                self._passes.append((start, count, norm))
        elif rotates:
            self._passes.append((0, heads + self._kv_heads, None))

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Return the output [1, T, hidden] and no weights. Raises MemoryError."""
        own, handler = self._own, handler_or_none()
        if handler is None or args or named.get("past_key_values") is not None:
            return type(own).forward(own, *args, **named)
        cosines, sines = named["position_embeddings"] if self._rotates else (None, None)
        query, key, value = self._project(named["hidden_states"], cosines, sines)
        sinks = None if self._sinks is None else getattr(own, self._sinks)
        attended = handler.attend(AttentionCall(own, query, key, value, None, *self._options, sinks, {}))
        return own.o_proj(attended.reshape(1, len(attended), -1)), None

    def _project(self, hidden: Tensor, cosines: Any, sines: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [1, heads, T, dk], key [1, kv_heads, T, dk] and value [1, kv_heads, T, dv], views.

        The angles [1, T, rotated] are None if nothing is rotated.
        """
        given, library, weights = rows_of(hidden, self._inputs), self._library, self._siblings()
        rows, total, threads = given.shape[1], weights.outputs, torch.get_num_threads()
        found = given.new_empty(rows, total)
        start = found.data_ptr()
        failed = library.multiply(
            weights.addresses, weights.bias_addresses, 3, given.data_ptr(), start, rows, library.instructions, threads,
            library.parallel,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"{given.numel() * 4:,} bytes of packed rows do not fit into memory")
        rotated, angles = 0, (None, None)
        if cosines is not None:
            cosines, sines = as_float32(cosines), as_float32(sines)
            rotated, angles = cosines.shape[2], (cosines.data_ptr(), sines.data_ptr())
        for first, heads, norm in self._passes:
            scaling = (None, 0.0) if norm is None else (norm.factors.data_ptr(), norm.variance_epsilon)
            library.rotate(
                start + 4 * first, rows, total, heads, self._key_dim, *scaling, *angles, rotated, threads,
                library.parallel,
            )  # fmt: skip
        return self._views(found, rows, total)

    def _views(self, found: Tensor, rows: int, total: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value in `found` [rows, total]."""
        heads, kv_heads, dim, width = self._heads, self._kv_heads, self._key_dim, self._value_dim
        keys, values = heads * dim, (heads + kv_heads) * dim
        strides, value_strides = (rows * total, dim, total, 1), (rows * total, width, total, 1)
        return (
            found.as_strided((1, heads, rows, dim), strides),
            found.as_strided((1, kv_heads, rows, dim), strides, keys),
            found.as_strided((1, kv_heads, rows, width), value_strides, values),
        )

    def agrees(self, use: Use) -> bool:
        """Return whether this makes the attention calls of the module, for its input in several magnitudes.

        The output has to be the same too.
        """
        (call, answer), hidden = use.calls[0], use.named.get("hidden_states")
        if (
            not isinstance(hidden, Tensor)
            or use.args
            or use.named.get("past_key_values") is not None
            or call.mask is not None
        ):
            return False
        return self._takes(hidden, use) and all(
            self._agrees(use.named | {"hidden_states": hidden * size}, answer) for size in _MAGNITUDES
        )

    def _agrees(self, named: dict[str, Any], answer: Tensor) -> bool:
        """Return whether this and the module do the same with these arguments, if `answer` is the attention."""
        ours, own = Player(answer), Player(answer)
        with handled_by(ours):
            output = self(**named)
        with handled_by(own):
            expected = type(self._own).forward(self._own, **named)
        if not isinstance(expected, tuple) or len(expected) != 2 or expected[1] is not None or len(own.calls) != 1:
            return False
        (made,), (call,) = ours.calls, own.calls
        return (
            (made.scale, made.window, made.softcap) == (call.scale, call.window, call.softcap)
            and made.sinks is call.sinks
            and all(close(getattr(made, name), getattr(call, name), _TOLERANCE) for name in ("query", "key", "value"))
            and close(output[0], expected[0], _TOLERANCE)
        )

    def _takes(self, hidden: Tensor, use: Use) -> bool:
        """Return whether the arguments have the shapes that this forward expects."""
        if hidden.ndim != 3 or len(hidden) != 1:
            return False
        if not self._rotates:
            return True
        angles = use.named.get("position_embeddings")
        if not isinstance(angles, tuple) or len(angles) != 2 or not all(isinstance(each, Tensor) for each in angles):
            return False
        shape = angles[0].shape
        return bool(
            angles[1].shape == shape
            and len(shape) == 3
            and shape[:2] == hidden.shape[:2]
            and shape[2] <= self._key_dim
            and shape[2] % 2 == 0
        )


# ---- structure


def _is_mlp(module: nn.Module) -> bool:
    """Return whether a module has the parts of a gated MLP, with weights of 8 or 4 bits."""
    return _has_parts(module, _MLP)


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module has the projections of attention, in 8 or 4 bits, and norms of both or none."""
    if not _has_parts(module, _PROJECTIONS) or not isinstance(getattr(module, "o_proj", None), nn.Module):
        return False
    norms = [getattr(module, name, None) for name in _NORMS]
    return norms == [None, None] or all(isinstance(norm, FusedNorm) for norm in norms)


def _has_heads(module: Any, call: AttentionCall) -> bool:
    """Return whether the outputs of the projections are those heads, and the norms belong to single heads."""
    sizes = [each.shape[1] * each.shape[3] for each in (call.query, call.key, call.value)]
    norms = [norm for name in _NORMS if (norm := getattr(module, name, None)) is not None]
    return sizes == [getattr(module, name).out_features for name in _PROJECTIONS] and (
        call.query.shape[3] == call.key.shape[3] and all(len(norm.factors) == call.query.shape[3] for norm in norms)
    )


def _has_parts(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether a module has these quantised layers of equal inputs, no hooks, and no forward of its own."""
    parts = [getattr(module, name, None) for name in names]
    if not all(isinstance(part, QuantizedLinear) for part in parts):
        return False
    return is_plain(module)
