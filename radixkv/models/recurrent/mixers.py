"""The modules that keep recurrent state, found in a model and called through a seam.

Such a module ("mixer": a gated delta net, a Mamba-2 scan, a short convolution) reads and updates its state through a
small interface of transformers' cache. It takes one sequence, or several of equal length, so the packed row of a step
must be cut before it. `install` puts a `Mixer` before its forward, which passes each call to the handler of the current
thread. Without a handler the module computes as transformers wrote it.

The time steps of Mamba-2 decodes are clamped as in longer chunks, which transformers' path for one token leaves out.
Without the clamp the state after a token depends on whether the token came alone. The reference is the model's forward
of a whole prompt, which clamps. Time steps are softplus(dt + bias), so that dt can be clamped before.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Protocol

from torch import Tensor, nn

_STATE_CALLS = frozenset({"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"})
CACHES = ("cache", "past_key_values", "cache_params")
"""Names of the argument that holds the cache: the first one since transformers 5.24, the others in earlier versions."""


class MixerHandler(Protocol):
    """Answers the calls of mixers in one forward."""

    def mix(self, mixer: Mixer, arguments: dict[str, Any]) -> Any:
        """Return the output of `mixer` for a packed row; `arguments` are its forward's, by name."""
        ...


_current = threading.local()


@contextmanager
def mixed_by(handler: MixerHandler) -> Iterator[None]:
    """Pass the calls of mixers on this thread to `handler` while this is open."""
    _current.handler = handler
    try:
        yield
    finally:
        _current.handler = None


class Mixer:
    """Stands for the forward of one module with state; copies of a model copy it with the module.

    `hidden` and `cache` are the names of the arguments with the hidden states [1, T, ...] and with the cache.
    `others` are the names of all other arguments that the forward declares.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._replaced: Callable[..., Any] | None = vars(module).get("forward")  # hooks of accelerate
        declared = inspect.signature(type(module).forward).parameters.values()
        self._names = [each.name for each in declared if each.kind is not each.VAR_KEYWORD][1:]
        self.hidden = self._names[0]
        self.cache = next(name for name in self._names if name in CACHES)
        self.others = frozenset(self._names) - {self.hidden, self.cache}

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the handler of this thread, or the module's own forward."""
        handler: MixerHandler | None = getattr(_current, "handler", None)
        if handler is not None:
            return handler.mix(self, dict(zip(self._names, args, strict=False)) | named)
        if self._replaced is not None:
            return self._replaced(*args, **named)
        return type(self.module).forward(self.module, *args, **named)

    def compute(self, arguments: dict[str, Any]) -> Any:
        """Compute as the module was written, for sequences of one length."""
        if self._replaced is not None:
            return self._replaced(**arguments)
        return forward_of(self.module)(self.module, **arguments)


def install(model: nn.Module) -> None:
    """Put a `Mixer` before the forward of each module with state, unless it has one."""
    for module in _modules(model):
        if not isinstance(vars(module).get("forward"), Mixer):
            module.forward = Mixer(module)


def has_mixers(model: nn.Module) -> bool:
    """Return whether a module of `model` keeps state through transformers' interface."""
    return next(_modules(model), None) is not None


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose forward itself reads or updates states, and takes the cache as an argument."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and _keeps_state(type(module)):
            yield module


def _keeps_state(kind: type[nn.Module]) -> bool:
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    if code is None or not _STATE_CALLS.intersection(code.co_names):
        return False
    return any(name in CACHES for name in inspect.signature(forward).parameters)


# ---- time steps


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
