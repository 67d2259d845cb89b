"""The modules that keep recurrent state, found in a model and called through a seam.

Such a module ("mixer": a gated delta net, a Mamba-2 scan, a short convolution) reads and updates its state through a
small interface of transformers' cache. It takes one sequence, or several of equal length, so the packed row of a step
must be cut before it. `install` puts a `Mixer` before its forward, which passes each call to the handler of the current
thread. Without a handler the module computes as transformers wrote it.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from radixkv.models.recurrent.time_steps import forward_of

_STATE_CALLS = frozenset({"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"})
_CACHES = ("cache_params", "past_key_values")  # names of the argument that holds the cache


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
        self.cache = next(name for name in self._names if name in _CACHES)
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
    return any(name in _CACHES for name in inspect.signature(forward).parameters)
