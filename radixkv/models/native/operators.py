"""What a layer computes with: `Operators`, and their first implementation, in plain torch.

They compute as transformers' layers do, operator by operator, so that both round alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from radixkv.models.attention_interface import Handler, attention

Rotation = tuple[Tensor, Tensor] | None  # cosines and sines [T, dim]


class Operators(Protocol):
    """The parts of a layer, over rows [T, width]; a module has the weights and the options of its part."""

    def norm(self, module: Any, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of `hidden` and `residual`, and the sum."""
        ...

    def attention(self, module: Any, normed: Tensor, rotation: Rotation) -> Tensor:
        """Return the output of an attention [T, hidden]."""
        ...

    def mlp(self, module: Any, normed: Tensor) -> Tensor:
        """Return the output of an MLP [T, hidden]."""
        ...

    def serving(self, handler: Handler) -> Operators:
        """Return the operators for a forward whose attention `handler` answers."""
        ...

    def refresh(self, model: nn.Module) -> None:
        """Take the present weights of the model, after a reload."""
        ...


Attend = Callable[..., tuple[Tensor, Any]]


class TorchOperators:
    """Operators of torch; `attend` is called as transformers calls its attention functions."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def norm(self, module: Any, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalise in float32; a norm with an offset is also scaled there."""
        total = hidden if residual is None else residual + hidden
        return normalised(module, total), total

    def attention(self, module: Any, normed: Tensor, rotation: Rotation) -> Tensor:
        """Project, normalise and rotate heads, attend and project."""
        query, key, value = _projected(module, normed)
        if module.has_norms:
            query, key = normalised(module.q_norm, query), normalised(module.k_norm, key)
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        if rotation is not None:
            query, key = rotated(query, *rotation), rotated(key, *rotation)
        options = {"scaling": module.scale, "sliding_window": module.window, "softcap": module.softcap}
        attended, _ = self._attend(module, query, key, value, None, **options)
        output: Tensor = module.o_proj(attended.reshape(len(normed), -1))
        return output

    def mlp(self, module: Any, normed: Tensor) -> Tensor:
        """Multiply the activated gate by `up`."""
        if module.stacked:
            gate, up = module.gate_up_proj(normed).chunk(2, dim=-1)
        else:
            gate, up = module.gate_proj(normed), module.up_proj(normed)
        found: Tensor = module.down_proj(activated(module.activation, gate) * up)
        return found

    def serving(self, handler: Handler) -> TorchOperators:
        """Return these operators, which serve every handler."""
        return self

    def refresh(self, model: nn.Module) -> None:
        """Do nothing: the weights are read in each call."""


def _projected(module: Any, normed: Tensor) -> list[Tensor]:
    """Return queries, keys and values, [T, heads, head_dim]."""
    found = [layer(normed).view(len(normed), -1, module.head_dim) for layer in module.projections]
    return found if len(found) > 1 else list(found[0].split([module.heads, module.kv_heads, module.kv_heads], 1))


def normalised(module: Any, rows: Tensor) -> Tensor:
    """Return rows [..., width] over their root mean square, times the weight of a norm."""
    wide: Tensor = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.epsilon)
    if module.offset:
        wide = wide * (module.offset + module.weight.float())
        return wide.to(rows.dtype)
    found: Tensor = module.weight * wide.to(rows.dtype)
    return found


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first numbers of heads [1, heads, T, head_dim]."""
    dim = cosines.shape[-1]
    turned, rest = (heads, None) if dim == heads.shape[-1] else (heads[..., :dim], heads[..., dim:])
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat((-high, low), dim=-1) * sines
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def activated(name: str, gate: Tensor) -> Tensor:
    """Apply SiLU, or GELU by tanh."""
    return functional.silu(gate) if name == "silu" else functional.gelu(gate, approximate="tanh")


def _attend_alone(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, None]:
    """Attend without a pool: query [1, heads, T, dim], and [1, T, heads, dim] comes back. Costs T * T scores."""
    group, at = query.shape[1] // key.shape[1], torch.arange(query.shape[2], device=query.device)
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = at[:, None] - at
    hidden = (distance < 0) | (distance >= (sliding_window or len(at)))
    weights = functional.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1, dtype=torch.float32)
    return torch.matmul(weights.to(query.dtype), value).transpose(1, 2), None


TORCH = TorchOperators(attention)
"""In a forward of radixkv: its handler attends."""
ALONE = TorchOperators(_attend_alone)
"""Without a pool."""
