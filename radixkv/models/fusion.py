"""Compile a model around its attention, which stays opaque: norms, rotations and activations become few kernels.

Knows how to call a compiled model, and when not to. Does not know pools or batches.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from radixkv.attention import triton_backend
from radixkv.errors import InvalidInput

_log = logging.getLogger(__name__)


class Fused:
    """A model that is compiled when it is first called, for any number of tokens; itself, where that fails."""

    def __init__(self, model: Any, backend: str = "inductor") -> None:
        """`backend` is one of torch.compile's. Compiling costs some ten seconds, and again for a single token."""
        self._model = model
        self._compiled: Any = torch.compile(model, dynamic=True, fullgraph=True, backend=backend)

    def __call__(self, **inputs: Any) -> Any:
        """As the model; where it does not compile, from then on as it was written, with one warning."""
        if self._compiled is None:
            return self._model(**inputs)
        try:
            return self._compiled(**{name: _plain(value) for name, value in inputs.items()})
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # before anything ran, so nothing was stored
            self._compiled = None
            warn(error)
            return self._model(**inputs)


def _plain(value: Any) -> Any:
    """A tensor at the start of memory of its own, made in the mode of this call: code compiled for one fits all.

    What is compiled depends on where in its memory an argument starts and on whether it was made in inference mode; a
    recorded step's arguments lie elsewhere than a batch's.
    """
    return value.clone() if isinstance(value, torch.Tensor) else value


def wanted(asked: bool | str, device: str, *, deterministic: bool) -> bool:
    """Whether to compile: "auto" is on CUDA with Triton, but for deterministic engines; else raises InvalidInput."""
    if isinstance(asked, bool):
        return asked
    if asked != "auto":
        raise InvalidInput(f"compile={asked!r}: allowed are 'auto', True and False")
    return device.startswith("cuda") and triton_backend.TRITON and not deterministic


def warn(error: Exception) -> None:
    """Say that a model could not be compiled, and why."""
    reason = str(error).strip().partition("\n")[0]
    _log.warning("the model runs uncompiled from now on: %s: %s", type(error).__name__, reason)
