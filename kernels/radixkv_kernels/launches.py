"""Bind compiled Triton kernels, so that a repeated launch costs the host a few microseconds.

Triton inspects all arguments of each launch to find the kernel that was compiled for them. Its code depends on types,
on which addresses and numbers are multiples of 16, and on which numbers are 1. `first` launches as Triton does and
returns a `Bound`. The caller repeats it only for arguments with the same types and numbers, and with addresses that
are multiples of `ALIGNMENT`. `place` returns None where launches must not be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime import driver

ALIGNMENT = 16
"""Bytes whose multiples Triton takes all addresses to be, in kernels that are bound."""

MOST = 256
"""Entries of a dictionary of bound launches; to add one more, all are dropped."""

Remembered = TypeVar("Remembered")


def device() -> int | None:
    """Return the number of the present GPU, for bound launches; None if Triton itself must launch.

    This is so in the interpreter, for AMD's GPUs, whose code also depends on the sizes of tensors, and while hooks of a
    profiler observe launches.
    """
    runtime = triton.knobs.runtime
    if (
        runtime.interpret
        or torch.version.hip is not None
        or _calls(runtime.launch_enter_hook, runtime.launch_exit_hook)
    ):
        return None
    number: int = driver.active.get_current_device()
    return number


def _calls(*hooks: Any) -> bool:
    """Return whether any hook would be called: a hook is a function, None, or a chain of functions."""
    return any(getattr(hook, "calls", hook) for hook in hooks)


class Bound:
    """A compiled kernel, and the arguments that are the same in each launch."""

    __slots__ = ("_fixed", "_function", "_kernel", "_metadata", "_run")

    def __init__(self, kernel: Any, fixed: tuple[Any, ...]) -> None:
        """Bind what Triton compiled to the last arguments of the kernel, compile-time arguments included."""
        self._kernel, self._run = kernel, kernel.run  # the kernel unloads its code when it is freed
        self._function, self._metadata, self._fixed = kernel.function, kernel.packed_metadata, fixed

    def __call__(self, device: int, programs: int, *varying: int) -> None:
        """Launch in the present stream of a GPU, with the addresses and numbers of the first arguments."""
        stream = driver.active.get_current_stream(device)
        place = programs, 1, 1, stream, self._function, self._metadata, None, None, None
        self._run(*place, *varying, *self._fixed)


def first(
    kernel: Any,
    programs: int,
    varying: Sequence[Tensor | int],
    fixed: Sequence[Any],
    constants: Mapping[str, Any],
    **options: int,
) -> Bound | None:
    """Launch as Triton does; return the launch bound to all but its `varying` arguments, if it can be repeated.

    The kernel's arguments are those of `varying`, of `fixed`, and `constants` by name. Costs some 40 us, and the
    compilation of a kernel for new types or numbers.
    """
    compiled = kernel[(programs,)](*varying, *fixed, **constants, **options)
    if device() is None:
        return None
    names = [parameter.name for parameter in kernel.params[len(varying) + len(fixed) :]]
    return Bound(compiled, (*fixed, *(constants[name] for name in names)))


def remember(bound: dict[tuple[Any, ...], Remembered], key: tuple[Any, ...], made: Remembered) -> Remembered:
    """Keep `made` under `key`, among `MOST` others: strides that depend on the number of tokens make many keys."""
    if len(bound) >= MOST:
        bound.clear()
    bound[key] = made
    return made
