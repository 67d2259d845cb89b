"""Compile a model's layers around their attention, which stays opaque: norms, rotations and activations fuse.

A compiled model that fails, or computes something else than the model as written, is dropped with one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from radixkv.attention import triton_backend
from radixkv.device import device_of
from radixkv.errors import InvalidInput
from radixkv.models.loaded import SequenceInput
from radixkv.models.native.places import is_fused
from radixkv.models.packed import PackedLinear
from radixkv.models.quantized.layers import QuantizedLayer
from radixkv.models.rounding import agree
from radixkv.models.runner import PoolForward, Runner

_log = logging.getLogger(__name__)


def fuse(runner: Runner, backend: str = "inductor") -> None:
    """Compile the runner's model, if that computes the same; before `record_graphs`, and before anything is cached.

    `backend` is one of torch.compile's. Compiles at once, for several tokens and for one: about ten seconds each,
    independent of the number of layers. A model that fails to compile, would be compiled in each step, or computes
    something else runs uncompiled, with one warning. So does one with an `obstacle`, which is not tried. A model whose
    layers are fused by `native.fused` is not compiled either: it has no operators left to fuse.
    """
    forward = runner.forward
    if is_fused(runner.loaded.model):
        _log.info("the model runs uncompiled: its layers are fused already")
        return
    if runner.loaded.state:
        _log.warning("the model runs uncompiled: its layers keep recurrent state")
        return
    if not isinstance(forward, PoolForward):
        _log.warning("the model runs uncompiled: its attention is not radixkv's to compile around")
        return
    if (reason := obstacle(runner.loaded.model)) is not None:
        _log.warning("the model runs uncompiled: %s", reason)
        return
    dtype, expected = runner.loaded.dtype, _probe(runner)
    forward.model = Fused(runner.loaded.model, backend)
    try:
        first, compiled = _probe(runner), compilations()
        again = _probe(runner)
        if compilations() > compiled:
            _log.warning("the model runs uncompiled: it would be compiled anew in each step")
        elif all(agree(found, expected, dtype) for found in (first, again)):
            return
        else:
            _log.warning("the model runs uncompiled: compiled, it does not compute the same")
    except Exception as error:  # compilers raise exceptions of any type
        warn(error)
    forward.model = runner.loaded.model


def obstacle(model: nn.Module) -> str | None:
    """Return the reason why the layers of a model for the CPU cannot be compiled; None if they may be."""
    modules = list(model.modules())
    if any(isinstance(each, QuantizedLayer) for each in modules):
        layers = "linear layers with weights of 8 or 4 bits are compiled already, by radixkv"
    elif any(isinstance(each, PackedLinear) for each in modules):
        layers = "linear layers are packed for oneDNN"
    else:
        return None
    return (
        f"on a CPU its {layers}, and torch.compile cannot read them. Most of a step is the reading of their weights, "
        "which it would not shorten: leave compile at 'auto'"
    )


def _probe(runner: Runner) -> Tensor:
    """Return logits of a few tokens at the start of the pool: of a prompt, of one more token, and of two sequences.

    The prompt has five tokens, a size that no model has: a compiler takes equal sizes for the same one.
    """
    size = runner.store.block_size
    tables = np.arange(2 * -(-7 // size), dtype=np.int32).reshape(2, -1)

    def piece(row: int, start: int, end: int) -> SequenceInput:
        places = np.arange(start, end)
        slots = tables[row][places // size].astype(np.int64) * size + places % size
        return SequenceInput(places.astype(np.int32), start, slots, tables[row])

    steps = [[piece(0, 0, 5)], [piece(0, 5, 6)], [piece(0, 6, 7), piece(1, 0, 2)]]
    return torch.cat([runner.run(step) for step in steps])


class Fused:
    """A model whose layers are compiled at their first call, for any number of tokens; as written, if that fails.

    Layers are compiled one by one, and identical layers share the compiled code: 32 of them cost as much as one. The
    modules around them (the embedding, the last norm and product) run as written.
    """

    def __init__(self, model: Any, backend: str = "inductor") -> None:
        """`backend` is one of torch.compile's. Compiling costs some ten seconds, and again for a single token."""
        self._model = model
        self.failed = False
        self.layers = [_Layer(module, backend, self) for module in [*_repeated(model)] or [model]]

    def __call__(self, **inputs: Any) -> Any:
        """Call the model; after a failure to compile, as written from then on, with one warning."""
        if self.failed:
            return self._model(**inputs)
        for layer in self.layers:
            layer.module._compiled_call_impl = layer  # torch calls this in place of the module
        try:
            return self._model(**{name: _plain(value) for name, value in inputs.items()})
        finally:
            for layer in self.layers:
                layer.module._compiled_call_impl = None

    def fail(self, error: Exception) -> None:
        """Compile nothing from now on."""
        if not self.failed:
            self.failed = True
            warn(error)


class _Layer:
    """One module, compiled."""

    def __init__(self, module: Any, backend: str, fused: Fused) -> None:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes seconds

        self.module, self._fused = module, fused
        self._failures = TorchDynamoException, FailOnRecompileLimitHit
        self.compiled = torch.compile(module._call_impl, dynamic=True, fullgraph=True, backend=backend)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not self._fused.failed:
            try:
                return self.compiled(*inputs, **named)  # type: ignore[no-untyped-call]  # torch's own
            except self._failures as error:  # before the layer ran: it stored nothing
                self._fused.fail(error)
        return self.module._call_impl(*inputs, **named)


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of a model's outermost lists of modules: its layers, if it has any."""
    if isinstance(model, nn.ModuleList):
        yield from model
        return
    for child in model.children():
        yield from _repeated(child)


def compilations() -> int:
    """Return the number of compilations of this process."""
    from torch._dynamo.utils import counters  # takes seconds

    return int(counters["stats"]["unique_graphs"])


def _plain(value: Any) -> Any:
    """Copy a tensor to the start of memory of its own, in the mode of this call, so that one compilation fits all.

    Compiled code depends on an argument's offset in its memory and on whether it was made in inference mode. The
    arguments of a recorded step have other offsets than a batch.
    """
    return value.clone() if isinstance(value, torch.Tensor) else value


def wanted(asked: bool | str, device: torch.device, *, deterministic: bool) -> bool:
    """Return whether to compile; "auto" compiles on a GPU with Triton unless `deterministic`. Raises InvalidInput."""
    if isinstance(asked, bool):
        return asked
    if asked != "auto":
        raise InvalidInput(f"compile={asked!r}: allowed are 'auto', True and False")
    return device_of(device).is_gpu and triton_backend.TRITON and not deterministic


def warn(error: Exception) -> None:
    """Warn that a model could not be compiled, and why."""
    reason = str(error).strip().partition("\n")[0]
    _log.warning("the model runs uncompiled from now on: %s: %s", type(error).__name__, reason)
