"""Compare a fused layer with the layer as written, part by part, for the inputs that it gets in a forward.

Parts are compared in float32, where rounding hides nothing, for rows of several magnitudes. The layer with stacked
weights is compared in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.models.attention_interface import AttentionCall, RotaryCall, handled_by
from radixkv.models.gpu_layers.layer import NORMS, GpuLayer, GpuNorm, completed
from radixkv.models.observed import Player, Use, close
from radixkv.models.rounding import TOLERANCE, widened

_MAGNITUDES = (1e-2, 1.0, 30.0, 1e4)  # of the rows of one input: some models cut large numbers
_EXACT, _TF32 = 1e-4, 5e-3  # relative to a row's norm, in float32


class Unlike(Exception):
    """A layer is not one that `GpuLayer` computes; the text gives the reason."""


def proven(layer: Any, seen: dict[int, list[Use]], dtype: torch.dtype) -> GpuLayer:
    """Return the forward of a layer, with stacked weights. Raises `Unlike` if it computes something else."""
    uses, attention, mlp = (seen[id(each)] for each in (layer, layer.self_attn, layer.mlp))
    for use in uses:
        _check_use(use)
    if len(attention) != len(uses) or len(mlp) != len(uses):
        raise Unlike("attention or MLP is called several times")
    fused = _agreeing(layer, uses, attention, dtype)
    for stack in fused.stacks:
        stack.stack()
    for use in uses:
        found, expected = _outputs(fused, layer, use.args[0], use.named, *use.calls[0])
        if not close(found, expected, TOLERANCE[dtype]):
            raise Unlike(f"a fused layer computes something else in {dtype}")
    return fused


def _check_use(use: Use) -> None:
    """Raise `Unlike` for a call whose arguments or attention `GpuLayer` does not take."""
    if len(use.args) != 1 or not isinstance(use.args[0], Tensor) or not isinstance(use.output, Tensor):
        raise Unlike("the forward takes or returns other things than hidden states")
    if use.args[0].ndim != 3 or len(use.args[0]) != 1 or use.named.get("past_key_values") is not None:
        raise Unlike("the forward takes hidden states of another shape, or a cache")
    if len(use.calls) != 1 or use.calls[0][0].mask is not None or use.calls[0][0].sinks is not None:
        raise Unlike("attention is called several times, or with a mask or sinks")


def _agreeing(layer: Any, uses: list[Use], attention: list[Use], dtype: torch.dtype) -> GpuLayer:
    """Return a forward that computes the same as the layer in float32, by parts and as a whole."""
    like = uses[0].calls[0][0]
    with widened(each for each in layer.parameters() if each.dtype == dtype):
        hidden = _scaled(uses[0].args[0])
        for name in NORMS:
            if not norm_agrees(getattr(layer, name), hidden[0], torch.float32):
                raise Unlike(f"{name} is no plain RMS norm")
        fused = next((each for each in _forwards(layer, like) if _attention_agrees(each, attention[0])), None)
        if fused is None:
            raise Unlike("attention computes something else than projections, norms and a rotation of whole heads")
        if not close(fused.mlp(hidden[0]), layer.mlp(hidden)[0], _tolerance()):
            raise Unlike("the MLP is not gated by SiLU")
        found, expected = _outputs(fused, layer, hidden, _wide(uses[0].named), like, uses[0].calls[0][1].float())
        if not close(found, expected, _tolerance()):
            raise Unlike("the parts are connected in another way")
    return fused


def _forwards(layer: Any, like: AttentionCall) -> Iterator[GpuLayer]:
    """Yield the forwards that may compute the same: with and without a rotation."""
    for rotates in (True, False):
        yield GpuLayer(layer, like, rotates=rotates)


def norm_agrees(norm: Any, rows: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a norm is a plain one of rows [T, width], which are added to a residual first."""
    fused, tolerance = GpuNorm(norm), _tolerance() if dtype == torch.float32 else TOLERANCE[dtype]
    total = rows + rows.flip(0)
    alone, added = fused(rows.clone(), None), fused(rows.clone(), rows.flip(0).contiguous())
    return close(alone, norm(rows[None])[0], tolerance) and close(added, norm(total[None])[0], tolerance)


def _attention_agrees(fused: GpuLayer, use: Use) -> bool:
    """Return whether fused attention makes the calls of the module, for rows of several magnitudes."""
    (observed_call, answer), named = use.calls[0], _wide(use.named)
    hidden, angles = use.named.get("hidden_states"), named.get("position_embeddings")
    if (
        use.args
        or not isinstance(hidden, Tensor)
        or not fused.attention.takes(hidden, use.named.get("position_embeddings"))
    ):
        return False
    hidden = _scaled(hidden)
    ours, own = _RotatingPlayer(answer.float(), observed_call), Player(answer.float())
    output = fused.attention(hidden[0], angles, ours.attend_rows)
    with handled_by(own):
        expected = fused.attention.own(**(named | {"hidden_states": hidden}))
    if not isinstance(expected, tuple) or len(own.calls) != 1:
        return False
    (made,), (call,) = ours.calls, own.calls
    parts = ((getattr(made, name)[0], getattr(call, name)[0]) for name in ("query", "key", "value"))
    return made.scale == call.scale and all(
        close(found, other, _tolerance()) for found, other in (*parts, (output, expected[0][0]))
    )


def _outputs(
    fused: GpuLayer, layer: nn.Module, hidden: Tensor, named: dict[str, Any], like: AttentionCall, answer: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the rows of both forwards for these arguments, if `answer` is the attention."""
    with handled_by(_RotatingPlayer(answer, like)):
        found = completed(fused(hidden, **named))
    with handled_by(Player(answer)):
        expected = layer(hidden, **named)
    return found[0], expected[0]


class _RotatingPlayer(Player):
    """Answers attention calls alike before their rotation, and keeps them as they are after it."""

    def __init__(self, answer: Tensor, like: AttentionCall) -> None:
        """Take calls with the heads of `like`."""
        super().__init__(answer)
        self._kv_heads, self._dim = like.key.shape[1], like.key.shape[3]

    def attend_rows(self, call: RotaryCall) -> Tensor:
        """Rotate and write by the kernel, keep the call, and return the answer."""
        tokens = len(call.rows)
        shape = self._kv_heads, tokens, self._dim
        key, value = (call.rows.new_full(shape, torch.nan) for _ in range(2))
        slots = torch.arange(tokens, device=call.rows.device)
        query = call.rotate_and_write(key.unsqueeze(2), value.unsqueeze(2), slots)
        self.calls.append(
            AttentionCall(call.module, query[None], key[None], value[None], None, call.scale, None, None, None, {})
        )
        return self.answer


# ---- numbers


def _scaled(hidden: Tensor) -> Tensor:
    """Return hidden states [1, T, width] in float32, whose rows have several magnitudes."""
    tokens = hidden.shape[1]
    sizes = torch.tensor(_MAGNITUDES, device=hidden.device).repeat(-(-tokens // len(_MAGNITUDES)))[:tokens]
    return hidden.float() * sizes[:, None]


def _wide(named: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a module with the angles in float32."""
    angles = named.get("position_embeddings")
    if not isinstance(angles, tuple) or not all(isinstance(each, Tensor) for each in angles):
        return named
    return named | {"position_embeddings": tuple(each.float() for each in angles)}


def _tolerance() -> float:
    """Return the tolerance of products in float32, which some users compute in TF32."""
    return _EXACT if torch.get_float32_matmul_precision() == "highest" else _TF32
