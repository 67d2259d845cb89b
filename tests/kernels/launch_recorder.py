"""A recorder that acts as a CUDA graph in Triton's interpreter: it keeps each launch of a step.

A replay runs the same operators on the same memory, and none of the host's code: values from the host are those of the
recording. Operations that a capture does not allow raise: reading a number back, making a tensor of the host's numbers,
shapes that depend on data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

READS_BACK = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "_unique2"}
FROM_HOST = {"lift_fresh", "lift_fresh_copy", "from_file"}
FRESH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class CaptureError(RuntimeError):
    """The step did something that a real capture does not allow."""


class RecordedCalls(TorchDispatchMode):
    """Records all calls on the device while this is open."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Callable[[], Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        by_mask = name.startswith("index") and any(t.dtype == torch.bool for t in _tensors((args[1:], kwargs)))
        if name in READS_BACK | FROM_HOST or by_mask:
            raise CaptureError(f"a step that is recorded cannot use {func.name()}")

        def call() -> Any:
            return func(*args, **(kwargs or {}))

        result = call()
        self.calls.append((name, call, result))
        return result

    def launch(self, kernel: Callable[[], None]) -> None:
        with _disable_current_modes():  # the interpreter computes on the host
            kernel()
        self.calls.append(("launch", kernel, None))

    def replay(self) -> None:
        for name, call, result in self.calls:
            for before, now in zip(_tensors(result), _tensors(call()), strict=True):
                if name in FRESH:
                    before.fill_(torch.nan if before.is_floating_point() else -1)
                elif before.data_ptr() != now.data_ptr():
                    before.copy_(now)

    @property
    def launches(self) -> int:
        return sum(name == "launch" for name, _, _ in self.calls)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def _guarded(recording: RecordedCalls) -> Iterator[None]:
    """Record launches; raise for host operations that no operator shows."""
    run = InterpretedFunction.run
    inside = False

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        def kernel() -> None:
            nonlocal inside
            inside = True
            try:
                run(self, *args, **kwargs)
            finally:
                inside = False

        recording.launch(kernel)

    def forbidden(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not inside:
                raise CaptureError(f"a step that is recorded cannot use {original.__name__}")
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, recording:
        patch.setattr(InterpretedFunction, "run", launch)
        patch.setattr(torch, "from_numpy", forbidden(torch.from_numpy))
        patch.setattr(Tensor, "numpy", forbidden(Tensor.numpy))
        patch.setattr(Tensor, "tolist", forbidden(Tensor.tolist))
        yield


class LaunchRecorder:
    """Records steps."""

    def __init__(self) -> None:
        self.recordings: list[RecordedCalls] = []

    def has_room(self, nbytes: int) -> bool:
        return True

    def warm_up(self, step: Callable[[], Tensor]) -> int:
        with _guarded(RecordedCalls()):
            step()
        return 0

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recording = RecordedCalls()
        with _guarded(recording):
            output = step()
        self.recordings.append(recording)

        def replay() -> Tensor:
            output.fill_(torch.nan)  # a recording computes nothing, only a replay does
            recording.replay()
            return output

        return replay
