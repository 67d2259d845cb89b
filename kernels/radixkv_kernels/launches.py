"""Bind compiled Triton kernels, so that a repeated launch costs the host a few microseconds.

Triton inspects all arguments of each launch to find the kernel that was compiled for them. Its code depends on types,
on which addresses and numbers are multiples of 16, and on which numbers are 1. `first` launches as Triton does and
returns a `Bound`. The caller repeats it only for arguments with the same types and numbers, and with addresses that
are multiples of `ALIGNMENT`. `device` returns None where launches must not be repeated. A `Launcher` does all of this
for one kernel; `attention` shares one inspection among the launches of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
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

    def __call__(self, device: int, programs: int, *varying: int, spans: int = 1) -> None:
        """Launch (programs, spans) in the present stream of a GPU, with the first arguments' addresses and numbers."""
        stream = driver.active.get_current_stream(device)
        place = programs, spans, 1, stream, self._function, self._metadata, None, None, None
        self._run(*place, *varying, *self._fixed)


def first(
    kernel: Any,
    grid: tuple[int, ...],
    varying: Sequence[Tensor | int],
    fixed: Sequence[Any],
    constants: Mapping[str, Any],
    **options: int,
) -> Bound | None:
    """Launch as Triton does; return the launch bound to all but its `varying` arguments, if it can be repeated.

    The kernel's arguments are `varying`, `fixed`, and `constants` by name. Costs some 40 us, and the
    compilation of a kernel for new types or numbers.
    """
    compiled = kernel[grid](*varying, *fixed, **constants, **options)
    if compiled is None or device() is None:
        return None
    names = [parameter.name for parameter in kernel.params[len(varying) + len(fixed) :]]
    return Bound(compiled, (*fixed, *(constants[name] for name in names)))


def remember(bound: dict[tuple[Any, ...], Remembered], key: tuple[Any, ...], made: Remembered) -> Remembered:
    """Keep `made` under `key`, among `MOST` others: strides that depend on the number of tokens make many keys."""
    if len(bound) >= MOST:
        bound.clear()
    bound[key] = made
    return made


class Launcher:
    """Launches one kernel, bound if it was launched with the same types and numbers before."""

    def __init__(self, kernel: Any) -> None:
        """Launch `kernel`; its arguments are addresses, counts, numbers, and compile-time constants, in this order."""
        self._kernel = kernel
        self._bound: dict[tuple[Any, ...], Bound] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        counts: Sequence[int],
        numbers: tuple[float, ...],
        constants: Mapping[str, Any],
        *,
        spans: int = 1,
        num_warps: int = 4,
    ) -> None:
        """Launch a grid of (programs, spans). `counts` are below 2^31, and Triton must not specialise on them.

        Costs about 8 us, and some 40 us where it cannot be bound.
        """
        present, key = device(), None
        if present is not None:
            addresses = [each.data_ptr() for each in tensors]
            if not reduce(or_, addresses) % ALIGNMENT:
                key = present, num_warps, numbers, *constants.values(), *[each.dtype for each in tensors]
                if (bound := self._bound.get(key)) is not None:
                    bound(present, programs, *addresses, *counts, spans=spans)
                    return
        made = first(self._kernel, (programs, spans), (*tensors, *counts), numbers, constants, num_warps=num_warps)
        if key is not None and made is not None:
            remember(self._bound, key, made)

    def __len__(self) -> int:
        """Return the number of bound launches."""
        return len(self._bound)

    def forget(self) -> None:
        """Drop all bound launches: Triton inspects the next ones again."""
        self._bound.clear()
