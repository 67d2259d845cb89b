"""Clamp the time steps of Mamba-2 decodes as in longer chunks, which transformers' path for one token leaves out.

Without the clamp the state after a token depends on whether the token came alone. The reference is the model's forward
of a whole prompt, which clamps. Time steps are softplus(dt + bias), so that dt can be clamped before.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

_UPDATE = "mamba2_selective_state_update"  # the function that a mixer's forward calls for one token


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the module's class, to be called with the module; with clamps if it needs them."""
    low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    if low <= 0 and high == math.inf:
        return type(module).forward
    kind: Any = type(module)
    return _clamped(kind, float(low), float(high))


@functools.cache
def _clamped(kind: type[nn.Module], low: float, high: float) -> Callable[..., Any]:
    """Return a copy of the class's forward that calls a clamping update; the class itself stays as it is."""
    own = inspect.unwrap(kind.forward)
    if not isinstance(own, FunctionType) or _UPDATE not in own.__globals__:
        return kind.forward
    update = own.__globals__[_UPDATE]

    def clamping(state: Tensor, hidden: Tensor, dt: Tensor, *args: Any, dt_bias: Tensor, **more: Any) -> Any:
        return update(state, hidden, _within(dt, dt_bias, low, high), *args, dt_bias=dt_bias, **more)

    copied = FunctionType(
        own.__code__, {**own.__globals__, _UPDATE: clamping}, own.__name__, own.__defaults__, own.__closure__
    )
    copied.__kwdefaults__ = own.__kwdefaults__
    return copied


def _within(dt: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
    """Clamp dt [B, heads, head_dim] so that softplus(dt + bias) lies in [low, high]."""
    least, most = (_inverse_softplus(limit) - bias.double() for limit in (low, high))
    return dt.clamp(least.to(dt.dtype), most.to(dt.dtype))


def _inverse_softplus(value: float) -> float:
    """Return x with log(1 + exp(x)) = value.

    >>> round(_inverse_softplus(1.0), 4), _inverse_softplus(0.0), _inverse_softplus(math.inf)
    (0.5413, -inf, inf)
    """
    return value + math.log(-math.expm1(-value)) if value > 0 else -math.inf
